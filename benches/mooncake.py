"""A tier in a Mooncake pool against its library alone, and against memcpy.

Each figure moves `volume` bytes in calls of `batch` blocks, with one caller; ours are executed by
the threads of a mover, as in a store. `local`: the pool is
a segment of this process, which the library reaches with memcpy. `remote`: it is another
process, reached over TCP on the loopback interface; both share the machine's CPUs.

A put or get of ours has three rows, all of the same repetitions. The first compares it with
memcpy: `np.copyto` by one thread, block by block, between memory of the same kind and size. The
`bare` row compares it with the library's own batch call on one registered buffer per key; the
`checked` row with that and an xxh3-64 of each block by the caller, which is the least that a
checksum of our own costs when nothing runs beside it.

Within a repetition the arms take turns in an order that rotates, each on keys of its own, all
through the same client. What was put is then read, and removed by force, since nobody else
reads. Every page of the pool has been touched before.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import xxhash

from benches.common import PAIRS, Result, paired, seconds
from benches.world import random_keys
from tieredkv.buffers import RevocableViews
from tieredkv.config import MoverConfig
from tieredkv.executor import DaemonExecutor
from tieredkv.mover import Mover
from tieredkv.tiers.base import Bytes
from tieredkv.tiers.mooncake.client import PoolClient
from tieredkv.tiers.mooncake.processes import LOCALHOST, Master, Owner
from tieredkv.tiers.mooncake.tier import MooncakeTier
from tieredkv.tiers.slab import Slab
from tieredkv.transfer import Transfer
from tieredkv.types import Move, Outcome

MIB = 1 << 20
TIMEOUT = 30.0


@dataclass(frozen=True, slots=True)
class Size:
    batches: tuple[tuple[int, tuple[int, ...]], ...] = (
        (MIB, (1, 4, 16, 64)),
        (4 * MIB, (1, 4, 16)),
    )
    """Bytes of a block -> blocks per call."""
    places: tuple[str, ...] = ("local", "remote")
    volume: int = 128 * MIB
    repetitions: int = PAIRS

    @property
    def pool(self) -> int:
        """Bytes: the volume of each arm that uses it, and some more."""
        return 3 * self.volume + max(self.volume // 2, 16 * MIB)


FULL = Size()


def run(size: Size = FULL) -> Iterator[Result]:
    """Nothing where Mooncake is not installed."""
    if find_spec("mooncake") is None:
        return
    for place in size.places:
        for block, batches in size.batches:
            with _World(place == "remote", block, size) as world:
                for batch in batches:
                    yield from _rows(world, place, batch)


def _rows(world: _World, place: str, batch: int) -> Iterator[Result]:
    figures = world.repeat(batch)
    for name in ("put", "get"):
        arms = figures[name]
        metric = f"mooncake.{place}.{name}.{world.block // MIB}MiB.x{batch}"
        large = place == "local" and world.block >= 4 * MIB and batch > 1
        for reference, bar in (
            ("memcpy", 0.8 if large else None),
            ("bare", 0.95),
            ("checked", None),
        ):
            label = metric if reference == "memcpy" else f"{metric}.{reference}"
            yield paired(label, "GB/s", arms["ours"], arms[reference], bar=bar)


class _World:
    """A pool, its client, and the caller's memory: a source and a target."""

    def __init__(self, remote: bool, block: int, size: Size) -> None:
        self.block, self.size = block, size
        self.blocks = size.volume // block
        self._closing = ExitStack()
        with ExitStack() as stack:
            self._open(stack, remote)
            self._closing = stack.pop_all()

    def _open(self, stack: ExitStack, remote: bool) -> None:
        size = self.size
        master = stack.enter_context(Master(eviction_watermark=1.0, eviction_ratio=0.0))
        if remote:
            stack.enter_context(Owner(master.address, size.pool))
        client = PoolClient(master.address, 0 if remote else size.pool, "tcp", "", LOCALHOST)
        self.tier = MooncakeTier("pool", client, "bench", size.volume, self.block)
        stack.callback(self.tier.close)
        threads = MoverConfig().threads
        executor = DaemonExecutor(threads, "mover")
        self.mover = Mover(executor, threads, 2 * size.volume, 2 * size.volume)
        stack.callback(self.mover.close, TIMEOUT)
        _await(lambda: client.breaker.closed and master.capacity() == size.pool)
        self.library: Any = client.call(lambda store: store)
        self.config = importlib.import_module("mooncake.store").ReplicateConfig()
        self.config.replica_num = 1
        self.source, self.target, self.ring = (self._memory(stack) for _ in range(3))
        self.source[:] = np.random.default_rng(1).integers(0, 256, self.source.shape, np.uint8)
        self._touch()

    def _memory(self, stack: ExitStack) -> Bytes:
        """Page-aligned, of huge pages, as a staging memory is, and registered."""
        slab = Slab(self.blocks, self.block)
        stack.callback(slab.close)
        slab.rows[:] = 1
        self.tier.register(slab.address, slab.nbytes)
        return slab.rows

    def _touch(self) -> None:
        """Use all of the pool's memory once, but for what one more block would not fit into."""
        arm = Bare(self, 1)
        for _ in range(self.size.pool // self.block - 1):
            arm.renew()
            arm.put_call(0)
        self.clear()

    def clear(self) -> None:
        self.library.remove_all(True)

    def repeat(self, batch: int) -> dict[str, dict[str, list[float]]]:
        """GB/s of each arm, put and get; the first repetition is checked and thrown away."""
        arms = {
            "ours": Ours(self, batch),
            "bare": Bare(self, batch),
            "checked": Checked(self, batch),
            "memcpy": Memcpy(self, batch),
        }
        names = list(arms)
        figures: dict[str, dict[str, list[float]]] = {
            way: {name: [] for name in arms} for way in ("put", "get")
        }
        for i in range(-1, self.size.repetitions):
            turn = names[i % len(names) :] + names[: i % len(names)]
            for name in turn:
                figures["put"][name].append(arms[name].rate(put=True))
            for name in turn:
                if i < 0:
                    self.target[:] = 0
                figures["get"][name].append(arms[name].rate(put=False))
                if i < 0 and not np.array_equal(self.source, self.target):
                    raise RuntimeError(f"{name}: other bytes came back")
            self.clear()
        return {
            way: {name: samples[1:] for name, samples in of.items()} for way, of in figures.items()
        }

    def __enter__(self) -> _World:
        return self

    def __exit__(self, *error: object) -> None:
        del self.source, self.target, self.ring
        self._closing.close()


class Arm:
    """One way to move the volume, in calls of `batch` blocks."""

    def __init__(self, world: _World, batch: int) -> None:
        self.world, self.batch = world, batch

    def rate(self, put: bool) -> float:
        """GB/s of all calls."""
        if put:
            self.renew()
        call = self.put_call if put else self.get_call
        firsts = range(0, self.world.blocks, self.batch)

        def work() -> None:
            for at in firsts:
                call(at)

        return self.world.size.volume / seconds(work) / 1e9

    def renew(self) -> None:
        """Take keys that nobody has stored."""

    def put_call(self, at: int) -> None:
        raise NotImplementedError

    def get_call(self, at: int) -> None:
        raise NotImplementedError


class Memcpy(Arm):
    """The limit."""

    def put_call(self, at: int) -> None:
        ring, source = self.world.ring, self.world.source
        for i in range(at, at + self.batch):
            np.copyto(ring[i], source[i])

    def get_call(self, at: int) -> None:
        target, ring = self.world.target, self.world.ring
        for i in range(at, at + self.batch):
            np.copyto(target[i], ring[i])


class Bare(Arm):
    """The library: one buffer per key, nothing of ours."""

    def __init__(self, world: _World, batch: int) -> None:
        super().__init__(world, batch)
        self.keys: list[str] = []
        self.sizes = [[world.block] for _ in range(batch)]
        self.sources, self.targets = (
            [[int(row.ctypes.data)] for row in rows] for rows in (world.source, world.target)
        )

    def renew(self) -> None:
        self.keys = _names(self.world.blocks)

    def put_call(self, at: int) -> None:
        part = slice(at, at + self.batch)
        codes = self.world.library.batch_put_from_multi_buffers(
            self.keys[part], self.sources[part], self.sizes, self.world.config
        )
        _expect(codes, 0)

    def get_call(self, at: int) -> None:
        part = slice(at, at + self.batch)
        codes = self.world.library.batch_get_into_multi_buffers(
            self.keys[part], self.targets[part], self.sizes
        )
        _expect(codes, self.world.block)


class Checked(Bare):
    """The library, and a checksum of each block by the caller."""

    def put_call(self, at: int) -> None:
        self._checksums(self.world.source, at)
        super().put_call(at)

    def get_call(self, at: int) -> None:
        super().get_call(at)
        self._checksums(self.world.target, at)

    def _checksums(self, rows: Bytes, at: int) -> None:
        for i in range(at, at + self.batch):
            xxhash.xxh3_64_intdigest(rows[i].data)


class Ours(Arm):
    """The tier, on the threads of a store's mover, each batch cut as a store cuts it."""

    def __init__(self, world: _World, batch: int) -> None:
        super().__init__(world, batch)
        self.keys: list[bytes] = []
        limits = MoverConfig()
        most, even = int(limits.batch) // world.block, -(-batch // limits.threads)
        self.part = max(1, min(most, even))

    def renew(self) -> None:
        self.keys = random_keys(self.world.blocks)

    def put_call(self, at: int) -> None:
        self._move(None, 0, at, self.world.source)

    def get_call(self, at: int) -> None:
        self._move(0, None, at, self.world.target)

    def _move(self, src: int | None, dst: int | None, at: int, rows: Bytes) -> None:
        numbers, keys = list(range(at, at + self.batch)), self.keys[at : at + self.batch]
        move = Move(src, dst, keys, [1] * self.batch, numbers, numbers, numbers)
        views = RevocableViews(rows[at : at + self.batch])
        transfer = Transfer(move, [self.world.tier], views, self.part, lambda _: None)
        if not self.world.mover.start(transfer, self.world.block, load=dst is None):
            raise RuntimeError("the mover refuses")
        _expect(transfer.expire(TIMEOUT), Outcome.OK)


def _expect(found: Sequence[object], wanted: object) -> None:
    if any(one != wanted for one in found):
        raise RuntimeError(f"{wanted} expected: {found}")


def _names(blocks: int) -> list[str]:
    return [f"bare/{key.hex()}" for key in random_keys(blocks)]


def _await(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the pool is not complete after {TIMEOUT:g} s")
        time.sleep(0.02)
