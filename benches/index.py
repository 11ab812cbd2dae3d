"""The index at a million resident blocks: lookup, pin, insert and evict, memory.

Keys of a chain are the bench `keys`. The chain looked up has 5,000 blocks: stored at once,
and in 20 turns. Where vLLM is installed, its CPU offload manager does the same beside ours.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from benches import vllm_offload
from benches.common import Result, absolute, seconds
from benches.world import ControlPlane, fresh_copies, random_keys
from tieredkv.config import Config
from tieredkv.store import TieredKVStore
from tieredkv.types import Fingerprint

BATCH = 256
"""Blocks of one put: a turn."""
TINY = 64
"""Bytes per block where the whole store is measured: the bytes are not the subject."""


@dataclass(frozen=True, slots=True)
class Size:
    resident: int = 1_000_000
    chain: int = 5_000
    evictions: int = 2_000_000
    timed: int = 1_000
    """Batches of insert and evict."""
    samples: int = 101
    worlds: int = 9
    """Processes that measure memory."""


FULL = Size()


def run(size: Size = FULL) -> Iterator[Result]:
    yield from _memory(size)
    yield from _lookups(size)
    yield from _store_lookups(size)
    yield from _evictions(size)
    yield from vllm_offload.run(size.resident, size.chain, size.samples)


def _lookups(size: Size) -> Iterator[Result]:
    world = ControlPlane(size.resident)
    for runs in (1, 20):
        keys = world.chain(size.chain, runs)
        _fill(world, size.resident - 2 * size.chain)
        yield from _times(
            f"index.lookup.{runs}run", keys, lambda keys: world.planner.match(keys), size
        )

        def pin(keys: Sequence[bytes]) -> None:
            planner = world.planner
            number, _ = planner.pin(keys, 1e9, world.now)
            assert number is not None
            planner.pins.release(number)

        yield from _times(f"index.pin+unpin.{runs}run", keys, pin, size)


def _store_lookups(size: Size) -> Iterator[Result]:
    config = Config.model_validate(
        {"block_bytes": TINY, "tiers": [{"kind": "dram", "capacity": size.resident * TINY}]}
    )
    with TieredKVStore(config, Fingerprint("bench")) as store:
        stack = bytes(BATCH * TINY)
        chains = []
        for runs in (1, 20):
            keys = random_keys(size.chain)
            step = size.chain // runs
            for start in range(0, size.chain, step):
                blocks = bytes(step * TINY)
                store.put(keys[: start + step], blocks, start)
            chains.append((runs, keys))
        while store.stats().blocks + BATCH <= size.resident:
            for _ in range(min(100, (size.resident - store.stats().blocks) // BATCH)):
                store.put(random_keys(BATCH), stack)
        for runs, keys in chains:
            if store.lookup(keys).blocks != size.chain:
                raise RuntimeError("the chain is not stored")
            yield from _times(f"index.store.lookup.{runs}run", keys, store.lookup, size)

            def pin(keys: Sequence[bytes]) -> None:
                with store.pin(keys):
                    pass

            yield from _times(f"index.store.pin+unpin.{runs}run", keys, pin, size)


def _evictions(size: Size) -> Iterator[Result]:
    world = ControlPlane(size.resident)
    _fill(world, size.resident)
    times = [world.put(random_keys(BATCH)) for _ in range(size.evictions // BATCH)]
    timed = [world.put(random_keys(BATCH)) for _ in range(size.timed)]
    if world.planner.room.evicted[0] < size.evictions // BATCH * BATCH - BATCH:
        raise RuntimeError("nothing was evicted")
    yield absolute("index.insert+evict", "us/block", [t / BATCH * 1e6 for t in timed], bar=2.0)
    yield absolute("index.insert+evict.worst", "ms/batch", [1e3 * max(times + timed)], bar=5.0)


def _memory(size: Size) -> Iterator[Result]:
    """In processes of their own, since freed memory of others would hide what is taken."""
    context = get_context("spawn")
    fresh, churned = [], []
    for _ in range(size.worlds):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            pair = pool.submit(memory, size.resident, size.evictions).result(timeout=300)
        fresh.append(pair[0])
        churned.append(pair[1])
    yield absolute("index.memory.fresh", "B/block", fresh, bar=150.0)
    yield absolute("index.memory.churned", "B/block", churned, bar=150.0)


def memory(resident: int, evictions: int) -> tuple[float, float]:
    """Resident bytes per block that the control plane takes, keys included: once filled, and
    after so many evictions."""
    random_keys(BATCH)
    gc.collect()
    before = _rss()
    world = ControlPlane(resident)
    _fill(world, resident)
    fresh = (_rss() - before) / resident
    for _ in range(evictions // BATCH):
        world.put(random_keys(BATCH))
    return fresh, (_rss() - before) / resident


def _fill(world: ControlPlane, blocks: int) -> None:
    while world.planner.res.tree.blocks + BATCH <= blocks:
        world.put(random_keys(BATCH))


def _times(
    metric: str, keys: list[bytes], call: Callable[[Sequence[bytes]], object], size: Size
) -> Iterator[Result]:
    """Microseconds of a call with a chain of new key objects."""
    samples = []
    for _ in range(size.samples):
        asked = fresh_copies(keys)
        samples.append(1e6 * seconds(lambda asked=asked: call(asked)))  # type: ignore[misc]
    yield absolute(metric, "us", samples, bar=20.0)


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
