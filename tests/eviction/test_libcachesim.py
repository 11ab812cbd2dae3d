"""On streams of single blocks, policies miss exactly as often as libCacheSim's."""

from __future__ import annotations

import random
from functools import cache
from itertools import accumulate
from typing import Any

import libcachesim
import pytest

from tests.eviction.leaves import lab_hits
from tieredkv.eviction import BUILTIN
from tieredkv.eviction.base import Access, Kind

BLOCK = 4096
REQUESTS = 200_000
REFERENCE: dict[str, Any] = {
    "fifo": libcachesim.FIFO,
    "lru": libcachesim.LRU,
    "arc": libcachesim.ARC,
    "s3fifo": libcachesim.S3FIFO,
    "sieve": libcachesim.Sieve,
}


@cache
def stream(kind: str) -> list[int]:
    """`zipf`: 20,000 keys with exponent 0.9. `scans`: a quarter of it, with scans and loops
    between, so that ghosts, promotions and laps of all kinds occur."""
    rng = random.Random(kind)
    weights = list(accumulate(1 / rank**0.9 for rank in range(1, 20_001)))
    if kind == "zipf":
        return rng.choices(range(20_000), cum_weights=weights, k=REQUESTS)
    keys: list[int] = []
    fresh = 100_000
    while len(keys) < REQUESTS // 4:
        keys += rng.choices(range(20_000), cum_weights=weights, k=3000)
        keys += range(fresh, fresh + 900)
        keys += list(range(fresh, fresh + rng.randrange(50, 700))) * 3
        fresh += 900
    return keys


class Flat:
    """Drives a policy as the planner does, with one run of one block per key."""

    def __init__(self, policy: Any, blocks: int) -> None:
        self.policy = policy
        self.free = blocks
        self.runs: dict[int, tuple[int, float, int]] = {}
        """Key -> (run, when it was stored, uses)."""
        self.keys: dict[int, int] = {}
        self.now = 0.0
        self.count = 0

    def request(self, key: int) -> bool:
        """Was it there?"""
        self.now += 1.0
        found = self.runs.get(key)
        if found is not None:
            run, born, hits = found
            self.runs[key] = run, born, hits + 1
            self.policy.record(self.access(Kind.HIT, run, key, born, hits + 1))
            return True
        if hasattr(self.policy, "expect"):
            self.policy.expect(key.to_bytes(8))
        if not self.free:
            (victim,) = self.policy.victims(BLOCK, self.now, lambda run: 0)
            assert victim.nbytes == BLOCK
            self.policy.forget(victim.run, evicted=True)
            del self.runs[self.keys.pop(victim.run)]
            self.free += 1
        self.count += 1
        self.runs[key] = self.count, self.now, 0
        self.keys[self.count] = key
        self.policy.record(self.access(Kind.INSERT, self.count, key, self.now, 0))
        self.free -= 1
        return False

    def access(self, kind: Kind, run: int, key: int, born: float, hits: int) -> Access:
        name = key.to_bytes(8)
        return Access(kind, run, name, 1, BLOCK, 1, born, self.now, hits, first=name)


def flat_misses(name: str, blocks: int, keys: list[int]) -> int:
    driven = Flat(BUILTIN[name](blocks * BLOCK, BLOCK), blocks)
    return sum(not driven.request(key) for key in keys)


def reference_misses(name: str, blocks: int, keys: list[int]) -> int:
    cache = REFERENCE[name](cache_size=blocks)
    request = libcachesim.Request()
    request.obj_size = 1
    misses = 0
    for key in keys:
        request.obj_id = key
        misses += not cache.get(request)
    return misses


@pytest.mark.parametrize("blocks", [40, 333, 2000])
@pytest.mark.parametrize("kind", [pytest.param("zipf", marks=pytest.mark.slow), "scans"])
@pytest.mark.parametrize("name", REFERENCE)
def test_miss_ratios_are_equal(name: str, kind: str, blocks: int) -> None:
    keys = stream(kind)
    ours, theirs = flat_misses(name, blocks, keys), reference_misses(name, blocks, keys)
    assert ours == theirs
    assert 0 < ours < len(keys)


def test_the_streams_tell_the_policies_apart() -> None:
    """Or else equal ratios would say little."""
    counts = {name: reference_misses(name, 333, stream("scans")) for name in REFERENCE}
    assert len(set(counts.values())) == len(counts), counts


@pytest.mark.parametrize("name", ["lru", "s3fifo"])
def test_the_planner_decides_the_same(name: str) -> None:
    keys = stream("scans")[:20_000]
    hits = lab_hits(name, [[key] for key in keys], 333)
    assert len(keys) - sum(hits) == flat_misses(name, 333, keys)
