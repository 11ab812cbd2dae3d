"""The lab: sound after every step, and the laws of a hierarchy hold in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.small import Random, opened, replay, request, traces
from tieredkv.events import EventKind
from tieredkv.sim.lab import Lab
from tieredkv.sim.replay import Replayer, block_keys
from tieredkv.types import Turn

POLICIES = ["lru", "arc", "delay"]


@dataclass(frozen=True)
class Shape:
    slots: tuple[int, ...]
    nvme: int = 0
    write: str = "on_evict"


def keys_of(ids: Sequence[int]) -> list[bytes]:
    return block_keys(ids)


def sound(lab: Lab) -> None:
    assert lab.planner.check([]) == []
    for level in lab.planner.res.levels:
        assert level.pool.used <= level.slots
        assert not level.writing
        assert not level.pool.expected


class Residents:
    """What the events say is where."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.tiers: dict[str, set[bytes]] = {tier.name: set() for tier in lab.tiers}

    def follow(self) -> None:
        events = self._lab.planner.res.events
        assert events is not None
        for event in events.take():
            there, keys = self.tiers[event.tier], set(event.keys)
            if event.kind is EventKind.STORED:
                assert not there & keys, "stored twice"
                there |= keys
            else:
                assert event.kind is EventKind.REMOVED
                assert keys <= there, "removed what was not there"
                there -= keys

    def prefix(self, keys: Sequence[bytes]) -> int:
        everywhere = set().union(*self.tiers.values())
        return next((i for i, key in enumerate(keys) if key not in everywhere), len(keys))


def hint(lab: Lab, kind: str, trace: Random, at: int) -> None:
    """What a front end may say after request `at`, true or not."""
    session, ids = trace.requests[at].session, trace.requests[at].hash_ids
    planner = lab.planner
    if kind == "finish":
        planner.end_session(session, lab.now)
    elif kind == "abandon":
        planner.abandon(keys_of(ids), lab.now)
    elif kind == "fork":
        planner.fork(session, f"{session}.{at}", lab.now)
    elif kind == "turn_ended":
        planner.turn_ended(session, lab.now, finish_reason="tool_use", next_tool="bash")
    elif kind == "queued":
        planner.queued(session, lab.now)
    elif kind == "urgent" and ids:
        lab.put(keys_of(ids), len(ids), Turn(session, priority=3))


HINTS = st.lists(
    st.tuples(st.sampled_from(["finish", "abandon", "fork", "turn_ended", "queued", "urgent"]),
              st.integers(0, 13)), max_size=8,
)  # fmt: skip
SHAPES = st.one_of(
    st.builds(Shape, st.tuples(st.integers(1, 12))),
    st.builds(Shape, st.tuples(st.integers(1, 5), st.integers(1, 8))),
    st.builds(Shape, st.tuples(st.integers(1, 8)), st.integers(1, 30), st.just("on_evict")),
    st.builds(Shape, st.tuples(st.integers(1, 8)), st.integers(1, 30), st.just("through")),
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None)
@given(traces(), SHAPES, HINTS)
def test_sound_after_every_step(
    policy: str, trace: Random, shape: Shape, hints: list[tuple[str, int]]
) -> None:
    with opened(policy, *shape.slots, nvme=shape.nvme, write=shape.write) as lab:
        replayer, residents = Replayer(lab), Residents(lab)
        for at, req in enumerate(trace.requests):
            before = residents.prefix(keys_of(req.hash_ids))
            served = replayer.serve(req, at in trace.finishes)
            residents.follow()
            sound(lab)
            assert served.hit == sum(blocks for _, blocks in served.spans) == before
            for kind, _ in (h for h in hints if h[1] == at):
                hint(lab, kind, trace, at)
                sound(lab)
        replayer.advance(1e6)
        residents.follow()
        sound(lab)
        assert not len(lab.planner.pins)


@pytest.mark.parametrize("write", ["on_evict", "through"])
def test_a_disk_that_memory_overflows_comes_to_rest(write: str) -> None:
    """What the watermark evicts of a run that is being written must not be written again."""
    chains = [[0, 1], [0, 1, 2, 3], [4, 5, 6], [*range(4, 10)], [*range(4, 12)],
              [12, 13, 14], [15, 16]]  # fmt: skip
    turns = [request(0.0, "a", ids, turn) for turn, ids in enumerate(chains, 1)]
    with opened("lru", 17, nvme=16, write=write) as lab:
        replay(lab, turns)
        sound(lab)
        assert lab.moved[0, 1] <= 2 * 17, "blocks written more than once or twice"


def test_what_comes_back_from_below_is_copied_up() -> None:
    """Four slots above eight. A's chain is pushed down, read from there and copied up again."""
    turns = [
        request(0.0, "a", [1, 2, 3]),
        request(10.0, "b", [4, 5, 6]),
        request(20.0, "a", [1, 2, 3], 2),
        request(30.0, "a", [1, 2, 3], 3),
    ]
    with opened("lru", 4, 8) as lab:
        spans = [served.spans for served in replay(lab, turns)]
        # 2: three slots, one is free: the tail of "123" goes down, 3 and then 2. 3: only 1 and
        # 2 fit, as no tier takes more than half of its slots at once. Hits stay whole.
        assert [sum(n for _, n in s) for s in spans] == [0, 0, 3, 3]
        assert spans[2] == (("memory-0", 1), ("memory-1", 2))
        assert spans[3] == (("memory-0", 3),)
        assert lab.moved[0, 1] >= 2  # demoted
        assert lab.moved[None, 0] == 6 + 2  # put and promoted
        sound(lab)


def test_a_block_on_disk_alone_is_found_there() -> None:
    """Two slots of memory, disk for all, written through."""
    turns = [request(10.0 * n, f"s{n}", [2 * n, 2 * n + 1]) for n in range(4)]
    turns.append(request(40.0, "s0", [0, 1], 2))
    with opened("lru", 2, nvme=64, write="through") as lab:
        spans = [served.spans for served in replay(lab, turns)]
        assert spans[-1] == (("nvme", 2),)
        assert lab.moved[0, 1] == 8  # each block once
        assert lab.planner.room.evicted == [6, 0]
        sound(lab)
