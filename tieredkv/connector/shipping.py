"""The planner's moves on their way to the workers and back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tieredkv.config import MoverConfig
from tieredkv.connector.wire import Job, Report, WorkerMetadata
from tieredkv.control import Control
from tieredkv.index.durable import DurableIndex
from tieredkv.planner import Planner
from tieredkv.tiers.base import SharedCatalogue
from tieredkv.types import Clock, Move, Outcome

Heard = Callable[[Move, Sequence[Outcome], Sequence[Outcome]], None]
"""Told of each move that has ended: (move, read outcomes, write outcomes)."""
Done = Callable[[Report], None]


@dataclass(slots=True)
class Shipped:
    """A move that the workers have."""

    job: Job
    request: str | None
    """Whose load it is."""
    left: int
    """Ranks that have not reported."""
    done: Done | None
    release: Callable[[], None] | None
    """Gives the engine's blocks back; None once done."""
    unreleased: int
    """Ranks that may still touch those blocks."""
    report: Report | None = field(default=None)


class Shipping(Control):
    """A planner whose moves are executed by `ranks` workers. Thread-safe.

    Background moves wait in the outbox for the next step; nothing starts while the engine is
    idle.
    """

    def __init__(
        self,
        planner: Planner,
        chunk_bytes: int,
        limits: MoverConfig,
        index: DurableIndex | None,
        clock: Clock,
        ranks: int,
        heard: Heard,
        shared: SharedCatalogue | None = None,
    ) -> None:
        super().__init__(planner, chunk_bytes, limits, index, clock, shared)
        self.shipped: dict[int, Shipped] = {}
        self.progress = time.monotonic()
        """When anything was last sent or heard."""
        self._ranks = ranks
        self._told = heard
        self._outbox: deque[Move] = deque()
        self._next = 1

    def ship(
        self,
        move: Move,
        blocks: list[list[int]] | None = None,
        request: str | None = None,
        done: Done | None = None,
        release: Callable[[], None] | None = None,
    ) -> Job:
        """A job for the metadata of this step; the move must be noted.

        `done` is called once all ranks have ended it and the planner knows, `release` once,
        when no rank touches the job's engine blocks any more; the lock is not held then.
        """
        job = Job(self._next, move, blocks)
        self._next += 1
        self.shipped[job.id] = Shipped(job, request, self._ranks, done, release, self._ranks)
        self.progress = time.monotonic()
        return job

    def background(self) -> list[Job]:
        """Jobs for the moves that the planner wants by itself."""
        with self.lock:
            moves = list(self._outbox)
            self._outbox.clear()
        return [self.ship(move) for move in moves]

    def note(self, moves: Sequence[Move]) -> None:
        """These moves of the planner will be shipped. The lock is held."""
        self._note(moves)

    def drain(self) -> None:
        """Send what the planner wants by itself on its way."""
        with self.lock:
            self._background()
            effects = self._drain()
        self._start(effects.moves)

    def hear(self, metadata: WorkerMetadata) -> None:
        """Take the workers' reports."""
        for number, ranks in metadata.released.items():  # first: they may have ended since
            if number in self.shipped:
                self._release(self.shipped[number], ranks)
        ended = []
        for number, report in metadata.reports.items():
            shipped = self.shipped.get(number)
            if shipped is None:
                continue
            before = shipped.report
            shipped.report = report if before is None else before.merge(report)
            shipped.left -= report.ranks
            self._release(shipped, report.holding)
            if shipped.left <= 0:
                del self.shipped[number]
                ended.append(shipped)
        if metadata.slots is not None:
            with self.lock:
                for tier, slots in enumerate(metadata.slots):
                    self.planner.shrink(tier, slots)
        for shipped in ended:
            self._finish(shipped)

    def _release(self, shipped: Shipped, ranks: int) -> None:
        shipped.unreleased -= ranks
        if shipped.release is not None and shipped.unreleased <= 0:
            shipped.release()
            shipped.release = None

    def _finish(self, shipped: Shipped) -> None:
        report = shipped.report
        assert report is not None
        self.progress = time.monotonic()
        with self.lock:
            effects = self._end(shipped.job.move, report.read, report.write, expired=False)
        self._start(effects.moves)
        if shipped.done is not None:
            shipped.done(report)

    @property
    def waiting(self) -> bool:
        """Does anything wait for the next step, or for a report?"""
        return bool(self.shipped or self._outbox)

    def _start(self, moves: Sequence[Move]) -> None:
        if moves:
            with self.lock:
                self._outbox.extend(moves)

    @property
    def _idle(self) -> bool:
        return not self.shipped and not self._outbox

    def _heard(self, move: Move, read: Sequence[Outcome], write: Sequence[Outcome]) -> None:
        self._told(move, read, write)

    def close(self) -> None:
        """Nothing goes to the index any more."""
        with self.lock:
            self._closed = self._finished = True
        if self.shared is not None:
            self.shared.close()
