"""The engine under a store: executes moves on tiers of this process.

Bytes move outside the lock. Copies between memory tiers run in the thread that wants them,
since they cannot block; everything else runs on the mover.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tieredkv.config import MoverConfig
from tieredkv.control import Control
from tieredkv.index.durable import DurableIndex
from tieredkv.metrics import Metrics
from tieredkv.mover import Mover
from tieredkv.planner import Planner
from tieredkv.staging import Staging
from tieredkv.tiers.base import SharedCatalogue, Tier
from tieredkv.transfer import Done, Transfer
from tieredkv.types import Clock, Move, Outcome

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What `build` puts together for one block size."""

    tiers: list[Tier]
    planner: Planner
    block_bytes: int
    shared: SharedCatalogue | None = None


class Engine(Control):
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
        super().__init__(parts.planner, parts.block_bytes, limits, index, clock, parts.shared)
        self.tiers = parts.tiers
        self.mover = mover
        self.metrics = metrics
        self.healthy = [True] * len(self.tiers)
        self._staging = Staging(parts.block_bytes, self._batch, limits.threads)

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
        if self.shared is not None:
            self.shared.close()
        for tier in reversed(self.tiers):
            tier.close()
        self._staging.close()
        return True

    # -- moves ----------------------------------------------------------------------------

    @property
    def _idle(self) -> bool:
        return self.mover.backlog == 0

    def _inline(self, move: Move) -> bool:
        src, dst, tiers = move.src, move.dst, self.tiers
        return (src is None or tiers[src].inline) and (dst is None or tiers[dst].inline)

    def _copy(self, move: Move, ended: Done) -> Transfer:
        """A transfer from tier to tier."""
        return Transfer(move, self.tiers, None, self._batch, ended, self._staging)

    def _start(self, moves: Sequence[Move]) -> bool:
        """Start background moves; True if any ran to its end in this thread."""
        ran = False
        copies = [self._copy(move, self._ended) for move in moves]
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
        with self.lock:
            effects = self._end(move, transfer.read, transfer.write, expired=transfer.expired)
        self._start(effects.moves)

    def _heard(self, move: Move, read: Sequence[Outcome], write: Sequence[Outcome]) -> None:
        size = self.block_bytes
        if move.src is not None:
            self.metrics.moved("read", self.tiers[move.src].name, read, size)
        if move.dst is not None:
            self.metrics.moved("write", self.tiers[move.dst].name, write, size)
            if move.src is not None:  # what could not be read was not the target's failure
                pairs = zip(read, write, strict=True)
                write = [put for got, put in pairs if got is Outcome.OK]
            if Outcome.FAILED in write:
                self.planner.shrink(move.dst, self.tiers[move.dst].slots)
                self.healthy[move.dst] = False
            elif Outcome.OK in write:
                self.healthy[move.dst] = True
