"""Least hit density."""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sortedcontainers import SortedList

from tieredkv.eviction.base import Access, Kind, Victim
from tieredkv.eviction.ttl import BINS, EDGES, SHORTEST, cover

SAMPLE = 64  # runs that one victim is chosen from
PERIOD = 1024  # events between two computations of the densities
DECAY = 0.9  # of what was counted, per computation
USES, DEPTHS = 4, 4  # classes by uses (0, 1, 2, more) and depth (< 8, < 64, < 512, more blocks)
PRIOR = 4.0  # events of each class that behave like LRU
WIDTHS = [high - low for low, high in zip([0.0, *EDGES], EDGES, strict=False)]
LRU = [1.0 / edge for edge in EDGES]
GOLDEN = 0x9E3779B97F4A7C15  # odd: its multiples modulo 2**64 are spread evenly


@dataclass(slots=True)
class _Member:
    group: int
    last: float
    ended: bool
    index: int = 0
    """Place in the list that samples are drawn from."""


def _bin(age: float) -> int:
    return min(BINS - 1, math.ceil(2 * math.log2(max(age, SHORTEST) / SHORTEST)))


class LhdPolicy:
    """The run with the lowest hit density goes first: hits that its bytes are expected to give,
    per second that they are expected to stay.

    Beckmann, Chen, Cidon: LHD: improving cache hit rate by maximizing hit density. NSDI 2018.

    From the ages at which runs of a class were used (H) and left (L, used or evicted):
        density(a) = sum of H over ages >= a / sum of (age - a) L over ages >= a.
    Each victim is the lowest of 64 runs drawn at random. Differences to the paper: ages are
    seconds in bins of half an octave, not accesses; classes are by uses and depth, not by the
    age at the last use and the application; events count by blocks; a few events per class
    that give 1 / age, which is LRU's order, stand for its exploration; samples that were not
    taken stay candidates for the rest of a question; leaves only; runs whose session has
    ended go first.

    Cost: O(1) per record and forget (O(log n) for ended runs) and every 1,024th time O(classes
    x bins), O(victims x sample) per question. Memory: only the resident runs.
    """

    def __init__(self, capacity: int, block_bytes: int, seed: int = 0) -> None:
        """`seed` of the draws; `capacity` of the tier in bytes."""
        self._block_bytes = block_bytes
        self._seed = seed
        self._members: dict[int, _Member] = {}
        self._nbytes: dict[int, int] = {}
        self._alive: list[int] = []
        self._ended: SortedList[tuple[float, int]] = SortedList()
        classes = range(USES * DEPTHS)
        self._hits = [array("d", [0.0] * BINS) for _ in classes]
        self._evictions = [array("d", [0.0] * BINS) for _ in classes]
        self._density = [array("d", LRU) for _ in classes]
        self._clock = 0.0
        self._events = 0

    def record(self, access: Access) -> None:
        run, member = access.run, self._members.get(access.run)
        self._clock = max(self._clock, access.last)
        if member is not None and access.kind is Kind.HIT and not member.ended:
            self._count(self._hits, member, access.last, access.blocks)
        if member is None or access.kind is not Kind.RESIZE:
            self._drop(run)
            depth = min(DEPTHS - 1, (access.depth.bit_length() - 1) // 3)
            group = min(access.hits, USES - 1) * DEPTHS + depth
            self._add(run, _Member(group, access.last, access.kind is Kind.END))
        self._nbytes[run] = access.nbytes

    def forget(self, run: int, evicted: bool) -> None:
        member = self._members.get(run)
        if member is None:
            return
        if evicted and not member.ended:
            blocks = self._nbytes[run] // self._block_bytes
            self._count(self._evictions, member, self._clock, blocks)
        self._drop(run)
        del self._nbytes[run]

    def victims(self, nbytes: int, now: float, pinned: Callable[[int], int]) -> list[Victim]:
        return cover(self._ranked(now), self._nbytes, nbytes, self._block_bytes, pinned)

    def density(self, run: int, now: float) -> float:
        """Hits per second that each block of the run is expected to give."""
        member = self._members[run]
        return self._density[member.group][_bin(now - member.last)]

    def _ranked(self, now: float) -> Iterator[int]:
        for _, run in self._ended:
            yield run
        heap: list[tuple[float, float, int]] = []
        for run in self._draw():
            heapq.heappush(heap, (self.density(run, now), self._members[run].last, run))
            if len(heap) == SAMPLE:
                yield heapq.heappop(heap)[2]
        while heap:
            yield heapq.heappop(heap)[2]

    def _draw(self) -> Iterator[int]:
        """All runs in an order that the seed and the events so far determine."""
        left = len(self._alive)
        moved: dict[int, int] = {}  # a shuffle of which only the touched part exists
        state = (self._seed * GOLDEN + self._events) % 2**64
        while left:
            state = (state + GOLDEN) % 2**64
            mixed = (state ^ state >> 31) * 0xBF58476D1CE4E5B9 % 2**64  # as in splitmix64
            place = (mixed ^ mixed >> 29) % left
            left -= 1
            index = moved.get(place, place)
            moved[place] = moved.get(left, left)
            yield self._alive[index]

    def _count(self, counts: list[array[float]], member: _Member, now: float, blocks: int) -> None:
        counts[member.group][_bin(now - member.last)] += blocks
        self._events += 1
        if self._events % PERIOD == 0:
            self._compute()

    def _compute(self) -> None:
        for group, density in enumerate(self._density):
            hits, evictions = self._hits[group], self._evictions[group]
            used = left = stay = 0.0
            for age in range(BINS - 1, -1, -1):
                used += hits[age]
                stay += left * WIDTHS[age] + (hits[age] + evictions[age]) * WIDTHS[age] / 2
                left += hits[age] + evictions[age]
                density[age] = (used + PRIOR) / (stay + PRIOR * EDGES[age])
                hits[age] *= DECAY
                evictions[age] *= DECAY

    def _add(self, run: int, member: _Member) -> None:
        self._members[run] = member
        if member.ended:
            self._ended.add((member.last, run))
        else:
            member.index = len(self._alive)
            self._alive.append(run)

    def _drop(self, run: int) -> None:
        member = self._members.pop(run, None)
        if member is None:
            return
        if member.ended:
            self._ended.remove((member.last, run))
            return
        final = self._alive.pop()
        if final != run:
            self._alive[member.index] = final
            self._members[final].index = member.index
