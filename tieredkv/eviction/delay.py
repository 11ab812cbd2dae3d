"""Eviction by expected return: the policy that knows how sessions pause."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sortedcontainers import SortedList

from tieredkv.eviction.base import Access, Kind, SessionState, Victim
from tieredkv.eviction.delay_model import UPPER, DelayModel, bin_of

ENDED = -1.0
BUSY = 1e6
"""Value of a session whose turn is being served or queued, in hits per second."""
LOST = 3600.0
"""Seconds after which a turn that has not ended counts as a wait: its client may be gone."""
COARSE = 1 / 16
"""A leaf is valued anew at most this often, as a share of the age of its youngest session."""


@dataclass(slots=True)
class _Leaf:
    recent: tuple[bool, float, int]
    nbytes: int
    last: float
    ended: bool
    sessions: tuple[SessionState, ...]
    place: tuple[float, float, int] | None = None
    due: float | None = None


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
        self._stale: dict[int, None] = {}
        self._timers: list[tuple[float, int]] = []
        self.scored = 0

    def use(self, model: DelayModel, trusted: Callable[[], bool] | None = None) -> None:
        """Take the values from this model, which somebody else feeds, while `trusted`."""
        self.model, self.trusted = model, trusted or self.trusted

    def record(self, access: Access) -> None:
        run, leaf = access.run, self._leaves.get(access.run)
        if leaf is not None and access.kind is Kind.RESIZE:
            leaf.nbytes = access.nbytes
            return
        if leaf is not None:
            self._remove(leaf)
        ended = access.kind is Kind.END
        recent = (not ended, access.last, run)
        self._leaves[run] = _Leaf(recent, access.nbytes, access.last, ended, tuple(access.sessions))
        self._recent.add(recent)
        self._stale[run] = None

    def forget(self, run: int, evicted: bool) -> None:
        leaf = self._leaves.pop(run, None)
        if leaf is not None:
            self._remove(leaf)
            self._stale.pop(run, None)

    def victims(self, nbytes: int, now: float, pinned: Callable[[int], int]) -> list[Victim]:
        if self.trusted():
            self._value(now)
            order: Iterable[tuple[float, float, int] | tuple[bool, float, int]] = self._order
        else:
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

    def _remove(self, leaf: _Leaf) -> None:
        if leaf.place is not None:
            self._order.remove(leaf.place)
        self._recent.remove(leaf.recent)

    def _value(self, now: float) -> None:
        """Bring the order up to date."""
        timers, due = self._timers, self._stale
        while timers and timers[0][0] <= now:
            time, run = heapq.heappop(timers)
            if run in self._leaves and self._leaves[run].due == time:
                due[run] = None
        for run in due:
            leaf = self._leaves.get(run)
            if leaf is None:
                continue
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

    def _score(self, leaf: _Leaf, now: float) -> tuple[float, float | None]:
        """(value now, when to look again)."""
        self.scored += 1
        if leaf.ended:
            return ENDED, None
        total, next_bin, youngest = 0.0, float("inf"), float("inf")
        for session in leaf.sessions:
            weight = 2.0**session.priority if session.priority else 1.0
            age = now - session.since
            if (session.running or session.queued) and age < LOST:
                total += BUSY * weight
                next_bin, youngest = min(next_bin, session.since + LOST), 0.0
                continue
            here = bin_of(age)
            total += weight * self.model.table(session).index[here]
            next_bin = min(next_bin, session.since + _UPPER[here])
            youngest = min(youngest, age)
        if next_bin == float("inf"):
            return total, None
        return total, max(next_bin, now + COARSE * youngest, now + 1e-3)


_UPPER = UPPER.tolist()
