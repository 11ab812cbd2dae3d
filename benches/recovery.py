"""Opening a store with a million NVMe blocks, files dropped from the page cache before.

Blocks have one page each, so that the segments stay small; their headers are really there
and are read at start, as are all records of the index. Chains have 8 turns of 64 blocks.
TIEREDKV_BENCH_DIR names the filesystem (default: the system's temporary directory).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benches.common import Result, absolute, work_directory
from benches.world import random_keys
from tieredkv.build import open_disk
from tieredkv.config import Config
from tieredkv.index.record import ROOT, Piece
from tieredkv.store import TieredKVStore
from tieredkv.tiers.nvme.segment import identity
from tieredkv.tiers.nvme.tier import NvmeTier
from tieredkv.types import Fingerprint

BLOCK = 4096
TURN, TURNS = 64, 8
BULK = 64
"""Pieces per submission."""
TIMEOUT = 120.0
FINGERPRINT = Fingerprint("bench")


@dataclass(frozen=True, slots=True)
class Size:
    blocks: int = 1_000_000
    samples: int = 7


FULL = Size()


def run(size: Size = FULL) -> Iterator[Result]:
    with work_directory() as path:
        capacity = size.blocks * (BLOCK + 1024) + (64 << 20)
        config = Config.model_validate(
            {
                "tiers": [
                    {"kind": "dram", "capacity": 64 << 20},
                    {"kind": "nvme", "path": str(path), "capacity": capacity, "min_free": 0},
                ]
            }
        )
        stored = _build(config, size.blocks)
        samples = [_open(config, path, stored) for _ in range(size.samples)]
    yield absolute("recovery.open", "s", samples, bar=3.0 * size.blocks / 1_000_000)


def _open(config: Config, path: Path, blocks: int) -> float:
    for file in path.rglob("*"):
        if file.is_file():
            _drop_cache(file)
    begin = time.perf_counter()
    store = TieredKVStore(config, FINGERPRINT)
    elapsed = time.perf_counter() - begin
    found = store.stats().blocks
    store.close()
    if found != blocks:
        raise RuntimeError(f"{found} of {blocks} blocks came back")
    return elapsed


def _drop_cache(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _build(config: Config, blocks: int) -> int:
    """Write index and segments as a store would have left them; the blocks in them."""
    disk = open_disk(config, FINGERPRINT)
    assert disk is not None
    disk.index.set_block_bytes(BLOCK)
    nvme = config.tiers[-1]
    tier = NvmeTier(disk.directory, "nvme", BLOCK, nvme.capacity, min_free=0)
    disk.index.set_map_limit(tier.index_bytes)
    failed: list[bool] = []
    waiting: list[Piece] = []
    for piece in _pieces(blocks, disk.index.boot << 40):
        _headers(tier, piece, disk.index.epoch)
        waiting.append(piece)
        if len(waiting) == BULK:
            disk.index.submit(waiting, [], lambda ok: None if ok else failed.append(True))
            waiting = []
    disk.index.submit(waiting, [], lambda ok: None if ok else failed.append(True))
    if not disk.index.flush(TIMEOUT) or failed:
        raise RuntimeError(f"the index could not be written: {disk.index.last_error}")
    for segment in tier.segments.all().values():
        segment.sync(segment.mark())
    tier.close()
    disk.index.close(TIMEOUT)
    disk.directory.close()
    return blocks // TURN * TURN


def _pieces(blocks: int, generation: int) -> Iterator[Piece]:
    parent, depth, when = ROOT, 0, time.time() - blocks
    for number in range(blocks // TURN):
        if number % TURNS == 0:
            parent, depth = ROOT, 0
        keys = random_keys(TURN)
        slots = list(range(number * TURN, (number + 1) * TURN))
        now = when + number
        yield Piece(keys, parent, slots, generation + number + 1, depth, now, now)
        parent, depth = keys[-1], depth + TURN


def _headers(tier: NvmeTier, piece: Piece, epoch: int) -> None:
    per_segment = tier.segments.geometry.table_slots
    headers: dict[int, list[tuple[int, bytes, int]]] = {}
    for slot, key in zip(piece.slots, piece.keys, strict=True):
        header = (slot % per_segment, identity(key, piece.generation, epoch, BLOCK), 0)
        headers.setdefault(slot // per_segment, []).append(header)
    for number, some in headers.items():
        segment = tier.segments.get_or_create(number)
        if segment is None:
            raise RuntimeError(f"no segment: {tier.segments.growth_error}")
        segment.put_headers(some)
