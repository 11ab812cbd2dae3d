"""The delay policy: values, order, and what it falls back to."""

from __future__ import annotations

import random

import pytest

from tieredkv.eviction.base import Access, EvictionPolicy, Kind, SessionState, Victim
from tieredkv.eviction.delay import BUSY, DelayPolicy
from tieredkv.eviction.delay_model import DelayModel
from tieredkv.eviction.delay_table import bin_of
from tieredkv.eviction.lru import LruPolicy
from tieredkv.testing.policy_suite import PolicySuite
from tieredkv.testing.policy_world import no_pins

BLOCK = 10


class TestDelay(PolicySuite):
    def make(self, capacity: int, block_bytes: int, seed: int) -> EvictionPolicy:
        return DelayPolicy(capacity, block_bytes, seed)


class TestUntrusted(PolicySuite):
    def make(self, capacity: int, block_bytes: int, seed: int) -> EvictionPolicy:
        policy = DelayPolicy(capacity, block_bytes, seed)
        policy.trusted = lambda: False
        return policy


def access(kind: Kind, run: int, last: float, *sessions: SessionState, blocks: int = 1) -> Access:
    key = run.to_bytes(32, "big")
    return Access(kind, run, key, blocks, blocks * BLOCK, blocks, last, last, 0, sessions=sessions)


def order(policy: EvictionPolicy, now: float) -> list[int]:
    return [victim.run for victim in policy.victims(1 << 30, now, no_pins)]


def wait(model: DelayModel, since: float, reason: str, name: str = "s") -> SessionState:
    """A session whose first turn ended at `since`."""
    state = SessionState(name, turns=1, since=since, finish_reason=reason)
    model.completed(state, since)
    return state


def teach(model: DelayModel, reason: str, delay: float | None, turns: int, now: float) -> float:
    """So many turns that end so are followed after `delay` seconds; None: never. The time."""
    for _ in range(turns):
        state = wait(model, now, reason)
        if delay is not None:
            model.returned(state, now + delay)
        now += 1.0 if delay is None else delay
    return now


def test_with_nothing_learned_the_order_is_that_of_lru() -> None:
    rng = random.Random(3)
    model, delay, lru = DelayModel(), DelayPolicy(1 << 20, BLOCK), LruPolicy(1 << 20, BLOCK)
    delay.use(model)
    now, group = 0.0, wait(model, 0.0, "x").group
    for run in range(300):
        now += rng.expovariate(0.1)
        state = SessionState(str(run), turns=1, since=now, group=group, scale=(0, 0, 0))
        for policy in (delay, lru):
            policy.record(access(Kind.INSERT, run, now, state))
        if run % 7 == 0:
            assert order(delay, now) == order(lru, now)
    for later in (1.0, 60.0, 3600.0, 86400.0):
        assert order(delay, now + later) == order(lru, now + later)


def test_the_session_that_comes_back_soon_stays_though_it_is_older() -> None:
    model, policy = DelayModel(half_life=1e9), DelayPolicy(1 << 20, BLOCK)
    policy.use(model)
    now = teach(model, "tool_use", 10.0, 200, 0.0)
    now = teach(model, "end_turn", 1000.0, 200, now)
    soon, late = wait(model, now, "tool_use"), wait(model, now + 2, "end_turn")
    policy.record(access(Kind.INSERT, 1, now, soon))
    policy.record(access(Kind.INSERT, 2, now + 2, late))
    assert order(policy, now + 3) == [2, 1]
    # Long after its time the first is probably lost, and the second is due.
    assert order(policy, now + 900) == [1, 2]


def test_a_class_that_never_comes_back_goes_first() -> None:
    model, policy = DelayModel(), DelayPolicy(1 << 20, BLOCK)
    policy.use(model)
    now = 0.0
    for _ in range(100):
        now = teach(model, "stop", None, 5, now)
        now = teach(model, "tool_use", 20.0, 5, now)
    old, young = wait(model, now, "tool_use"), wait(model, now + 5, "stop")
    policy.record(access(Kind.INSERT, 1, now, old))
    policy.record(access(Kind.INSERT, 2, now + 5, young))
    assert order(policy, now + 6) == [2, 1]
    assert model.table(young).returns[0] < 0.2 < 0.7 < model.table(old).returns[0]


def test_a_shared_run_is_worth_the_sum_of_its_sessions() -> None:
    model, policy = DelayModel(), DelayPolicy(1 << 20, BLOCK)
    policy.use(model)
    many = [wait(model, 0.0, "x", str(i)) for i in range(4)]
    one = wait(model, 10.0, "x", "one")
    policy.record(access(Kind.INSERT, 1, 0.0, *many))
    policy.record(access(Kind.INSERT, 2, 10.0, one))
    assert order(policy, 30.0) == [2, 1]
    policy.record(access(Kind.SESSION, 1, 0.0, many[0]))  # the others have moved on
    assert order(policy, 30.0) == [1, 2]


def test_busy_and_queued_sessions_stay_ended_and_deserted_runs_go() -> None:
    model, policy = DelayModel(), DelayPolicy(1 << 20, BLOCK)
    policy.use(model)
    states = [wait(model, float(i), "x", str(i)) for i in range(5)]
    states[0].running = True
    states[1].queued = True
    for run, state in enumerate(states):
        policy.record(access(Kind.INSERT, run, float(run), state))
    policy.record(access(Kind.SESSION, 4, 4.0))  # nobody
    policy.record(access(Kind.END, 3, 3.0))
    assert order(policy, 10.0) == [3, 4, 2, 0, 1]
    states[2].priority = 8
    states[1].queued = False
    policy.record(access(Kind.SESSION, 1, 1.0, states[1]))
    policy.record(access(Kind.SESSION, 2, 2.0, states[2]))
    assert order(policy, 10.0) == [3, 4, 1, 2, 0]


def test_while_not_trusted_it_is_lru() -> None:
    model, policy = DelayModel(), DelayPolicy(1 << 20, BLOCK)
    trusted = False
    policy.use(model, lambda: trusted)
    now = teach(model, "stop", None, 200, teach(model, "tool_use", 10.0, 200, 0.0))
    policy.record(access(Kind.INSERT, 1, now, wait(model, now, "tool_use")))
    policy.record(access(Kind.INSERT, 2, now + 1, wait(model, now + 1, "stop")))
    assert order(policy, now + 2) == [1, 2]
    trusted = True
    assert order(policy, now + 2) == [2, 1]


def test_a_turn_that_never_ends_is_busy_for_an_hour() -> None:
    policy = DelayPolicy(1 << 20, BLOCK)
    lost = SessionState("lost", turns=1, running=True, since=0.0)
    for run, state in ((1, lost), (2, wait(policy.model, 3000.0, "x"))):
        policy.record(access(Kind.INSERT, run, state.since, state))
    assert order(policy, 3100.0) == [2, 1]
    assert order(policy, 3700.0) == [1, 2]


def test_pinned_bytes_and_whole_blocks() -> None:
    policy = DelayPolicy(1 << 20, BLOCK)
    policy.record(access(Kind.INSERT, 1, 0.0, blocks=5))
    assert policy.victims(25, 1.0, lambda run: 30) == [Victim(1, 20)]
    assert policy.victims(11, 1.0, lambda run: 0) == [Victim(1, 20)]


def test_drift_old_habits_are_forgotten() -> None:
    after = []
    for half_life in (6 * 3600.0, 1e9):
        model = DelayModel(half_life)
        now = teach(model, "x", 5.0, 300, 0.0)
        before = model.table(wait(model, now, "x")).index[bin_of(2.0)]
        now = teach(model, "x", 500.0, 300, now)
        after.append(model.table(wait(model, now, "x")).index[bin_of(2.0)])
    forgets, keeps = after
    assert forgets < keeps / 2
    assert keeps < before


def test_factors_tell_sessions_of_one_class_apart() -> None:
    """Long chains come back, short ones do not; the class is the same."""
    model, now = DelayModel(half_life=1e9), 0.0
    for turn in range(600):
        state = SessionState("s", turns=1, since=now, finish_reason="x")
        state.blocks = 1000 if turn % 2 else 3
        model.completed(state, now)
        if turn % 2:
            model.returned(state, now + 30.0)
        now += 31.0
    long, short = (SessionState("s", turns=1, since=now, finish_reason="x") for _ in range(2))
    long.blocks, short.blocks = 1000, 3
    for state in (long, short):
        model.completed(state, now)
    assert model.table(short).returns[0] < 0.5 < 0.7 < model.table(long).returns[0]


@pytest.mark.parametrize("age", [0.0, 0.05, 1.0, 15.0, 120.0, 3600.0, 1e6, 1e12])
def test_a_value_exists_at_every_age(age: float) -> None:
    model, policy = DelayModel(), DelayPolicy(1 << 20, BLOCK)
    policy.use(model)
    policy.record(access(Kind.INSERT, 1, 0.0, wait(model, 0.0, "x")))
    assert order(policy, age) == [1]
    assert order(policy, age) == [1]


def test_values_stay_sound_where_nearly_nobody_waits_so_long() -> None:
    model, now = DelayModel(half_life=1e9), 0.0
    now = teach(model, "x", 0.45, 3000, now)
    table = model.table(wait(model, now, "x"))
    assert all(0.0 < value < BUSY for value in table.index)
    assert all(0.0 <= chance <= 1.0 for chance in table.returns)
    assert table.index[bin_of(0.2)] > 10 * table.index[bin_of(30.0)]


def test_timers_do_not_pile_up() -> None:
    policy = DelayPolicy(1 << 20, BLOCK)
    state = SessionState("s", turns=1, running=True)
    for turn in range(2000):
        state.since = float(turn)
        policy.record(access(Kind.SESSION, 1, float(turn), state))
        order(policy, float(turn))
    assert len(policy._timers) < 100


@pytest.mark.parametrize("delay", [0.5, 5.0, 120.0, 7200.0])
def test_a_session_stays_until_those_like_it_have_come_back(delay: float) -> None:
    """To the bins of a quarter octave, of which shrinkage may add two."""
    model = DelayModel(half_life=1e9)
    now = teach(model, "x", delay, 600, 0.0)
    assert delay <= model.stay(wait(model, now, "x")) < 2 * delay


def test_of_a_spread_of_delays_nine_of_ten_are_waited_for() -> None:
    model, now, delays = DelayModel(half_life=1e9), 0.0, [4.0] * 12 + [600.0] * 6 + [9000.0] * 2
    for delay in delays * 60:
        now = teach(model, "x", delay, 1, now)
    assert 600.0 <= model.stay(wait(model, now, "x")) < 1800.0
    now = teach(model, "never", None, 2000, now)
    now = teach(model, "x", 4.0, 200, now + 1e6)  # by when the waits in vain are counted
    assert model.stay(wait(model, now, "never")) == 0.0
