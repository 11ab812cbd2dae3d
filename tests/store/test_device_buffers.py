"""Blocks in the memory of a device, put into and read from a store.

The device is one of host memory that is late with everything, the callers' computations included,
and the tensors only say that they are on it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.pretender import Pretender, pretend
from tests.store.world import FP, SIZE, Shape, chain, open_store, payload
from tieredkv import TieredKVStore
from tieredkv.buffers import view_blocks
from tieredkv.errors import BlockSizeError, UsageError
from tieredkv.testing import Gate, LateDevice
from tieredkv.types import Outcome

OK, BUSY = Outcome.OK, Outcome.BUSY
SHAPES = {
    "dram": Shape(dram=64),
    "little dram, nvme": Shape(dram=6, write="on_evict"),
    "nvme": Shape(write="through"),
    "hbm": Shape(hbm=64),
    "little hbm, dram": Shape(hbm=5, dram=64),
    "little of both, nvme": Shape(hbm=4, dram=6, write="on_evict"),
    "little hbm, nvme": Shape(hbm=4, write="through"),
    "dram that can block": Shape(dram=64, inline=False),
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    with LateDevice(0.001) as late:
        monkeypatch.setattr("tieredkv.device.streams_of", lambda _: late)
        monkeypatch.setattr("tieredkv.tiers.hbm.streams_of", lambda _: late)
        yield late


def computed(device: LateDevice, keys: list[bytes], stacked: bool) -> Any:
    """Blocks that a kernel has yet to compute."""
    tensor = torch.zeros((len(keys), SIZE), dtype=torch.uint8)
    joined = b"".join(payload(key) for key in keys)
    wanted = torch.frombuffer(bytearray(joined), dtype=torch.uint8).view(len(keys), SIZE)
    device.compute.queue(lambda: tensor.copy_(wanted))
    return pretend(tensor) if stacked else list(pretend(tensor).unbind(0))


def host(blocks: Any) -> list[bytes]:
    return [block.as_subclass(torch.Tensor).numpy().tobytes() for block in blocks]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_what_a_device_has_computed_comes_back(
    tmp_path: Path, device: LateDevice, shape: Shape
) -> None:
    draw = random.Random(7)
    stored: list[tuple[int, ...]] = []
    hits = 0
    store, _ = open_store(shape, tmp_path)
    with store:
        for step in range(40):
            path = (draw.choice(stored) if stored and draw.random() < 0.6 else ())[:6]
            path += tuple(draw.randrange(4) for _ in range(draw.randrange(1, 4)))
            keys = chain(path)
            outcomes = store.put(keys, computed(device, keys, step % 2 == 0))
            stored.append(path[: outcomes.count(OK)] or path)
            wanted = chain(draw.choice(stored))
            target = pretend(torch.full((len(wanted), SIZE), 0xAA, dtype=torch.uint8))
            seen: list[bytes] = []
            device.compute.queue(lambda target=target, seen=seen: seen.extend(host(target)))
            found = store.get(wanted, target if step % 2 else list(target.unbind(0)))
            assert seen == [b"\xaa" * SIZE] * len(wanted)  # whoever still read it could
            for key, outcome, block in zip(wanted, found, host(target), strict=True):
                if outcome is OK:
                    assert block == payload(key)
                    hits += 1
            mixed = [bytearray(SIZE) for _ in wanted]  # what a device has put, the host may get
            for key, outcome, buffer in zip(wanted, store.get(wanted, mixed), mixed, strict=True):
                assert outcome is not OK or buffer == payload(key)
            assert store.check() == []
    assert hits > 40


def test_blocks_that_are_not_there_are_not_touched(tmp_path: Path, device: LateDevice) -> None:
    store, _ = open_store(Shape(write="through"), tmp_path)
    with store:
        keys = chain((1, 2, 3))
        assert store.put(keys[:2], computed(device, keys[:2], True)) == [OK] * 2
        target = pretend(torch.full((3, SIZE), 0xAA, dtype=torch.uint8))
        assert store.get(keys, target) == [OK, OK, Outcome.MISSING]
        assert host(target) == [payload(keys[0]), payload(keys[1]), b"\xaa" * SIZE]


def test_nothing_is_written_after_the_deadline(tmp_path: Path, device: LateDevice) -> None:
    store, tiers = open_store(Shape(write="through"), tmp_path)
    with store:
        keys = chain((1, 2, 3))
        assert store.put(keys, computed(device, keys, True)) == [OK] * 3
        hang = tiers["nvme"].hang = Gate(op="read")
        target = pretend(torch.full((3, SIZE), 0xAA, dtype=torch.uint8))
        assert store.get(keys, target, deadline=0.2) == [BUSY] * 3
        assert store.stats().quarantined_transfers == 1
        hang.release()
        deadline = time.monotonic() + 20
        while store.stats().quarantined_transfers:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        device.run("in", lambda: None).synchronize()
        assert host(target) == [b"\xaa" * SIZE] * 3
        assert store.get(keys, target) == [OK] * 3


def test_async_calls(tmp_path: Path, device: LateDevice) -> None:
    store, _ = open_store(Shape(dram=4, write="on_evict"), tmp_path)
    with store:
        keys = chain((1, 2, 3))
        assert store.put_async(keys, computed(device, keys, False)).result(20) == [OK] * 3
        target = pretend(torch.zeros((3, SIZE), dtype=torch.uint8))
        assert store.get_async(keys, target).result(20) == [OK] * 3
        assert host(target) == [payload(key) for key in keys]


def test_a_caller_whose_stream_is_busy_waits_no_longer_than_it_wants(
    tmp_path: Path, device: LateDevice
) -> None:
    go_on = threading.Event()
    store, _ = open_store(Shape(dram=8), tmp_path)
    with store:
        keys = chain((1, 2, 3))
        assert store.put(keys, computed(device, keys, True)) == [OK] * 3
        target = pretend(torch.full((3, SIZE), 0xAA, dtype=torch.uint8))
        device.compute.queue(lambda: go_on.wait(20))
        assert store.get(keys, target, deadline=0.05) == [BUSY] * 3
        later = store.get_async(keys, target, deadline=20)  # both return at once
        other = chain((4, 5))
        put = store.put_async(other, computed(device, other, False))
        assert not later.done()
        assert host(target) == [b"\xaa" * SIZE] * 3
        go_on.set()
        assert later.result(20) == [OK] * 3
        assert host(target) == [payload(key) for key in keys]
        assert put.result(20) == [OK] * 2
        assert store.get(other, target[:2]) == [OK] * 2
        assert host(target[:2]) == [payload(key) for key in other]


def test_tensors_of_inference_mode_are_filled_outside_it(
    tmp_path: Path, device: LateDevice
) -> None:
    for shape in (Shape(dram=8), Shape(hbm=8), Shape(write="through")):
        store, _ = open_store(shape, tmp_path)
        with store:
            keys = chain((1, 2, 3))
            assert store.put(keys, computed(device, keys, True)) == [OK] * 3
            with torch.inference_mode():
                target = pretend(torch.zeros((3, SIZE), dtype=torch.uint8))
                rows = list(target.unbind(0))
            assert store.get_async(keys, rows).result(20) == [OK] * 3
            assert host(rows) == [payload(key) for key in keys]


@pytest.mark.parametrize("shape", [Shape(dram=8), Shape(hbm=8), Shape(write="through")])
def test_an_error_of_the_device_costs_no_block(
    tmp_path: Path, device: LateDevice, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(way: str, work: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    store, _ = open_store(shape, tmp_path)
    with store:
        keys = chain((1, 2, 3))
        assert store.put(keys, computed(device, keys, True)) == [OK] * 3
        target = pretend(torch.zeros((3, SIZE), dtype=torch.uint8))
        with monkeypatch.context() as patch:
            patch.setattr(device, "run", fail)
            assert store.get(keys, target) == [BUSY] * 3
        assert store.lookup(keys).blocks == 3
        assert store.get(keys, target) == [OK] * 3
        assert host(target) == [payload(key) for key in keys]
        assert store.check() == []


class HostOnly:
    """A tier that knows nothing of devices, as one of a plug-in."""

    def __init__(self, inner: Any, inline: bool) -> None:
        self.inner, self.inline, self.most = inner, inline, 0
        self.name, self.block_bytes, self.durable = inner.name, inner.block_bytes, inner.durable
        self.views, self.close = inner.views, inner.close

    @property
    def slots(self) -> int:
        return int(self.inner.slots)

    def write(self, batch: Any, sources: Any) -> list[Outcome]:
        return self._call(self.inner.write, batch, sources)

    def read(self, batch: Any, targets: Any) -> list[Outcome]:
        return self._call(self.inner.read, batch, targets)

    def _call(self, call: Any, batch: Any, buffers: Any) -> list[Outcome]:
        assert not any(isinstance(buffer, torch.Tensor) for buffer in buffers)
        self.most = max(self.most, len(batch))
        found: list[Outcome] = call(batch, buffers)
        return found


@pytest.mark.parametrize("inline", [True, False])
def test_a_tier_that_knows_nothing_of_devices(
    tmp_path: Path, device: LateDevice, inline: bool
) -> None:
    wrapped: list[HostOnly] = []

    def wrap(tier: Any) -> Any:
        wrapped.append(HostOnly(tier, inline))
        return wrapped[-1]

    config = Shape(dram=32).config(tmp_path)
    with TieredKVStore(config, FP, wrap_tier=wrap) as store:
        keys = chain(tuple(range(20)))
        assert store.put(keys, computed(device, keys, True)) == [OK] * 20
        target = pretend(torch.zeros((20, SIZE), dtype=torch.uint8))
        assert store.get(keys, target) == [OK] * 20
        assert host(target) == [payload(key) for key in keys]
    assert wrapped[0].most == 2  # of a batch: staging memory is bounded


def test_buffers_of_a_device_are_checked_like_others(device: LateDevice) -> None:
    stack = pretend(torch.zeros((4, 6), dtype=torch.int32))
    blocks = view_blocks(stack, 4, writable=True)
    assert blocks.ready is not None
    assert (len(blocks), blocks.block_bytes) == (4, 24)
    assert all(isinstance(block, Pretender) and len(block) == 24 for block in blocks.buffers)
    assert view_blocks(np.zeros((4, 6)), 4, writable=True).ready is None
    assert view_blocks([], 0, writable=True).ready is None
    with pytest.raises(BlockSizeError, match=r"\(4, 6\)"):
        view_blocks(stack, 3, writable=True)
    with pytest.raises(UsageError, match="contiguous"):
        view_blocks(stack.T, 4, writable=True)
    with pytest.raises(UsageError, match="overlap"):
        view_blocks([stack[0], stack[0]], 2, writable=True)
    with pytest.raises(UsageError, match=r"blocks on .*the host: pass all blocks of a call in one"):
        view_blocks([stack[0], bytearray(24)], 2, writable=True)
