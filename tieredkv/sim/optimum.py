"""Offline bounds: the best any policy could do, and what an infinite cache would hit.

Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal
5(2), 1966: evict what is used furthest in the future. On prefix chains a block's next use is
never later than its child's, so furthest-next-use with ties deepest first takes leaves only
and is exact for blocks of equal size. All blocks with the same next use belong to the chain of
one request, the deepest go first, and what is left of them is a prefix of that chain: the
state of the cache is one count per future request.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

NEVER = 1 << 62


@dataclass(slots=True)
class Future:
    """What each request of a trace finds and leaves, seen from the end."""

    blocks: list[int] = field(default_factory=list)
    """Blocks of each request."""
    seen: list[int] = field(default_factory=list)
    """Its leading blocks that an earlier request had: hits of an infinite cache."""
    next_use: list[list[tuple[int, int]]] = field(default_factory=list)
    """Per request (next request, blocks) of its blocks, root first; `NEVER` for the rest."""
    unique: int = 0
    """Distinct blocks."""
    peak_live: int = 0
    """Most blocks that are between their first and their last use at one time."""


def look_ahead(chains: Iterable[Sequence[int]]) -> Future:
    """The future of a trace given each request's block ids in order of arrival.

    O(accesses) time; memory for one entry per distinct block and per change of next use.
    """
    future = Future()
    last: dict[int, int] = {}  # block -> latest request that used it
    heirs: list[Counter[int]] = []  # per request: blocks by next request
    born: list[int] = []
    for index, ids in enumerate(chains):
        future.blocks.append(len(ids))
        previous = [last[block] for block in ids if block in last]
        future.seen.append(len(previous))
        for earlier, count in Counter(previous).items():
            heirs[earlier][index] += count
        last.update(dict.fromkeys(ids, index))
        heirs.append(Counter())
        born.append(len(ids) - len(previous))
    future.unique = len(last)
    dying = Counter(last.values())
    live = 0
    for index, count in enumerate(future.blocks):
        entries = sorted(heirs[index].items())
        rest = count - sum(n for _, n in entries)
        future.next_use.append([*entries, (NEVER, rest)] if rest else entries)
        live += born[index]
        future.peak_live = max(future.peak_live, live)
        live -= dying[index]
    return future


def optimum(
    future: Future, capacity: int, spans: Sequence[tuple[float, float]] | None = None
) -> list[int]:
    """Hit blocks of each request in one cache of `capacity` blocks that knows the future.

    With `spans`, (arrival, end of the response) of each request in seconds, it plays by the
    rules of an online policy: running requests keep their blocks, and every block is stored.
    Without, nothing is pinned and a block may be let go at once: no policy can beat that.
    """
    cache = _Cache(capacity)
    running: list[tuple[float, int]] = []
    hits = []
    for index, count in enumerate(future.blocks):
        if spans is None:
            hits.append(cache.take(index))
            cache.add(future.next_use[index], count, index)
            cache.evict(cache.total - capacity)
            continue
        arrival, end = spans[index]
        while running and running[0][0] <= arrival:
            cache.unpin(heapq.heappop(running)[1])
        hits.append(cache.take(index))
        wanted = min(count, capacity)
        cache.evict(cache.total + wanted - capacity)
        cache.add(future.next_use[index], min(wanted, capacity - cache.total), index, pin=True)
        heapq.heappush(running, (end, index))
    return hits


class _Cache:
    """Resident blocks by the request that uses them next."""

    def __init__(self, capacity: int) -> None:
        self.total = 0
        self._count: dict[int, int] = {}
        self._depth: dict[int, int] = {}
        """Depth of the deepest resident block of a future request's chain."""
        self._furthest: list[int] = []
        self._pins: dict[int, list[int]] = {}
        """Running request -> next requests of the blocks that it keeps."""
        self._kept: dict[int, dict[int, int]] = {}
        """Future request -> running request -> depth up to which its blocks stay."""
        self._heirs: dict[int, int] = {}
        """Depths kept by requests that still run, of the chain that was taken last."""

    def take(self, index: int) -> int:
        """The request uses what is there for it; how many blocks."""
        found = self._count.pop(index, 0)
        self.total -= found
        self._depth.pop(index, None)
        self._heirs = self._kept.pop(index, {})
        return found

    def add(
        self, segments: Sequence[tuple[int, int]], count: int, index: int, *, pin: bool = False
    ) -> None:
        """Store the first `count` blocks of a request's chain; `pin` them until `unpin`, and
        those that others have pinned until theirs."""
        depth, pins = 0, {**self._heirs, index: count} if pin else {}
        for after, blocks in segments:
            blocks = min(blocks, count)
            count -= blocks
            if not blocks:
                break
            if after == NEVER:
                after += index  # chains without a future are let go one by one
            if after not in self._count:
                self._count[after] = 0
                self._depth[after] = 0
                heapq.heappush(self._furthest, -after)
            self._count[after] += blocks
            before, depth = depth, depth + blocks
            self._depth[after] = max(self._depth[after], depth)
            self.total += blocks
            for running, kept in pins.items():
                if kept > before:
                    mine = self._kept.setdefault(after, {})
                    mine[running] = max(mine.get(running, 0), min(kept, depth))
                    self._pins.setdefault(running, []).append(after)

    def unpin(self, running: int) -> None:
        for after in self._pins.pop(running, ()):
            kept = self._kept.get(after)
            if kept is not None:
                kept.pop(running, None)
                if not kept:
                    del self._kept[after]

    def evict(self, excess: int) -> None:
        """Let unpinned blocks go, those with the furthest next use first."""
        aside = []
        while excess > 0 and self._furthest:
            furthest = -self._furthest[0]
            here = self._count.get(furthest, 0)
            depth = self._depth.get(furthest, 0)
            kept = max(self._kept.get(furthest, {}).values(), default=0)
            take = max(0, min(here, excess, depth - kept))
            excess -= take
            self.total -= take
            if take == here:
                heapq.heappop(self._furthest)
                self._count.pop(furthest, None)
                self._depth.pop(furthest, None)
                continue
            self._count[furthest] = here - take
            self._depth[furthest] = depth - take
            if excess > 0:
                aside.append(heapq.heappop(self._furthest))
        for item in aside:
            heapq.heappush(self._furthest, item)
