"""Eviction by expected return: the policy that knows how sessions pause."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sortedcontainers import SortedList

from tieredkv.eviction.base import LOST, Access, Kind, SessionState, Victim
from tieredkv.eviction.delay_model import DelayModel
from tieredkv.eviction.delay_table import UPPER, bin_of

ENDED = -1.0
BUSY = 1e6
"""Value of a session whose turn is being served or queued, in hits per second."""
COARSE = 1 / 16
"""A leaf is valued anew at most this often, as a share of the age of its youngest session."""
LEAST = 1e-3
"""And not before so many seconds, however equal times and edges of bins are."""


@dataclass(slots=True)
class _Leaf:
    nbytes: int = 0
    last: float = 0.0
    ended: bool = False
    sessions: tuple[SessionState, ...] = ()
    place: tuple[float, float, int] | None = None
    """In the order by value, as far as it is up to date."""
    recent: tuple[bool, float, int] | None = None
    """The same by recency."""
    due: float | None = None
    """When to value it again."""


class DelayPolicy:
    """The leaf whose sessions are least likely to use it soon goes first.

    A leaf is worth the sum, over the sessions whose next turn would use it, of the index that
    `DelayModel` gives for their age; equal leaves go by recency. Sessions that are over, or
    that went on without the leaf, count nothing.

    Cost: O(log n) per record and forget; a leaf is valued once per record and per bin that its
    youngest session passes.
    """

    def __init__(self, capacity: int, block_bytes: int, seed: int = 0) -> None:
        """`capacity` of the tier in bytes. Nothing here is random."""
        self._block_bytes = block_bytes
        self.model = DelayModel()
        self.trusted: Callable[[], bool] = lambda: True
        """May the values decide? Otherwise it is LRU."""
        self._leaves: dict[int, _Leaf] = {}
        self._order: SortedList[tuple[float, float, int]] = SortedList()
        self._recent: SortedList[tuple[bool, float, int]] = SortedList()
        self._unvalued: dict[int, None] = {}
        self._unsorted: dict[int, None] = {}
        self._timers: list[tuple[float, int]] = []

    def use(self, model: DelayModel, trusted: Callable[[], bool] | None = None) -> None:
        """Take the values from this model, which somebody else feeds, while `trusted`."""
        self.model, self.trusted = model, trusted or self.trusted

    def record(self, access: Access) -> None:
        run, leaf = access.run, self._leaves.get(access.run)
        if leaf is None:
            leaf = self._leaves[run] = _Leaf()
        elif access.kind is Kind.RESIZE:
            leaf.nbytes = access.nbytes
            return
        leaf.nbytes, leaf.last = access.nbytes, access.last
        leaf.ended, leaf.sessions = access.kind is Kind.END, tuple(access.sessions)
        self._unvalued[run] = self._unsorted[run] = None

    def forget(self, run: int, evicted: bool) -> None:
        leaf = self._leaves.pop(run, None)
        if leaf is not None:
            if leaf.place is not None:
                self._order.remove(leaf.place)
            if leaf.recent is not None:
                self._recent.remove(leaf.recent)
            self._unvalued.pop(run, None)
            self._unsorted.pop(run, None)

    def victims(self, nbytes: int, now: float, pinned: Callable[[int], int]) -> list[Victim]:
        if self.trusted():
            self._value(now)
            order: Iterable[tuple[float, float, int] | tuple[bool, float, int]] = self._order
        else:
            self._sort()
            order = self._recent
        chosen: list[Victim] = []
        for _, _, run in order:
            if nbytes <= 0:
                break
            free = self._leaves[run].nbytes - pinned(run)
            if free > 0:
                take = min(free, -(-nbytes // self._block_bytes) * self._block_bytes)
                chosen.append(Victim(run, take))
                nbytes -= take
        return chosen

    def _value(self, now: float) -> None:
        """Bring the order by value up to date."""
        timers, due = self._timers, self._unvalued
        while timers and timers[0][0] <= now:
            time, run = heapq.heappop(timers)
            if run in self._leaves and self._leaves[run].due == time:
                due[run] = None
        for run in due:
            leaf = self._leaves[run]
            value, leaf.due = self._score(leaf, now)
            place = (value, leaf.last, run)
            if place != leaf.place:
                if leaf.place is not None:
                    self._order.remove(leaf.place)
                self._order.add(place)
                leaf.place = place
            if leaf.due is not None:
                heapq.heappush(timers, (leaf.due, run))
        due.clear()
        if len(timers) > 2 * len(self._leaves) + 64:  # most are of leaves that were valued anew
            leaves = self._leaves.items()
            self._timers = [(leaf.due, run) for run, leaf in leaves if leaf.due is not None]
            heapq.heapify(self._timers)

    def _sort(self) -> None:
        """Bring the order by recency up to date."""
        for run in self._unsorted:
            leaf = self._leaves[run]
            recent = (not leaf.ended, leaf.last, run)
            if recent != leaf.recent:
                if leaf.recent is not None:
                    self._recent.remove(leaf.recent)
                self._recent.add(recent)
                leaf.recent = recent
        self._unsorted.clear()

    def _score(self, leaf: _Leaf, now: float) -> tuple[float, float | None]:
        """(value now, when to look again)."""
        if leaf.ended:
            return ENDED, None
        if not leaf.sessions:
            return 0.0, None
        total, again, youngest, table = 0.0, _NEVER, _NEVER, self.model.table
        for session in leaf.sessions:
            age = now - session.since
            if session.busy(now):
                value, change, age = BUSY, session.since + LOST, 0.0
            else:
                here = bin_of(age)
                value, change = table(session).index[here], session.since + _UPPER[here]
            total += value * 2.0**session.priority if session.priority else value
            if change < again:
                again = change
            if age < youngest:
                youngest = age
        return total, max(again, now + COARSE * youngest, now + LEAST)


_UPPER = UPPER.tolist()
_NEVER = float("inf")
