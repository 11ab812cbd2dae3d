"""Workload-aware: fits, probabilities and order, worked out by hand."""

from __future__ import annotations

import math
import random

import pytest

from tests.eviction.leaves import BLOCK, Leaves, away, back
from tieredkv.eviction import WorkloadPolicy
from tieredkv.eviction.base import EvictionPolicy
from tieredkv.eviction.workload import CLASSES
from tieredkv.testing.policy_suite import PolicySuite
from tieredkv.types import Turn


class TestWorkload(PolicySuite):
    def make(self, capacity: int, block_bytes: int, seed: int) -> EvictionPolicy:
        return WorkloadPolicy(capacity, block_bytes, seed)


def test_without_data_half_return_within_the_window_on_average() -> None:
    policy = WorkloadPolicy(1000, BLOCK)
    within = 1 - math.exp(-1)  # of one mean delay, the window of 1 s
    assert policy.chance("new", 0.0) == pytest.approx(math.log(0.5 * within))
    half = 0.5 * math.exp(-2)
    assert policy.chance("new", 2.0) == pytest.approx(math.log(half * within / (0.5 + half)))


def taught() -> Leaves:
    """Of 100 first turns of `chat` 80 return, after 10 s each; of `api` none of 100."""
    leaves = Leaves(WorkloadPolicy(1000, BLOCK))
    leaves.insert(1, 0.0)
    for number in range(100):
        leaves.session(1, 1.0, away(f"c{number}", 0.0, category="chat"))
        leaves.session(1, 1.0, away(f"a{number}", 0.0, category="api"))
        if number < 80:
            leaves.session(1, 1.0, back(f"c{number}", 10.0, category="chat"))
    leaves.end(1, 1.0)
    return leaves


def test_the_fit_is_the_share_of_returns_and_their_mean_delay() -> None:
    policy = taught().policy
    share, mean = 81 / 203, 801 / 81  # of all 201 turns, with 1 return of 2 to begin with
    chat, rate = (80 + 2 * share) / 102, 82 / (800 + 2 * mean)
    expected = chat * (1 - math.exp(-rate))
    assert policy.chance(("chat", 1), 0.0) == pytest.approx(math.log(expected))
    api = 2 * share / 102 * (1 - math.exp(-1 / mean))
    assert policy.chance(("api", 1), 0.0) == pytest.approx(math.log(api))
    assert policy.chance(("chat", 2), 0.0) == pytest.approx(
        math.log(share * (1 - math.exp(-1 / mean)))
    )


def test_what_returns_less_goes_first_until_the_other_is_too_old() -> None:
    leaves = taught()
    for number in range(20):  # `slow`: 20 of 100 return, after 1,000 s
        leaves.session(1, 1.0, back(f"s{number}", 1000.0, category="slow"))
    for number in range(20, 100):
        leaves.session(1, 1.0, away(f"s{number}", 0.0, category="slow"))
    leaves.end(1, 1.0)
    leaves.insert(2, 100.0, away("x", 100.0, category="chat"))
    leaves.insert(3, 101.0, away("y", 101.0, category="chat"))
    leaves.insert(4, 102.0, away("z", 102.0, category="slow"))
    assert leaves.order(103.0) == [1, 4, 2, 3]
    assert leaves.order(300.0) == [1, 2, 3, 4]


def test_what_comes_back_too_late_for_the_tier_is_no_return() -> None:
    leaves = taught()
    leaves.insert(2, 91.0)
    leaves.hit(2, 100.0)
    leaves.insert(3, 110.0)
    leaves.child(1)
    assert leaves.evict() == 2  # after 10 s: the tier waits for 40
    fit = leaves.policy._fits["chat", 1]
    for delay, returns in ((39.0, 81), (41.0, 81), (40.0, 82)):
        leaves.session(3, 110.0, back(f"c{delay}", delay, category="chat"))
        assert fit.returns == returns


def test_the_turn_number_tells_classes_apart() -> None:
    leaves = taught()
    leaves.insert(2, 100.0, away("x", 100.0, turns=2, category="api"))
    leaves.insert(3, 101.0, away("y", 101.0, turns=1, category="api"))
    assert leaves.order(101.0) == [1, 3, 2]  # nothing is known of second turns: as all others


def test_of_equals_the_deepest_goes_first() -> None:
    leaves = Leaves(WorkloadPolicy(1000, BLOCK))
    for run, depth in ((1, 5), (2, 9), (3, 7)):
        leaves.insert(run, 1.0, depth=depth, turn=Turn(category="chat"))
    assert leaves.order(2.0) == [2, 3, 1]


def test_without_sessions_the_uses_of_a_leaf_teach() -> None:
    leaves = Leaves(WorkloadPolicy(1000, BLOCK))
    leaves.insert(1, 0.0, turn=Turn(category="chat"))
    for now in range(1, 21):
        leaves.hit(1, float(now))
        leaves.insert(100 + now, float(now), turn=Turn(category="api"))
    leaves.insert(2, 21.0, turn=Turn(category="api"))
    assert leaves.order(21.0) == [*range(101, 121), 2, 1]


def test_comparing_heads_is_comparing_all() -> None:
    rng = random.Random(0)
    policy = WorkloadPolicy(1000, BLOCK)
    leaves = Leaves(policy)
    categories = ["chat", "api", "agent", None]
    alive: list[int] = []
    for run in range(300):
        now = run / 3
        category, name = rng.choice(categories), f"s{run}"
        turns = rng.randrange(1, 12)
        leaves.insert(run, now, away(name, now, turns=turns, category=category), depth=run % 7)
        alive.append(run)
        if category == "agent" or rng.random() < 0.3:
            leaves.session(run, now, back(name, rng.expovariate(0.3), turns + 1, category=category))
        if rng.random() < 0.4:
            alive.remove(leaves.evict())
    assert policy._life.seconds > 1
    for later in (0.0, 10.0, 1000.0):
        now = leaves.now + later

        def badness(run: int, now: float = now) -> tuple[float, float, float]:
            group, (last, depth, _) = policy._place[run]
            return policy.chance(group, now - last), depth, last

        assert leaves.order(now) == sorted(alive, key=badness)


def test_classes_are_bounded() -> None:
    policy = WorkloadPolicy(1000, BLOCK)
    leaves = Leaves(policy)
    for run in range(1000):
        leaves.insert(run, float(run), away(f"s{run}", float(run), category=f"tenant {run}"))
    assert len(policy._lists) == len(policy._fits) + 1 == CLASSES + 2
    assert sorted(leaves.order()) == list(range(1000))
