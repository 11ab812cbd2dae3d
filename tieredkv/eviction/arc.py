"""Adaptive replacement cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sortedcontainers import SortedList

from tieredkv.eviction.base import Access, Kind, Victim

ENDED, ONCE, OFTEN = range(3)


@dataclass(slots=True)
class _Member:
    part: int
    last: float
    nbytes: int
    ghost: bytes
    weight: int
    """Bytes that a ghost of the run stands for: the most it had."""


class ArcPolicy:
    """Balances recency against frequency by what it regrets to have evicted.

    Megiddo, Modha: ARC: A self-tuning, low overhead replacement cache. FAST 2003.

    Runs used once (the paper's T1) and more often (T2) are two LRU lists. Evicted runs leave
    ghosts (B1, B2); a ghost that is stored again moves the target size p of T1. Differences
    to the paper: runs are weighted by bytes, and a ghost by all bytes of its run; a run is
    known by the key of its first block, because a session that comes back stores the same
    first block but more of them behind it; leaves only; runs whose session has ended go
    before all others and leave no ghost. With runs of one block each, `expect` before
    `victims` and `record(INSERT)` after them, the decisions are the paper's. Without
    `expect`, p moves when the block is stored, after room was made for it.

    Cost: O(log n) per record and forget, O(victims) per question. Memory: ghosts of at most
    the tier's capacity beside the resident runs.
    """

    def __init__(self, capacity: int, block_bytes: int, seed: int = 0) -> None:
        """`capacity` of the tier in bytes. Nothing here is random."""
        self._capacity = capacity
        self._block_bytes = block_bytes
        self._members: dict[int, _Member] = {}
        self._order: list[SortedList[tuple[float, int]]] = [SortedList() for _ in range(3)]
        self._size = [0, 0, 0]
        self._ghosts: list[OrderedDict[bytes, int]] = [OrderedDict() for _ in range(3)]
        self._ghost_size = [0, 0, 0]
        self._target = 0.0
        self._expected: bytes | None = None

    def expect(self, key: bytes) -> None:
        """The next INSERT will be a run that begins with `key`, and needs room."""
        if key != self._expected:
            self._adapt(key)
            self._expected = key

    def record(self, access: Access) -> None:
        run = access.run
        member = self._members.get(run)
        if member is None or access.kind is not Kind.RESIZE:
            part = self._part(access, member)
            weight = self._remove(run)
            member = _Member(part, access.last, 0, b"", weight)
            self._members[run] = member
            self._order[part].add((access.last, run))
        self._size[member.part] += access.nbytes - member.nbytes
        member.nbytes = access.nbytes
        member.ghost = access.first or access.key
        member.weight = max(member.weight, access.nbytes)
        self._trim_ghosts()

    def forget(self, run: int, evicted: bool) -> None:
        member = self._members.get(run)
        if member is None:
            return
        self._remove(run)
        if evicted and member.part != ENDED:
            self._remove_ghost(member.ghost)
            self._ghosts[member.part][member.ghost] = member.weight
            self._ghost_size[member.part] += member.weight
            self._trim_ghosts()

    def victims(self, nbytes: int, now: float, pinned: Callable[[int], int]) -> list[Victim]:
        chosen: list[Victim] = []
        ended, once, often = (self._evictable(part, pinned) for part in (ENDED, ONCE, OFTEN))
        size = self._size[ONCE]
        tie = self._expected in self._ghosts[OFTEN]
        while nbytes > 0:
            shrink_once = size > self._target or (tie and size == self._target)
            first, second = (once, often) if shrink_once else (often, once)
            found = next(ended, None) or next(first, None) or next(second, None)
            if found is None:
                break
            run, free = found
            take = min(free, -(-nbytes // self._block_bytes) * self._block_bytes)
            chosen.append(Victim(run, take))
            nbytes -= take
            if self._members[run].part == ONCE:
                size -= take
        return chosen

    def _part(self, access: Access, member: _Member | None) -> int:
        if access.kind is Kind.END:
            return ENDED
        if access.kind is Kind.HIT:
            return OFTEN
        if access.kind is Kind.INSERT:
            key = access.first or access.key
            if key != self._expected:
                self._adapt(key)
            self._expected = None
            if self._remove_ghost(key):
                return OFTEN
            return ONCE if member is None else max(ONCE, member.part)
        return OFTEN if access.hits else ONCE

    def _adapt(self, key: bytes) -> None:
        """Grow the list that would have kept `key`, the faster the fewer ghosts it has."""
        for part, other, sign in ((ONCE, OFTEN, 1), (OFTEN, ONCE, -1)):
            weight = self._ghosts[part].get(key)
            if weight is not None:
                step = weight * max(1.0, self._ghost_size[other] / self._ghost_size[part])
                self._target = min(max(0.0, self._target + sign * step), float(self._capacity))

    def _evictable(self, part: int, pinned: Callable[[int], int]) -> Iterator[tuple[int, int]]:
        for _, run in self._order[part]:
            free = self._members[run].nbytes - pinned(run)
            if free > 0:
                yield run, free

    def _remove(self, run: int) -> int:
        """Take the run out of its list; the bytes that its ghost would stand for."""
        member = self._members.pop(run, None)
        if member is None:
            return 0
        self._order[member.part].remove((member.last, run))
        self._size[member.part] -= member.nbytes
        return member.weight

    def _remove_ghost(self, key: bytes) -> bool:
        for part in (ONCE, OFTEN):
            weight = self._ghosts[part].pop(key, None)
            if weight is not None:
                self._ghost_size[part] -= weight
                return True
        return False

    def _trim_ghosts(self) -> None:
        """Once-lists hold one capacity with ghosts, all lists two."""
        while self._ghosts[ONCE] and self._size[ONCE] + self._ghost_size[ONCE] > self._capacity:
            self._drop_oldest(ONCE)
        total = sum(self._size) - self._size[ENDED] + sum(self._ghost_size)
        while self._ghosts[OFTEN] and total > 2 * self._capacity:
            total -= self._drop_oldest(OFTEN)

    def _drop_oldest(self, part: int) -> int:
        _, weight = self._ghosts[part].popitem(last=False)
        self._ghost_size[part] -= weight
        return weight
