"""GDSF: priorities worked out by hand. At depth 64, 128, 192 a block costs 1.5, 2, 2.5."""

from __future__ import annotations

import pytest

from tests.eviction.leaves import BLOCK, Leaves
from tieredkv.eviction import GdsfPolicy
from tieredkv.eviction.base import EvictionPolicy
from tieredkv.testing.policy_suite import PolicySuite


class TestGdsf(PolicySuite):
    def make(self, capacity: int, block_bytes: int, seed: int) -> EvictionPolicy:
        return GdsfPolicy(capacity, block_bytes, seed)


def three() -> Leaves:
    """Priorities 3 (used once), 2 and 2.5."""
    leaves = Leaves(GdsfPolicy(1000, BLOCK))
    for run, depth in ((1, 65), (2, 129), (3, 193)):
        leaves.insert(run, float(run), blocks=2, depth=depth)
    leaves.hit(1, 4.0)
    return leaves


def test_uses_and_depth_make_the_priority() -> None:
    assert three().order() == [2, 3, 1]


def test_the_last_evicted_raises_what_comes_later() -> None:
    leaves = three()
    assert leaves.evict() == 2  # L = 2
    leaves.insert(4, 5.0, blocks=2, depth=65)  # 2 + 1.5
    assert leaves.order() == [3, 1, 4]
    leaves.hit(3, 6.0)  # 2 + 2 * 2.5
    assert leaves.order() == [1, 4, 3]
    assert leaves.evict() == 1  # L = 3
    leaves.insert(5, 7.0, blocks=2, depth=129)  # 3 + 2
    assert leaves.order() == [4, 5, 3]


@pytest.mark.parametrize("blocks", [1, 2, 8])
def test_size_cancels_out(blocks: int) -> None:
    leaves = three()
    leaves.insert(4, 5.0, blocks=blocks, depth=160 + blocks // 2)  # about 2.25
    assert leaves.order() == [2, 4, 3, 1]


def test_what_is_no_use_changes_no_priority() -> None:
    leaves = three()
    assert leaves.evict() == 2
    leaves.resize(1, 1)
    leaves.session(3, 9.0)
    leaves.insert(4, 10.0, blocks=2, depth=65)
    assert leaves.order() == [3, 1, 4]


def test_ended_runs_raise_nothing() -> None:
    leaves = three()
    leaves.end(1, 5.0)
    assert leaves.evict() == 1
    leaves.insert(4, 6.0, blocks=2, depth=65)
    assert leaves.order() == [4, 2, 3]
