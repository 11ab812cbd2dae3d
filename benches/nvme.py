"""Durable puts with checksums and cold verified reads against fio, in the same file.

A figure moves `volume` bytes in calls of 64 MiB, four at a time. Puts end when their futures
say that the blocks are durable: data synced, index committed; each evicts as much as it
brings. `through` rows put a DRAM tier in front.

fio does sequential O_DIRECT I/O of the block size at queue depth 16, with one sync at the
end of its writes, and no checksums. It works on the store's own segment file, because equal
files in different places of a disk differ by a third; so puts come last, when nobody wants
the payloads that it overwrites. Without fio a loop of 4 threads takes its place.

Reads go to the device: the segment is opened with O_DIRECT, and its pages are dropped from
the cache besides. TIEREDKV_BENCH_DIR names the filesystem (default: the system's temporary
directory).
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benches.common import Result, compare, seconds, work_directory
from benches.world import random_keys
from tieredkv.config import Config, NvmeConfig
from tieredkv.store import TieredKVStore
from tieredkv.tiers.base import Bytes
from tieredkv.tiers.nvme.segment import read_header
from tieredkv.types import Fingerprint, Outcome

KIB, MIB = 1 << 10, 1 << 20
CALL = 64 * MIB
CALLS = 4
"""In flight."""
DEPTH = 16
SPARE = 2
"""The store has room for this part of the volume more: slots whose eviction is under way."""
TIMEOUT = 120.0


@dataclass(frozen=True, slots=True)
class Size:
    blocks: tuple[int, ...] = (MIB, 4 * MIB)
    volume: int = 512 * MIB
    call: int = CALL
    stores: int = 3
    """The places of their files on the disk are luck."""
    pairs: int = 15


FULL = Size()


def run(size: Size = FULL) -> Iterator[Result]:
    for block in size.blocks:
        label = f"{block // MIB}MiB" if block >= MIB else f"{block // KIB}KiB"
        for through in (False, True):
            with ExitStack() as stack:
                worlds = [
                    _World(
                        stack.enter_context(
                            _store(stack.enter_context(work_directory()), block, size, through)
                        ),
                        block,
                        size,
                    )
                    for _ in range(size.stores)
                ]
                yield from _rows(worlds, label, through, size)


def _rows(worlds: Sequence[_World], label: str, through: bool, size: Size) -> Iterator[Result]:
    if not through:
        for world in worlds:
            _drop_cache(world.file)
        yield compare(
            f"nvme.get.{label}",
            "GB/s",
            _in_turn([world.get for world in worlds]),
            _in_turn([world.reference.read for world in worlds]),
            bar=0.95,
            pairs=size.pairs,
        )
    name, bar = ("nvme.put.through", None) if through else ("nvme.put", 0.95)
    yield compare(
        f"{name}.{label}",
        "GB/s",
        _in_turn([world.put for world in worlds]),
        _in_turn([world.reference.write for world in worlds]),
        bar=bar,
        pairs=size.pairs,
    )


def _in_turn(calls: Sequence[Callable[[], float]]) -> Callable[[], float]:
    """Each time the next of them, so that both sides of a pair use the same file."""
    following = itertools.cycle(calls)
    return lambda: next(following)()


def _store(path: Path, block: int, size: Size, through: bool) -> TieredKVStore:
    room = size.volume + size.volume // SPARE
    nvme = {
        "kind": "nvme",
        "path": str(path),
        # of the directory, in which records, tables and locks have their share
        "capacity": room + room // block * 1024 + 2 * MIB,
        "min_free": 0,
        "segment": 2 * room,
        "engine": "direct",
        "write": "through" if through else "on_evict",
    }
    config = {
        "block_bytes": block,
        "tiers": [{"kind": "dram", "capacity": size.volume}, nvme] if through else [nvme],
        "mover": {"load_queue": "4GiB", "store_queue": "4GiB"},
        "promotion": {"enabled": False},
    }
    return TieredKVStore(Config.model_validate(config), Fingerprint("bench"))


class _World:
    """A store, the caller's memory, and the chains that were stored last."""

    def __init__(self, store: TieredKVStore, block: int, size: Size) -> None:
        self.store, self.volume = store, size.volume
        self.blocks = max(1, size.call // block)
        self.calls = size.volume // (self.blocks * block)
        shape = (CALLS, self.blocks, block)
        # page-aligned, as an engine's staging memory is
        self.memory: Bytes = np.frombuffer(
            mmap.mmap(-1, CALLS * self.blocks * block), np.uint8
        ).reshape(shape)
        rng = np.random.default_rng(1)
        self.memory[:] = rng.integers(0, 256, shape, np.uint8)
        self.chains: deque[list[bytes]] = deque(maxlen=self.calls)
        self.put(), self.put(), self.put()  # create the segment and fill it
        if not store.flush(TIMEOUT):
            raise RuntimeError("the first blocks could not be written")
        nvme = store.config.tiers[-1]
        assert isinstance(nvme, NvmeConfig)
        (self.file,) = nvme.path.rglob("*.kv")
        self.reference = (Fio if shutil.which("fio") else Loop)(self.file, block, size.volume)

    def put(self) -> float:
        chains = [random_keys(self.blocks) for _ in range(self.calls)]
        self.chains.extend(chains)
        return self._rate(lambda i: self.store.put_async(chains[i], self.memory[i % CALLS]))

    def get(self) -> float:
        chains = self.chains
        return self._rate(lambda i: self.store.get_async(chains[i], self.memory[i % CALLS]))

    def _rate(self, start: Callable[[int], Future[list[Outcome]]]) -> float:
        """GB/s of all calls, CALLS of them in flight."""

        def work() -> None:
            running: deque[Future[list[Outcome]]] = deque()
            for i in range(self.calls):
                if len(running) == CALLS:
                    _check(running.popleft())
                running.append(start(i))
            for future in running:
                _check(future)

        return self.volume / seconds(work) / 1e9


def _check(future: Future[list[Outcome]]) -> None:
    outcomes = future.result(TIMEOUT)
    if set(outcomes) != {Outcome.OK}:
        raise RuntimeError(f"outcomes: { {o: outcomes.count(o) for o in outcomes} }")


class Fio:
    """The usual yardstick of disks. Its start is not counted."""

    def __init__(self, file: Path, block: int, volume: int) -> None:
        self._file, self._block, self._volume = file, block, volume
        self._engine = "io_uring"
        try:
            self.read()
        except subprocess.CalledProcessError:  # refused in many containers
            self._engine = "libaio"

    def write(self) -> float:
        return self._run("write", "--end_fsync=1")

    def read(self) -> float:
        return self._run("read")

    def _run(self, direction: str, *more: str) -> float:
        command = [
            "fio", "--name=bench", f"--filename={self._file}", f"--rw={direction}",
            f"--offset={_payloads(self._file)}", f"--size={self._volume}", f"--bs={self._block}",
            f"--ioengine={self._engine}", f"--iodepth={DEPTH}", "--direct=1", "--overwrite=1",
            "--allow_file_create=0", "--output-format=json", *more,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][direction]
        nbytes, milliseconds = int(job["io_bytes"]), max(1, int(job["runtime"]))
        return nbytes / milliseconds / 1e6


class Loop:
    """Positional O_DIRECT I/O from a few threads."""

    def __init__(self, file: Path, block: int, volume: int) -> None:
        self._file, self._block, self._volume = file, block, volume
        self._memory = [mmap.mmap(-1, block) for _ in range(4)]
        for memory in self._memory:
            memory[:] = os.urandom(1) * block

    def write(self) -> float:
        return self._run(lambda fd, memory, at: os.pwritev(fd, [memory], at))

    def read(self) -> float:
        return self._run(lambda fd, memory, at: os.preadv(fd, [memory], at))

    def _run(self, move: Callable[[int, mmap.mmap, int], int]) -> float:
        fd = os.open(self._file, os.O_RDWR | os.O_DIRECT)
        first = _payloads(self._file)

        def part(number: int) -> None:
            step = self._block * len(self._memory)
            for at in range(number * self._block, self._volume, step):
                if move(fd, self._memory[number], first + at) != self._block:
                    raise RuntimeError("short transfer")

        def work() -> None:
            list(pool.map(part, range(len(self._memory))))
            os.fdatasync(fd)

        try:
            with ThreadPoolExecutor(len(self._memory)) as pool:
                return self._volume / seconds(work) / 1e9
        finally:
            os.close(fd)


def _payloads(segment: Path) -> int:
    """Where the payloads of a segment file begin, behind its headers."""
    return read_header(segment).geometry.offset(0)


def _drop_cache(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
