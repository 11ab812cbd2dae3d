"""LHD: densities against their definition, what is learned, and how victims are drawn."""

from __future__ import annotations

import random
from array import array

import pytest

from tests.eviction.leaves import BLOCK, Leaves
from tieredkv.eviction import LhdPolicy
from tieredkv.eviction.base import EvictionPolicy
from tieredkv.eviction.lhd import LRU, PERIOD, PRIOR, SAMPLE
from tieredkv.eviction.ttl import BINS, EDGES
from tieredkv.testing.policy_suite import PolicySuite


class TestLhd(PolicySuite):
    def make(self, capacity: int, block_bytes: int, seed: int) -> EvictionPolicy:
        return LhdPolicy(capacity, block_bytes, seed)


def test_densities_are_those_of_the_definition() -> None:
    rng = random.Random(0)
    policy = LhdPolicy(1000, BLOCK)
    hits = [rng.randrange(20) for _ in range(BINS)]
    evictions = [rng.randrange(20) for _ in range(BINS)]
    policy._hits[5], policy._evictions[5] = array("d", hits), array("d", evictions)
    policy._compute()
    starts = [0.0, *EDGES]
    for age in range(BINS):
        stay = 0.0
        for later in range(age, BINS):
            middle = (starts[later] + EDGES[later]) / 2
            stay += (hits[later] + evictions[later]) * (middle - starts[age])
        expected = (sum(hits[age:]) + PRIOR) / (stay + PRIOR * EDGES[age])
        assert policy._density[5][age] == pytest.approx(expected)
    assert list(policy._hits[5]) == pytest.approx([count * 0.9 for count in hits])
    assert list(policy._density[6]) == pytest.approx(LRU)


def test_without_data_it_is_lru() -> None:
    leaves = Leaves(LhdPolicy(1000, BLOCK))
    for run in range(1, 21):
        leaves.insert(run, float(run))
    leaves.hit(3, 30.0)
    assert leaves.order(31.0) == [1, 2, *range(4, 21), 3]


def serve(leaves: Leaves, rounds: int) -> None:
    """Run 0 is used every 2 s; others are stored, not used, and evicted at the age of 1 s."""
    for _ in range(rounds):
        now = leaves.now + 1.0
        leaves.insert(1, now)
        leaves.hit(0, now + 1.0)
        leaves.policy.forget(1, evicted=True)


def test_what_is_not_used_again_goes_before_older_runs_that_are() -> None:
    leaves = Leaves(LhdPolicy(1000, BLOCK))
    leaves.insert(0, 0.0)
    serve(leaves, 300)
    leaves.insert(2, leaves.now + 1.0)
    assert leaves.order() == [0, 2]  # nothing was computed yet: as LRU
    leaves.child(2)
    serve(leaves, PERIOD)
    leaves.insert(3, leaves.now + 1.0)
    assert leaves.order() == [3, 0]


def test_a_victim_is_the_worst_of_a_sample() -> None:
    draws = set()
    for seed in range(20):
        leaves = Leaves(LhdPolicy(100_000, BLOCK, seed))
        for run in range(1000):
            leaves.insert(run, float(run))
        (first,) = leaves.policy.victims(BLOCK, 1000.0, lambda run: 0)
        draws.add(first.run)
        assert first.run < 1000 - SAMPLE
        drawn = list(leaves.policy._draw())
        assert sorted(drawn) == list(range(1000))
        assert first.run == min(drawn[:SAMPLE])
        order = leaves.order(1000.0)
        assert order[1] == min({*drawn[: SAMPLE + 1]} - {first.run})
    assert len(draws) > 10
    assert sum(draws) / len(draws) < 60  # 1000 / 65 expected


def test_classes_are_uses_and_depth() -> None:
    policy = LhdPolicy(100_000, BLOCK)
    leaves = Leaves(policy)
    for run, depth in enumerate((1, 7, 8, 63, 64, 511, 512, 100_000)):
        leaves.insert(run, 0.0, depth=depth)
    assert [policy._members[run].group for run in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    for uses in range(1, 6):
        leaves.hit(0, float(uses))
        assert policy._members[0].group == 4 * min(uses, 3)
