"""What the control-plane benches share: random chains, and a planner without tiers."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import count

from tieredkv.eviction.lru import LruPolicy
from tieredkv.planner import Planner
from tieredkv.planner.level import Level
from tieredkv.planner.residency import Residency
from tieredkv.planner.room import Room
from tieredkv.types import Outcome

BLOCK_BYTES = 1 << 20
OK = Outcome.OK


def random_keys(blocks: int) -> list[bytes]:
    """New keys, nowhere stored."""
    return [os.urandom(32) for _ in range(blocks)]


def fresh_copies(keys: Sequence[bytes]) -> list[bytes]:
    """Equal keys in new objects, as `chain_keys` returns them: no hash is cached in them."""
    return [bytes(bytearray(key)) for key in keys]


class ControlPlane:
    """A planner of one memory tier with `lru`, whose moves succeed at once."""

    def __init__(self, slots: int) -> None:
        level = Level("dram", LruPolicy(slots * BLOCK_BYTES, BLOCK_BYTES), slots)
        residency = Residency([level], BLOCK_BYTES, None)
        self.planner = Planner(residency, Room(residency, None, 64))
        self._time = count()

    @property
    def now(self) -> float:
        return float(next(self._time))

    def put(self, keys: Sequence[bytes], start: int = 0) -> float:
        """Record the blocks `keys[start:]` and their arrival; seconds of CPU time.

        It waits for nothing, so what other processes take of a CPU is not counted.
        """
        planner, now = self.planner, self.now
        begin = time.thread_time()
        plan = planner.plan_put(keys, start, None, now, force=False)
        for move in plan.moves:
            planner.finish(move, [], [OK] * len(move), now)
        planner.drain()
        elapsed = time.thread_time() - begin
        if plan.short or plan.known != start:
            raise RuntimeError(f"put of {len(keys) - start} blocks: {plan}")
        return elapsed

    def chain(self, blocks: int, runs: int) -> list[bytes]:
        """A new chain that was stored in so many turns."""
        keys: list[bytes] = []
        step = blocks // runs
        for _ in range(runs):
            keys += random_keys(step)
            self.put(keys, len(keys) - step)
        return keys
