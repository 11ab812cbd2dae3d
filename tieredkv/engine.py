"""The engine under a store: what runs in the background, and every wait.

Planner, mover, tiers and index behind one lock. Bytes move outside the lock. Copies between
memory tiers run in the thread that wants them, since they cannot block; everything else runs
on the mover.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tieredkv.config import MoverConfig
from tieredkv.errors import ClosedError
from tieredkv.index.durable import DurableIndex
from tieredkv.metrics import Metrics
from tieredkv.mover import Mover, Transfer
from tieredkv.planner import Planner
from tieredkv.planner.plans import Effects
from tieredkv.tiers.base import Tier
from tieredkv.types import Clock, Move, Outcome

log = logging.getLogger(__name__)

FLUSH_POLL = 0.05  # seconds between looks, when nothing has ended


@dataclass(frozen=True, slots=True)
class Parts:
    """What `build` puts together for one block size."""

    tiers: list[Tier]
    planner: Planner
    block_bytes: int


class Engine:
    """Runs moves, write-back and commits. Thread-safe."""

    def __init__(
        self,
        parts: Parts,
        mover: Mover,
        limits: MoverConfig,
        index: DurableIndex | None,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self.lock = threading.RLock()
        self.tiers, self.planner, self.block_bytes = parts.tiers, parts.planner, parts.block_bytes
        self.mover = mover
        self.index = index
        self.metrics = metrics
        self.clock = clock
        self.healthy = [True] * len(self.tiers)
        self._limits = limits
        self._batch = max(1, limits.batch // self.block_bytes)
        self._changed = threading.Condition(self.lock)
        self._ends = 0
        self._moving: dict[int, Move] = {}
        self._acknowledged = 0
        self._closed = False
        self._finished = False
        """Nothing may be submitted to the index any more."""
        self._stalled = False
        """The last put that waited for room waited in vain: drop at once until a demotion ends."""

    # -- durability -----------------------------------------------------------------------

    def flush(self, timeout: float) -> bool:
        """Write and commit everything that the durable tier should have; False if something
        could not be written, or at the deadline."""
        deadline = time.monotonic() + timeout
        durable = self.planner.res.durable
        if durable is None or self.index is None:
            return True
        with self.lock:
            self.planner.pins.expire(self.clock())
            refused, upto = self.planner.begin_flush()
        while True:
            with self.lock:
                if not self.planner.writes(durable, upto):
                    break
                self._write_back(durable)
                effects = self._drain()
            self._start(effects.moves)
            with self.lock:
                seen = self._ends  # of refused moves too: they must not make this loop spin
            if time.monotonic() >= deadline:
                return False
            self._await_end(seen, min(deadline, time.monotonic() + FLUSH_POLL))
        committed = self._await_commit(deadline)
        with self.lock:
            whole = self.planner.room.refused == refused
            return committed and whole and not self.planner.lacking(upto, self.clock())

    def await_durable(self, key: bytes, timeout: float) -> bool:
        """Wait until the block's record is committed; False if it is gone, or at the deadline."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._changed.wait_for(
                lambda: self.planner.durable(key) is not False,
                max(0.0, deadline - time.monotonic()),
            )
            if not self.planner.durable(key):
                return False
        if not self._await_commit(deadline):
            return False
        with self.lock:
            return bool(self.planner.durable(key))

    def clear(self, tier: int | None) -> int:
        """Forget everything in one tier, or in all; blocks forgotten. Other calls wait for the
        commit of the new epoch: nothing may enter the index meanwhile."""

        def work(planner: Planner) -> int:
            durable = self.index is not None and tier in (None, planner.res.durable)
            epoch = self.index.new_epoch() if self.index is not None and durable else None
            return planner.clear(tier, epoch)

        return self.apply(work)

    def apply(self, work: Callable[[Planner], int]) -> int:
        """Run a change of the planner's and start what it causes."""
        with self.lock:
            result = work(self.planner)
            effects = self._drain()
            self._ends += 1
            self._changed.notify_all()
        self._start(effects.moves)
        return result

    def check(self) -> list[str]:
        with self.lock:
            return self.planner.check(list(self._moving.values()))

    def close(self, timeout: float) -> bool:
        """Finish what can be finished by the deadline; False if an operation still hangs. Then
        its tier, and the lock of the directory, stay as they are until the process ends."""
        deadline = time.monotonic() + timeout
        with self.lock:
            self._closed = True
        ended = self.mover.close(timeout)
        with self._changed:  # copies in the threads of callers
            left = max(0.0, deadline - time.monotonic())
            ended &= self._changed.wait_for(lambda: not self._moving, left)
        with self.lock:
            self._finished = True
        if self.index is not None:
            ended &= self.index.close(max(0.0, deadline - time.monotonic()))
        if not ended:
            log.error("close: operations still hang after %.1f s; their tiers stay open", timeout)
            return False
        for tier in self.tiers:
            tier.close()
        return True

    # -- waits -----------------------------------------------------------------------------

    def _await_commit(self, deadline: float) -> bool:
        """Wait until every index change submitted so far is answered; False at the deadline."""
        with self._changed:
            mark = self.planner.last_ticket
            left = max(0.0, deadline - time.monotonic())
            return self._changed.wait_for(lambda: self._acknowledged >= mark, left)

    def _await_end(self, seen: int, deadline: float) -> bool:
        """Wait until anything has ended since `seen`; False at the deadline."""
        with self._changed:
            left = max(0.0, deadline - time.monotonic())
            return self._changed.wait_for(lambda: self._ends != seen, left)

    # -- moves ----------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the store is closed: open a new one")

    def _inline(self, move: Move) -> bool:
        src, dst, tiers = move.src, move.dst, self.tiers
        return (src is None or tiers[src].inline) and (dst is None or tiers[dst].inline)

    def _note(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self._moving[id(move)] = move

    def _start(self, moves: Sequence[Move]) -> bool:
        """Start background moves; True if any ran to its end in this thread."""
        ran = False
        copies = [Transfer(move, self.tiers, None, self._batch, self._ended) for move in moves]
        with self._ending(copies) as transfers:
            for transfer in transfers:
                if self._inline(transfer.move):
                    transfer.run_all()
                    ran = True
                elif not self.mover.start(transfer, self.block_bytes, load=False):
                    with self.lock:
                        self.metrics.dropped_moves += len(transfer.move)
                    transfer.refuse()
        return ran

    @contextmanager
    def _ending(self, transfers: list[Transfer]) -> Iterator[list[Transfer]]:
        """Whatever interrupts the caller, each transfer ends and gives its buffers back."""
        try:
            yield transfers
        except BaseException:
            for transfer in transfers:
                if transfer.running:
                    transfer.expire(0.0)
                    if transfer.queued:
                        self.mover.late(transfer)
                    else:
                        transfer.refuse()
            raise

    def _ended(self, transfer: Transfer) -> None:
        """A transfer has really ended, on whatever thread."""
        move = transfer.move
        write = transfer.write
        if Outcome.BUSY in write and not transfer.expired:
            # nobody hurried it: trying again at once would change nothing
            write = [Outcome.FAILED if o is Outcome.BUSY else o for o in write]
        with self.lock:
            self._moving.pop(id(move), None)
            self.planner.finish(move, transfer.read, write, self.clock())
            self._count(move, transfer)
            if not transfer.expired:
                if move.src is not None and Outcome.OK in transfer.write:
                    self._stalled = False
                if move.dst != self.planner.res.durable or Outcome.OK in transfer.write:
                    self._background()  # else it would repeat at once what has just failed
            # what ends after a close that did not wait for it has nothing to start any more
            effects = Effects() if self._finished else self._drain()
            self._ends += 1
            self._changed.notify_all()
        self._start(effects.moves)

    def _count(self, move: Move, transfer: Transfer) -> None:
        size = self.block_bytes
        if move.src is not None:
            self.metrics.moved("read", self.tiers[move.src].name, transfer.read, size)
        if move.dst is not None:
            self.metrics.moved("write", self.tiers[move.dst].name, transfer.write, size)
            given = transfer.write
            if move.src is not None:  # what could not be read was not the target's failure
                pairs = zip(transfer.read, transfer.write, strict=True)
                given = [put for got, put in pairs if got is Outcome.OK]
            if Outcome.FAILED in given:
                self.planner.shrink(move.dst, self.tiers[move.dst].slots)
                self.healthy[move.dst] = False
            elif Outcome.OK in given:
                self.healthy[move.dst] = True

    def _background(self) -> None:
        """Write back while the disk has nothing else to do, or at once under `through`."""
        durable = self.planner.res.durable
        if durable is None or not self.planner.res.dirty:
            return
        if self.planner.through or self.mover.backlog == 0:
            self._write_back(durable)

    def _write_back(self, durable: int) -> None:
        """Want dirty blocks written, as many as keep all threads busy."""
        now = self.clock()
        self.planner.pins.expire(now)
        free = self._batch * self._limits.threads - len(self.planner.res.levels[durable].writing)
        if free > 0:
            self.planner.room.write_back(now, free)

    def _drain(self) -> Effects:
        """Collect what the planner wants; index changes are queued before the lock is given up."""
        effects = self.planner.drain()
        self._note(effects.moves)
        if effects.index is not None and self.index is not None:
            op = effects.index
            self.index.submit(op.puts, op.deletes, lambda ok: self._committed(op.ticket, ok))
        return effects

    def _committed(self, ticket: int, ok: bool) -> None:
        effects = Effects()
        with self.lock:
            self._acknowledged = max(self._acknowledged, ticket)
            try:
                self.planner.committed(ticket, ok, self.clock())
                self._stalled = self._stalled or not ok
                if ok and not self._finished:
                    self._stalled = False
                    self._background()
                    effects = self._drain()
            finally:
                self._ends += 1
                self._changed.notify_all()
        self._start(effects.moves)
