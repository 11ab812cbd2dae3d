"""SIEVE: a queue that stays in order, and a hand."""

from __future__ import annotations

from sortedcontainers import SortedList

from tieredkv.eviction.base import Access, Kind, RankedPolicy

Place = tuple[float, int]
OLDEST = (float("-inf"), 0)


class SievePolicy(RankedPolicy):
    """Runs stand in the order in which they were stored. A hand goes from the oldest to the
    newest and around again; it evicts what was not used since it last came by.

    Zhang, Yang, Yue, Vigfusson, Rashmi: SIEVE is simpler than LRU: an efficient turn-key
    eviction algorithm for web caches. NSDI 2024.

    Differences to the paper: runs are weighted by bytes; leaves only: a run that is a leaf
    again stands where its last use was, unused, because the hand has just been at its last
    descendant; runs whose session has ended go before all others and leave the hand where it
    is. What the hand finds pinned stays the next candidate. With runs of one block each the
    decisions are the paper's.

    Instead of clearing bits on its way, the hand counts laps: a run goes in the lap in which
    the hand finds it next, or if it was used in the one after. Both are known at the time of
    the use, so victims are simply the runs by (lap, place).

    Cost: O(log n) per record and forget, O(victims) per question.
    """

    def __init__(self, capacity: int, block_bytes: int, seed: int = 0) -> None:
        """`capacity` of the tier in bytes. Nothing here is random."""
        super().__init__(capacity, block_bytes, seed)
        self._places: SortedList[Place] = SortedList()
        self._hand: tuple[int, Place] = (0, OLDEST)
        self._count = 0

    def rank(self, access: Access) -> tuple[int, Place]:
        """(lap in which the hand may take it, place in the queue)."""
        before = self._place.get(access.run)
        if before is None or not before[0]:
            self._count += 1
            place = (access.last, self._count)
            self._places.add(place)
            return self._lap(place), place
        lap, place = before[1]
        return (self._lap(place) + 1 if access.kind is Kind.HIT else lap), place

    def record(self, access: Access) -> None:
        if access.kind is Kind.END:
            self.forget(access.run, False)
        super().record(access)

    def forget(self, run: int, evicted: bool) -> None:
        before = self._place.get(run)
        if before is not None and before[0]:
            lap, place = before[1]
            self._places.remove(place)
            if evicted:
                newest = not self._places or place > self._places[-1]
                self._hand = max(self._hand, (lap + 1, OLDEST) if newest else (lap, place))
        super().forget(run, evicted)

    def _lap(self, place: Place) -> int:
        """The lap in which the hand comes by next."""
        lap, reached = self._hand
        return lap if place > reached else lap + 1
