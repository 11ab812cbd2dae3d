"""A store in a small world: chains over a tiny alphabet, recognisable bytes, tiny tiers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tieredkv import Config, Fingerprint, TieredKVStore
from tieredkv.core import Core
from tieredkv.testing import FaultyTier
from tieredkv.tiers.base import Tier
from tieredkv.types import Clock

SIZE = 512
FP = Fingerprint("model", layout="X")
DISK = 320_000
"""Capacity that gives the NVMe tier a handful of slots."""
PATIENCE = 20.0

Path_: TypeAlias = tuple[int, ...]
"""A chain as the symbols of its blocks."""


def key_of(path: Path_) -> bytes:
    return hashlib.sha256(repr(path).encode()).digest()


def chain(path: Path_) -> list[bytes]:
    return [key_of(path[: i + 1]) for i in range(len(path))]


def payload(key: bytes, version: int = 0, size: int = SIZE) -> bytes:
    return hashlib.shake_128(key + version.to_bytes(4, "little")).digest(size)


@dataclass(frozen=True)
class Shape:
    """A hierarchy: blocks of hbm and dram (0: absent), write policy of nvme (None: absent)."""

    hbm: int = 0
    dram: int = 0
    write: str | None = None
    policy: str = "lru"
    inline: bool = True
    """False: memory goes through the mover, as a tier that can block does."""
    disk: int = DISK

    def config(self, root: Path, **limits: Any) -> Config:
        tiers: list[dict[str, Any]] = []
        if self.hbm:
            tiers.append({"kind": "hbm", "capacity": self.hbm * SIZE, "device": "cpu"})
        if self.dram:
            tiers.append({"kind": "dram", "capacity": self.dram * SIZE, "pin": "off"})
        if self.write is not None:
            tiers.append(
                {
                    "kind": "nvme", "path": root, "capacity": self.disk, "min_free": 0,
                    "segment": 1 << 20, "write": self.write,
                }
            )  # fmt: skip
        return Config.model_validate(
            {
                "block_tokens": 1,
                "block_bytes": SIZE,
                "tiers": tiers,
                "eviction": {"policy": self.policy},
                "mover": {"room_wait": 2.0, "threads": 2, "batch": 2 * SIZE, **limits},
            }
        )


def open_store(
    shape: Shape, root: Path, clock: Clock | None = None, **limits: Any
) -> tuple[TieredKVStore, dict[str, FaultyTier]]:
    """The store, and the wrapper around each of its tiers."""
    wrapped: dict[str, FaultyTier] = {}

    def wrap(tier: Tier) -> Tier:
        inline = tier.inline and shape.inline
        wrapped[tier.name] = FaultyTier(tier, inline=inline)
        return wrapped[tier.name]

    return TieredKVStore(shape.config(root, **limits), FP, clock, wrap), wrapped


def core_of(store: TieredKVStore) -> Core:
    assert store._core is not None
    return store._core


def busy(store: TieredKVStore) -> bool:
    """Is a move or an index change under way?"""
    core = core_of(store)
    with core.lock:
        unanswered = core.planner._tickets
        return bool(core._moving or unanswered or any(core.mover.queued_bytes))


def settle(store: TieredKVStore) -> None:
    """Wait until nothing moves any more."""
    deadline = time.monotonic() + PATIENCE
    while busy(store):
        assert time.monotonic() < deadline, "moves that never end"
        time.sleep(0.0003)


def leaks(store: TieredKVStore) -> list[str]:
    """What an empty, idle store still holds, but for slots that were withdrawn."""
    planner = core_of(store).planner
    found = [
        f"{level.name}: {level.pool.used - level.pool.lost} slots, "
        f"{level.pool.expected} expected, {level.writing}"
        for level in planner.res.levels
        if level.pool.used != level.pool.lost or level.pool.expected or level.writing
    ]
    if planner.res.tree.runs or planner.res.dirty or planner.res.declined:
        found.append("runs are left")
    return found


def durable(store: TieredKVStore, keys: Sequence[bytes]) -> set[bytes]:
    """Those of `keys` that the NVMe tier holds."""
    core = core_of(store)
    with core.lock:
        return {key for key in keys if core.planner.durable(key)}
