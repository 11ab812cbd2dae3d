"""Reuse probabilities by category and turn."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from sortedcontainers import SortedList

from tieredkv.eviction.base import Access, Kind, Victim
from tieredkv.eviction.ttl import MEMORY, RECENT, Life, Turns, cover

CLASSES = 64  # classes with a list of their own; later ones share one
TURNS = 8  # turn numbers that are told apart
HORIZON = 4.0  # longer delays than so many windows are no returns: no tier waits for them
PRIOR = 2.0  # turns that the pool of all classes counts for in each
ENDED, OTHERS = "ended", "others"


@dataclass(slots=True)
class _Fit:
    """Of one class: turns that ended, those that another turn followed, and after how long."""

    ends: float = 0.0
    returns: float = 0.0
    seconds: float = 0.0

    def add(self, ends: int, returns: int, delay: float) -> None:
        self.ends += ends
        self.returns += returns
        self.seconds += delay
        if self.ends > MEMORY:
            self.ends, self.returns, self.seconds = (
                self.ends / 2,
                self.returns / 2,
                self.seconds / 2,
            )


class WorkloadPolicy:
    """The leaf that is least likely to be used within the time that the tier keeps a run goes
    first; of equals the deepest.

    KVCache Cache in the Wild: characterizing and optimizing KVCache cache at a large cloud
    provider (Wang et al., USENIX ATC 2025): each category x turn number has its own
    exponential distribution of reuse times, fitted while running.

    With p, the share of turns that are followed by another, and the mean delay 1 / r of those,
    a leaf of age a is used within w with the probability
        p e^(-r a) (1 - e^(-r w)) / (1 - p + p e^(-r a)).
    Differences to the paper: this is conditional on not having been used until now; w is the
    average age of evicted runs, and delays beyond 4 w count as no returns, because a few of
    them would hide the decay of all others; the turn number is that of the session which
    ended its turn last; classes with few turns lean on all together; leaves only, weighted by
    bytes; runs whose session has ended go first. Without sessions a class is a category, and
    its delays those between the uses of a leaf.

    Within a class the probability falls with age, so each class is a list by last use, and
    only the heads of the lists are compared.

    Cost: O(log n) per record and forget, O(classes + victims) per question, with at most 66
    classes. Memory: the turns of 65,536 sessions beside the resident runs.
    """

    def __init__(self, capacity: int, block_bytes: int, seed: int = 0) -> None:
        """`capacity` of the tier in bytes. Nothing here is random."""
        self._block_bytes = block_bytes
        self._nbytes: dict[int, int] = {}
        self._place: dict[int, tuple[Hashable, tuple[float, int, int]]] = {}
        """Run -> (class, (last use, minus its depth, run))."""
        self._lists: dict[Hashable, SortedList[tuple[float, int, int]]] = {ENDED: SortedList()}
        self._fits: dict[Hashable, _Fit] = {}
        self._all = _Fit()
        self._turns = Turns()
        self._life = Life()
        self._clock = 0.0

    def record(self, access: Access) -> None:
        run = access.run
        self._clock = max(self._clock, access.last)
        self._learn(access)
        if run not in self._place or access.kind is not Kind.RESIZE:
            self._drop(run)
            group = ENDED if access.kind is Kind.END else self._group(access)
            place = (access.last, -access.depth, run)
            self._place[run] = group, place
            self._lists[group].add(place)
        self._nbytes[run] = access.nbytes

    def forget(self, run: int, evicted: bool) -> None:
        if run in self._place:
            group, (last, _, _) = self._place[run]
            if evicted and group != ENDED:
                self._life.add(self._clock - last)
            self._drop(run)
            del self._nbytes[run]

    def victims(self, nbytes: int, now: float, pinned: Callable[[int], int]) -> list[Victim]:
        return cover(self._ranked(now), self._nbytes, nbytes, self._block_bytes, pinned)

    def chance(self, group: Hashable, age: float) -> float:
        """Logarithm of the probability that a leaf of this class and age in s is used within
        the time that the tier keeps a run."""
        window = max(self._life.seconds, 1.0)
        pool, fit = self._all, self._fits.get(group, _Fit())
        share = (pool.returns + 1) / (pool.ends + 2)
        mean = (pool.seconds + window) / (pool.returns + 1)
        share = (fit.returns + PRIOR * share) / (fit.ends + PRIOR)
        rate = (fit.returns + PRIOR) / (fit.seconds + PRIOR * mean)
        share = min(share, 0.999)
        gone = rate * max(0.0, age)
        still = 1 - share + share * math.exp(-gone)
        return math.log(share) - gone + math.log(-math.expm1(-rate * window)) - math.log(still)

    def _counts(self, delay: float) -> bool:
        life = self._life.seconds
        return not life or delay <= HORIZON * life

    def _ranked(self, now: float) -> Iterator[int]:
        for _, _, run in self._lists[ENDED]:
            yield run
        heads: list[tuple[float, int, float, int]] = []
        rest: dict[int, tuple[Hashable, Iterator[tuple[float, int, int]]]] = {}

        def push(group: Hashable, places: Iterator[tuple[float, int, int]]) -> None:
            for last, depth, run in places:
                heapq.heappush(heads, (self.chance(group, now - last), depth, last, run))
                rest[run] = group, places
                return

        for group, places in self._lists.items():
            if group != ENDED:
                push(group, iter(places))
        while heads:
            run = heapq.heappop(heads)[3]
            yield run
            push(*rest.pop(run))

    def _group(self, access: Access) -> Hashable:
        if access.sessions:
            latest = max(list(access.sessions)[-RECENT:], key=lambda session: session.since)
            return self._known((latest.category, min(latest.turns, TURNS)))
        return self._known((None if access.turn is None else access.turn.category, 0))

    def _known(self, group: Hashable) -> Hashable:
        if group not in self._lists:
            if len(self._lists) > CLASSES:
                group = OTHERS
            self._lists.setdefault(group, SortedList())
            self._fits.setdefault(group, _Fit())
        return group

    def _learn(self, access: Access) -> None:
        for session in self._turns.news(access):
            if not session.running:
                self._add((session.category, min(session.turns, TURNS)), 1, 0, 0.0)
            elif session.delay is not None and self._counts(session.delay):
                before = min(session.turns - 1, TURNS)
                self._add((session.category, before), 0, 1, session.delay)
        if not access.sessions and access.kind in (Kind.INSERT, Kind.HIT):
            place = self._place.get(access.run)
            if place is not None and access.kind is Kind.HIT:
                self._add(self._group(access), 0, 1, access.last - place[1][0])
            self._add(self._group(access), 1, 0, 0.0)

    def _add(self, group: Hashable, ends: int, returns: int, delay: float) -> None:
        for fit in (self._all, self._fits[self._known(group)]):
            fit.add(ends, returns, delay)

    def _drop(self, run: int) -> None:
        place = self._place.pop(run, None)
        if place is not None:
            self._lists[place[0]].remove(place[1])
