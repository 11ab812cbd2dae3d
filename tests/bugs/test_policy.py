"""A28-A30: eviction keeps prefixes, counters and events tell the truth."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.bugs.test_capacity import only
from tests.bugs.world import (
    KINDS,
    MISSING,
    OK,
    TOKENS,
    Faulty,
    chain,
    dram,
    get,
    hbm,
    nvme,
    opened,
    put,
    resident,
    tier,
    tiers,
)
from tieredkv import Outcome, TieredKVStore
from tieredkv.events import EventKind
from tieredkv.testing import Fault

POLICIES = ("lru", "fifo", "lfu", "arc")


@pytest.mark.parametrize("kind", ["hbm", "dram", "nvme"])
@pytest.mark.parametrize("policy", POLICIES)
def test_A28_the_tail_goes_before_the_head(policy: str, kind: str, tmp_path: Path) -> None:
    keys, seed = chain(4), 0
    with opened(only(kind, 4, tmp_path), eviction={"policy": policy}) as store:
        for evicted in (1, 2, 3, 1):
            assert put(store, keys) == [OK] * 4
            for _ in range(5):
                assert get(store, keys[:2]) == [OK] * 2
            seed += 1
            other = chain(evicted, seed)
            assert put(store, other) == [OK] * evicted
            assert store.lookup(keys).blocks == 4 - evicted
            assert get(store, keys) == [OK] * (4 - evicted) + [MISSING] * evicted
            store.delete(other)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_A28_no_block_outlives_its_parent(kind: str, policy: str, tmp_path: Path) -> None:
    trunk = chain(4)
    specs = tiers(kind, tmp_path)
    for spec in specs:
        spec["capacity"] = (320 << 10) if spec["kind"] == "nvme" else spec["capacity"] // 4
    branches = [chain(4) + chain(4 + n, seed=n)[4:] for n in range(1, 9)]
    with opened(*specs, eviction={"policy": policy}, mover={"room_wait": 0.01}) as store:
        for _ in range(3):
            for keys in branches:
                put(store, keys)
                get(store, trunk)
                assert store.check() == []
                everywhere = set().union(*resident(store).values())
                for known in branches:
                    stored = [key in everywhere for key in known]
                    assert stored == sorted(stored, reverse=True), "a block without its parent"


def test_A29_a_lookup_is_no_query_and_a_get_is_one() -> None:
    keys = chain(8)
    with opened(dram(16)) as store:
        assert put(store, keys[:6]) == [OK] * 6
        for _ in range(2):  # the scheduler asks twice
            assert store.lookup(keys).blocks == 6
            store.contains(keys[0])
        assert (store.stats().query_tokens, store.stats().hit_tokens) == (0, 0)
        outcomes = get(store, keys)
        stats = store.stats()
        assert stats.query_tokens == 8 * TOKENS
        assert stats.hit_tokens == outcomes.count(OK) * TOKENS == 6 * TOKENS


def test_A29_what_the_engine_has_already_is_not_asked_for() -> None:
    keys = chain(8)
    with opened(dram(16)) as store:
        assert put(store, keys[:6]) == [OK] * 6
        assert get(store, keys, start=4) == [OK] * 2 + [MISSING] * 2
        stats = store.stats()
        assert (stats.query_tokens, stats.hit_tokens) == (4 * TOKENS, 2 * TOKENS)


def test_A29_tiers_and_recomputed_tokens_add_up_to_the_prompt(tmp_path: Path) -> None:
    keys, wrap = chain(12), Faulty()
    specs = (dram(16), nvme(tmp_path))
    with opened(*specs, wrap=wrap, promotion={"enabled": False}) as store:
        assert put(store, keys[:8]) == [OK] * 8
        assert store.flush(10)
        store.clear("dram")
        assert store.prefetch(keys[:4]).result(10) == 4
        wrap.tiers["nvme"].error = Fault([keys[7]], op="read")
        outcomes = get(store, keys)
        assert outcomes == [OK] * 7 + [Outcome.FAILED] + [MISSING] * 4
        stats = store.stats()
        recomputed = (12 - outcomes.count(OK)) * TOKENS
        assert [t.hit_tokens for t in stats.tiers] == [4 * TOKENS, 3 * TOKENS]
        assert sum(t.hit_tokens for t in stats.tiers) + recomputed == stats.query_tokens
        assert stats.query_tokens == 12 * TOKENS


def test_A29_the_exported_counters_are_the_same() -> None:
    keys = chain(4)
    with opened(dram(16)) as store:
        put(store, keys[:3])
        get(store, keys)
        sample = store.metrics.registry.get_sample_value
        assert sample("tieredkv:query_tokens_total") == 4 * TOKENS
        assert sample("tieredkv:hit_tokens_total", {"tier": "dram"}) == 3 * TOKENS


class Consumer:
    """A router that knows a store only from its events."""

    def __init__(self) -> None:
        self.tiers: dict[str, set[bytes]] = defaultdict(set)
        self.lost = 0

    def follow(self, store: TieredKVStore) -> None:
        events = store.take_events()
        if any(event.kind is EventKind.LOST for event in events):
            self.lost += 1
            self.tiers = defaultdict(set, resident(store))
            return
        for event in events:
            if event.kind is EventKind.STORED:
                assert not self.tiers[event.tier] & set(event.keys), "stored twice"
                self.tiers[event.tier] |= set(event.keys)
            elif event.kind is EventKind.REMOVED:
                assert self.tiers[event.tier] >= set(event.keys), "removed what was not there"
                self.tiers[event.tier] -= set(event.keys)
            else:
                self.tiers[event.tier].clear()

    def agrees(self, store: TieredKVStore) -> bool:
        self.follow(store)
        return {name: keys for name, keys in self.tiers.items() if keys} == {
            name: keys for name, keys in resident(store).items() if keys
        }


def test_A30_removal_from_one_tier_is_not_removal_from_all(tmp_path: Path) -> None:
    keys, router = chain(4), Consumer()
    with opened(dram(8), nvme(tmp_path), events=1000) as store:
        assert put(store, keys) == [OK] * 4
        assert store.flush(10)
        assert router.agrees(store)
        assert router.tiers == {"dram": set(keys), "nvme": set(keys)}
        assert put(store, chain(8, seed=1)) == [OK] * 8  # takes the place in dram
        assert router.agrees(store)
        assert not router.tiers["dram"] & set(keys)
        assert router.tiers["nvme"] >= set(keys)
        assert store.flush(10)  # what is in dram now may go
        assert store.prefetch(keys).result(10) == 4
        assert router.agrees(store)
        assert router.tiers["dram"] >= set(keys)
        store.clear("nvme")
        assert router.agrees(store)
        assert not router.tiers["nvme"]
        assert store.delete(keys[2:3]) == 2
        assert router.agrees(store)


def test_A30_a_replay_ends_with_the_resident_sets(tmp_path: Path) -> None:
    router = Consumer()
    specs = (hbm(4), dram(8), nvme(tmp_path, 320 << 10))
    with opened(*specs, events=10_000, mover={"room_wait": 0.01}) as store:
        for seed in range(40):
            keys = chain(1 + seed % 6, seed // 2)
            put(store, keys)
            get(store, chain(6, seed // 3))
            if seed % 7 == 0:
                store.delete(keys[-1:])
            assert store.flush(10)
            assert router.agrees(store)
        assert tier(store.stats(), "nvme").evicted_blocks > 0
        store.clear()
        assert router.agrees(store)
        assert not any(router.tiers.values())
    assert router.lost == 0


def test_A30_damage_and_restarts_are_announced(tmp_path: Path) -> None:
    keys, router, wrap = chain(4), Consumer(), Faulty()
    with opened(nvme(tmp_path), events=100) as store:
        assert put(store, keys) == [OK] * 4
    with opened(nvme(tmp_path), events=100, wrap=wrap) as store:
        assert router.agrees(store)
        assert router.tiers["nvme"] == set(keys)
        wrap.tiers["nvme"].error = Fault([keys[2]], op="read", outcome=Outcome.CORRUPT)
        get(store, keys)
        assert router.agrees(store)
        assert router.tiers["nvme"] == set(keys[:2])


def test_A30_a_consumer_that_was_too_slow_is_told() -> None:
    router = Consumer()
    with opened(dram(64), events=3) as store:
        for seed in range(10):
            assert put(store, chain(2, seed)) == [OK] * 2
        assert router.agrees(store)
        assert router.lost == 1
        assert put(store, chain(2, seed=99)) == [OK] * 2
        assert router.agrees(store)
        assert router.lost == 1
