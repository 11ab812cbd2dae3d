"""Moves between a GPU and the tiers, against what the machine can do in the same run.

`dram` and `nvme` move the blocks of an engine as a vLLM worker does: chunks scattered over a
paged KV cache, through a mover with its threads. In `blocks` every engine block lies together
(vLLM's order BLHNC), in `layers` each layer's part lies apart. `hbm` is the tier of that name,
`nh` the checksum that the device computes for GPUDirect Storage.

The references are one pinned copy of the same bytes, fio on the segment file (nvme by `direct`),
cuFile's own gdsio where it is installed (nvme by `gds`, else fio too), and a copy inside the
device (`nh`). Without a GPU the same code runs on the CPU, where it shows that it runs and
nothing else: metrics end in `.cpu` and have no bar. `nh.host` is the processor's on any machine,
against XXH3.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from benches.common import PAIRS, Result, compare, seconds, work_directory
from benches.nvme import Fio, Loop
from benches.world import random_keys
from tieredkv.connector.paged import PagedBlocks, PagedCache
from tieredkv.errors import TieredKVError
from tieredkv.executor import DaemonExecutor
from tieredkv.mover import Mover
from tieredkv.tiers.base import Tier
from tieredkv.tiers.dram import DramTier
from tieredkv.tiers.hbm import HbmTier
from tieredkv.tiers.nvme.checksum import NH_64, XXH3_64, Checksums
from tieredkv.tiers.nvme.directory import Directory
from tieredkv.tiers.nvme.tier import NvmeTier
from tieredkv.transfer import Transfer
from tieredkv.types import Batch, Fingerprint, Move, Outcome

MIB = 1 << 20
BAR = 0.8
"""Of a pinned copy of the same bytes."""
THREADS = 8
TIMEOUT = 120.0
GDSIO = Path("/usr/local/cuda/gds/tools/gdsio")
THROUGHPUT = re.compile(r"Throughput:\s*([\d.]+)\s*GiB/sec")
Work: TypeAlias = Callable[[], object]


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
    yield from _hbm(world)
    yield _nh_by_host(world)
    if world.cuda:
        yield _nh(world)
    for layout in ("blocks", "layers"):
        engine = _Engine(world, layout)
        yield from _dram(world, engine, layout)
        with work_directory() as path:
            for kind in ("direct", "gds"):
                yield from _nvme(world, engine, f"{kind}.{layout}", path / kind, kind)
        engine.close()


class _World:
    """Host and device memory for all blocks, and the copies that nothing can beat."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.cuda = self.device.type == "cuda"
        self.suffix = "" if self.cuda else ".cpu"
        self.bar = BAR if self.cuda else None
        shape = (size.blocks, size.block)
        self.host = torch.zeros(shape, dtype=torch.uint8, pin_memory=self.cuda)
        self.host.random_(0, 256)
        self.there = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        self.other = torch.zeros_like(self.there)
        self.keys = random_keys(size.blocks)

    def rate(self, copy: Work) -> float:
        """GB/s of all blocks."""

        def whole() -> None:
            copy()
            if self.cuda:
                torch.cuda.synchronize(self.device)

        return self.host.numel() / seconds(whole) / 1e9

    def down(self) -> float:
        return self.rate(lambda: self.there.copy_(self.host, non_blocking=True))

    def up(self) -> float:
        return self.rate(lambda: self.host.copy_(self.there, non_blocking=True))

    def within(self) -> float:
        return self.rate(lambda: self.other.copy_(self.there))

    def row(
        self, name: str, ours: Work, limit: Callable[[], float], *, bar: float | None
    ) -> Result:
        rate, metric = (lambda: self.rate(ours)), f"gpu.{name}{self.suffix}"
        return compare(metric, "GB/s", rate, limit, bar=bar, pairs=self.size.pairs)


class _Engine:
    """A paged KV cache on the device, chunks in an order that nothing can merge, and a mover."""

    def __init__(self, world: _World, layout: str) -> None:
        size, self._world = world.size, world
        width = size.block // size.per_chunk // size.layers
        count = size.blocks * size.per_chunk
        shape = (count, size.layers) if layout == "blocks" else (size.layers, count)
        self.memory = torch.zeros((*shape, width), dtype=torch.uint8, device=world.device)
        layers = list(self.memory.unbind(1) if layout == "blocks" else self.memory)
        self.cache = PagedCache(layers, count, size.per_chunk, batch=8 * MIB, users=THREADS)
        order = np.random.default_rng(0).permutation(count)
        self._chunks = order.reshape(size.blocks, -1).tolist()
        self._mover = Mover(DaemonExecutor(THREADS, "bench"), THREADS, 1 << 40, 1 << 40)

    def fill(self) -> None:
        self.memory.random_(0, 256)

    def save(self, tier: Tier) -> None:
        self._move(tier, 1, 0)

    def load(self, tier: Tier) -> None:
        self._move(tier, 0, 1)

    def check(self, tier: Tier) -> None:
        """What is saved comes back."""
        self.fill()
        self.save(tier)
        wanted = self.memory.cpu()
        self.memory.zero_()
        self.load(tier)
        if not torch.equal(self.memory.cpu(), wanted):
            raise RuntimeError(f"{tier.name}: other bytes came back")

    def _move(self, tier: Tier, src: int, dst: int) -> None:
        blocks = PagedBlocks(self.cache, self._chunks, self.cache.fence())
        slots = list(range(len(self._chunks)))
        move = Move(src, dst, self._world.keys, [1] * len(slots), slots, slots, slots)
        part, staging = self.cache.part, self.cache.staging
        transfer = Transfer(move, [tier, blocks], None, part, lambda _: None, staging)
        if not self._mover.start(transfer, self.cache.chunk_bytes, load=dst == 1):
            raise RuntimeError("the mover refuses")
        transfer.expire(TIMEOUT)
        _fine(transfer.write)

    def close(self) -> None:
        self._mover.close(TIMEOUT)
        self.cache.staging.close()


def _hbm(world: _World) -> Iterator[Result]:
    size = world.size
    batch = Batch(list(range(size.blocks)), world.keys, [1] * size.blocks)
    tier = HbmTier("hbm", size.blocks * size.block, size.block, str(world.device))
    source, target = world.host.numpy(), torch.empty_like(world.host).numpy()
    _fine(tier.write(batch, source))
    _fine(tier.read(batch, target))
    if not np.array_equal(source, target):
        raise RuntimeError("hbm: other bytes came back")
    put, get = lambda: _fine(tier.write(batch, source)), lambda: _fine(tier.read(batch, source))
    yield world.row("hbm.put", put, world.down, bar=world.bar)
    yield world.row("hbm.get", get, world.up, bar=world.bar)
    tier.close()


def _nh(world: _World) -> Result:
    sums, rows = Checksums(bytes(8), world.size.block), list(world.there)
    if sums.on_device(rows[:1]) != [sums.of(NH_64, world.there[0].cpu().numpy())]:
        raise RuntimeError("nh: device and host differ")
    return world.row("nh", lambda: sums.on_device(rows), world.within, bar=None)


def _nh_by_host(world: _World) -> Result:
    """What the host pays for blocks that a GPU can verify, against the checksum it has else."""
    sums, block = Checksums(bytes(8), world.size.block), world.host[0].numpy()

    def rate(kind: int) -> float:
        return block.size / seconds(lambda: sums.of(kind, block)) / 1e9

    pairs = world.size.pairs
    return compare("gpu.nh.host", "GB/s", lambda: rate(NH_64), lambda: rate(XXH3_64), pairs=pairs)


def _dram(world: _World, engine: _Engine, layout: str) -> Iterator[Result]:
    size = world.size
    tier = DramTier("dram", size.blocks * size.block, size.block)
    if not tier.wait_ready(TIMEOUT):
        raise RuntimeError("dram: the slab is not ready")
    engine.check(tier)
    # where layers lie apart a kernel per layer and chunk is launched from Python: no bar
    name, bar = f"dram.{layout}", world.bar if layout == "blocks" else None
    yield world.row(f"{name}.save", lambda: engine.save(tier), world.up, bar=bar)
    yield world.row(f"{name}.load", lambda: engine.load(tier), world.down, bar=bar)
    tier.close()


def _nvme(world: _World, engine: _Engine, name: str, path: Path, kind: Any) -> Iterator[Result]:
    """Nothing where the machine does not have the engine: `tieredkv doctor` says why."""
    size = world.size
    directory = Directory.open(path, Fingerprint(model="bench"), 256, 0)
    volume = size.blocks * size.block
    room = volume + (64 << 20)
    try:
        tier = NvmeTier(directory, "nvme", size.block, room, min_free=0, engine=kind, segment=room)
    except TieredKVError:
        directory.close()
        return
    try:
        if tier.device and world.cuda:
            engine.cache.staging.add_device(world.device)
            tier.register(engine.cache.staging.memory)
        engine.check(tier)
        (file,) = path.rglob("*.kv")
        if tier.mode == "gds" and GDSIO.exists():
            reference: Any = Gdsio(path / "gdsio.tmp", volume)
        else:
            reference = (Fio if shutil.which("fio") else Loop)(file, MIB, volume)
        name = name.replace(kind, tier.mode)
        yield world.row(f"nvme.{name}.load", lambda: engine.load(tier), reference.read, bar=None)
        # last: nobody wants the payloads that the reference overwrites
        yield world.row(f"nvme.{name}.save", lambda: engine.save(tier), reference.write, bar=None)
    finally:
        tier.close()
        directory.close()


class Gdsio:
    """cuFile's own yardstick: its DMA between a file and the first GPU."""

    def __init__(self, file: Path, volume: int) -> None:
        self._file, self._volume = file, volume
        self.write()

    def write(self) -> float:
        return self._run("1")

    def read(self) -> float:
        return self._run("0")

    def _run(self, direction: str) -> float:
        """GB/s of 1 MiB at a time on 8 threads."""
        command = [
            str(GDSIO), "-f", str(self._file), "-d", "0", "-w", str(THREADS),
            "-s", f"{self._volume // MIB}M", "-i", "1M", "-x", "0", "-I", direction,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
        return gdsio_rate(done.stdout)


def gdsio_rate(text: str) -> float:
    """GB/s from what gdsio prints. Raises ValueError."""
    found = THROUGHPUT.search(text)
    if found is None:
        raise ValueError(f"gdsio says {text!r}")
    return float(found[1]) * (1 << 30) / 1e9


def _fine(outcomes: list[Outcome]) -> None:
    if set(outcomes) != {Outcome.OK}:
        raise RuntimeError(f"a copy failed: {outcomes}")
