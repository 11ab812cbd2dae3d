"""Shadows: caches without bytes, to see which order of eviction would have hit more.

A policy that guesses the future can guess wrongly. Blocks are megabytes and their metadata are
bytes, so a guard keeps two full caches of metadata beside a tier, one under LRU and one under
the policy, feeds both with everything that is stored, and follows whichever leads.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from tieredkv.errors import UsageError
from tieredkv.eviction.base import LOST, EvictionPolicy, SessionState
from tieredkv.planner.level import Level
from tieredkv.planner.residency import Residency
from tieredkv.planner.room import Room
from tieredkv.types import Turn

SLOTS = 1 << 13
"""Blocks of the largest shadow; of larger tiers it sees a sample of the sessions."""
HALF_LIFE = 1800.0
"""Seconds after which a hit counts half."""
MARGIN = 0.0005
"""Share by which the policy must lead to be followed; LRU is followed once it leads at all."""


class Shadow:
    """One tier of metadata. Not thread-safe."""

    def __init__(self, policy: EvictionPolicy, slots: int, block_bytes: int) -> None:
        self.cache = Residency([Level("shadow", policy, slots)], block_bytes, None)
        self._room = Room(self.cache, None, 0)
        self._pins: dict[SessionState, int] = {}

    def store(self, keys: Sequence[bytes], session: SessionState, now: float) -> int:
        """A request of the session uses this chain; the blocks that were there when it came."""
        cache = self.cache
        cache.pins.expire(now)
        try:
            known, run = cache.tree.match(keys, visible=True)
            cache.tree.check_new(keys[known:])
        except UsageError:
            return 0  # no chain: what it clashes with has left the real cache already
        if run is not None:
            cache.touch(run, now)
        wanted = len(keys) - known
        if wanted:
            if run is not None and known < run.end:
                run = cache.split(run, known - run.start)
            turn = Turn(session.id)
            got = self._room.make(0, wanted, now, run, force=True)
            if got:
                child = cache.tree.append(run, keys[known : known + got], 0, now, turn)
                cache.install(child, 0, 0, cache.levels[0].pool.take(got), reserved=False)
                child.visible = True
                run = child
        cache.visitors.place(session, run)
        again = session in self._pins
        self.release(session)
        if run is not None and session.running:
            self._pins[session] = cache.pins.add(run, run.end, now + LOST)
        return 0 if again else known

    def release(self, session: SessionState) -> None:
        """The session's request has been served: until then its blocks are in use."""
        pin = self._pins.pop(session, None)
        if pin is not None:
            self.cache.pins.release(pin)


class Guard:
    """Whether a policy may be trusted. Not thread-safe."""

    def __init__(
        self, lru: EvictionPolicy, policy: EvictionPolicy, slots: int, block_bytes: int
    ) -> None:
        """Of a tier of `slots` blocks; both policies are of `shadow_slots(slots)`."""
        size = shadow_slots(slots)
        self._rate = size / slots
        self._shadows = [Shadow(lru, size, block_bytes), Shadow(policy, size, block_bytes)]
        self._hits = [0.0, 0.0]
        self._time: float | None = None
        self._trusted = False

    def trusted(self) -> bool:
        """May the policy decide? Otherwise LRU would have hit more of late."""
        return self._trusted

    @property
    def caches(self) -> list[Residency]:
        return [shadow.cache for shadow in self._shadows]

    def stored(self, keys: Sequence[bytes], session: SessionState, now: float) -> None:
        """A request of the session has used and stored this chain."""
        if self._rate < 1 and zlib.crc32(session.id.encode()) / 2**32 >= self._rate:
            return
        keep = 1.0
        if self._time is not None:
            keep = 0.5 ** (max(0.0, now - self._time) / HALF_LIFE)
        self._time = now
        for at, shadow in enumerate(self._shadows):
            self._hits[at] = keep * self._hits[at] + shadow.store(keys, session, now)
        lru, policy = self._hits
        self._trusted = policy >= lru if self._trusted else policy > lru * (1 + MARGIN)

    def ended(self, session: SessionState) -> None:
        """The request has been served."""
        for shadow in self._shadows:
            shadow.release(session)


def shadow_slots(slots: int) -> int:
    """Blocks of the shadows of a tier of `slots` blocks."""
    return min(slots, SLOTS)
