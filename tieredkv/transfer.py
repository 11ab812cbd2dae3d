"""One move under way: bytes copied between two ends, in parts that run in parallel.

It copies and reports what became of each block. It decides nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from tieredkv.buffers import RevocableViews
from tieredkv.device import copy_blocks, on_device
from tieredkv.staging import NoStaging, Staging
from tieredkv.tiers.base import BlockBuffers, Tier, device_views, takes_device
from tieredkv.types import Batch, Move, Outcome

log = logging.getLogger(__name__)

DELIVERY = 60.0  # seconds for a copy between memories, which takes far less or for ever
Outcomes: TypeAlias = list[Outcome]
Done: TypeAlias = Callable[["Transfer"], None]


class Transfer:
    """One move under way, cut into parts that run in parallel.

    `done` is called once, on the thread that ended the last part, when nothing touches the
    move's slots and buffers any more: also after `expire`.
    """

    def __init__(
        self,
        move: Move,
        tiers: Sequence[Tier],
        buffers: BlockBuffers | None,
        part: int,
        done: Done,
        staging: Staging | None = None,
    ) -> None:
        """`buffers`: one per block, for moves from or to the caller. `part`: blocks per part.
        `staging`: for moves between tiers, which may lend each other no memory, and for buffers
        on a device."""
        self.move = move
        self.read: Outcomes = [Outcome.BUSY] * len(move) if move.src is not None else []
        self.write: Outcomes = [Outcome.BUSY] * len(move) if move.dst is not None else []
        self.expired = False
        self.queued = False
        """A mover has it, and will end it."""
        self._tiers = tiers
        ends = [tiers[end] for end in (move.src, move.dst) if end is not None]
        self.far = any(getattr(tier, "far", False) for tier in ends)
        """Another machine takes part, and may let it hang."""
        self._buffers = buffers
        self._done, self._staging = done, staging
        self._ended = threading.Condition()
        self.parts = [(lo, min(lo + part, len(move))) for lo in range(0, len(move), part)]
        self._open = len(self.parts)
        self._active = self._delivering = 0
        self._finished = not self.parts

    def run(self, lo: int, hi: int) -> None:
        """Copy the blocks [lo, hi). Raises nothing but interrupts, and then it has ended too."""
        with self._ended:
            self._active += 1
        failed = [Outcome.FAILED] * (hi - lo)
        read = write = failed
        try:
            if self.expired:
                read = write = [Outcome.BUSY] * (hi - lo)
            else:
                read, write = self._copy(self.move, lo, hi)
        except NoStaging as error:  # which says nothing about the blocks
            log.warning("%d blocks are not moved: %s", hi - lo, error)
            read = write = [Outcome.BUSY] * (hi - lo)
        except Exception:  # a plug-in that breaks its contract must not take a thread down
            if not self.expired:  # else its buffers were taken away
                log.exception("tier raised while moving %d blocks", hi - lo)
        finally:
            self._end_part(lo, hi, read, write)

    def _end_part(self, lo: int, hi: int, read: Outcomes, write: Outcomes) -> None:
        move = self.move
        with self._ended:
            if self.expired and (move.src is None or move.dst is None):
                # the caller's buffers were taken away under the copy: it proves nothing
                read = write = [Outcome.BUSY] * (hi - lo)
            if move.src is not None:
                self.read[lo:hi] = read
            if move.dst is not None:
                self.write[lo:hi] = write
            self._open -= 1
            self._active -= 1
            last = not self._open
        if last:
            self._buffers = None
            try:
                self._done(self)
            finally:
                with self._ended:
                    self._finished = True
                    self._ended.notify_all()

    def run_all(self) -> None:
        """Copy everything here. An interrupt is passed on once all parts have ended."""
        for at, (lo, hi) in enumerate(self.parts):
            try:
                self.run(lo, hi)
            except BaseException:
                self.expired = True
                for rest in self.parts[at + 1 :]:
                    self.run(*rest)
                raise

    def refuse(self) -> None:
        """End it without running: the queue was full, or its caller was interrupted."""
        self.expired = True
        self.run_all()

    def expire(self, timeout: float) -> Outcomes:
        """Wait for the end; at the deadline give up: what is unfinished is BUSY.

        From then on no part starts and the caller's buffers are taken away from parts that
        run; of a device they cannot be while another one than the processor writes to them.
        Returns the outcomes known by then.
        """
        with self._ended:
            self._ended.wait_for(lambda: self._finished, max(0.0, timeout))
            if self._open:
                self.expired = True
                if isinstance(self._buffers, RevocableViews):
                    self._buffers.revoke()
                self._ended.wait_for(lambda: not self._delivering, DELIVERY)
            return list(self.read or self.write)

    @property
    def running(self) -> bool:
        """Some part has not ended, or not even begun, or `done` has not returned."""
        return not self._finished

    @property
    def active(self) -> int:
        """Parts that a thread is in."""
        return self._active

    def _copy(self, move: Move, lo: int, hi: int) -> tuple[Outcomes, Outcomes]:
        if move.src is not None and move.dst is not None:
            return self._between(self._tiers[move.src], self._tiers[move.dst], move, lo, hi)
        end = move.dst if move.src is None else move.src
        assert end is not None
        assert self._buffers is not None
        tier, part = self._tiers[end], self._buffers[lo:hi]
        if on_device(part[0]) and not takes_device(tier):
            assert self._staging is not None
            with self._staging.take(hi - lo) as staging:
                return self._across(tier, move, lo, hi, part, staging)
        if move.src is None:
            return [], write(tier, move.write_batch(lo, hi), part)
        return read(tier, move.read_batch(lo, hi), part), []

    def _across(
        self,
        tier: Tier,
        move: Move,
        lo: int,
        hi: int,
        device: BlockBuffers,
        host: BlockBuffers,
    ) -> tuple[Outcomes, Outcomes]:
        """From or to the caller's buffers on a device, through host memory."""
        if move.src is None:
            copy_blocks("out", device, host)
            return [], write(tier, move.write_batch(lo, hi), host)
        got = read(tier, move.read_batch(lo, hi), host)
        good = [i for i, outcome in enumerate(got) if outcome is Outcome.OK]
        with self._ended:
            if self.expired or not good:
                return got, []
            self._delivering += 1
        try:
            copy_blocks("in", [device[i] for i in good], [host[i] for i in good])
        except RuntimeError:  # which says nothing about the blocks either
            log.exception("%d blocks were read and do not reach the device", len(good))
            got = [Outcome.BUSY if outcome is Outcome.OK else outcome for outcome in got]
        finally:
            with self._ended:
                self._delivering -= 1
                self._ended.notify_all()
        return got, []

    def _between(
        self, source: Tier, target: Tier, move: Move, lo: int, hi: int
    ) -> tuple[Outcomes, Outcomes]:
        """From tier to tier, through memory of whichever has some that the other takes."""
        there = _lent(target, move.dst_slots[lo:hi], source)
        if there is not None:
            got = read(source, move.read_batch(lo, hi), there)
            return got, got
        here = _lent(source, move.src_slots[lo:hi], target)
        if here is not None:
            ok = [Outcome.OK] * (hi - lo)
            return ok, attempt(target, move.write_batch(lo, hi), here)
        assert self._staging is not None
        device = takes_device(source) and takes_device(target) and self._staging.on_device
        with self._staging.take(hi - lo, device=device) as staging:
            return _staged(source, target, move, lo, hi, staging)


def _lent(owner: Tier, slots: Sequence[int], user: Tier) -> BlockBuffers | None:
    """Memory of these slots that `user` can copy from and to."""
    views = owner.views(slots)
    return device_views(owner, slots) if views is None and takes_device(user) else views


def _staged(
    source: Tier, target: Tier, move: Move, lo: int, hi: int, staging: BlockBuffers
) -> tuple[Outcomes, Outcomes]:
    got = read(source, move.read_batch(lo, hi), staging)
    good = [i for i, outcome in enumerate(got) if outcome is Outcome.OK]
    batch = move.write_batch(lo, hi)
    batch = replace(
        batch,
        slots=[batch.slots[i] for i in good],
        keys=[batch.keys[i] for i in good],
        generations=[batch.generations[i] for i in good],
    )
    put = attempt(target, batch, [staging[i] for i in good])
    result = list(got)
    for i, outcome in zip(good, put, strict=True):
        result[i] = outcome
    return got, result


def read(tier: Tier, batch: Batch, targets: BlockBuffers) -> Outcomes:
    return _checked(tier, tier.read(batch, targets), len(batch))


def write(tier: Tier, batch: Batch, sources: BlockBuffers) -> Outcomes:
    return _checked(tier, tier.write(batch, sources), len(batch))


def attempt(tier: Tier, batch: Batch, sources: BlockBuffers) -> Outcomes:
    """`write`, where what raises must not be taken for a failure of the source."""
    try:
        return write(tier, batch, sources)
    except Exception:
        log.exception("tier %s raised in a write of %d blocks", tier.name, len(batch))
        return [Outcome.FAILED] * len(batch)


def _checked(tier: Tier, outcomes: object, count: int) -> Outcomes:
    """A tier that answers anything but one Outcome per block has answered FAILED."""
    if (
        isinstance(outcomes, list)
        and len(outcomes) == count
        and set(map(type, outcomes)) <= {Outcome}
    ):
        return outcomes
    log.error("tier %s answered %.80r for %d blocks", tier.name, outcomes, count)
    return [Outcome.FAILED] * count
