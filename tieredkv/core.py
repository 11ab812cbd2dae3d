"""The engine of one process: planner, mover, tiers and index behind one lock.

Bytes move outside the lock. Copies between memory tiers run in the calling thread, since
they cannot block; everything else runs on the mover under a deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from tieredkv.buffers import HostBlocks, revocable
from tieredkv.config import MoverConfig
from tieredkv.errors import ClosedError
from tieredkv.index.durable import DurableIndex
from tieredkv.metrics import Metrics
from tieredkv.mover import Mover, Transfer
from tieredkv.planner import Planner
from tieredkv.plans import Effects, PutPlan
from tieredkv.tiers.base import Tier
from tieredkv.types import Clock, Move, Outcome, Turn

log = logging.getLogger(__name__)

ROOM_ROUNDS = 8  # demotions cascade through few tiers; a promotion is not worth more


@dataclass(frozen=True, slots=True)
class Parts:
    """What `build` puts together for one block size."""

    tiers: list[Tier]
    planner: Planner
    block_bytes: int


class Core:
    """Executes puts, gets and background moves. Thread-safe."""

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
        self._stalled = False
        """The last put that waited for room waited in vain: drop at once until a demotion ends."""

    # -- put ------------------------------------------------------------------------------

    def put(
        self, keys: Sequence[bytes], host: HostBlocks, start: int, turn: Turn | None
    ) -> list[Outcome]:
        """Outcome per block of `keys[start:]`. Returns once the first tier holds the bytes; if
        that is the durable one, once the index is committed."""
        deadline = time.monotonic() + self._limits.put_deadline
        plan = self._plan_put(keys, start, turn)
        outcomes = [Outcome.BUSY] * (len(keys) - start)
        if start > plan.known:
            return [Outcome.MISSING] * len(outcomes)
        for i in range(plan.known - start):
            outcomes[i] = Outcome.OK
        if plan.moves:
            self._run_put(plan.moves, host, start, deadline, outcomes)
        if plan.pending and plan.known > start:
            joined = self._await_visible(keys[plan.known - 1], deadline)
            for i in range(plan.known - start):
                outcomes[i] = joined
        if turn is not None and turn.ttl:
            with self.lock:
                self.planner.pin(keys, turn.ttl, self.clock())
        return outcomes

    def _plan_put(self, keys: Sequence[bytes], start: int, turn: Turn | None) -> PutPlan:
        """Plan, and wait a moment for demotions where only those can make room."""
        patience = time.monotonic() + self._limits.room_wait
        force = self._stalled
        while True:
            with self.lock:
                self._check_open()
                plan = self.planner.plan_put(keys, start, turn, self.clock(), force=force)
                self._note(plan.moves)
                effects, seen = self._drain(), self._ends
            self._start(effects.moves)
            if not plan.wait:
                return plan
            if time.monotonic() >= patience:
                force = True
            elif not self._await_end(seen, patience):
                force = self._stalled = True

    def _run_put(
        self,
        moves: Sequence[Move],
        host: HostBlocks,
        start: int,
        deadline: float,
        outcomes: list[Outcome],
    ) -> None:
        for move in moves:
            lo = move.depths[0] - start
            transfer = self._transfer(move, host, lo, lo + len(move))
            result = self._finish_here(transfer, deadline, load=False)
            tier = self.tiers[move.dst or 0]
            if tier.durable and self.index is not None and result.count(Outcome.OK):
                # its bytes are on disk; the put is acknowledged once its record is
                result = self._acknowledge(move, result, deadline)
            outcomes[lo : lo + len(move)] = result

    def _acknowledge(self, move: Move, result: list[Outcome], deadline: float) -> list[Outcome]:
        """Outcomes of a durable put, once its records are committed or have failed."""
        in_time = self._await_commit(deadline)
        with self.lock:
            kept = [self.planner.durable(key) is True for key in move.keys]
        late = Outcome.FAILED if in_time else Outcome.BUSY
        return [
            late if outcome is Outcome.OK and not (in_time and held) else outcome
            for outcome, held in zip(result, kept, strict=True)
        ]

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

    def _await_visible(self, key: bytes, deadline: float) -> Outcome:
        with self._changed:
            self._changed.wait_for(
                lambda: self.planner.visible(key) is not False,
                max(0.0, deadline - time.monotonic()),
            )
            visible = self.planner.visible(key)
        return {True: Outcome.OK, False: Outcome.BUSY, None: Outcome.FAILED}[visible]

    # -- get ------------------------------------------------------------------------------

    def get(
        self, keys: Sequence[bytes], host: HostBlocks, start: int, deadline: float, promote: bool
    ) -> tuple[list[Outcome], dict[str, int]]:
        """(outcome per block of `keys[start:]`, blocks returned per tier)."""
        with self.lock:
            self._check_open()
            _, moves = self.planner.plan_get(keys, start, self.clock())
            self._note(moves)
        outcomes = [Outcome.MISSING] * (len(keys) - start)
        hits: dict[str, int] = {}
        transfers = [self._gather(move, host, start) for move in moves]
        for transfer in transfers:  # what can block runs beside the memory copies
            if not self._inline(transfer.move):
                self._queue(transfer, load=True)
        for transfer in transfers:
            result = self._finish_here(transfer, deadline, load=True)
            for depth, outcome in zip(transfer.move.depths, result, strict=True):
                outcomes[depth - start] = outcome
            hits[self.tiers[transfer.move.src or 0].name] = result.count(Outcome.OK)
        if promote and any(move.src for move in moves):
            self._promote(keys, host, start, moves, outcomes)
        return outcomes, {tier: n for tier, n in hits.items() if n}

    def _gather(self, move: Move, host: HostBlocks, start: int) -> Transfer:
        """A read into the caller's blocks, which need not be neighbours."""
        lo, hi = move.depths[0] - start, move.depths[-1] + 1 - start
        if hi - lo == len(move):
            return self._transfer(move, host, lo, hi)
        picked = [host.buffers[depth - start] for depth in move.depths]
        return self._transfer(move, HostBlocks(picked, host.block_bytes, []), 0, len(move))

    def _promote(
        self,
        keys: Sequence[bytes],
        host: HostBlocks,
        start: int,
        moves: Sequence[Move],
        outcomes: Sequence[Outcome],
    ) -> None:
        """Copy what was read from slower tiers out of the caller's buffers, still ours now."""
        slower = sorted(
            depth
            for move in moves
            if move.src
            for depth in move.depths
            if outcomes[depth - start] is Outcome.OK
        )
        with self.lock:
            tier = self.planner.promotion_target(len(slower))
            if not slower or tier is None or not self.tiers[tier].inline:
                return
        self._make_room(tier, len(slower), keys)
        with self.lock:
            plan = self.planner.plan_promote(keys, slower, tier, self.clock(), read=False)
            self._note(plan)
        for move in plan:
            self._gather(move, host, start).run_all()

    def _make_room(self, tier: int, blocks: int, keys: Sequence[bytes]) -> None:
        """Let memory-to-memory demotions make room, without waiting for anything slower."""
        for _ in range(ROOM_ROUNDS):
            with self.lock:
                short = self.planner.room_for(tier, blocks, keys, self.clock())
                effects = self._drain()
            if not self._start(effects.moves) or not short:
                return

    def prefetch(self, keys: Sequence[bytes], target: int) -> Future[int]:
        """Start copies of the chain's durable blocks into `target`; blocks copied."""
        future: Future[int] = Future()
        with self.lock:
            match = self.planner.match(keys)
            moves = self.planner.plan_promote(
                keys, range(match.blocks), target, self.clock(), read=True
            )
            self._note(moves)
            effects = self._drain()
        self._start(effects.moves)
        left, copied = len(moves), 0

        def ended(transfer: Transfer) -> None:
            nonlocal left, copied
            self._ended(transfer)
            with self.lock:
                left -= 1
                copied += transfer.write.count(Outcome.OK)
                finished = not left
            if finished:
                future.set_result(copied)

        for move in moves:
            transfer = Transfer(move, self.tiers, None, self._batch, ended)
            if self._inline(move):
                transfer.run_all()
            elif not self.mover.start(transfer, self.block_bytes, load=True):
                transfer.refuse()
        if not moves:
            future.set_result(0)
        return future

    # -- durability -----------------------------------------------------------------------

    def flush(self, timeout: float) -> bool:
        """Write and commit everything that the durable tier should have; False if something
        could not be written, or at the deadline."""
        deadline = time.monotonic() + timeout
        durable = self.planner.res.durable
        if durable is None or self.index is None:
            return True
        with self.lock:
            refused, upto = self.planner.begin_flush()
        while True:
            with self.lock:
                if not self.planner.writes(durable, upto):
                    break
                before = len(self.planner.res.declined)
                self.planner.room.write_back(self.clock(), self._write_back_blocks())
                turned_down = len(self.planner.res.declined) != before
                effects, seen = self._drain(), self._ends
            self._start(effects.moves)
            if turned_down:
                continue  # perhaps the rest can go
            if time.monotonic() >= deadline or not self._await_end(seen, deadline):
                return False
        committed = self._await_commit(deadline)
        with self.lock:
            return committed and self.planner.room.refused == refused

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
        """Forget everything in one tier, or in all; blocks forgotten."""
        with self.lock:
            epoch = None
            if self.index is not None and tier in (None, self.planner.res.durable):
                epoch = self.index.new_epoch()
            gone = self.planner.clear(tier, epoch)
            effects = self._drain()
            self._ends += 1
            self._changed.notify_all()
        self._start(effects.moves)
        return gone

    def change(self, dropped: int) -> int:
        """After a planner call made by the store: pass on what it caused."""
        effects = self._drain()
        self._ends += 1
        self._changed.notify_all()
        self._start(effects.moves)
        return dropped

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
        if self.index is not None:
            ended &= self.index.close(max(0.1, deadline - time.monotonic()))
        if not ended:
            log.error("close: operations still hang after %.1f s; their tiers stay open", timeout)
            return False
        for tier in self.tiers:
            tier.close()
        return True

    # -- moves ----------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the store is closed: open a new one")

    def _inline(self, move: Move) -> bool:
        ends = [t for t in (move.src, move.dst) if t is not None]
        return all(self.tiers[t].inline for t in ends)

    def _note(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self._moving[id(move)] = move

    def _transfer(self, move: Move, host: HostBlocks, lo: int, hi: int) -> Transfer:
        buffers = host.buffers[lo:hi]
        if self._inline(move):
            return Transfer(move, self.tiers, buffers, len(move), self._ended)
        threads = self._limits.threads
        part = max(1, min(self._batch, -(-len(move) // threads)))
        return Transfer(move, self.tiers, revocable(buffers), part, self._ended)

    def _queue(self, transfer: Transfer, *, load: bool) -> None:
        if not self.mover.start(transfer, self.block_bytes, load=load):
            transfer.refuse()

    def _finish_here(self, transfer: Transfer, deadline: float, *, load: bool) -> list[Outcome]:
        """Run or await a transfer of the caller's; its outcomes by the deadline."""
        if self._inline(transfer.move):
            transfer.run_all()
        elif not load:
            self._queue(transfer, load=False)
        outcomes = transfer.expire(deadline - time.monotonic())
        if transfer.running:
            self.mover.late(transfer)
        return outcomes

    def _start(self, moves: Sequence[Move]) -> bool:
        """Start background moves; True if any ran to its end in this thread."""
        ran = False
        for move in moves:
            transfer = Transfer(move, self.tiers, None, self._batch, self._ended)
            if self._inline(move):
                transfer.run_all()
                ran = True
            elif not self.mover.start(transfer, self.block_bytes, load=False):
                with self.lock:
                    self.metrics.dropped_moves += len(move)
                transfer.refuse()
        return ran

    def _ended(self, transfer: Transfer) -> None:
        """A transfer has really ended, on whatever thread."""
        move = transfer.move
        with self.lock:
            self._moving.pop(id(move), None)
            self.planner.finish(move, transfer.read, transfer.write, self.clock())
            self._count(move, transfer)
            if not transfer.expired:
                if move.src is not None and Outcome.OK in transfer.write:
                    self._stalled = False
                self._background()
            effects = self._drain()
            self._ends += 1
            self._changed.notify_all()
        self._start(effects.moves)

    def _count(self, move: Move, transfer: Transfer) -> None:
        size = self.block_bytes
        if move.src is not None:
            self.metrics.moved("read", self.tiers[move.src].name, transfer.read, size)
        if move.dst is not None:
            self.metrics.moved("write", self.tiers[move.dst].name, transfer.write, size)
            if Outcome.FAILED in transfer.write:
                self.planner.shrink(move.dst, self.tiers[move.dst].slots)
            self.healthy[move.dst] = Outcome.FAILED not in transfer.write

    def _background(self) -> None:
        """Write back while the disk has nothing else to do, or at once under `through`."""
        durable = self.planner.res.durable
        if durable is None or not self.planner.res.dirty:
            return
        writing = len(self.planner.res.levels[durable].writing)
        limit = self._write_back_blocks()
        if writing < limit and (self.planner.through or self.mover.backlog == 0):
            self.planner.room.write_back(self.clock(), limit - writing)

    def _write_back_blocks(self) -> int:
        return self._batch * self._limits.threads

    def _drain(self) -> Effects:
        """Collect what the planner wants; index changes are queued before the lock is given up."""
        effects = self.planner.drain()
        self._note(effects.moves)
        if effects.index is not None and self.index is not None:
            op = effects.index
            self.index.submit(
                op.puts, [k for k, _ in op.deletes], lambda ok: self._committed(op.ticket, ok)
            )
        return effects

    def _committed(self, ticket: int, ok: bool) -> None:
        with self.lock:
            self._acknowledged = ticket
            self.planner.committed(ticket, ok, self.clock())
            if ok:
                self._background()
            effects = self._drain() if ok else Effects()
            self._ends += 1
            self._changed.notify_all()
        self._start(effects.moves)
