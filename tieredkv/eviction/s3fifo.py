"""Three static FIFO queues."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from sortedcontainers import SortedList

from tieredkv.eviction.base import Access, Kind, Victim

ENDED, COLD, HOT, MAIN = range(4)  # COLD and HOT are the small queue
PROMOTE = 2  # uses in the small queue that lead to the main one
MOST = 3  # uses that the main queue counts
SMALL, GHOSTS = 0.1, 0.9  # shares of the capacity


@dataclass(slots=True, eq=False)
class _Member:
    run: int
    nbytes: int = 0
    ghost: bytes = b""
    weight: int = 0
    """Bytes that a ghost of the run stands for: the most it had."""
    uses: int = 0
    part: int = ENDED
    rank: tuple[float, ...] = ()
    """Place in its queue: (level, time, number); the level is 0 but in the main queue."""


class S3FifoPolicy:
    """A small FIFO queue lets go quickly what is used once; what is used more often moves to
    the main queue, a CLOCK with counters up to 3. What leaves the small queue leaves a ghost,
    and what comes back while its ghost is there starts in the main queue.

    Yang, Zhang, Qiu, Yue, Rashmi: FIFO queues are all you need for cache eviction. SOSP 2023.
    Until the first eviction, runs that find the small queue full start in the main one, as in
    libCacheSim.

    Differences to the paper: runs are weighted by bytes, and a ghost by all bytes of its run;
    leaves only: a run that is a leaf again enters the small queue, at the time of its last
    use and with the uses that it had; runs whose session has ended go before all others and
    leave no ghost. With runs of one block each, `expect` before `victims` and
    `record(INSERT)` after them, the decisions are libCacheSim's.

    One lap of the main queue takes one from every counter and changes no order. So its next
    victim is the run with the lowest (counter, place), and laps are counted in `_lap`
    instead of in each run: a run's level is `_lap` plus its counter.

    Cost: O(log n) per record, amortised also per forget and victim (each use is paid back by
    one move). Memory: ghosts of at most 0.9 times the capacity beside the resident runs.
    """

    def __init__(self, capacity: int, block_bytes: int, seed: int = 0) -> None:
        """`capacity` of the tier in bytes. Nothing here is random."""
        blocks = capacity // block_bytes
        self._small_limit = max(1, int(blocks * SMALL)) * block_bytes
        self._main_limit = capacity - self._small_limit
        self._ghost_limit = int(blocks * GHOSTS) * block_bytes
        self._block_bytes = block_bytes
        self._members: dict[int, _Member] = {}
        self._queues: list[SortedList[tuple[float, ...]]] = [SortedList() for _ in range(4)]
        self._size = [0, 0, 0, 0]
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()
        self._ghost_size = 0
        self._expected: bytes | None = None
        self._evicting = False
        self._lap = self._count = 0
        self._clock = 0.0
        self._undo: list[tuple[_Member, int, tuple[float, ...]]] | None = None

    def expect(self, key: bytes) -> None:
        """The next INSERT will be a run that begins with `key`, and needs room."""
        if self._drop_ghost(key):
            self._expected = key
        elif key != self._expected:
            self._expected = None

    def record(self, access: Access) -> None:
        self._clock = max(self._clock, access.last)
        member = self._members.get(access.run)
        new = member is None
        if member is None:
            member = self._members[access.run] = _Member(access.run)
        self._resize(member, access)
        ended = member.part == ENDED
        if access.kind is Kind.END:
            self._put(member, ENDED, self._place(0, access.last))
        elif (new or ended) and access.kind is Kind.INSERT:
            self._enter(member, access)
        elif new or (ended and access.kind is not Kind.RESIZE):
            member.uses = min(access.hits, MOST)
            part = HOT if member.uses >= PROMOTE else COLD
            self._put(member, part, self._place(0, access.last))
        elif access.kind is Kind.HIT:
            self._use(member)

    def forget(self, run: int, evicted: bool) -> None:
        member = self._members.get(run)
        if member is None:
            return
        if evicted and member.part != ENDED:
            self._evicting = True
            self._advance(member)
            if member.part == COLD:
                self._add_ghost(member.ghost, member.weight)
        self._take(member)
        del self._members[run]

    def victims(self, nbytes: int, now: float, pinned: Callable[[int], int]) -> list[Victim]:
        chosen: list[Victim] = []
        before = self._count, self._lap, list(self._size)
        self._undo = []  # the queues run as they would, and then back
        try:
            while nbytes > 0 and (member := self._next()) is not None:
                free = member.nbytes - pinned(member.run)
                if free > 0:
                    take = min(free, -(-nbytes // self._block_bytes) * self._block_bytes)
                    chosen.append(Victim(member.run, take))
                    nbytes -= take
                    if member.part != ENDED:
                        self._advance(member)
                self._take(member)
                self._size[member.part] += member.nbytes if free <= 0 else 0
            return chosen
        finally:
            undo, self._undo = self._undo, None
            for member, part, rank in reversed(undo):
                self._move(member, part, rank)
            self._count, self._lap, self._size = before

    def _next(self) -> _Member | None:
        """Whose turn it is to leave."""
        full = self._size[MAIN] > self._main_limit
        if not full and not self._queues[COLD]:
            self._promote(None)
        for part in (ENDED, MAIN, COLD, HOT) if full else (ENDED, COLD, MAIN):
            if self._queues[part]:
                return self._members[int(self._queues[part][0][3])]
        return None

    def _advance(self, member: _Member) -> None:
        """Let the queues run until `member` leaves: those before it that were used move on."""
        if member.part == COLD:
            self._promote(member.rank)
            return
        if member.part == HOT or self._size[MAIN] <= self._main_limit:
            self._promote(None)  # the small queue had nothing to give
        level, *place = member.rank[:3]
        if level < self._lap:
            return  # was pinned when the hand came by
        self._lap = int(level)
        main, above = self._queues[MAIN], range(self._lap + 1, self._lap + MOST + 1)
        passed = [rank for high in above for rank in main.irange((high,), (high, *place))]
        for rank in sorted(passed, key=lambda rank: rank[1:]):
            self._put(self._members[int(rank[3])], MAIN, self._place(rank[0] - 1, self._clock))

    def _promote(self, before: tuple[float, ...] | None) -> None:
        """Move what was used in the small queue, and stored before that rank, to the main one."""
        for rank in list(self._queues[HOT].irange(maximum=before)):
            self._put(self._members[int(rank[3])], MAIN, self._place(self._lap, self._clock))

    def _enter(self, member: _Member, access: Access) -> None:
        key, member.uses = member.ghost, 0
        known = key == self._expected or self._drop_ghost(key)
        self._expected = None
        small = self._size[COLD] + self._size[HOT]
        if known or (not self._evicting and small >= self._small_limit):
            self._put(member, MAIN, self._place(self._lap, access.last))
        else:
            self._put(member, COLD, self._place(0, access.last))

    def _use(self, member: _Member) -> None:
        if member.part == MAIN:
            level, *place = member.rank[:3]
            level = min(max(level, self._lap) + 1, self._lap + MOST)
            self._put(member, MAIN, (level, *place))
            return
        member.uses += 1
        if member.part == COLD and member.uses >= PROMOTE:
            self._put(member, HOT, member.rank[:3])

    def _place(self, level: float, time: float) -> tuple[float, ...]:
        self._count += 1
        return level, time, self._count

    def _put(self, member: _Member, part: int, rank: tuple[float, ...]) -> None:
        self._move(member, part, (*rank[:3], member.run))

    def _take(self, member: _Member) -> None:
        self._move(member, member.part, ())

    def _move(self, member: _Member, part: int, rank: tuple[float, ...]) -> None:
        if self._undo is not None:
            self._undo.append((member, member.part, member.rank))
        if member.rank:
            self._queues[member.part].remove(member.rank)
            self._size[member.part] -= member.nbytes
        member.part, member.rank = part, rank
        if rank:
            self._queues[part].add(rank)
            self._size[part] += member.nbytes

    def _resize(self, member: _Member, access: Access) -> None:
        if member.rank:
            self._size[member.part] += access.nbytes - member.nbytes
        member.nbytes = access.nbytes
        member.weight = max(member.weight, access.nbytes)
        member.ghost = access.first or access.key

    def _add_ghost(self, key: bytes, weight: int) -> None:
        self._drop_ghost(key)
        self._ghosts[key] = weight
        self._ghost_size += weight
        while self._ghost_size > self._ghost_limit:
            self._ghost_size -= self._ghosts.popitem(last=False)[1]

    def _drop_ghost(self, key: bytes) -> bool:
        weight = self._ghosts.pop(key, None)
        self._ghost_size -= weight or 0
        return weight is not None
