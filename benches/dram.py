"""A store of DRAM, and its tier alone, against memcpy into a ring of the same size.

One thread each. A round moves 256 MiB through memory that no cache holds. The reference is
memmove block by block between the same sizes of memory, without bookkeeping. The store is
full, so that every put evicts as much as it brings; `single` rows have one block per call,
each the next of its chain. `shared` rows let the tier use its second copy thread; they have
no bar, because they need a second CPU that is idle.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benches.common import PAIRS, Result, absolute, compare, seconds
from benches.world import random_keys
from tieredkv.config import Config
from tieredkv.store import TieredKVStore
from tieredkv.tiers.base import Bytes
from tieredkv.tiers.dram import DramTier
from tieredkv.tiers.slab import Slab
from tieredkv.types import Batch, Fingerprint, Outcome

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Size:
    blocks: tuple[int, ...] = (128 * KIB, MIB, 4 * MIB)
    shared: int = MIB
    ring: int = 256 * MIB
    users: int = 64 * MIB
    """The caller's memory, larger than the caches that count."""
    batch: int = 64 * MIB
    """Bytes per call: what 512 tokens of a model of 8e9 parameters take."""
    pairs: int = PAIRS


FULL = Size()


def run(size: Size = FULL) -> Iterator[Result]:
    for block_bytes in size.blocks:
        yield from _tier(block_bytes, size, threads=1)
        yield from _store(block_bytes, size)
    yield from _tier(size.shared, size, threads=2)


class _Ring:
    """The reference, and the caller's blocks."""

    def __init__(self, block_bytes: int, size: Size) -> None:
        self.size, self.block_bytes = size, block_bytes
        self.batch = max(1, size.batch // block_bytes)
        self.blocks = size.ring // block_bytes
        # the same kind of memory as the tier's: page-aligned, of huge pages
        self.slab = Slab(1, size.ring)
        self.ring = self.slab.rows[0]
        self.ring[:] = 1
        self.users: Bytes = np.ones((size.users // block_bytes, block_bytes), np.uint8)
        self.lists = [list(self.users[i : i + self.batch]) for i in self.firsts(len(self.users))]

    def firsts(self, count: int) -> range:
        return range(0, count, self.batch)

    def memcpy_in(self) -> None:
        sizes = self.size.ring, self.size.users
        self._memcpy(self.ring.ctypes.data, self.users.ctypes.data, *sizes)

    def memcpy_out(self) -> None:
        sizes = self.size.users, self.size.ring
        self._memcpy(self.users.ctypes.data, self.ring.ctypes.data, *sizes)

    def bare_calls(self) -> float:
        """Seconds that the calls of a round take without their copies."""
        memmove, at, ring, users = ctypes.memmove, self.ring.ctypes.data, *self._sizes()
        return min(
            seconds(lambda: [memmove(at + i % ring, at + i % users, 0) for i in range(self.blocks)])
            for _ in range(5)
        )

    def close(self) -> None:
        del self.ring
        self.slab.close()

    def _memcpy(self, target: int, source: int, target_size: int, source_size: int) -> None:
        memmove, size = ctypes.memmove, self.block_bytes
        for at in range(0, self.size.ring, size):
            memmove(target + at % target_size, source + at % source_size, size)

    def _sizes(self) -> tuple[int, int]:
        return self.size.ring, self.size.users


class _Tier:
    """A tier without a store."""

    def __init__(self, ring: _Ring, threads: int) -> None:
        self.lists = ring.lists
        size = ring.size.ring
        self.tier = DramTier("dram", size, ring.block_bytes, copy_threads=threads, pin="off")
        if not self.tier.wait_ready(60):
            raise RuntimeError("the slab is still not pre-faulted after 60 s")
        self.batches = [
            Batch(list(range(i, i + ring.batch)), [b""] * ring.batch, [1] * ring.batch)
            for i in ring.firsts(ring.blocks)
        ]

    def put(self) -> None:
        for batch, blocks in zip(self.batches, itertools.cycle(self.lists), strict=False):
            if self.tier.write(batch, blocks)[-1] is not Outcome.OK:
                raise RuntimeError("write failed")

    def get(self) -> None:
        for batch, blocks in zip(self.batches, itertools.cycle(self.lists), strict=False):
            if self.tier.read(batch, blocks)[-1] is not Outcome.OK:
                raise RuntimeError("read failed")


def _tier(block_bytes: int, size: Size, threads: int) -> Iterator[Result]:
    ring = _Ring(block_bytes, size)
    tier = _Tier(ring, threads)
    suffix = ".shared" if threads > 1 else ""
    for name, ours, reference in (
        ("put", tier.put, ring.memcpy_in),
        ("get", tier.get, ring.memcpy_out),
    ):
        bar = 0.95 if block_bytes >= MIB and threads == 1 else None
        metric = f"dram.tier.{name}.{_label(block_bytes)}{suffix}"
        yield _rates(metric, ring, lambda ours=ours: seconds(ours), reference, bar)  # type: ignore[misc]
        if block_bytes < MIB:
            yield _overhead(metric, ring, lambda ours=ours: seconds(ours), reference, 1.0)  # type: ignore[misc]
    tier.tier.close()
    ring.close()


class _Store:
    """A store of one tier; a round puts new chains that take the place of all others."""

    def __init__(self, ring: _Ring, threads: int | None) -> None:
        """`threads` None: as configured by default."""
        self.ring = ring
        tier = {"kind": "dram", "capacity": ring.size.ring, "pin": "off"}
        if threads is not None:
            tier["copy_threads"] = threads
        config = Config.model_validate({"block_bytes": ring.block_bytes, "tiers": [tier]})
        self.store = TieredKVStore(config, Fingerprint("bench"))
        self.chains: list[list[bytes]] = []
        self.put()  # touches the slab

    def put(self) -> float:
        """Seconds of a round in batches."""
        ring = self.ring
        self.chains = [random_keys(ring.batch) for _ in ring.firsts(ring.blocks)]
        return seconds(lambda: self._batches(self.store.put))

    def get(self) -> float:
        return seconds(lambda: self._batches(self.store.get))

    def put_single(self) -> float:
        ring = self.ring
        self.chains = [random_keys(ring.batch) for _ in ring.firsts(ring.blocks)]
        return self._singles(self.store.put)

    def get_single(self) -> float:
        return self._singles(self.store.get)

    def _batches(self, call: Callable[..., list[Outcome]]) -> None:
        for chain, blocks in zip(self.chains, itertools.cycle(self.ring.lists), strict=False):
            if call(chain, blocks)[-1] is not Outcome.OK:
                raise RuntimeError("a block is not OK")

    def _singles(self, call: Callable[..., list[Outcome]]) -> float:
        calls: list[tuple[Sequence[bytes], list[Bytes], int]] = []
        for chain, blocks in zip(self.chains, itertools.cycle(self.ring.lists), strict=False):
            calls += [(chain[: i + 1], [blocks[i]], i) for i in range(len(chain))]

        def work() -> None:
            for keys, block, start in calls:
                if call(keys, block, start)[0] is not Outcome.OK:
                    raise RuntimeError("a block is not OK")

        return seconds(work)


def _store(block_bytes: int, size: Size) -> Iterator[Result]:
    """The default shares large batches among threads; the rows of one thread show what the
    software costs on top of one memcpy."""
    large = block_bytes >= MIB
    ring = _Ring(block_bytes, size)
    for threads in (None, 1) if large else (1,):
        store = _Store(ring, threads)
        suffix = ".one_thread" if threads and large else ""
        for name, ours, reference, single in (
            ("put", store.put, ring.memcpy_in, False),
            ("get", store.get, ring.memcpy_out, False),
            ("put.single", store.put_single, ring.memcpy_in, True),
            ("get.single", store.get_single, ring.memcpy_out, True),
        ):
            if single and threads is None:
                continue
            metric = f"dram.store.{name}.{_label(block_bytes)}{suffix}"
            yield _rates(metric, ring, ours, reference, 0.95 if threads is None else None)
            if not large:
                yield _overhead(metric, ring, ours, reference, None if single else 4.0)
        store.store.close()
    ring.close()


def _rates(
    metric: str,
    ring: _Ring,
    ours: Callable[[], float],
    reference: Callable[[], None],
    bar: float | None,
) -> Result:
    nbytes = ring.size.ring
    return compare(
        metric,
        "GB/s",
        lambda: nbytes / ours() / 1e9,
        lambda: nbytes / seconds(reference) / 1e9,
        bar=bar,
        pairs=ring.size.pairs,
    )


def _overhead(
    metric: str,
    ring: _Ring,
    ours: Callable[[], float],
    reference: Callable[[], None],
    bar: float | None,
) -> Result:
    """Microseconds per block on top of the bare copy, whose own call costs are taken off."""
    calls = ring.bare_calls()
    samples = [
        (ours() - (seconds(reference) - calls)) / ring.blocks * 1e6 for _ in range(ring.size.pairs)
    ]
    return absolute(f"{metric}.overhead", "us/block", samples, bar=bar)


def _label(block_bytes: int) -> str:
    return f"{block_bytes // MIB}MiB" if block_bytes >= MIB else f"{block_bytes // KIB}KiB"
