"""GPU memory, and its stand-in on the CPU."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tieredkv.errors import CapacityError, ConfigError
from tieredkv.testing import LateDevice, TierSuite
from tieredkv.testing.tier_suite import batch, content
from tieredkv.tiers.base import Tier
from tieredkv.tiers.hbm import HbmTier
from tieredkv.types import Outcome

CUDA = torch.cuda.is_available()
SIZE = 8192


class TestHbmOnCpu(TierSuite):
    def make(self, tmp_path: Path) -> Tier:
        return HbmTier("hbm", self.blocks * self.block_bytes, self.block_bytes, "cpu")


class TestHbmOnLateStreams(TierSuite):
    """Nothing has been copied when the device has been asked to: only waiting helps."""

    blocks = 16

    @pytest.fixture(autouse=True)
    def device(self) -> Iterator[None]:
        with LateDevice(0.001) as self.late:
            yield

    def make(self, tmp_path: Path) -> Tier:
        return HbmTier("hbm", self.blocks * self.block_bytes, self.block_bytes, "cpu", self.late)


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


@pytest.fixture
def late() -> Iterator[HbmTier]:
    """A tier whose copies run on streams, late, between tensors of the CPU."""
    with LateDevice() as device:
        tier = HbmTier("hbm", 8 * SIZE, SIZE, "cpu", device)
        yield tier
        tier.close()


@pytest.mark.parametrize("kind", ["views", "stack", "tensors"])
@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [6, 2, 3, 0]])
def test_copies_on_streams(late: HbmTier, slots: list[int], kind: str) -> None:
    frozen = [memoryview(content(slot, 1, SIZE)) for slot in slots]
    stack = np.frombuffer(b"".join(frozen), np.uint8).reshape(4, SIZE)
    out = np.zeros((4, SIZE), np.uint8)
    sources: dict[str, Any] = {
        "views": frozen,
        "stack": stack,
        "tensors": torch.from_numpy(stack.copy()).unbind(0),
    }
    targets: dict[str, Any] = {
        "views": [memoryview(row) for row in out],
        "stack": out,
        "tensors": torch.from_numpy(out).unbind(0),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert late.write(batch(slots), sources[kind]) == [Outcome.OK] * 4
        stack = stack.copy()
        assert late.read(batch(slots), targets[kind]) == [Outcome.OK] * 4
    assert (out == stack).all()
    for slot, view in zip(slots, late.device_views(slots) or (), strict=True):
        assert view.numpy().tobytes() == content(slot, 1, SIZE)


def test_an_error_of_the_device_fails_the_batch(
    late: HbmTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = np.zeros((1, SIZE), np.uint8)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.Tensor, "copy_", fail)
    assert late.read(batch([2]), target) == [Outcome.BUSY]  # the slot may well be good
    assert late.write(batch([2]), target) == [Outcome.FAILED]
    monkeypatch.undo()
    assert late.write(batch([2]), target) == [Outcome.OK]


def test_slots_that_were_made_in_inference_mode_can_be_written_outside_it() -> None:
    with LateDevice(0.001) as device:
        with torch.inference_mode():
            tier = HbmTier("hbm", 8 * SIZE, SIZE, "cpu", device)
        block = memoryview(content(3, 1, SIZE))
        assert tier.write(batch([3]), [block]) == [Outcome.OK]
        with torch.inference_mode():
            target = torch.zeros(SIZE, dtype=torch.uint8)
        assert tier.read(batch([3]), [target]) == [Outcome.OK]  # type: ignore[list-item]
        assert target.numpy().tobytes() == block
        tier.close()


def test_rows_with_gaps_are_copied_one_by_one(late: HbmTier) -> None:
    """A two-dimensional copy across would take temporary memory."""
    wide = np.zeros((4, SIZE + 100), np.uint8)[:, :SIZE]
    slots = [2, 3, 4, 5]
    assert len(list(late._pairs(slots, wide))) == 4
    assert len(list(late._pairs(slots, np.zeros((4, SIZE), np.uint8)))) == 1


def test_only_slots_on_a_device_are_lent_as_such(late: HbmTier) -> None:
    assert late.device
    assert late.views([1]) is None
    host = HbmTier("hbm", 8 * SIZE, SIZE, "cpu")
    assert not host.device
    assert host.device_views([1]) is None
    assert host.views([1]) is not None


@pytest.mark.parametrize("device", ["meta", "mps", "nonsense", "cuda:99"])
def test_unusable_devices(device: str) -> None:
    with pytest.raises(ConfigError, match=device.partition(":")[0]):
        HbmTier("hbm", 4 * SIZE, SIZE, device)


def test_less_than_one_block_is_refused() -> None:
    with pytest.raises(CapacityError, match="raise the capacity"):
        HbmTier("hbm", SIZE - 1, SIZE, "cpu")
