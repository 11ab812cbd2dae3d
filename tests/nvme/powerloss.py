"""A model of losing power: what has not been synced may or may not be on the disk.

Use: give `PowerLossEngine` to `NvmeTier(engine=...)`, or `install` it under a whole store.
Let the clock run; at the crash call `power_off()` (every call fails from then on, so nothing
is acknowledged any more), close everything, then `crash()`: a random subset of the unsynced
512-byte sectors reaches the real files, in random order. Reopen with any engine and compare.

Creation of segments and LMDB commits sync before they return and go to the real disk.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tieredkv.tiers.base import BlockBuffer
from tieredkv.tiers.nvme.engines import File
from tieredkv.tiers.nvme.selection import Selection

SECTOR = 512


class PowerLossEngine:
    """An `Engine` over real files with a volatile write cache. Thread-safe."""

    name = "power-loss"

    def __init__(
        self,
        seed: int,
        off_after: int | None = None,
        honest_sync: bool = True,
        alignment: int = 1,
    ) -> None:
        """Power goes off during write or sync number `off_after`, if given.

        `honest_sync` False is a disk that ignores flushes, to see that a test notices.
        """
        self.alignment = alignment
        self.operations = 0
        """Writes and syncs so far."""
        self.is_off = False
        self.honest_sync = honest_sync
        self.lock = threading.RLock()
        self._random = random.Random(seed)
        self._off_after = off_after
        self._caches: dict[Path, _Cache] = {}

    def open(self, path: Path) -> File:
        with self.lock:
            return _CachedFile(self, self._caches.setdefault(path, _Cache()), path)

    def close(self) -> None:
        """The cache outlives the tier."""

    def power_off(self) -> None:
        """Every later call fails with EIO."""
        with self.lock:
            self.is_off = True

    def crash(self) -> int:
        """Decide what the disk holds; returns how many sectors were lost."""
        lost = 0
        with self.lock:
            self.is_off = True
            for path, cache in self._caches.items():
                pending, cache.pending = cache.pending, []
                kept = [w for w in pending if self._random.random() < self._random.random()]
                lost += len(pending) - len(kept)
                self._random.shuffle(kept)
                fd = os.open(path, os.O_WRONLY)
                for offset, data in kept:
                    os.pwrite(fd, data, offset)
                os.close(fd)
        return lost

    def step(self) -> None:
        """One write or sync begins."""
        self.operations += 1
        if self._off_after is not None and self.operations > self._off_after:
            self.is_off = True

    def check_power(self) -> None:
        if self.is_off:
            raise OSError(errno.EIO, "the power is off")


class _Cache:
    """Sectors written to one file and not synced, oldest first."""

    def __init__(self) -> None:
        self.pending: list[tuple[int, bytes]] = []


class _CachedFile:
    def __init__(self, engine: PowerLossEngine, cache: _Cache, path: Path) -> None:
        self._engine, self._cache = engine, cache
        self._fd = os.open(path, os.O_RDWR)

    def pwrite(self, buffers: Sequence[BlockBuffer], offset: int) -> int:
        data = b"".join(bytes(buffer) for buffer in buffers)
        with self._engine.lock:
            self._engine.check_power()
            self._engine.step()
            self._cache.pending += [
                (offset + at, data[at : at + SECTOR]) for at in range(0, len(data), SECTOR)
            ]
            self._engine.check_power()  # off during this write: some of it may arrive
        return len(data)

    def pread(self, buffers: Sequence[BlockBuffer], offset: int) -> int:
        with self._engine.lock:
            self._engine.check_power()
            size = sum(len(buffer) for buffer in buffers)
            data = bytearray(os.pread(self._fd, size, offset))
            for start, sector in self._cache.pending:
                at = start - offset
                if 0 <= at < len(data):
                    data[at : at + len(sector)] = sector[: len(data) - at]
        at = 0
        for buffer in buffers:
            part = data[at : at + len(buffer)]
            memoryview(buffer)[: len(part)] = part
            at += len(part)
        return len(data)

    def sync(self) -> None:
        with self._engine.lock:
            self._engine.check_power()
            self._engine.step()
            self._engine.check_power()  # off during this sync: it never returned
            if self._engine.honest_sync:
                for offset, data in self._cache.pending:
                    os.pwrite(self._fd, data, offset)
                self._cache.pending.clear()

    def close(self) -> None:
        os.close(self._fd)


def install(monkeypatch: pytest.MonkeyPatch, engine: PowerLossEngine) -> None:
    """Make every NvmeTier that is opened from now on use `engine`."""
    chosen = Selection(engine, "a model of power loss")
    monkeypatch.setattr("tieredkv.tiers.nvme.tier.select", lambda kind, directory: chosen)
