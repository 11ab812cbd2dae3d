"""SIEVE: walks of the hand worked out by hand; `test_libcachesim.py` has the long streams."""

from __future__ import annotations

from tests.eviction.leaves import BLOCK, Leaves
from tieredkv.eviction import SievePolicy
from tieredkv.eviction.base import EvictionPolicy
from tieredkv.testing.policy_suite import PolicySuite


class TestSieve(PolicySuite):
    def make(self, capacity: int, block_bytes: int, seed: int) -> EvictionPolicy:
        return SievePolicy(capacity, block_bytes, seed)


def five() -> Leaves:
    """Runs 1 to 5; 1, 2 and 4 were used."""
    leaves = Leaves(SievePolicy(5 * BLOCK, BLOCK))
    for run in range(1, 6):
        leaves.insert(run, float(run))
    for run in (1, 2, 4):
        leaves.hit(run, 5.0 + run)
    return leaves


def test_the_hand_spares_what_was_used_once_per_lap() -> None:
    leaves = five()
    assert leaves.order() == [3, 5, 1, 2, 4]
    assert leaves.evict() == 3  # 1 and 2 have been passed
    leaves.insert(6, 20.0)
    assert leaves.order() == [5, 6, 1, 2, 4]
    leaves.hit(1, 21.0)
    assert leaves.order() == [5, 6, 2, 4, 1]
    leaves.hit(4, 22.0)  # not passed yet: it was spared in this lap anyway
    assert leaves.order() == [5, 6, 2, 4, 1]


def test_after_the_newest_the_hand_starts_again_with_the_oldest() -> None:
    leaves = Leaves(SievePolicy(2 * BLOCK, BLOCK))
    leaves.insert(1, 1.0)
    leaves.insert(2, 2.0)
    leaves.hit(1, 3.0)
    assert leaves.evict() == 2
    leaves.insert(3, 4.0)
    assert leaves.order() == [1, 3]


def test_using_twice_is_using_once() -> None:
    leaves = five()
    for use in range(3):
        leaves.hit(1, 30.0 + use)
    assert leaves.order() == [3, 5, 1, 2, 4]


def test_a_chain_that_is_not_used_goes_as_a_whole() -> None:
    leaves = Leaves(SievePolicy(5 * BLOCK, BLOCK))
    leaves.insert(1, 1.0)
    leaves.insert(2, 2.0)
    leaves.hit(2, 3.0)
    leaves.child(2)
    for run in (3, 4, 5):  # 3 is the child of 2
        leaves.insert(run, float(run))
    leaves.hit(1, 6.0)
    assert leaves.evict() == 3
    leaves.leaf(2, 3.0, hits=1)
    assert leaves.order() == [2, 4, 5, 1]


def test_a_parent_stands_where_its_newest_descendant_was_used() -> None:
    leaves = five()
    leaves.child(3)
    leaves.leaf(3, 4.5, hits=1)
    assert leaves.order() == [3, 5, 1, 2, 4]
    assert leaves.evict() == 3
    leaves.insert(6, 9.0)
    leaves.hit(4, 10.0)  # the hand stands between 4 and 5, so it finds it in the next lap
    assert leaves.order() == [5, 6, 1, 2, 4]
    leaves.hit(5, 11.0)
    assert leaves.order() == [6, 1, 2, 5, 4]


def test_the_pinned_stay_the_next_candidates() -> None:
    leaves = five()
    (victim,) = leaves.policy.victims(BLOCK, 9.0, lambda run: BLOCK if run == 3 else 0)
    assert victim.run == 5
    leaves.policy.forget(5, evicted=True)
    assert leaves.order() == [3, 1, 2, 4]


def test_ended_runs_do_not_move_the_hand() -> None:
    leaves = five()
    leaves.end(5, 9.0)
    assert leaves.evict() == 5
    leaves.insert(6, 20.0)
    assert leaves.order() == [3, 6, 1, 2, 4]
