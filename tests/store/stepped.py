"""A core over a pool in which nothing happens unless the test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from tests.store.shared_pool import FakeCatalogue, Link, Pool, PoolTier
from tests.store.stepped_catalogue import SteppedCatalogue
from tieredkv import Config
from tieredkv.build import build_planner
from tieredkv.core import Core
from tieredkv.engine import Parts
from tieredkv.index.durable import DurableIndex
from tieredkv.index.record import Deletion, Piece
from tieredkv.metrics import Metrics
from tieredkv.mover import Mover
from tieredkv.testing import StepExecutor
from tieredkv.tiers.base import BlockBuffers, Tier
from tieredkv.transfer import Transfer
from tieredkv.types import Batch, Clock, Outcome

SIZE = 64
PATIENCE = 600.0
"""Seconds that no step takes: deadlines are the test's business."""


class SlotTier:
    """Implements `tieredkv.tiers.base.Tier` in a bytearray; a `durable` one can block."""

    def __init__(self, name: str, slots: int, *, durable: bool) -> None:
        self.name, self.slots, self.block_bytes = name, slots, SIZE
        self.durable, self.inline = durable, not durable
        self._rows = np.zeros((slots, SIZE), np.uint8)
        self._names: dict[int, tuple[bytes, int]] = {}

    def write(self, batch: Batch, sources: BlockBuffers) -> list[Outcome]:
        for i, slot in enumerate(batch.slots):
            self._rows[slot] = np.frombuffer(sources[i], np.uint8)
            self._names[slot] = batch.keys[i], batch.generations[i]
        return [Outcome.OK] * len(batch)

    def read(self, batch: Batch, targets: BlockBuffers) -> list[Outcome]:
        outcomes = [Outcome.OK] * len(batch)
        for i, slot in enumerate(batch.slots):
            np.frombuffer(targets[i], np.uint8)[:] = self._rows[slot]
            if self.durable and self._names[slot] != (batch.keys[i], batch.generations[i]):
                outcomes[i] = Outcome.CORRUPT
        return outcomes

    def views(self, slots: Sequence[int]) -> list[memoryview] | None:
        return None if self.durable else [self._rows[slot].data for slot in slots]

    def close(self) -> None:
        pass


class Index:
    """What a core needs of a `DurableIndex`; every commit succeeds."""

    def __init__(self, executor: StepExecutor) -> None:
        self.learned: Callable[[], bytes] | None = None
        self._epoch = 0
        self._executor = executor

    def submit(
        self, puts: Sequence[Piece], deletes: Sequence[Deletion], done: Callable[[bool], None]
    ) -> None:
        epoch = self._epoch
        self._executor.submit(lambda: done(epoch == self._epoch))

    def new_epoch(self, *, until_reopened: bool = False) -> int:
        self._epoch += 1
        return self._epoch

    def close(self, timeout: float) -> bool:
        return True


class SteppedCore(Core):
    """Runs background work where a caller would wait for it, and only as much as that takes."""

    executor: StepExecutor
    hurried = False
    """Callers give up at once."""

    def _until(self, done: Callable[[], bool]) -> bool:
        while not done():
            if self.hurried or not self.executor.step():
                return False
        return True

    def _finish_here(self, transfer: Transfer, deadline: float, *, load: bool) -> list[Outcome]:
        if not load and not self._inline(transfer.move):
            self._queue(transfer, load=False)
        if not self._inline(transfer.move):
            self._until(lambda: not transfer.running)
        return super()._finish_here(transfer, 0.0, load=True)

    def _await_end(self, seen: int, deadline: float) -> bool:
        return self._until(lambda: self._ends != seen)

    def _await_commit(self, deadline: float) -> bool:
        mark = self.planner.last_ticket
        return self._until(lambda: self._acknowledged >= mark)

    def _await_visible(self, key: bytes, deadline: float) -> Outcome:
        self._until(lambda: self.planner.visible(key) is not False)
        return super()._await_visible(key, 0.0)


@dataclass(frozen=True)
class Shape:
    """Blocks of dram and nvme (0: absent) before and behind a shared tier."""

    dram: int = 0
    shared: int = 6
    disk: int = 0
    soft_pin: bool = True
    policy: str = "lru"
    write: str = "on_evict"
    real: bool = False
    """With the catalogue of a Mooncake pool."""

    def config(self) -> Config:
        tiers: list[dict[str, Any]] = []
        if self.dram:
            tiers.append({"kind": "dram", "capacity": self.dram * SIZE})
        pool = {"kind": "mooncake", "master": "nowhere:1", "capacity": self.shared * SIZE}
        tiers.append({**pool, "soft_pin": self.soft_pin})
        if self.disk:
            path = Path("/nowhere")
            tiers.append({"kind": "nvme", "path": path, "capacity": 1 << 30, "write": self.write})
        mover = {"threads": 2, "batch": 2 * SIZE}
        document = {"block_tokens": 1, "block_bytes": SIZE, "tiers": tiers, "mover": mover}
        return Config.model_validate({**document, "eviction": {"policy": self.policy}})


class Side:
    """One core, its background work and its ways to the pool."""

    def __init__(self, shape: Shape, pool: Pool, clock: Clock) -> None:
        config = shape.config()
        self.executor, self.link = StepExecutor(), Link(pool)
        self.catalogue: FakeCatalogue | SteppedCatalogue
        if shape.real:
            pins = shape.soft_pin
            self.catalogue = SteppedCatalogue(self.link, clock, soft_pins=pins, block_bytes=SIZE)
        else:
            self.catalogue = FakeCatalogue(self.link, clock, soft_pins=shape.soft_pin)
        self.tier = PoolTier("mooncake", self.link, shape.shared, SIZE)
        self.tier.refused = self.catalogue.doomed
        tiers: list[Tier] = [self.tier]
        if shape.dram:
            tiers.insert(0, SlotTier("dram", shape.dram, durable=False))
        if shape.disk:
            tiers.append(SlotTier("nvme", shape.disk, durable=True))
        planner = build_planner(config, tiers, None, SIZE)
        limits = config.mover
        mover = Mover(self.executor, limits.threads, limits.load_queue, limits.store_queue)
        index = cast("DurableIndex", Index(self.executor)) if shape.disk else None
        metrics = Metrics(1, cast("Any", None))
        parts = Parts(tiers, planner, SIZE, self.catalogue)
        self.core = SteppedCore(parts, mover, limits, index, metrics, clock)
        self.core.executor = self.executor
        self.apart = False
        shared = planner.res.shared
        assert shared is not None
        self.shared = shared

    def leave(self) -> None:
        """For good: what is on its way may still arrive, and nothing else."""
        self.core.clear(None, until_reopened=True)
        self.apart = self.catalogue.sealed = True
        self.tier.sealed = self.core.planner._generation

    def held(self) -> set[bytes]:
        """Blocks that the core counts on in the pool."""
        runs = self.core.planner.res.tree.runs.values()
        return {
            key
            for run in runs
            for key, slot in zip(run.keys, run.slots[self.shared] or (), strict=False)
            if slot >= 0
        }

    @property
    def idle(self) -> bool:
        return not self.executor.pending and not self.core._moving

    def settle(self) -> None:
        """Do everything that can be done now."""
        self.link.probe()
        while self.executor.run_all() or self.catalogue.step():
            continue
        assert self.idle, "moves that never end"
