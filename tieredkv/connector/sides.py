"""What the scheduler side is made of, once the workers have said what their tiers hold."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from tieredkv.build import Disk, build_planner
from tieredkv.build_pool import open_catalogue
from tieredkv.config import Config
from tieredkv.connector.bandwidth import Prefill
from tieredkv.connector.loads import Loads
from tieredkv.connector.pinning import Pinning
from tieredkv.connector.saves import Saves
from tieredkv.connector.shipping import Heard, Shipping
from tieredkv.connector.wire import Hello
from tieredkv.errors import UsageError
from tieredkv.tiers.mooncake.client import PoolClient
from tieredkv.types import Fingerprint


class Slots(NamedTuple):
    """A tier as the planner has to know it."""

    name: str
    durable: bool
    slots: int


class Geometry(NamedTuple):
    """Sizes of the engine."""

    block: int
    """Tokens of an engine block."""
    hash: int
    """Tokens that one of the engine's block hashes stands for."""
    blocks: int
    """Engine blocks in its pool."""
    ranks: int


class Sides(NamedTuple):
    """What exists once all ranks have said what their tiers hold."""

    shipping: Shipping
    saves: Saves
    loads: Loads


def open_sides(
    config: Config,
    geometry: Geometry,
    fingerprint: Fingerprint,
    disk: Disk | None,
    pool: PoolClient | None,
    hellos: Sequence[Hello],
    pinning: Pinning,
    heard: Heard,
    prefill: Prefill,
) -> Sides:
    """A planner for the smallest of the ranks' tiers, with what the index holds.

    Raises UsageError where the ranks differ, CapacityError, FormatError.
    """
    first = hellos[0]
    if any([t[:2] for t in hello.tiers] != [t[:2] for t in first.tiers] for hello in hellos):
        raise UsageError("ranks have different tiers: give all of them one configuration")
    tiers = [
        Slots(name, durable, min(hello.tiers[i][2] for hello in hellos))
        for i, (name, durable, _) in enumerate(first.tiers)
    ]
    size = sum(hello.chunk_bytes for hello in hellos)
    if disk is not None:
        disk.index.set_map_limit(min(hello.index_bytes for hello in hellos))
    planner = build_planner(config, tiers, disk, size)
    index = disk.index if disk else None
    shared = open_catalogue(config, fingerprint, pool, size, geometry.ranks)
    limits, ranks = config.mover, geometry.ranks
    shipping = Shipping(planner, size, limits, index, time.time, ranks, heard, shared)
    saves = Saves(shipping, config, geometry.block, pinning)
    loads = Loads(shipping, config, geometry.block, saves.copy, prefill)
    return Sides(shipping, saves, loads)
