"""GPU memory, and its stand-in on the CPU."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from tieredkv.errors import CapacityError, ConfigError
from tieredkv.testing import TierSuite
from tieredkv.testing.tier_suite import batch, content
from tieredkv.tiers.base import Tier
from tieredkv.tiers.hbm import HbmTier

CUDA = torch.cuda.is_available()
SIZE = 8192


class TestHbmOnCpu(TierSuite):
    def make(self, tmp_path: Path) -> Tier:
        return HbmTier("hbm", self.blocks * self.block_bytes, self.block_bytes, "cpu")


class TestHbmOnCpuOfOddBlocks(TestHbmOnCpu):
    block_bytes = 4095


@pytest.mark.skipif(not CUDA, reason="no CUDA device")
class TestHbmOnCuda(TierSuite):
    def make(self, tmp_path: Path) -> Tier:
        return HbmTier("hbm", self.blocks * self.block_bytes, self.block_bytes, "cuda")


@pytest.mark.skipif(CUDA, reason="a CUDA device is present")
def test_says_that_it_runs_on_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        HbmTier("hbm", 4 * SIZE, SIZE).close()
    assert [r.message for r in caplog.records] == [
        "hbm tier runs on cpu: torch finds no CUDA device"
    ]


def test_the_slots_are_a_tensor() -> None:
    tier = HbmTier("hbm", 4 * SIZE, SIZE, "cpu")
    tier.write(batch([2]), [memoryview(content(2, 1, SIZE))])
    assert tier.tensor.shape == (4, SIZE)
    assert tier.tensor.dtype == torch.uint8
    assert tier.tensor[2].numpy().tobytes() == content(2, 1, SIZE)
    tier.close()
    assert tier.tensor.numel() == 0


def test_cpu_slots_are_aligned_for_direct_io() -> None:
    tier = HbmTier("hbm", 4 * 70_000, 70_000, "cpu")
    views = tier.views(range(4))
    assert views is not None
    assert all(np.frombuffer(v, np.uint8).ctypes.data % 4096 == 0 for v in views)


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [6, 2, 3, 0]])
def test_copies_of_the_device_path(slots: list[int], listed: bool) -> None:
    """The copies that run on a stream on CUDA, here between CPU tensors."""
    tier = HbmTier("hbm", 8 * SIZE, SIZE, "cpu")
    frozen = [memoryview(content(slot, 1, SIZE)) for slot in slots]
    stack = np.frombuffer(b"".join(frozen), np.uint8).reshape(4, SIZE)
    out = np.zeros((4, SIZE), np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tier._to_device(slots, frozen if listed else stack)
        tier._to_host(slots, [memoryview(row) for row in out] if listed else out)
    assert (out == stack).all()
    for slot in set(range(8)) - set(slots):
        assert not tier.tensor[slot].any()


@pytest.mark.parametrize("device", ["meta", "mps", "nonsense", "cuda:99"])
def test_unusable_devices(device: str) -> None:
    with pytest.raises(ConfigError, match=device.partition(":")[0]):
        HbmTier("hbm", 4 * SIZE, SIZE, device)


def test_less_than_one_block_is_refused() -> None:
    with pytest.raises(CapacityError, match="raise the capacity"):
        HbmTier("hbm", SIZE - 1, SIZE, "cpu")
