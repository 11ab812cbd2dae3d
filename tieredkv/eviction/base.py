"""The eviction policy protocol, and the base of policies that are one ranking.

A policy ranks the **leaf runs of one tier**: runs with resident blocks in that tier and no
child run that has any. The planner tells it when a run becomes a leaf or is used (`record`)
and when it stops being one (`forget`), and asks for `victims` when it needs room. Blocks
leave a run from its tail, so a prefix never outlives its head.

No clock, lock, I/O or reference counts in here; randomness is a seeded argument.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from sortedcontainers import SortedList

from tieredkv.types import Turn


class Kind(StrEnum):
    """Why a run is recorded."""

    INSERT = "insert"
    """Its blocks have just been stored in this tier."""
    HIT = "hit"
    """A request used it as its deepest block."""
    LEAF = "leaf"
    """Its last child has left this tier: it is a leaf again, nothing was used."""
    RESIZE = "resize"
    """Only `blocks`/`nbytes` changed: a tail was trimmed, blocks were added, or it was split."""
    END = "end"
    """Its session has finished or abandoned it: it is not expected back."""
    SESSION = "session"
    """A session came to it, left it, or changed its state; `last` may be later than it was."""


LOST = 3600.0
"""Seconds after which a turn that was announced and has not ended is not waited for."""


@dataclass(slots=True, eq=False)
class SessionState:
    """What the planner knows of one session, kept while its blocks come and go.

    Policies read it, the planner writes it; the last four fields belong to the delay model.
    """

    id: str
    turns: int = 0
    """Turns begun."""
    running: bool = False
    """A turn is being served; its blocks are in use."""
    queued: bool = False
    """Its next turn waits in the engine's queue: it is certain to come."""
    since: float = 0.0
    """When the last turn ended; while running: began; while queued: was announced."""
    delay: float | None = None
    """Seconds between the end of a turn and the begin of the next, the last time."""
    blocks: int = 0
    """Length of its chain."""
    category: str | None = None
    finish_reason: str | None = None
    next_tool: str | None = None
    output_tokens: int | None = None
    priority: int = 0
    parent: str | None = None
    """The session that it was forked from."""
    announced: bool = False
    """Its turns are said to begin and to end: a put is neither."""
    group: int = 0
    scale: tuple[int, ...] = ()
    features: tuple[tuple[str, int], ...] = ()
    counted: int = 0

    def busy(self, now: float) -> bool:
        """Its turn is certain: it is being served, or waits in the queue, and not for so long
        that its client must be gone."""
        return (self.running or self.queued) and now - self.since < LOST


@dataclass(frozen=True, slots=True)
class Access:
    """One event of a leaf run, with the run's state after it."""

    kind: Kind
    run: int
    """Identity of the run while it lives; never reused."""
    key: bytes
    """Key of its deepest block in this tier: what a ghost entry remembers."""
    blocks: int
    """Blocks of the run resident in this tier, >= 1."""
    nbytes: int
    """The same in bytes."""
    depth: int
    """Blocks from the root to the run's end."""
    born: float
    """When its blocks were first stored."""
    last: float
    """Last use of the run or of any descendant, present or evicted."""
    hits: int
    """Uses of the run or of any descendant after they were stored."""
    turn: Turn | None = None
    """What is known about the request that wrote it."""
    first: bytes = b""
    """Key of the run's first block: the one that is stored first when the run comes back."""
    sessions: Collection[SessionState] = ()
    """Whose next turn is expected to use the run: sessions that are alive and whose chain ends
    in it, or below it where this tier has no blocks. Not to be kept: it changes later."""


class Victim(NamedTuple):
    """Trim the last `nbytes` of this run (a multiple of the block size)."""

    run: int
    nbytes: int


class EvictionPolicy(Protocol):
    """Ranks leaf runs. Not thread-safe: the planner's lock guards it."""

    def record(self, access: Access) -> None:
        """The run was used, became a leaf, or changed size."""
        ...

    def forget(self, run: int, evicted: bool) -> None:
        """The run is no leaf any more: it got a child (`evicted` False), or its last block
        left the tier (`evicted` True). Unknown runs are ignored."""
        ...

    def victims(self, nbytes: int, now: float, pinned: Callable[[int], int]) -> list[Victim]:
        """Runs to trim, worst first, until `nbytes` are covered or no run is left.

        `pinned(run)` is the number of bytes of the run that must stay. Changes nothing:
        asking twice gives the same answer.
        """
        ...


class DelayStatistics(Protocol):
    """Learns when sessions come back. Told by the planner, asked by policies."""

    def completed(self, session: SessionState, now: float) -> None:
        """A turn has ended: `since` is now, and the session waits."""
        ...

    def returned(self, session: SessionState, now: float) -> None:
        """The next turn has begun, `delay` seconds after the last one ended."""
        ...

    def ended(self, session: SessionState, now: float) -> None:
        """The session is over, or its wait is counted no further."""
        ...

    def stay(self, session: SessionState) -> float:
        """Seconds of its wait for which the session is worth keeping; 0: for none."""
        ...

    def state(self) -> bytes:
        """What was learned, for the next process; of bounded size."""
        ...


class Admission(Protocol):
    """Decides which runs are worth writing to the NVMe tier. Called under the planner's lock.

    With an attribute `late = True`, because time tells more, runs are written when they are
    about to leave memory (and by `flush`), not as soon as the disk is idle.
    """

    def admit(self, run: Access, now: float) -> bool:
        """`run` as in `EvictionPolicy.record`, with its blocks still to be written."""
        ...


class RankedPolicy:
    """A policy that is one sort key per run: subclasses define `rank`, lowest goes first.

    Cost: O(log n) per record and forget, O(victims) per question.
    """

    def __init__(self, capacity: int, block_bytes: int, seed: int = 0) -> None:
        """`capacity` of the tier in bytes; `seed` for policies that draw random numbers."""
        self._order: SortedList[tuple[int, Any, int]] = SortedList()
        self._place: dict[int, tuple[int, Any, int]] = {}
        self._nbytes: dict[int, int] = {}
        self._block_bytes = block_bytes

    def rank(self, access: Access) -> Any:
        raise NotImplementedError

    def record(self, access: Access) -> None:
        run = access.run
        place = self._place.get(run)
        if access.kind is not Kind.RESIZE or place is None:
            if place is not None:
                self._order.remove(place)
            ended = access.kind is Kind.END
            place = (0, access.last, run) if ended else (1, self.rank(access), run)
            self._order.add(place)
            self._place[run] = place
        self._nbytes[run] = access.nbytes

    def forget(self, run: int, evicted: bool) -> None:
        place = self._place.pop(run, None)
        if place is not None:
            self._order.remove(place)
            del self._nbytes[run]

    def victims(self, nbytes: int, now: float, pinned: Callable[[int], int]) -> list[Victim]:
        chosen: list[Victim] = []
        for _, _, run in self._order:
            if nbytes <= 0:
                break
            free = self._nbytes[run] - pinned(run)
            if free > 0:
                wanted = -(-nbytes // self._block_bytes) * self._block_bytes
                take = min(free, wanted)
                chosen.append(Victim(run, take))
                nbytes -= take
        return chosen
