"""Time to live by what ended the turn."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain

from sortedcontainers import SortedList

from tieredkv.eviction.base import Access, Kind, SessionState, Victim

SESSIONS = 1 << 16  # sessions whose last turn is remembered
RECENT = 32  # sessions of one run that are looked at, the last to come
CLASSES = 256  # classes with statistics of their own; later ones share one
ENOUGH = 8  # delays before they are believed
MEMORY = 512  # delays that count; older ones fade
BINS, SHORTEST = 64, 0.05  # delays in bins of half an octave from 50 ms
EDGES = [SHORTEST * 2 ** (number / 2) for number in range(BINS)]  # upper ends, s
ENDED, LOOSE, KEPT = range(3)
LAST = 1 << 62  # after every run


def cover(
    runs: Iterable[int],
    sizes: Mapping[int, int],
    nbytes: int,
    block_bytes: int,
    pinned: Callable[[int], int],
) -> list[Victim]:
    """Whole blocks of these runs, in their order, until `nbytes` are covered."""
    chosen: list[Victim] = []
    wanted = -(-nbytes // block_bytes) * block_bytes
    for run in runs if wanted > 0 else ():
        free = min(sizes[run] - pinned(run), wanted)
        if free > 0:
            chosen.append(Victim(run, free))
            wanted -= free
            if not wanted:
                break
    return chosen


class Turns:
    """Hears of each turn of each session once, however often its run is recorded."""

    def __init__(self) -> None:
        self._stage: OrderedDict[str, int] = OrderedDict()

    def news(self, access: Access) -> Iterator[SessionState]:
        """Sessions of the run whose turn has begun or ended since they were last heard of."""
        for session in list(access.sessions)[-RECENT:]:
            stage = 2 * session.turns + (not session.running)
            if self._stage.get(session.id, -1) < stage:
                self._stage[session.id] = stage
                self._stage.move_to_end(session.id)
                if len(self._stage) > SESSIONS:
                    self._stage.popitem(last=False)
                yield session


class Delays:
    """How long sessions of one class stay away: a histogram that fades."""

    def __init__(self) -> None:
        self.total = 0.0
        self._counts = [0.0] * BINS

    def add(self, delay: float) -> None:
        octaves = 2 * math.log2(max(delay, SHORTEST) / SHORTEST)
        self._counts[min(BINS - 1, math.ceil(octaves))] += 1
        self.total += 1
        if self.total > MEMORY:
            self._counts = [count / 2 for count in self._counts]
            self.total /= 2

    def best_ttl(self, life: float) -> float:
        """The t in s with the largest P(delay <= t) - E[min(delay, t)] / life.

        A reload saved is worth as much as `life` seconds of holding: that is how long the
        tier keeps its bytes for one chance of being used.
        """
        best, best_gain, returned, held = 0.0, 0.0, 0.0, 0.0
        for count, edge in zip(self._counts, EDGES, strict=True):
            returned += count
            held += count * edge
            gain = returned - (held + (self.total - returned) * edge) / life
            if count and gain > best_gain:
                best, best_gain = edge, gain
        return best


class Life:
    """How long ago the runs that a tier evicts were used, on average, in s; 0: none yet."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def add(self, age: float) -> None:
        age = max(age, SHORTEST)
        self.seconds += (age - self.seconds) / 64 if self.seconds else age


class TtlPolicy:
    """After a turn the session's leaf is kept for as long as sessions are usually away after
    such a turn, if that is worth the room. Expired runs go first, least recently used first,
    then the others in the same order.

    In the manner of Continuum (Li et al.: Continuum: efficient and robust multi-turn LLM agent
    scheduling with KV cache time-to-live, arXiv 2511.02230), which pins a request's cache after
    a tool call for the time that trades the tool's delays against the reload.

    Differences to the paper: a turn may end in anything, a class is (finish reason, next
    tool); what holding costs is not queueing time but the tier's own exchange rate, the age at
    which it evicts (both sides are per byte, so sizes cancel out); an unexpired run is
    evicted when there is no other; leaves only; runs whose session has ended go first. Without
    sessions the delays are those between the uses of a leaf. Until delays and evictions have
    been seen it is LRU.

    Cost: O(log n) per record and forget, O(victims + runs expired since the last event) per
    question. Memory: the turns of 65,536 sessions and 256 histograms beside the resident runs.
    """

    def __init__(self, capacity: int, block_bytes: int, seed: int = 0) -> None:
        """`capacity` of the tier in bytes. Nothing here is random."""
        self._block_bytes = block_bytes
        self._nbytes: dict[int, int] = {}
        self._place: dict[int, tuple[int, float, float]] = {}
        """Run -> (group, last use, end of its time to live)."""
        self._order: list[SortedList[tuple[float, int]]] = [SortedList() for _ in range(3)]
        self._expiry: SortedList[tuple[float, int]] = SortedList()
        self._turns = Turns()
        self._delays: dict[object, Delays] = {None: Delays()}
        self._life = Life()
        self._clock = 0.0

    def record(self, access: Access) -> None:
        run = access.run
        self._learn(access)
        if run not in self._place or access.kind is not Kind.RESIZE:
            ended = access.kind is Kind.END
            until = math.inf if ended else self._until(access)
            self._put(run, (ENDED if ended else KEPT, access.last, until))
        self._nbytes[run] = access.nbytes
        self._clock = max(self._clock, access.last)
        for late in self._expired(self._clock):
            _, last, until = self._place[late]
            self._put(late, (LOOSE, last, until))

    def forget(self, run: int, evicted: bool) -> None:
        if run in self._place:
            group, last, _ = self._place[run]
            if evicted and group != ENDED:
                self._life.add(self._clock - last)
            self._put(run, None)
            del self._nbytes[run]

    def victims(self, nbytes: int, now: float, pinned: Callable[[int], int]) -> list[Victim]:
        return cover(self._ranked(now), self._nbytes, nbytes, self._block_bytes, pinned)

    def _ranked(self, now: float) -> Iterator[int]:
        late = {run: self._place[run][1] for run in self._expired(now)}
        ended, loose, kept = self._order
        fresh = sorted((last, run) for run, last in late.items())
        for _, run in chain(ended, heapq.merge(loose, fresh)):
            yield run
        for _, run in kept:
            if run not in late:
                yield run

    def _expired(self, now: float) -> list[int]:
        """Kept runs whose time is over."""
        return [run for _, run in self._expiry.irange(maximum=(now, LAST))]

    def _until(self, access: Access) -> float:
        turn = access.turn
        if access.sessions:
            idle = [s for s in list(access.sessions)[-RECENT:] if not s.running]
            ends = [s.since + self._ttl((s.finish_reason, s.next_tool)) for s in idle]
            return max(ends, default=access.last)
        ending = (None, None) if turn is None else (turn.finish_reason, turn.next_tool)
        return access.last + self._ttl(ending)

    def _ttl(self, ending: tuple[str | None, str | None]) -> float:
        delays = self._delays.get(ending)
        if delays is None or delays.total < ENOUGH:
            delays = self._delays[None]
        known = delays.total >= ENOUGH and self._life.seconds
        return delays.best_ttl(self._life.seconds) if known else 0.0

    def _learn(self, access: Access) -> None:
        for session in self._turns.news(access):
            if session.running and session.delay is not None:
                self._add((session.finish_reason, session.next_tool), session.delay)
        if access.kind is Kind.HIT and not access.sessions and access.run in self._place:
            turn = access.turn
            ending = (None, None) if turn is None else (turn.finish_reason, turn.next_tool)
            self._add(ending, access.last - self._place[access.run][1])

    def _add(self, ending: tuple[str | None, str | None], delay: float) -> None:
        self._delays[None].add(delay)
        if ending not in self._delays and len(self._delays) < CLASSES:
            self._delays[ending] = Delays()
        if ending in self._delays:
            self._delays[ending].add(delay)

    def _put(self, run: int, place: tuple[int, float, float] | None) -> None:
        """Move the run to its new place; None: nowhere."""
        before = self._place.pop(run, None)
        if before is not None:
            group, last, until = before
            self._order[group].remove((last, run))
            if group == KEPT:
                self._expiry.remove((until, run))
        if place is not None:
            group, last, until = self._place[run] = place
            self._order[group].add((last, run))
            if group == KEPT:
                self._expiry.add((until, run))
