"""What the planner knows of sessions, as policies see it: `Access.sessions` of each leaf."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tieredkv.eviction.base import Access, Kind, RankedPolicy
from tieredkv.planner import Planner
from tieredkv.planner.residency import Level, Residency
from tieredkv.planner.room import Room
from tieredkv.testing.index_suite import chain
from tieredkv.types import Outcome, Turn

A, B = chain([0] * 8), chain([1] * 8)
SIDE = [*A[:2], *chain([0, 0, 1, 1])[2:]]


class Eyes(RankedPolicy):
    """LRU that remembers what it last heard of each leaf."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots, 1)
        self.leaves: dict[bytes, Access] = {}
        """Key of the deepest block -> last word on that leaf."""
        self._keys: dict[int, bytes] = {}

    def rank(self, access: Access) -> float:
        return access.last

    def record(self, access: Access) -> None:
        self.forget(access.run, False)
        self._keys[access.run] = access.key
        self.leaves[access.key] = access
        super().record(access)

    def forget(self, run: int, evicted: bool) -> None:
        self.leaves.pop(self._keys.pop(run, b""), None)
        super().forget(run, evicted)

    def seen(self, keys: Sequence[bytes]) -> set[str]:
        """Named sessions expected at the leaf that ends this chain."""
        return {s.id for s in self.leaves[keys[-1]].sessions if s.id.isalpha()}


class World:
    """A planner whose moves end at once."""

    def __init__(self, *slots: int) -> None:
        self.eyes = [Eyes(n) for n in slots]
        levels = [Level(f"m{i}", self.eyes[i], n) for i, n in enumerate(slots)]
        self.res = Residency(levels, 1, None)
        self.planner = Planner(self.res, Room(self.res, None, 0))
        self.now = 0.0

    def put(self, keys: Sequence[bytes], session: str | Turn | None = None) -> None:
        turn = Turn(session) if isinstance(session, str) else session
        self.tick(lambda planner, now: self._put(keys, turn, now))

    def _put(self, keys: Sequence[bytes], turn: Turn | None, now: float) -> None:
        while True:
            plan = self.planner.plan_put(keys, 0, turn, now, force=False)
            moves = plan.moves + self.planner.drain().moves
            for move in moves:
                read = [Outcome.OK] * len(move) if move.src is not None else []
                self.planner.finish(move, read, [Outcome.OK] * len(move), now)
            if not plan.wait:
                return

    def get(self, keys: Sequence[bytes]) -> None:
        def read(planner: Planner, now: float) -> None:
            for move in planner.plan_get(keys, 0, now)[1]:
                planner.finish(move, [Outcome.OK] * len(move), [], now)

        self.tick(read)

    def tick(self, work: Callable[[Planner, float], None]) -> None:
        self.now += 10.0
        work(self.planner, self.now)
        assert self.planner.check([]) == []


def test_a_session_is_expected_where_its_chain_ends() -> None:
    world = World(20)
    world.put(A[:2], "a")
    world.put(B[:2], "b")
    world.put(A[:4], "a")
    (eyes,) = world.eyes
    assert (eyes.seen(A[:4]), eyes.seen(B[:2])) == ({"a"}, {"b"})
    world.put(SIDE, "a")  # a reset: nobody is expected on the old branch
    assert (eyes.seen(SIDE), eyes.seen(A[:4])) == ({"a"}, set())


def test_several_sessions_on_one_leaf() -> None:
    world = World(20)
    for session in "abc":
        world.put(A[:3], session)
    assert world.eyes[0].seen(A[:3]) == {"a", "b", "c"}
    world.tick(lambda planner, now: planner.end_session("b", now))
    world.put(A[:5], "c")
    world.put(A[:6], "a")
    assert world.eyes[0].seen(A[:6]) == {"a"}  # c stands on an inner run now


def test_who_loses_its_run_is_expected_at_what_is_left() -> None:
    world = World(6)
    world.put(A[:2], "a")
    world.put(SIDE, "b")
    world.put(A[:4], "a")
    (eyes,) = world.eyes
    world.put(B[:2], "c")  # b's tail, of two blocks, is the oldest leaf
    assert eyes.seen(A[:4]) == {"a"}
    assert world.planner.match(SIDE).blocks == 2
    world.planner.delete([A[2]])
    assert eyes.seen(A[:2]) == {"a", "b"}


def test_each_tier_sees_the_deepest_run_that_it_has() -> None:
    """Four slots above eight; only the tail of the first chain is below."""
    world = World(4, 8)
    world.put(A[:2], "a")
    world.put(A[:4], "a")
    world.put(B[:2], "b")
    above, below = world.eyes
    assert (above.seen(A[:2]), below.seen(A[:4])) == ({"a"}, {"a"})
    assert above.seen(B[:2]) == {"b"}


def test_an_end_is_told_only_where_nobody_else_is_expected() -> None:
    world = World(20)
    world.put(A[:3], "a")
    world.tick(lambda planner, now: planner.fork("a", "b", now))
    (eyes,) = world.eyes
    world.tick(lambda planner, now: planner.end_session("a", now))
    assert eyes.leaves[A[2]].kind is not Kind.END
    assert eyes.seen(A[:3]) == {"b"}
    world.tick(lambda planner, now: planner.end_session("b", now))
    assert (eyes.seen(A[:3]), eyes.leaves[A[2]].kind) == (set(), Kind.END)
    world.put(A[:3], "b")  # it is back: not over
    assert eyes.leaves[A[2]].kind is not Kind.END
    assert eyes.seen(A[:3]) == {"b"}


def test_what_two_have_begun_with_others_may_begin_with() -> None:
    """The second to begin with a chain leaves somebody unnamed waiting there for good."""
    world = World(20)
    world.put(A[:3], "a")
    (eyes,) = world.eyes
    assert len(eyes.leaves[A[2]].sessions) == 1
    world.put(A[:3], "b")
    assert len(eyes.leaves[A[2]].sessions) == 3
    for session in "ab":
        world.tick(lambda planner, now, over=session: planner.end_session(over, now))
    assert (eyes.seen(A[:3]), len(eyes.leaves[A[2]].sessions)) == (set(), 1)
    assert eyes.leaves[A[2]].kind is not Kind.END


def test_a_fork_is_expected_where_its_parent_is_and_stays_there() -> None:
    world = World(20)
    world.put(A[:3], "a")
    world.tick(lambda planner, now: planner.fork("a", "f", now))
    (eyes,) = world.eyes
    assert eyes.seen(A[:3]) == {"a", "f"}
    (fork,) = (state for state in eyes.leaves[A[2]].sessions if state.id == "f")
    assert (fork.since, fork.parent, fork.running, fork.blocks) == (world.now, "a", False, 3)
    world.tick(lambda planner, now: planner.end_session("a", now))
    assert (eyes.seen(A[:3]), eyes.leaves[A[2]].kind is Kind.END) == ({"f"}, False)
    world.tick(lambda planner, now: planner.fork("nobody", "g", now))
    assert eyes.seen(A[:3]) == {"f"}


def test_an_abandoned_chain_is_awaited_by_nobody() -> None:
    world = World(20)
    world.put(A[:3], "a")
    world.put(A[:3], "b")
    world.tick(lambda planner, now: planner.abandon(A[:3], now))
    (eyes,) = world.eyes
    assert (eyes.seen(A[:3]), eyes.leaves[A[2]].kind) == (set(), Kind.END)
    world.put(A[:4], "a")
    assert eyes.seen(A[:4]) == {"a"}


def test_turns_that_are_announced() -> None:
    world = World(20)
    world.tick(lambda planner, now: planner.turn_began("a", now))  # 10
    world.put(A[:3], Turn("a", category="chat", priority=2))  # 20
    (eyes,) = world.eyes
    (state,) = eyes.leaves[A[2]].sessions
    assert (state.running, state.turns, state.since, state.delay) == (True, 1, 10.0, None)
    assert (state.category, state.priority, state.blocks) == ("chat", 2, 3)
    world.tick(
        lambda planner, now: planner.turn_ended(
            "a", now, finish_reason="tool_use", next_tool="bash", output_tokens=7
        )
    )  # 30
    assert (state.running, state.since) == (False, 30.0)
    assert (state.finish_reason, state.next_tool, state.output_tokens) == ("tool_use", "bash", 7)
    world.tick(lambda planner, now: planner.queued("a", now))  # 40
    assert state.queued
    assert list(eyes.leaves[A[2]].sessions) == [state]
    world.tick(lambda planner, now: planner.turn_began("a", now))  # 50
    assert (state.running, state.queued, state.turns) == (True, False, 2)
    assert (state.since, state.delay) == (50.0, 10.0)  # in the queue it was here already
    world.put(A[:5], "a")  # part of the turn that runs
    assert (state.running, state.turns, state.blocks) == (True, 2, 5)


def test_turns_that_nobody_announces_begin_with_a_get_and_end_with_a_put() -> None:
    world = World(20)
    world.put(A[:3], "a")  # 10
    (eyes,) = world.eyes
    (state,) = eyes.leaves[A[2]].sessions
    assert (state.running, state.since, state.turns) == (False, 10.0, 1)
    world.get(A[:2])  # 20: not all of its chain, so it may be anybody
    assert not state.running
    world.get(A[:3])  # 30
    assert (state.running, state.turns, state.delay) == (True, 2, 20.0)
    world.put(A[:5], "a")  # 40
    assert (state.running, state.turns, state.since) == (False, 2, 40.0)


def test_a_get_of_a_chain_that_two_sessions_share_is_nobodys_turn() -> None:
    world = World(20)
    world.put(A[:3], "a")
    world.put(A[:3], "b")
    states = list(world.eyes[0].leaves[A[2]].sessions)
    world.get(A[:3])
    assert not any(state.running for state in states)


def test_the_end_of_a_response_counts_as_a_use() -> None:
    world = World(4)
    world.tick(lambda planner, now: planner.turn_began("a", now))
    world.put(A[:2], "a")  # 20
    world.put(B[:2], "b")  # 30
    world.tick(lambda planner, now: planner.turn_ended("a", now))  # 40
    world.put(chain([2, 2]), "c")
    assert [world.planner.match(keys).blocks for keys in (A[:2], B[:2])] == [2, 0]


def test_strangers_who_share_a_prefix_are_no_next_turns() -> None:
    """Once a session's own blocks have gone it stands on what it shared."""
    world = World(4)
    for number in range(6):
        world.put([*A[:2], *chain([0, 0, 100 + number, number])[2:]])
    (leaf,) = world.eyes[0].leaves.values()
    states = [state for state in leaf.sessions if state.category is None]
    assert [state.turns for state in states] == [1]
    assert len(world.planner.sessions) == 7, "six, and those who may yet begin like them"


def test_a_chain_that_is_only_read_is_young_after_each_read() -> None:
    world = World(20)
    world.put(A[:3])
    for _ in range(5):
        world.get(A[:3])
        (state,) = world.eyes[0].leaves[A[2]].sessions
        assert (state.since, state.running) == (world.now, True)
    assert state.turns == 6
