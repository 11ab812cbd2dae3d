"""Saves: confirmed chunks of a request, copied out of the engine's blocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from tieredkv.config import Config
from tieredkv.connector.pinning import Pinning
from tieredkv.connector.requests import Tracked
from tieredkv.connector.shipping import Shipping
from tieredkv.connector.wire import Job, Report
from tieredkv.types import Move

NULL = 0  # the engine's placeholder for blocks that a sliding window has passed
Release = Callable[[], None]


class Saves:
    """Saves of one engine. The engine's thread only."""

    def __init__(
        self, shipping: Shipping, config: Config, block_tokens: int, pinning: Pinning
    ) -> None:
        self._shipping = shipping
        self._per_chunk = config.block_tokens // block_tokens
        self._room_wait = config.mover.room_wait
        self._pinning = pinning
        self._jobs: list[Job] = []
        self._ended: list[tuple[Tracked, int, Release]] = []
        """Ended requests whose last save waits for room, and their held blocks."""
        self.dropped = 0
        """Chunks not stored: no room, or the engine's blocks were needed."""

    def take(self) -> list[Job]:
        """Jobs for this step; waiting saves are tried again."""
        waiting, self._ended = self._ended, []
        for tracked, done, release in waiting:
            if self.save(tracked, done, held=done * self._per_chunk):
                release()  # the save holds them by itself
                tracked.settle()
            else:
                self._ended.append((tracked, done, release))
        jobs, self._jobs = self._jobs, []
        return jobs

    @property
    def waiting(self) -> bool:
        return bool(self._jobs or self._ended)

    def save(self, tracked: Tracked, done: int, held: int = 0) -> bool:
        """Store the first `done` chunks of the request where they are not; False: later.
        `held`: engine blocks that are held for it already. O(new chunks).
        """
        per, first = self._per_chunk, tracked.saved
        if not self._pinning.fits((done - first) * per, held):
            return False
        if NULL in tracked.blocks[first * per : done * per]:
            tracked.saved = done
            return True
        shipping, keys = self._shipping, tracked.keys[:done]
        since = tracked.waiting_since
        force = since is not None and time.monotonic() - since > self._room_wait
        with shipping.lock:
            shipping.accept()
            planner, now = shipping.planner, shipping.clock()
            plan = planner.plan_put(keys, tracked.saved, tracked.turn, now, force=force)
            if plan.known < first and NULL not in tracked.blocks[: first * per]:
                # evicted meanwhile, but the engine has them still
                plan = planner.plan_put(keys, 0, tracked.turn, now, force=force)
            shipping.note(plan.moves)
        shipping.drain()
        if plan.wait:
            tracked.waiting_since = since or time.monotonic()
            return False
        tracked.waiting_since, tracked.saved = None, done
        self.dropped += plan.short
        self.copy(tracked, plan.moves)
        return True

    def finish(self, tracked: Tracked, done: int) -> None:
        """Store what an ended request has computed, from blocks that it is about to give up."""
        if self.save(tracked, done):
            tracked.settle()
            return
        if tracked.waiting_since is None:
            self.dropped += done - tracked.saved
            tracked.settle()
            return
        held = tracked.blocks[: done * self._per_chunk]
        self._ended.append((tracked, done, self._pinning.pin(held)))

    def copy(self, tracked: Tracked, moves: list[Move]) -> None:
        """Have moves out of the request's blocks executed; the blocks stay until that ends."""
        per = self._per_chunk
        for move in moves:
            chunks = [tracked.blocks[depth * per : (depth + 1) * per] for depth in move.depths]
            release = self._pinning.pin(block for chunk in chunks for block in chunk)
            done = partial(self._copied, tracked, move)
            tracked.copies += 1
            self._jobs.append(self._shipping.ship(move, chunks, done=done, release=release))

    def forget(self) -> None:
        """The cache was reset: nothing that waits may be stored."""
        ended, self._ended = self._ended, []
        for tracked, _, release in ended:
            release()
            tracked.settle()

    def _copied(self, tracked: Tracked, move: Move, report: Report) -> None:
        if tracked.turn.ttl and tracked.fresh:
            keys, shipping = tracked.keys[: move.depths[-1] + 1], self._shipping
            with shipping.lock:
                shipping.planner.hold(keys, tracked.turn.ttl, shipping.clock())
        tracked.copies -= 1
        tracked.settle()
