"""TTL: what is learned, how long a leaf is kept, and who goes first, worked out by hand."""

from __future__ import annotations

import pytest

from tests.eviction.leaves import BLOCK, Leaves, away, back
from tieredkv.eviction import TtlPolicy
from tieredkv.eviction.base import EvictionPolicy
from tieredkv.eviction.ttl import CLASSES, Delays, Turns
from tieredkv.testing.policy_suite import PolicySuite
from tieredkv.types import Turn

SHORT, LONG = 0.8, 51.2  # ends of bins: 0.05 s times 2^4 and 2^10


class TestTtl(PolicySuite):
    def make(self, capacity: int, block_bytes: int, seed: int) -> EvictionPolicy:
        return TtlPolicy(capacity, block_bytes, seed)


def eight_and_two() -> Delays:
    delays = Delays()
    for delay in [SHORT] * 8 + [LONG] * 2:
        delays.add(delay)
    return delays


@pytest.mark.parametrize(
    ("life", "ttl"),
    [
        (0.5, 0.0),  # 8 returns cost 8 s / 0.5 s = 16
        (10.0, SHORT),  # 8 - 0.8 against 10 - 108.8 / 10
        (50.0, SHORT),  # 8 - 8 / 50 = 7.84 against 10 - 108.8 / 50 = 7.82
        (51.0, LONG),  # 7.843 against 7.867
        (1000.0, LONG),
    ],
)
def test_the_ttl_trades_returns_against_holding(life: float, ttl: float) -> None:
    assert eight_and_two().best_ttl(life) == pytest.approx(ttl)


def test_old_delays_fade() -> None:
    delays = eight_and_two()
    for _ in range(5000):
        delays.add(LONG)
    assert delays.total <= 512
    assert delays.best_ttl(10.0) == 0.0
    assert delays.best_ttl(100.0) == pytest.approx(LONG)


def taught() -> Leaves:
    """Sessions return 0.8 s after a tool call and 51.2 s after a stop; a run lives 10 s."""
    leaves = Leaves(TtlPolicy(1000, BLOCK))
    leaves.insert(1, 0.0)
    leaves.insert(2, 10.0)
    assert leaves.evict() == 1
    for number in range(8):
        leaves.session(2, 10.0, back(f"tool {number}", SHORT, finish_reason="tool"))
        leaves.session(2, 10.0, back(f"stop {number}", LONG, finish_reason="stop"))
    leaves.end(2, 10.0)
    return leaves


def test_a_leaf_is_kept_as_long_as_what_ended_its_turn_tells() -> None:
    leaves = taught()
    leaves.insert(3, 20.0, away("a", 20.0, finish_reason="tool"))
    leaves.insert(4, 20.5, away("b", 20.5, finish_reason="stop"))  # returns too late: no ttl
    leaves.insert(5, 20.6, away("c", 20.6, finish_reason="tool"))
    assert leaves.order(20.7) == [2, 4, 3, 5]
    assert leaves.order(20.81) == [2, 3, 4, 5]  # 3 has expired
    assert leaves.order(20.7) == [2, 4, 3, 5]
    leaves.insert(6, 21.3, away("d", 21.3, finish_reason="tool"))
    assert leaves.order(21.3) == [2, 3, 4, 5, 6]
    assert leaves.order(21.5) == [2, 3, 4, 5, 6]
    leaves.hit(3, 21.5, away("a", 21.5, turns=2, finish_reason="tool"))
    assert leaves.order(21.5) == [2, 4, 5, 6, 3]


def test_the_longest_of_several_sessions_counts_and_the_running_do_not() -> None:
    leaves = taught()
    leaves.insert(3, 20.0, away("a", 20.0, finish_reason="tool"))
    leaves.insert(4, 20.1, away("b", 20.1, finish_reason="stop"))
    assert leaves.order(20.2) == [2, 4, 3]
    there = away("b", 20.1, finish_reason="stop"), away("c", 20.15, finish_reason="tool")
    leaves.session(4, 20.15, *there)
    assert leaves.order(20.2) == [2, 3, 4]
    assert leaves.order(20.9) == [2, 3, 4]
    leaves.session(3, 20.2, back("a", 0.2, finish_reason="tool"))
    assert leaves.order(20.3) == [2, 3, 4]


def test_without_sessions_the_uses_of_a_leaf_teach() -> None:
    leaves = Leaves(TtlPolicy(1000, BLOCK))
    leaves.insert(1, 0.0)
    leaves.insert(2, 10.0, turn=Turn(finish_reason="tool"))
    assert leaves.evict() == 1
    for number in range(1, 9):
        leaves.hit(2, 10.0 + number * SHORT)
    leaves.insert(3, 16.5)
    assert leaves.order(16.6) == [2, 3]  # both kept: what is unknown is as all others
    leaves.insert(4, 16.7, turn=Turn(finish_reason="stop"))
    leaves.hit(2, 30.0)
    leaves.hit(4, 30.1)
    assert leaves.order(30.5) == [3, 2, 4]


def test_a_turn_is_counted_once_though_its_run_is_recorded_often() -> None:
    policy = TtlPolicy(1000, BLOCK)
    leaves = Leaves(policy)
    leaves.insert(1, 0.0)
    session = back("a", SHORT, finish_reason="tool")
    for now in range(1, 20):
        leaves.session(1, float(now), session)
    assert policy._delays[None].total == 1
    session.turns += 1
    leaves.session(1, 20.0, session)
    assert policy._delays[None].total == policy._delays["tool", None].total == 2


def test_memory_of_turns_and_classes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tieredkv.eviction.ttl.SESSIONS", 100)
    policy = TtlPolicy(1000, BLOCK)
    leaves = Leaves(policy)
    leaves.insert(1, 0.0)
    for number in range(1000):
        leaves.session(1, 1.0, back(f"s{number}", SHORT, finish_reason=f"r{number}"))
    assert len(policy._turns._stage) == 100
    assert len(policy._delays) == CLASSES
    assert policy._delays[None].total > 300  # the rest counts in the pool


def test_turns_are_news_when_they_begin_and_when_they_end() -> None:
    leaves, turns = Leaves(TtlPolicy(1000, BLOCK)), Turns()
    heard: list[tuple[int, bool]] = []
    leaves.policy.record = lambda access: heard.extend(
        (session.turns, session.running) for session in turns.news(access)
    )
    session = back("a", 1.0, turns=1)
    leaves.insert(1, 0.0, session)
    leaves.session(1, 1.0, session)
    session.running = False
    leaves.session(1, 2.0, session)
    session.turns, session.running = 2, True
    leaves.session(1, 3.0, session)
    assert heard == [(1, True), (1, False), (2, True)]
