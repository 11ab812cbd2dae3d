"""The control side of a hierarchy: planner and durable index behind one lock.

It decides when the write-back runs, commits what the index has to know, and owns every wait
on either. Who executes the moves is a subclass's business: threads of this process, or the
workers of an engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import takewhile

from tieredkv.config import MoverConfig
from tieredkv.errors import ClosedError
from tieredkv.index.durable import DurableIndex
from tieredkv.planner import Planner
from tieredkv.planner.plans import Effects
from tieredkv.planner.sharing import publish, strays
from tieredkv.tiers.base import SharedCatalogue
from tieredkv.types import Clock, Move, Outcome

FLUSH_POLL = 0.05  # seconds between looks, when nothing has ended


class Control:
    """Plans, write-back and commits. Thread-safe."""

    def __init__(
        self,
        planner: Planner,
        block_bytes: int,
        limits: MoverConfig,
        index: DurableIndex | None,
        clock: Clock,
        shared: SharedCatalogue | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.planner = planner
        self.block_bytes = block_bytes
        self.index = index
        self.clock = clock
        self.shared = shared
        """Of the shared tier, if there is one."""
        self._apart = False
        """What is stored from now on is not what others know by its keys."""
        self._failures: int | None = None
        """Of the shared tier, as of the last time that it answered."""
        self._limits = limits
        self._batch = max(1, limits.batch // block_bytes)
        self._changed = threading.Condition(self.lock)
        self._ends = 0
        self._moving: dict[int, Move] = {}
        self._acknowledged = 0
        self._closed = False
        self._finished = False
        """Nothing may be submitted to the index any more."""
        self._stalled = False
        """The last put that waited for room waited in vain: drop at once until a demotion ends."""
        if index is not None and planner.sessions.model is not None:
            index.learned = self._learned
        if shared is not None:
            shared.shed = self._shed

    # -- for subclasses -------------------------------------------------------------------

    def _start(self, moves: Sequence[Move]) -> object:
        """Have background moves executed; each end comes back through `_end`. Called without
        the lock."""
        raise NotImplementedError

    @property
    def _idle(self) -> bool:
        """Has the data side nothing to do that a write-back would delay?"""
        raise NotImplementedError

    def _heard(self, move: Move, read: Sequence[Outcome], write: Sequence[Outcome]) -> None:
        """Outcomes have reached the planner; nothing has been planned after them yet."""
        raise NotImplementedError

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

    def clear(self, tier: int | None, *, until_reopened: bool = False) -> int:
        """Forget everything in one tier, or in all; blocks forgotten. Other calls wait for the
        commit of the new epoch: nothing may enter the index meanwhile. `until_reopened`: what
        is stored from now on is of no use to the next process, nor to others."""

        def work(planner: Planner) -> int:
            durable = self.index is not None and tier in (None, planner.res.durable)
            self._apart |= until_reopened  # first: the index may refuse
            epoch = None
            if self.index is not None and durable:
                epoch = self.index.new_epoch(until_reopened=until_reopened)
            self.accept()
            return planner.clear(tier, epoch)

        if self.shared is not None and tier in (None, self.planner.res.shared):
            self.shared.remove_own()
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

    # -- the shared tier -------------------------------------------------------------------

    def leave(self) -> None:
        """From now on others' blocks are not ours, whatever their keys, nor ours theirs."""
        with self.lock:
            self._apart = True
            self.accept()

    def unknown(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """What others may have stored of this chain: the blocks behind those that are known
        here."""
        with self.lock:
            self._check_open()
            if self.shared is None or self._apart:
                return ()
            return keys[self.planner.match(keys).blocks :]

    def adopt(self, keys: Sequence[bytes], found: int) -> None:
        """The shared tier has the chain up to the `found` first blocks of those `unknown`."""
        if not found:
            return
        with self.lock:
            self._check_open()
            known = len(keys) - found
            if self.shared is None or self._apart or self.planner.match(keys).blocks < known:
                return  # of what has gone since nobody has asked
            doomed = self.shared.doomed
            there = takewhile(lambda key: key not in doomed, keys[known:])
            self.planner.adopt([*keys[:known], *there], self.clock())
            effects = self._drain()
        self._start(effects.moves)

    def _shed(self, blocks: int) -> None:
        """Give so many blocks of the shared tier up."""
        tier = self.planner.res.shared
        assert tier is not None

        def work(planner: Planner) -> int:
            room, pool = planner.room, planner.res.levels[tier].pool
            short = pool.free + blocks - room.make(tier, pool.free + blocks, self.clock())
            if short:
                room.demote(tier, short, self.clock())
            return 0

        with self.lock:
            if not self._closed:
                self.apply(work)

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

    def _note(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self._moving[id(move)] = move
            if self.shared is not None and move.dst == self.planner.res.shared:
                self.shared.coming(move.keys)
                if self.shared.soft_pins:
                    move.pin = self.planner.sessions.stay(move.keys[-1])

    def _end(
        self, move: Move, read: Sequence[Outcome], write: Sequence[Outcome], *, expired: bool
    ) -> Effects:
        """A move has really ended; what to start next. `expired`: its caller had given up.

        The lock is held.
        """
        heard = write
        if Outcome.BUSY in write and not expired:
            # nobody hurried it: trying again at once would change nothing
            heard = [Outcome.FAILED if o is Outcome.BUSY else o for o in write]
        self._moving.pop(id(move), None)
        self._catalogue(move, read, write)
        self.planner.finish(move, read, heard, self.clock())
        self._heard(move, read, write)
        if not expired:
            if move.src is not None and Outcome.OK in write:
                self._stalled = False
            if move.dst != self.planner.res.durable or Outcome.OK in write:
                # else it would repeat at once what has just failed
                self._background(share=move.dst != self.planner.res.shared or Outcome.OK in write)
        # what ends after a close that did not wait for it has nothing to start any more
        effects = Effects() if self._finished else self._drain()
        self._ends += 1
        self._changed.notify_all()
        return effects

    def _catalogue(self, move: Move, read: Sequence[Outcome], write: Sequence[Outcome]) -> None:
        """Tell the shared tier's catalogue what became of the move there."""
        if self.shared is None:
            return
        if move.dst is not None and move.dst == self.planner.res.shared:
            done = zip(move.keys, write, strict=True)
            self.shared.stored([key for key, outcome in done if outcome is Outcome.OK])
            writing = self.planner.res.levels[move.dst].writing
            stray = strays(self.planner.res, move, write)
            # also where newer bytes are on their way: these were perhaps before them
            gone = [k for k in stray if k in writing or self.planner.visible(k) is None]
            self.shared.remove(gone)
            self.shared.left(stray)  # of what was stored anew since: unless it comes again
        if move.src == self.planner.res.shared:
            bad = (Outcome.FAILED, Outcome.CORRUPT)
            self.shared.lost([k for k, o in zip(move.keys, read, strict=True) if o in bad])

    def _background(self, *, share: bool = True) -> None:
        """Publish, if told to `share`; write back while the disk has nothing else to do, or at
        once under `through`."""
        durable = self.planner.res.durable
        self.accept()
        if share and self.planner.res.unshared:
            publish(self.planner.res, self.planner.room, self.clock(), self._batch)
        if durable is None or not self.planner.res.dirty:
            return
        if self.planner.through or self._idle:
            self._write_back(durable, ahead=self.planner.room.late and not self.planner.through)

    def accept(self) -> None:
        """Plan for the shared tier as long as it answers; when it is back from a failure, it may
        have lost everything. The lock is held."""
        if self.shared is None:
            return
        available, failures = self.shared.available, self.shared.failures
        if available and failures != self._failures:
            if self._failures is not None:
                self.shared.disown()
                self.planner.disown()
            self._failures = failures
        self.planner.res.accept_shared(available and not self._apart)

    def _write_back(self, durable: int, *, ahead: bool = False) -> None:
        """Want dirty blocks written, as many as keep all threads busy; `ahead`: only what is
        about to leave memory."""
        now, room = self.clock(), self.planner.room
        self.planner.pins.expire(now)
        free = self._batch * self._limits.threads - len(self.planner.res.levels[durable].writing)
        if free > 0:
            (room.write_ahead if ahead else room.write_back)(now, free)

    def _drain(self) -> Effects:
        """Collect what the planner wants; index changes are queued before the lock is given up."""
        effects = self.planner.drain()
        self._note(effects.moves)
        if self.shared is not None and self.planner.res.withdrawn:
            self.shared.left(self.planner.res.take_withdrawn())
        if effects.index is not None and self.index is not None:
            op = effects.index
            self.index.submit(op.puts, op.deletes, lambda ok: self._committed(op.ticket, ok))
        return effects

    def _learned(self) -> bytes:
        """When sessions come back, for the next process."""
        model = self.planner.sessions.model
        assert model is not None
        with self.lock:
            return model.state()

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
