"""The DRAM tier against memcpy into a ring of the same size, one thread each.

A round moves 256 MiB through memory that no cache holds. The reference is memmove block by
block between the same sizes of memory, without bookkeeping. `shared` rows let the tier use
its second copy thread; they have no bar, because they need a second CPU that is idle.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from benches.common import PAIRS, Result, absolute, compare, seconds
from tieredkv.tiers.base import Bytes
from tieredkv.tiers.dram import DramTier
from tieredkv.tiers.slab import Slab
from tieredkv.types import Batch, Outcome

KIB, MIB = 1 << 10, 1 << 20
RING = 256 * MIB
USERS = 64 * MIB
"""Size of the caller's memory, larger than the caches that count."""
BATCH = 16 * MIB
"""Bytes per call: a prefix of a few blocks."""


def run() -> Iterator[Result]:
    for block_bytes in (128 * KIB, MIB, 4 * MIB):
        yield from _tier(block_bytes, BATCH, threads=1)
    yield from _tier(MIB, BATCH, threads=2)


class _Memory:
    """A tier, the ring beside it, and the caller's blocks."""

    def __init__(self, block_bytes: int, batch_bytes: int, threads: int) -> None:
        self.block_bytes = block_bytes
        self.batch = batch_bytes // block_bytes
        self.blocks = RING // block_bytes
        self.tier = DramTier("dram", RING, block_bytes, copy_threads=threads, pin="off")
        if not self.tier.wait_ready(60):
            raise RuntimeError("the slab is still not pre-faulted after 60 s")
        # the same kind of memory as the tier's: page-aligned, of huge pages
        self.slab = Slab(1, RING)
        self.ring = self.slab.rows[0]
        self.ring[:] = 1
        self.users: Bytes = np.ones((USERS // block_bytes, block_bytes), np.uint8)
        self.lists = [list(self.users[i : i + self.batch]) for i in self._firsts(len(self.users))]
        self.batches = [
            Batch(list(range(i, i + self.batch)), [b""] * self.batch, [1] * self.batch)
            for i in self._firsts(self.blocks)
        ]

    def close(self) -> None:
        self.tier.close()
        del self.ring
        self.slab.close()

    def _firsts(self, count: int) -> range:
        return range(0, count, self.batch)

    def put(self) -> None:
        for batch, blocks in zip(self.batches, itertools.cycle(self.lists), strict=False):
            if self.tier.write(batch, blocks)[-1] is not Outcome.OK:
                raise RuntimeError("write failed")

    def get(self) -> None:
        for batch, blocks in zip(self.batches, itertools.cycle(self.lists), strict=False):
            if self.tier.read(batch, blocks)[-1] is not Outcome.OK:
                raise RuntimeError("read failed")

    def memcpy_in(self) -> None:
        self._memcpy(self.ring.ctypes.data, self.users.ctypes.data, RING, USERS)

    def memcpy_out(self) -> None:
        self._memcpy(self.users.ctypes.data, self.ring.ctypes.data, USERS, RING)

    def _memcpy(self, target: int, source: int, target_size: int, source_size: int) -> None:
        memmove, size = ctypes.memmove, self.block_bytes
        for at in range(0, RING, size):
            memmove(target + at % target_size, source + at % source_size, size)


def _tier(block_bytes: int, batch_bytes: int, threads: int) -> Iterator[Result]:
    memory = _Memory(block_bytes, batch_bytes, threads)
    label = f"{block_bytes // MIB}MiB" if block_bytes >= MIB else f"{block_bytes // KIB}KiB"
    label += ".shared" if threads > 1 else ""
    large = block_bytes >= MIB
    for name, ours, reference in (
        ("put", memory.put, memory.memcpy_in),
        ("get", memory.get, memory.memcpy_out),
    ):
        bar = 0.95 if large and threads == 1 else None
        yield compare(f"dram.{name}.{label}", "GB/s", _rate(ours), _rate(reference), bar=bar)
        if not large:
            yield _overhead(f"dram.{name}.{label}.overhead", memory, ours, reference)
    memory.close()


def _rate(fn: Callable[[], None]) -> Callable[[], float]:
    return lambda: RING / seconds(fn) / 1e9


def _overhead(
    metric: str, memory: _Memory, ours: Callable[[], None], reference: Callable[[], None]
) -> Result:
    """Microseconds per block on top of the bare copy, whose own call costs are taken off."""
    memmove, at = ctypes.memmove, memory.ring.ctypes.data
    calls = min(
        seconds(lambda: [memmove(at + i % RING, at + i % USERS, 0) for i in range(memory.blocks)])
        for _ in range(5)
    )
    samples = [
        (seconds(ours) - (seconds(reference) - calls)) / memory.blocks * 1e6 for _ in range(PAIRS)
    ]
    return absolute(metric, "us/block", samples, bar=1.0)
