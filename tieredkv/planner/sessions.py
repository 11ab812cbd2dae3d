"""Sessions: when their turns begin and end, and where their chains stand.

What is known of a session comes from hints (`Planner.turn_began`, `turn_ended`, ...) or from
the chain alone: who extends the chain that one session wrote is that session, a get of exactly
that chain is the begin of its next turn, and a put is the end of a turn that nobody announced.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

from tieredkv.eviction.base import DelayStatistics, Kind, SessionState
from tieredkv.index.prefix_tree import Run
from tieredkv.planner.residency import Residency
from tieredkv.planner.shadow import Guard
from tieredkv.planner.visitors import CROWD
from tieredkv.types import Turn

SESSIONS = 1 << 16
"""Sessions remembered; the one that was silent for longest is forgotten first."""
PRIORITY = 16
"""Largest priority, either way, that makes a difference."""
CHAIN = "\0chain:"
"""Begins the names of sessions that have none."""
OTHERS = "\0others"
"""Stands for all sessions that may yet begin with a chain that several have begun with."""


class Sessions:
    """The sessions of a hierarchy. Not thread-safe. O(1) per event."""

    def __init__(
        self, residency: Residency, model: DelayStatistics | None, guards: list[Guard]
    ) -> None:
        """`model` learns from every turn, policies ask it; `guards` watch that it helps."""
        self._res = residency
        self._visitors = residency.visitors
        self._by_id: OrderedDict[str, SessionState] = OrderedDict()
        self._over: OrderedDict[str, None] = OrderedDict()
        self._nameless: dict[str, None] = {}
        """Sessions that stand for those of an earlier process."""
        self.model = model
        self.guards = guards
        for cache in self._caches():
            cache.visitors.over = self._over

    def __len__(self) -> int:
        return len(self._by_id)

    def run(self, session: str) -> Run | None:
        """The deepest run of the session's chain."""
        state = self._by_id.get(session)
        return None if state is None else self._visitors.stand(state)

    def at(self, run: Run) -> str | None:
        """Whose next turn would go on from the end of `run`, if that is one session's."""
        there = list(islice(self._ending(run), 2))
        return there[0].id if len(there) == 1 else None

    def stay(self, key: bytes) -> float:
        """Seconds after the end of a turn for which the chain up to this block is worth keeping:
        by then those of its sessions that come back have done so. 0: none is expected."""
        run = self._res.tree.find(key)
        if run is None or self.model is None:
            return 0.0
        waiting = islice(self._visitors.standing(run), CROWD)
        return max((self.model.stay(state) for state in waiting), default=0.0)

    def began(self, session: str, now: float, *, announced: bool = True) -> SessionState:
        """The session's next turn is here."""
        state = self._enter(session)
        state.announced |= announced
        if state.turns and state.running:
            return state
        self._begin(state, now)
        self._attend(state, now)
        return state

    def adopt(self, leaves: Sequence[Run]) -> None:
        """Chains that an earlier process has stored: who comes back to them has no name yet.

        That they wait tells nothing new, so that the model is not told.
        """
        for run in sorted(leaves, key=lambda run: run.last)[-SESSIONS:]:
            state = self._enter(CHAIN + run.keys[-1].hex())
            state.turns, state.since, state.blocks = 1, run.last, run.end
            self._visitors.place(state, run)
            self._nameless[state.id] = None

    def used(self, run: Run, blocks: int, now: float) -> None:
        """A request has read the chain up to `run`: whose next turn is it?"""
        session = self.at(run) if blocks == run.end else None
        state = None if session is None else self._by_id.get(session)
        if state is None or state.announced:
            return
        if state.running:  # it was only read the last time
            self._end(state, state.since, state.finish_reason, state.next_tool, state.output_tokens)
        self.began(state.id, now, announced=False)

    def wrote(
        self, keys: Sequence[bytes], run: Run, base: Run | None, turn: Turn | None, now: float
    ) -> None:
        """The chain `keys`, up to `run`, was stored for this turn; up to `base` it was there
        before."""
        turn = turn or Turn()
        session = self._continued(run, base) if turn.session is None else turn.session
        state = self.began(session, now, announced=False)
        if state.turns == 1 and base is not None and self._visitors.stand(state) is None:
            before = self._before_restart(base)
            if before is None or before is state:
                self._joined(base, now)
            else:  # its name from before the restart
                self._leave(before, now)
        state.category = turn.category if turn.category is not None else state.category
        state.priority = max(-PRIORITY, min(PRIORITY, turn.priority))
        state.blocks = run.end
        self._visitors.place(state, run)
        for guard in self.guards:
            guard.stored(keys, state, now)
        if not state.announced:
            self._end(state, now, turn.finish_reason, turn.next_tool, turn.output_tokens)

    def ended(
        self,
        session: str,
        now: float,
        finish_reason: str | None,
        next_tool: str | None,
        output_tokens: int | None,
    ) -> None:
        """The session's turn is over."""
        state = self._by_id.get(session)
        if state is not None:
            state.announced = True
            self._end(state, now, finish_reason, next_tool, output_tokens)

    def queued(self, session: str, now: float) -> None:
        """The session's next turn waits to be served."""
        state = self._by_id.get(session)
        if state is not None and not state.running and not state.queued:
            self._returned(state, now)  # how long it waits in the queue is not its doing
            state.queued, state.since = True, now
            self._attend(state, now)

    def finish(self, session: str, now: float) -> None:
        """The session will not come back."""
        state = self._by_id.get(session)
        if state is None:
            return
        self._over[session] = None
        if len(self._over) > SESSIONS:
            self._over.popitem(last=False)
        stands = [(cache, cache.visitors.stand(state)) for cache in self._caches()]
        self._leave(state, now)
        for cache, run in stands:
            if run is not None and not run.children:
                cache.touch(run, now, Kind.END)

    def abandon(self, run: Run, now: float) -> None:
        """Nobody will extend this chain."""
        for state in list(self._visitors.standing(run)):
            for cache in self._caches():
                cache.visitors.place(state, None)
        if not run.children:
            self._res.touch(run, now, Kind.END)

    def fork(self, session: str, new: str, now: float) -> None:
        """A new session begins with this one's context."""
        parent = self._by_id.get(session)
        if parent is None or new in self._by_id:
            return
        state = self._enter(new)
        state.parent, state.blocks, state.since = session, parent.blocks, now
        for cache in self._caches():
            cache.visitors.place(state, cache.visitors.stand(parent))

    # -- inside ---------------------------------------------------------------------------

    def _caches(self) -> list[Residency]:
        return [self._res, *(cache for guard in self.guards for cache in guard.caches)]

    def _enter(self, session: str) -> SessionState:
        state = self._by_id.get(session)
        if state is not None:
            self._by_id.move_to_end(session)
            return state
        state = self._by_id[session] = SessionState(session)
        self._over.pop(session, None)
        if len(self._by_id) > SESSIONS:
            oldest = next(iter(self._by_id.values()))
            self._leave(oldest, oldest.since)  # its wait so far has been counted
        return state

    def _leave(self, state: SessionState, now: float) -> None:
        if self.model is not None:
            self.model.ended(state, now)
        del self._by_id[state.id]
        self._nameless.pop(state.id, None)
        for guard in self.guards:
            guard.ended(state)
        for cache in self._caches():
            cache.visitors.place(state, None)

    def _continued(self, run: Run, base: Run | None) -> str:
        """The session that a put without a name belongs to: the one that wrote what it extends,
        else a new one."""
        for node in (base, run):
            for state in () if node is None else self._ending(node):
                return state.id
        return CHAIN + run.keys[-1].hex()

    def _ending(self, run: Run) -> Iterator[SessionState]:
        """Sessions whose own chain ends with `run`; others stand there for want of theirs."""
        for state in self._visitors.standing(run):
            if state.blocks == run.end and state.category != OTHERS:
                yield state

    def _before_restart(self, run: Run) -> SessionState | None:
        """Who stood there under no name when the store was opened."""
        standing = self._visitors.standing(run) if self._nameless else ()
        return next((state for state in standing if state.id in self._nameless), None)

    def _attend(self, state: SessionState, now: float) -> None:
        for cache in self._caches():
            cache.attend(state, now)

    def _begin(self, state: SessionState, now: float) -> None:
        state.turns += 1
        if state.turns > 1 and not state.queued:
            self._returned(state, now)
        state.running, state.queued, state.since = True, False, now

    def _returned(self, state: SessionState, now: float) -> None:
        """The session waits no longer for whatever its last turn has ended with."""
        state.delay = max(0.0, now - state.since)
        if self.model is not None:
            self.model.returned(state, now)

    def _joined(self, run: Run, now: float) -> None:
        """A session that is new began with the chain up to `run`: more may follow."""
        state = self._enter(OTHERS + run.keys[-1].hex())
        state.category = state.finish_reason = OTHERS
        state.blocks = run.end
        self._begin(state, now)
        for cache in self._caches():
            cache.visitors.place(state, cache.tree.find(run.keys[-1]))
        self._end(state, now, OTHERS, None, None)

    def _end(
        self,
        state: SessionState,
        now: float,
        finish_reason: str | None,
        next_tool: str | None,
        output_tokens: int | None,
    ) -> None:
        if self.model is not None and not state.running:
            self.model.ended(state, now)  # said again: the wait starts anew
        state.finish_reason, state.next_tool = finish_reason, next_tool
        state.output_tokens = output_tokens
        state.running, state.queued, state.since = False, False, now
        for guard in self.guards:
            guard.ended(state)
        if self.model is not None:
            self.model.completed(state, now)
        self._attend(state, now)
