"""What distinguishes the simple policies, and what chains do under each of them."""

from __future__ import annotations

from typing import Any

import pytest

from tieredkv.eviction import BUILTIN, FifoPolicy, LfuPolicy, LruPolicy
from tieredkv.eviction.base import Access, Kind

BLOCK = 10


def record(
    policy: Any, kind: Kind, run: int, born: float, last: float, hits: int = 0, blocks: int = 1
) -> None:
    key = b"%d" % run
    nbytes = blocks * BLOCK
    policy.record(Access(kind, run, key, blocks, nbytes, 1, born, last, hits, first=key))


def order(policy: Any) -> list[int]:
    return [victim.run for victim in policy.victims(1 << 40, 0.0, lambda run: 0)]


def three(policy: Any) -> Any:
    """1 oldest and used most, 2 used longest ago, 3 newest."""
    for run in (1, 2, 3):
        record(policy, Kind.INSERT, run, float(run), float(run))
    record(policy, Kind.HIT, 1, 1.0, 5.0, hits=1)
    record(policy, Kind.HIT, 1, 1.0, 6.0, hits=2)
    record(policy, Kind.HIT, 3, 3.0, 7.0, hits=1)
    return policy


def test_each_policy_has_its_order() -> None:
    assert order(three(LruPolicy(100, BLOCK))) == [2, 1, 3]
    assert order(three(FifoPolicy(100, BLOCK))) == [1, 2, 3]
    assert order(three(LfuPolicy(100, BLOCK))) == [2, 3, 1]


def test_lfu_breaks_ties_by_recency() -> None:
    policy = LfuPolicy(100, BLOCK)
    for run, last in ((1, 9.0), (2, 3.0), (3, 5.0)):
        record(policy, Kind.HIT, run, 0.0, last, hits=4)
    assert order(policy) == [2, 3, 1]


def test_lru_puts_a_parent_where_its_newest_descendant_was() -> None:
    policy = LruPolicy(100, BLOCK)
    for run in (1, 2, 3):
        record(policy, Kind.INSERT, run, float(run), float(run))
    policy.forget(1, evicted=False)
    assert order(policy) == [2, 3]
    record(policy, Kind.LEAF, 1, 1.0, 2.5)
    assert order(policy) == [2, 1, 3]


@pytest.mark.parametrize("name", BUILTIN)
def test_a_change_of_size_changes_no_rank(name: str) -> None:
    policy = three(BUILTIN[name](100, BLOCK))
    before = order(policy)
    for run in (1, 2, 3):
        record(policy, Kind.RESIZE, run, float(run), 99.0, hits=50, blocks=3)
    assert order(policy) == before
    assert [nbytes for _, nbytes in policy.victims(50, 0.0, lambda run: 0)] == [30, 20]


@pytest.mark.parametrize("name", BUILTIN)
def test_use_revives_an_ended_run(name: str) -> None:
    policy = three(BUILTIN[name](100, BLOCK))
    record(policy, Kind.END, 3, 3.0, 8.0, hits=1)
    assert order(policy)[0] == 3
    record(policy, Kind.HIT, 3, 3.0, 9.0, hits=2)
    record(policy, Kind.INSERT, 4, 0.0, 0.0)
    assert order(policy)[0] != 3


@pytest.mark.parametrize("name", BUILTIN)
def test_a28_a_chain_loses_its_tail_first(name: str) -> None:
    policy = BUILTIN[name](4 * BLOCK, BLOCK)
    chain = [1, 2, 3, 4]  # runs of one block, each the child of the one before

    def store(missing: list[int], now: float) -> None:
        for run in missing:
            policy.forget(run - 1, evicted=False)
            record(policy, Kind.INSERT, run, now, now)

    def evict(blocks: int, now: float) -> None:
        for _ in range(blocks):
            (victim,) = policy.victims(BLOCK, now, lambda run: 0)
            assert victim.run == chain[-1]
            policy.forget(chain.pop(), evicted=True)
            if chain:
                record(policy, Kind.LEAF, chain[-1], 0.0, now, hits=20)

    store(chain, 0.0)
    evict(1, 1.0)
    assert chain == [1, 2, 3]
    record(policy, Kind.HIT, 3, 0.0, 2.0, hits=21)
    evict(2, 3.0)
    assert chain == [1]
    chain += [2, 3, 4]
    store([2, 3, 4], 4.0)
    evict(4, 5.0)
    assert chain == []
    assert policy.victims(BLOCK, 6.0, lambda run: 0) == []
