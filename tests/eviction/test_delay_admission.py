"""Which runs are written: those that somebody will probably come back to."""

from __future__ import annotations

import pytest

from tests.sim.small import opened, replay, request
from tieredkv.config import Config
from tieredkv.eviction.admission import OLDEST, DelayAdmission
from tieredkv.eviction.base import Access, Kind, SessionState
from tieredkv.eviction.delay_model import DelayModel
from tieredkv.sim.lab import Lab
from tieredkv.sim.replay import block_keys
from tieredkv.types import Turn

HOUR = 3600.0


def run(*sessions: SessionState) -> Access:
    return Access(Kind.RESIZE, 1, b"key", 1, 10, 1, 0.0, 0.0, 0, sessions=sessions)


def waiting(model: DelayModel, since: float, reason: str = "end_turn") -> SessionState:
    """A session whose first turn has ended."""
    state = SessionState("s", turns=1, since=since, finish_reason=reason)
    model.completed(state, since)
    return state


def learned(share: float) -> tuple[DelayModel, float]:
    """(a model, the time): so many of 400 sessions, one a minute, came back after 10 s."""
    model, now, due = DelayModel(half_life=1e9), 0.0, 0.0
    for _ in range(400):
        now, due = now + 60.0, due + share
        state = waiting(model, now)
        if due >= 1.0:
            due -= 1.0
            model.returned(state, now + 10.0)
    return model, now + 60.0


@pytest.mark.parametrize("age", [0.0, 1.0, 60.0, HOUR, 4 * HOUR, 24 * HOUR, 1e9])
def test_with_nothing_observed_everything_that_has_a_session_is_written(age: float) -> None:
    admission = DelayAdmission()
    assert admission.admit(run(waiting(admission.model, 0.0)), age)
    assert admission.admit(run(SessionState("new", turns=1, running=True)), age)
    assert OLDEST < 11 * HOUR


def test_a_run_without_sessions_is_not_written() -> None:
    assert not DelayAdmission().admit(run(), 0.0)


def test_what_nobody_comes_back_to_is_not_written() -> None:
    model, now = learned(0.02)
    admission = DelayAdmission(model)
    state = waiting(model, now)
    assert model.table(state).returns[0] < 0.2
    assert not admission.admit(run(state), now)
    assert not admission.admit(run(state), now + 60)
    state.queued = True
    assert admission.admit(run(state), now + 60)
    state.queued, state.running = False, True  # what its next wait will be worth
    assert not admission.admit(run(state), now + 60)


def test_what_most_come_back_to_is_written_until_it_is_late() -> None:
    model, now = learned(0.8)
    admission = DelayAdmission(model)
    state = waiting(model, now)
    assert admission.admit(run(state), now)
    assert not admission.admit(run(state), now + 600)


def test_several_sessions_add_up() -> None:
    model, now = learned(0.1)
    admission = DelayAdmission(model)
    states = [waiting(model, now) for _ in range(4)]
    assert 0.06 < model.table(states[0]).returns[0] < 0.2
    assert not admission.admit(run(states[0]), now)
    assert admission.admit(run(*states), now)


def test_sessions_that_are_over_cost_no_write() -> None:
    """60 sessions of one turn each, all of which say that they have finished, above a disk that
    could hold everything; and the same without a word."""
    requests = [request(10.0 * n, f"s{n}", range(100 * n, 100 * n + 4)) for n in range(60)]

    def written(policy: str, finishes: range) -> int:
        admission = "delay" if policy == "delay" else "all"
        with opened(policy, 40, nvme=400, admission=admission) as lab:
            replay(lab, requests, finishes)
            return lab.moved.get((0, 1), 0)

    assert written("lru", range(60)) > 200
    assert written("delay", range(0)) > 100
    assert written("delay", range(60)) == 0


def test_a_flush_writes_what_may_come_back_and_nothing_else() -> None:
    requests = [request(10.0 * n, f"s{n}", range(100 * n, 100 * n + 4)) for n in range(6)]
    with opened("delay", 40, nvme=400, admission="delay") as lab:
        replay(lab, requests, finishes=[0, 1])
        assert lab.moved.get((0, 1), 0) == 0  # memory is not full: there is time
        lab.now += 5.0
        assert lab.core.flush(5.0)
        assert lab.moved[0, 1] == 4 * 4


@pytest.mark.parametrize(
    ("policy", "nvme", "learns", "admits"),
    [
        ("delay", {}, True, False),
        ("delay", {"admission": "all"}, True, False),
        ("delay", {"admission": "delay"}, True, True),
        ("delay", {"eviction": {"policy": "lru"}, "admission": "delay"}, True, True),
        ("lru", {"eviction": {"policy": "delay"}}, True, False),
        ("lru", {"admission": "delay"}, True, True),
        ("lru", {}, False, False),
    ],
)
def test_who_is_asked(policy: str, nvme: dict[str, object], learns: bool, admits: bool) -> None:
    """One model for the whole hierarchy."""
    tier = {"kind": "nvme", "path": "/nowhere", "capacity": "1GiB", **nvme}
    document = {
        "tiers": [{"kind": "dram", "capacity": "1GiB"}, tier],
        "eviction": {"policy": policy},
    }
    lab = Lab(Config.model_validate(document), [8, 8], 512)
    lab.core.mover.close(1.0)
    model, admission = lab.planner.sessions.model, lab.planner.room.admission
    assert (model is not None, admission is not None) == (learns, admits)
    if admits:
        assert isinstance(admission, DelayAdmission)
        assert admission.model is model
    models = [getattr(level.policy, "model", model) for level in lab.planner.res.levels]
    assert all(one is model for one in models)


def test_a_run_that_cannot_be_written_does_not_stay_in_memory_for_ever() -> None:
    """The disk has given up the head of its chain, so that its own blocks would be no use there."""
    nvme = {"kind": "nvme", "capacity": 1, "path": "x", "admission": "delay"}
    document = {"block_tokens": 1, "tiers": [{"kind": "dram", "capacity": 1}, nvme]}
    lab = Lab(Config.model_validate(document), [8, 8], 512)
    head, chain = block_keys([1, 2]), block_keys([1, 2, 3, 4])
    lab.put(head, 0, Turn(session="s"))
    lab.put(chain, 2, Turn(session="s"))
    res, room = lab.planner.res, lab.planner.room
    tail = res.tree.find(chain[-1])
    assert tail is not None
    assert tail.parent is not None
    res.unwanted[tail.parent.id] = lab.now
    assert room.make(0, 6, lab.now) == 4, "it waits for its write"
    room.demote(0, 2, lab.now)
    assert not room.moves
    assert tail.id in res.declined
    assert room.make(0, 6, lab.now) == 6
