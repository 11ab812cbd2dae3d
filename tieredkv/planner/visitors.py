"""Who is expected back where: in each tier, the run that a session's next turn would use.

A session *stands* on the deepest run of its chain. In a tier that has no blocks of that run it
is *seen* at the nearest ancestor that has some; when a run's last copy leaves a tier, whoever
was seen there moves up. A leaf run is worth what all sessions seen at it are worth together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from itertools import islice

from tieredkv.eviction.base import SessionState
from tieredkv.index.prefix_tree import Run

Places = dict[int, dict[SessionState, None]]
"""Run id -> sessions, in order of their coming."""
CROWD = 64


class Visitors:
    """Places of sessions in one tree. Not thread-safe. O(tiers) per change, and O(sessions
    seen) when a run leaves a tier."""

    def __init__(self, tiers: int, changed: Callable[[Run, int], None]) -> None:
        """`changed(run, tier)`: who is seen at the run in that tier has changed."""
        self.over: Container[str] = ()
        """Sessions that said so, and were not heard of since."""
        self._changed = changed
        self._stand: dict[SessionState, Run] = {}
        self._seen: list[dict[SessionState, Run]] = [{} for _ in range(tiers)]
        self._standing: Places = {}
        self._here: list[Places] = [{} for _ in range(tiers)]

    def stand(self, session: SessionState) -> Run | None:
        """The run with the deepest block of the session's chain that is stored anywhere."""
        return self._stand.get(session)

    def standing(self, run: Run) -> Collection[SessionState]:
        return self._standing.get(run.id, ())

    def seen(self, run: Run, tier: int) -> Collection[SessionState]:
        return self._here[tier].get(run.id, ())

    def latest(self, run: Run, tier: int) -> tuple[SessionState, ...]:
        """The `CROWD` sessions that came to the run last: enough to value it."""
        here = self._here[tier].get(run.id)
        return () if here is None else tuple(islice(reversed(here), CROWD))

    def runs(self, session: SessionState) -> list[tuple[int, Run]]:
        """(tier, run) wherever the session is seen."""
        places = enumerate(seen.get(session) for seen in self._seen)
        return [(tier, run) for tier, run in places if run is not None]

    def place(self, session: SessionState, run: Run | None) -> None:
        """The session's chain now ends in `run`; None: nowhere."""
        self._put(session, run)
        for tier in range(len(self._seen)):
            node = run
            while node is not None and not node.present(tier):
                node = node.parent
            self._see(session, tier, node)

    def arrived(self, run: Run, tier: int) -> None:
        """The run has its first blocks in the tier: those who stand on it are seen there."""
        if run.id in self._standing:
            self._move(list(self._standing[run.id]), tier, run)

    def left(self, run: Run, tier: int) -> None:
        """The run's last blocks have left the tier."""
        gone = self._here[tier].get(run.id)
        if not gone:
            return
        node = run.parent
        while node is not None and not node.present(tier):
            node = node.parent
        self._move(list(gone), tier, node)

    def dropped(self, run: Run) -> None:
        """The run is leaving the tree, and has left all tiers before."""
        for session in list(self.standing(run)):
            self._put(session, run.parent)

    def check(self, runs: dict[int, Run]) -> list[str]:
        """Violated invariants; empty when sound."""
        problems = []
        for session, stand in self._stand.items():
            if runs.get(stand.id) is not stand:
                problems.append(f"session {session.id} stands on a dead run")
        for tier, (seen, here) in enumerate(zip(self._seen, self._here, strict=True)):
            for session, run in seen.items():
                if runs.get(run.id) is not run or not run.present(tier):
                    problems.append(f"session {session.id} is seen where nothing is")
                if session not in here.get(run.id, ()):
                    problems.append(f"session {session.id} is lost in tier {tier}")
            if sum(map(len, here.values())) != len(seen):
                problems.append(f"a session is seen twice in tier {tier}, or after it left")
        if sum(map(len, self._standing.values())) != len(self._stand):
            problems.append("a session stands twice, or after it left")
        return problems

    def _put(self, session: SessionState, run: Run | None) -> None:
        before = self._stand.get(session)
        if before is run:
            return
        if before is not None:
            _remove(self._standing, before.id, session)
            del self._stand[session]
        if run is not None:
            self._standing.setdefault(run.id, {})[session] = None
            self._stand[session] = run

    def _see(self, session: SessionState, tier: int, run: Run | None) -> None:
        self._move([session], tier, run)

    def _move(self, sessions: Sequence[SessionState], tier: int, run: Run | None) -> None:
        """These are seen at `run` from now on; each run that changes is named once."""
        seen, here = self._seen[tier], self._here[tier]
        changed: dict[int, Run] = {}
        for session in sessions:
            before = seen.get(session)
            if before is run:
                continue
            if before is not None:
                _remove(here, before.id, session)
                del seen[session]
                changed[before.id] = before
            if run is not None:
                here.setdefault(run.id, {})[session] = None
                seen[session] = run
                changed[run.id] = run
        for other in changed.values():
            self._changed(other, tier)


def _remove(places: Places, run_id: int, session: SessionState) -> None:
    there = places[run_id]
    del there[session]
    if not there:
        del places[run_id]
