"""Puts, gets and prefetches: plans of the planner, executed on the tiers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

from tieredkv.buffers import Blocks, RevocableViews
from tieredkv.engine import Engine
from tieredkv.planner.plans import PutPlan
from tieredkv.transfer import Transfer
from tieredkv.types import Move, Outcome, Turn

PATIENCE = 60.0  # seconds for an answer, which comes earlier in any case
ROOM_ROUNDS = 8  # demotions cascade through few tiers; more rounds would not help


class Core(Engine):
    """The calls of a store, on validated arguments. Thread-safe."""

    # -- put ------------------------------------------------------------------------------

    def put(
        self, keys: Sequence[bytes], blocks: Blocks, start: int, turn: Turn | None
    ) -> list[Outcome]:
        """Outcome per block of `keys[start:]`. Returns once the first tier holds the bytes; if
        that is the durable one, once the index is committed."""
        deadline = time.monotonic() + self._limits.put_deadline
        outcomes = [Outcome.BUSY] * (len(keys) - start)
        if not blocks.await_ready(deadline):
            return outcomes
        plan = self._plan_put(keys, start, turn)
        if start > plan.known:
            return [Outcome.MISSING] * len(outcomes)
        for i in range(plan.known - start):
            outcomes[i] = Outcome.OK
        if plan.moves:
            self._run_put(plan.moves, blocks, start, deadline, outcomes)
        if plan.pending:
            self._join(keys, start, plan.known, deadline, outcomes)
        _cut(outcomes)
        if self.planner.res.durable == 0 and Outcome.OK in outcomes:
            outcomes = self._acknowledge(keys[start:], outcomes, deadline)
        if turn is not None and turn.ttl:
            with self.lock:
                self.planner.hold(keys, turn.ttl, self.clock())
        return outcomes

    def durable(self, keys: Sequence[bytes], start: int, outcomes: list[Outcome]) -> list[Outcome]:
        """Under `through`, wait until the blocks are committed; FAILED where they are not."""
        if not self.planner.through:
            return outcomes
        deadline = time.monotonic() + self._limits.put_deadline
        for i in reversed([i for i, outcome in enumerate(outcomes) if outcome is Outcome.OK]):
            if self.await_durable(keys[start + i], max(0.0, deadline - time.monotonic())):
                break  # the deepest durable block vouches for its ancestors
            outcomes[i] = Outcome.FAILED
        return outcomes

    def _plan_put(self, keys: Sequence[bytes], start: int, turn: Turn | None) -> PutPlan:
        """Plan, and wait a moment for demotions where only those can make room."""
        alone = self.planner.res.durable == 0  # then room comes with a commit, as the put itself
        patience = self._limits.put_deadline if alone else self._limits.room_wait
        patience += time.monotonic()
        force, late = False, 0
        while True:
            with self.lock:
                self._check_open()
                force = force or self._stalled
                self.accept()
                plan = self.planner.plan_put(keys, start, turn, self.clock(), force=force)
                self._note(plan.moves)
                self._background()
                effects, seen = self._drain(), self._ends
            self._start(effects.moves)
            if not plan.wait:
                return plan
            late += time.monotonic() >= patience
            if not self._await_end(seen, patience) or late > ROOM_ROUNDS:
                force = self._stalled = True  # nothing has made room, not even at once

    def _run_put(
        self,
        moves: Sequence[Move],
        blocks: Blocks,
        start: int,
        deadline: float,
        outcomes: list[Outcome],
    ) -> None:
        with self._ending([self._gather(move, blocks, start) for move in moves]) as transfers:
            for transfer in transfers:
                lo = transfer.move.depths[0] - start
                result = self._finish_here(transfer, deadline, load=False)
                outcomes[lo : lo + len(result)] = result

    def _join(
        self,
        keys: Sequence[bytes],
        start: int,
        known: int,
        deadline: float,
        outcomes: list[Outcome],
    ) -> None:
        """Wait for the put that the known blocks are part of; nothing stands without them."""
        joined = self._await_visible(keys[known - 1], deadline)
        if joined is Outcome.OK:
            return
        with self.lock:
            shown = [self.planner.visible(key) is True for key in keys[start:known]]
        outcomes[: known - start] = [Outcome.OK if good else joined for good in shown]
        outcomes[known - start :] = [
            Outcome.MISSING if outcome is Outcome.OK else outcome
            for outcome in outcomes[known - start :]
        ]

    def _acknowledge(
        self, keys: Sequence[bytes], result: list[Outcome], deadline: float
    ) -> list[Outcome]:
        """Outcomes of a put into the durable tier, once records are committed or have failed."""
        in_time = self._await_commit(deadline)
        with self.lock:
            kept = [self.planner.durable(key) is True for key in keys]
        late = Outcome.FAILED if in_time else Outcome.BUSY
        return [
            late if outcome is Outcome.OK and not (in_time and held) else outcome
            for outcome, held in zip(result, kept, strict=True)
        ]

    def _await_visible(self, key: bytes, deadline: float) -> Outcome:
        with self._changed:
            self._changed.wait_for(
                lambda: self.planner.visible(key) is not False,
                max(0.0, deadline - time.monotonic()),
            )
            visible = self.planner.visible(key)
        return {True: Outcome.OK, False: Outcome.BUSY, None: Outcome.FAILED}[visible]

    # -- what others have stored ------------------------------------------------------------

    def discover(self, keys: Sequence[bytes]) -> None:
        """Learn which blocks behind the stored part of the chain others have put into the shared
        tier. One question to its master at most, for the fraction of a second."""
        unknown = self.unknown(keys)
        if self.shared is not None and unknown:
            found = self.shared.answer(self.shared.ask(unknown), wait=PATIENCE) or 0
            self.adopt(keys[: len(keys) - len(unknown) + found], found)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forget these blocks and what hangs on them, also for others; how many there were."""
        if self.shared is not None:
            self.shared.remove(keys)
        return self.apply(lambda planner: planner.delete(keys))

    # -- get ------------------------------------------------------------------------------

    def get(
        self, keys: Sequence[bytes], blocks: Blocks, start: int, deadline: float, promote: bool
    ) -> tuple[list[Outcome], dict[str, int]]:
        """(outcome per block of `keys[start:]`, blocks returned per tier)."""
        if not blocks.await_ready(deadline):
            return [Outcome.BUSY] * (len(keys) - start), {}
        with self.lock:
            self._check_open()
            _, moves = self.planner.plan_get(keys, start, self.clock())
            self._note(moves)
        outcomes = [Outcome.MISSING] * (len(keys) - start)
        hits: dict[str, int] = {}
        with self._ending([self._gather(move, blocks, start) for move in moves]) as transfers:
            for transfer in transfers:  # what can block runs beside the memory copies
                if not self._inline(transfer.move):
                    self._queue(transfer, load=True)
            for transfer in transfers:
                result = self._finish_here(transfer, deadline, load=True)
                for depth, outcome in zip(transfer.move.depths, result, strict=True):
                    outcomes[depth - start] = outcome
                hits[self.tiers[transfer.move.src or 0].name] = result.count(Outcome.OK)
        if promote and any(move.src for move in moves):
            self._promote(keys, blocks, start, moves, outcomes)
        return outcomes, {tier: n for tier, n in hits.items() if n}

    def _gather(self, move: Move, blocks: Blocks, start: int) -> Transfer:
        """A read into the caller's blocks, which need not be neighbours."""
        lo, hi = move.depths[0] - start, move.depths[-1] + 1 - start
        if hi - lo == len(move):
            return self._transfer(move, blocks, lo, hi)
        picked = [blocks.buffers[depth - start] for depth in move.depths]
        part = Blocks(picked, blocks.block_bytes, blocks.ready)
        return self._transfer(move, part, 0, len(move))

    def _promote(
        self,
        keys: Sequence[bytes],
        blocks: Blocks,
        start: int,
        moves: Sequence[Move],
        outcomes: Sequence[Outcome],
    ) -> None:
        """Copy what was read from slower tiers out of the caller's buffers, still ours now."""
        held = {
            depth: generation
            for move in moves
            if move.src
            for depth, generation in zip(move.depths, move.generations, strict=True)
            if outcomes[depth - start] is Outcome.OK
        }
        slower = sorted(held)
        with self.lock:
            tier = self.planner.promotion_target(len(slower))
            if self._closed or not slower or tier is None or not self.tiers[tier].inline:
                return
        self._make_room(tier, len(slower), keys)
        with self.lock:
            if self._closed:
                return
            plan = self.planner.plan_promote(keys, slower, tier, self.clock(), held)
            self._note(plan)
        with self._ending([self._gather(move, blocks, start) for move in plan]) as transfers:
            for transfer in transfers:
                transfer.run_all()

    def _make_room(self, tier: int, blocks: int, keys: Sequence[bytes]) -> None:
        """Let memory-to-memory demotions make room, without waiting for anything slower."""
        for _ in range(ROOM_ROUNDS):
            with self.lock:
                if self._closed:
                    return
                short = self.planner.room_for(tier, blocks, keys, self.clock())
                effects = self._drain()
            if not self._start(effects.moves) or not short:
                return

    def prefetch(self, keys: Sequence[bytes], target: int) -> Future[int]:
        """Start copies of the chain's durable blocks into `target`; blocks copied."""
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()  # copies that have begun cannot be called off
        with self.lock:
            self.accept()
            match = self.planner.match(keys)
            moves = self.planner.plan_promote(keys, range(match.blocks), target, self.clock())
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

        copies = [self._copy(move, ended) for move in moves]
        with self._ending(copies) as transfers:
            for transfer in transfers:
                if self._inline(transfer.move):
                    transfer.run_all()
                else:
                    self._queue(transfer, load=True)
        if not moves:
            future.set_result(0)
        return future

    # -- transfers of a caller ----------------------------------------------------------------

    def _transfer(self, move: Move, blocks: Blocks, lo: int, hi: int) -> Transfer:
        buffers, part = blocks.buffers[lo:hi], len(move)
        if not self._inline(move):
            part = max(1, min(self._batch, -(-len(move) // self._limits.threads)))
            buffers = buffers if blocks.ready else RevocableViews(buffers)
        elif blocks.ready:
            part = self._batch  # a tier that takes no memory of a device has so much staging
        return Transfer(move, self.tiers, buffers, part, self._ended, self._staging)

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


def _cut(outcomes: list[Outcome]) -> None:
    """What was written behind a block that was not is not stored either: make that MISSING."""
    if outcomes.count(Outcome.OK) != len(outcomes):
        bad = next(i for i, outcome in enumerate(outcomes) if outcome is not Outcome.OK)
        outcomes[bad:] = [Outcome.MISSING if o is Outcome.OK else o for o in outcomes[bad:]]
