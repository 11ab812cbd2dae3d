"""Copies to and from a GPU, against the same bytes by one pinned copy of torch's.

`hbm` is the tier, `paged` a chunk scattered over the blocks of an engine's KV cache, `nvme` a
tier on disk whose blocks are in device memory: by the engine `gds` without host memory in
between, by `direct` through it. Without a GPU the same code runs on the CPU, where it shows that
it runs and nothing else: metrics end in `.cpu` and have no bar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benches.common import PAIRS, Result, compare, seconds, work_directory
from benches.world import random_keys
from tieredkv.connector.paged import PagedCache
from tieredkv.errors import TieredKVError
from tieredkv.tiers.hbm import HbmTier
from tieredkv.tiers.nvme.directory import Directory
from tieredkv.tiers.nvme.tier import NvmeTier
from tieredkv.types import Batch, Fingerprint, Outcome

MIB = 1 << 20
BAR = 0.8
"""Of a pinned copy of the same bytes."""


@dataclass(frozen=True, slots=True)
class Size:
    block: int = 4 * MIB
    blocks: int = 64
    layers: int = 32
    per_chunk: int = 16
    """Engine blocks in a block of ours."""
    pairs: int = PAIRS


FULL = Size()


def run(size: Size = FULL) -> Iterator[Result]:
    world = _World(size)
    yield from _pair(world, "hbm", *_hbm(world))
    yield from _pair(world, "paged", *_paged(world))
    with work_directory() as path:
        for engine in ("direct", "gds"):
            yield from _nvme(world, path / engine, engine)


class _World:
    """Host and device memory for all blocks, and the copies that nothing can beat."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.cuda = self.device.type == "cuda"
        shape = (size.blocks, size.block)
        self.host = torch.zeros(shape, dtype=torch.uint8, pin_memory=self.cuda)
        self.host.random_(0, 256)
        self.back = torch.zeros(shape, dtype=torch.uint8, pin_memory=self.cuda)
        self.there = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        self.batch = Batch(list(range(size.blocks)), random_keys(size.blocks), [1] * size.blocks)

    def rate(self, copy: Callable[[], object]) -> float:
        """GB/s of all blocks."""

        def whole() -> None:
            copy()
            if self.cuda:
                torch.cuda.synchronize(self.device)

        return self.host.numel() / seconds(whole) / 1e9

    def down(self) -> float:
        return self.rate(lambda: self.there.copy_(self.host, non_blocking=True))

    def up(self) -> float:
        return self.rate(lambda: self.back.copy_(self.there, non_blocking=True))


def _pair(
    world: _World, name: str, put: Callable[[], object], get: Callable[[], object]
) -> Iterator[Result]:
    """Into the device and out of it; what comes back is compared once."""
    put()
    get()
    if not torch.equal(world.host, world.back):
        raise RuntimeError(f"{name}: other bytes came back")
    suffix, bar = ("", BAR) if world.cuda else (".cpu", None)
    for way, copy, limit in (("h2d", put, world.down), ("d2h", get, world.up)):
        ours = _timed(world, copy)
        metric = f"gpu.{name}.{way}{suffix}"
        yield compare(metric, "GB/s", ours, limit, bar=bar, pairs=world.size.pairs)


def _timed(world: _World, copy: Callable[[], object]) -> Callable[[], float]:
    return lambda: world.rate(copy)


def _hbm(world: _World) -> tuple[Callable[[], object], Callable[[], object]]:
    size, batch = world.size, world.batch
    tier = HbmTier("hbm", size.blocks * size.block, size.block, str(world.device))
    source, target = world.host.numpy(), world.back.numpy()
    return (lambda: _fine(tier.write(batch, source))), (lambda: _fine(tier.read(batch, target)))


def _paged(world: _World) -> tuple[Callable[[], object], Callable[[], object]]:
    """Chunks of engine blocks in an order that nothing can merge; blocks outermost, as vLLM
    lays them out for us."""
    size = world.size
    width = size.block // size.per_chunk // size.layers
    count = size.blocks * size.per_chunk
    memory = torch.zeros((count, size.layers, width), dtype=torch.uint8, device=world.device)
    layers = [memory[:, i] for i in range(size.layers)]
    cache = PagedCache(layers, count, size.per_chunk, batch=8 * MIB, users=1)
    order = np.random.default_rng(0).permutation(count).reshape(size.blocks, -1).tolist()
    source, target = world.host.numpy(), world.back.numpy()

    return (lambda: cache.scatter(order, source)), (lambda: cache.gather(order, target))


def _nvme(world: _World, path: Path, engine: str) -> Iterator[Result]:
    """Nothing where the machine does not have the engine: `tieredkv doctor` says why."""
    size, batch = world.size, world.batch
    directory = Directory.open(path, Fingerprint(model="bench"), 256, 0)
    capacity = 2 * size.blocks * size.block + (64 << 20)
    kind: Any = engine
    try:
        tier = NvmeTier(directory, "nvme", size.block, capacity, min_free=0, engine=kind)
    except TieredKVError:
        directory.close()
        return
    straight = world.cuda and tier.device
    rows = [row.numpy() for row in world.back]

    def put() -> None:
        if straight:
            _fine(tier.write(batch, list(world.there)))
        else:
            world.back.copy_(world.there)
            _fine(tier.write(batch, rows))

    def get() -> None:
        if straight:
            _fine(tier.read(batch, list(world.there)))
        else:
            _fine(tier.read(batch, rows))
            world.there.copy_(world.back)

    suffix = "" if world.cuda else ".cpu"
    world.there.copy_(world.host)
    try:
        for way, copy, limit in (("write", put, world.up), ("read", get, world.down)):
            metric = f"gpu.nvme.{tier.mode}.{way}{suffix}"
            yield compare(metric, "GB/s", _timed(world, copy), limit, pairs=size.pairs)
        if not torch.equal(world.there.cpu(), world.host):
            raise RuntimeError(f"nvme by {tier.mode}: other bytes came back")
    finally:
        tier.close()
        directory.close()


def _fine(outcomes: list[Outcome]) -> None:
    if set(outcomes) != {Outcome.OK}:
        raise RuntimeError(f"a copy failed: {outcomes}")
