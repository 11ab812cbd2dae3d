"""Copies between an engine's blocks and chunks: by the CPU, and on streams that run late.

The late ones are of a device in host memory on which nothing happens before it must: bytes that
are read before the event behind their copy come out wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from tieredkv.connector.paged import PagedBlocks, PagedCache
from tieredkv.device import Way
from tieredkv.errors import BlockSizeError, ConfigError, UsageError
from tieredkv.staging import NoStaging, Ring, Staging
from tieredkv.testing import LateDevice, LatencyTier
from tieredkv.testing.devices import LateEvent
from tieredkv.tiers.dram import DramTier
from tieredkv.tiers.hbm import HbmTier
from tieredkv.transfer import Transfer
from tieredkv.types import Batch, Move, Outcome

OK, BUSY, FAILED = Outcome.OK, Outcome.BUSY, Outcome.FAILED
CUDA = torch.cuda.is_available()
BLOCKS, PER_CHUNK = 12, 3


def apart(device: str) -> list[torch.Tensor]:
    """Two layers, each with keys and values apart: four segments."""
    return [torch.zeros(2, BLOCKS, 4, 8, device=device) for _ in range(2)]


def packed(device: str) -> list[torch.Tensor]:
    """Layers side by side in every block: one segment, blocks next to each other."""
    memory = torch.zeros(BLOCKS, 3, 40, dtype=torch.uint8, device=device)
    return [memory[:, i] for i in range(3)]


def padded(device: str) -> list[torch.Tensor]:
    """One segment whose blocks have something else between them."""
    memory = torch.zeros(BLOCKS, 3, 40, dtype=torch.uint8, device=device)
    return [memory[:, i] for i in range(2)]


def odd(device: str) -> list[torch.Tensor]:
    """Rows that no wide item divides."""
    return [torch.zeros(BLOCKS, n, dtype=torch.uint8, device=device) for n in (7, 13)]


def inferred(device: str) -> list[torch.Tensor]:
    """Made where only inference may change them, as some engines do."""
    with torch.inference_mode():
        return apart(device)


LAYOUTS = [apart, packed, padded, odd, inferred]
PLACES = [
    "host",
    "late",
    pytest.param("cuda", marks=pytest.mark.skipif(not CUDA, reason="no CUDA device")),
]


class World:
    """KV tensors with random content, and what reads and writes them."""

    def __init__(self, layout: Callable[[str], list[torch.Tensor]], place: str) -> None:
        self.tensors = layout("cuda" if place == "cuda" else "cpu")
        self.device = LateDevice() if place == "late" else None
        self.cache = self.make(self.device)
        with torch.inference_mode():
            drawn = torch.Generator().manual_seed(3)
            for tensor in self.tensors:
                bits = torch.randint(0, 100, tensor.shape, generator=drawn)
                tensor.copy_(bits.to(tensor.dtype))

    def make(self, device: Any) -> PagedCache:
        cache = PagedCache(self.tensors, BLOCKS, PER_CHUNK, batch=2 * 4096, users=4, streams=device)
        if cache.on_device:
            cache.staging.add_device(cache.device)  # as for a drive that takes memory of it
        return cache

    def block(self, number: int) -> list[torch.Tensor]:
        """Every tensor's part of an engine block."""
        return [t[:, number] if t.shape[0] == 2 else t[number] for t in self.tensors]

    def content(self) -> list[list[torch.Tensor]]:
        return [[part.clone() for part in self.block(i)] for i in range(BLOCKS)]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=LAYOUTS, ids=lambda layout: layout.__name__)
def world(request: pytest.FixtureRequest, place: str) -> Iterator[World]:
    world = World(request.param, place)
    yield world
    if world.device is not None:
        world.device.close()


def rows(world: World, count: int) -> Any:
    return np.zeros((count, world.cache.chunk_bytes), np.uint8)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def batch(*slots: int) -> Batch:
    return Batch(list(slots), [b""] * len(slots), [0] * len(slots))


def flat(chunks: list[list[int]]) -> list[int]:
    return [block for chunk in chunks for block in chunk]


SOURCE = [[5, 0, 3], [9, 10, 11], [8, 7, 2]]


@pytest.mark.parametrize(
    "wanted",
    [[1, 4, 6], [-1, 4, 6], [1, 4, -1], [-1, 4, -1], [-1, -1, -1]],
    ids=lambda wanted: str(wanted),
)
def test_chunks_come_back_into_other_blocks_and_nothing_else_changes(
    world: World, wanted: list[int]
) -> None:
    """A22: blocks that are not wanted are left alone at both ends."""
    chunks = rows(world, 3)
    world.cache.gather(SOURCE, chunks)
    before = world.content()
    world.cache.scatter([wanted, SOURCE[0], SOURCE[2]], chunks[[0, 1, 2]], world.cache.fence())
    after = world.content()
    came = dict(zip(wanted + SOURCE[0] + SOURCE[2], flat(SOURCE), strict=True))
    for block in range(BLOCKS):
        assert same(after[block], before[came.get(block, block)]), block


def test_lists_of_views_and_memory_of_the_device_do_as_well(world: World, place: str) -> None:
    chunks = rows(world, 3)
    world.cache.gather(SOURCE, [memoryview(row) for row in chunks])
    expected = chunks.copy()
    if place != "host":
        with world.cache.staging.take(2, device=True) as staged:
            world.cache.gather(SOURCE[:2], staged)
            world.cache.scatter([[5, 0, 3], [1, 4, 6]], [staged[1], staged[0]])
    else:
        world.cache.scatter([[5, 0, 3], [1, 4, 6]], [chunks[1], chunks[0]])
    chunks[:] = 0
    world.cache.gather([[1, 4, 6], [5, 0, 3], SOURCE[2]], chunks)
    assert (chunks == expected).all()


def test_many_threads_have_staging_of_their_own(world: World) -> None:
    expected = rows(world, 3)
    world.cache.gather(SOURCE, expected)

    def read(first: int) -> bool:
        order = [(first + i) % 3 for i in range(3)]
        chunks = rows(world, 3)
        world.cache.gather([SOURCE[i] for i in order], chunks)
        return bool((chunks == expected[order]).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(24)))


@pytest.mark.parametrize("layout", [apart, packed])
class TestLate:
    """On a device on which everything happens late."""

    @pytest.fixture
    def world(self, layout: Callable[[str], list[torch.Tensor]]) -> Iterator[World]:
        world = World(layout, "late")
        yield world
        assert world.device is not None
        world.device.close()

    def test_saves_wait_for_what_the_engine_computes(self, world: World) -> None:
        device, late = world.device, rows(world, 1)
        assert device is not None

        def compute() -> None:
            for tensor in world.tensors:
                tensor.fill_(77)

        early = rows(world, 1)
        device.compute.delay = 0.1
        device.compute.queue(compute)
        world.cache.gather([[1, 2, 3]], early)
        fence = world.cache.fence()
        assert fence is not None
        assert not fence.query()
        world.cache.gather([[1, 2, 3]], late, fence)
        expected = rows(world, 1)
        world.cache.gather([[1, 2, 3]], expected)
        assert (late == expected).all()
        assert (early != expected).any()  # or the fence would prove nothing

    def test_loads_wait_for_what_the_engine_still_reads(self, world: World) -> None:
        device = world.device
        assert device is not None
        seen: list[torch.Tensor] = []
        before = world.content()[4]
        chunks = rows(world, 1)
        device.compute.delay = 0.1
        device.compute.queue(lambda: seen.extend(part.clone() for part in world.block(4)))
        world.cache.scatter([[4, 5, 6]], chunks, world.cache.fence())
        assert same(seen, before)
        assert not any(part.any() for part in world.block(4))

    @pytest.mark.parametrize("way", ["out", "in"])
    def test_who_does_not_wait_is_found_out(self, world: World, way: str) -> None:
        """The same copies, on a device whose events say that they have passed at once."""
        assert world.device is not None
        hasty = world.make(Hasty(world.device))
        world.device.slow_down(0.1)
        chunks = rows(world, 1)
        if way == "out":
            hasty.gather([[1, 2, 3]], chunks)
            found = chunks.copy()
            world.cache.gather([[1, 2, 3]], chunks)
            assert (found != chunks).any()
        else:
            hasty.scatter([[1, 2, 3]], chunks)
            found = world.content()[1]
            world.cache.scatter([[4, 5, 6]], chunks)
            assert not same(found, world.content()[1])

    def test_an_error_of_the_device_is_one_of_the_copy(self, world: World) -> None:
        assert world.device is not None
        hostile = world.make(Hostile(world.device))
        with pytest.raises(RuntimeError, match="on the device"):
            hostile.gather([[1, 2, 3]], rows(world, 1))
        transfer = job(world, PagedBlocks(hostile, [[1, 2, 3]], None), [[0]], save=True)
        assert transfer.write == [FAILED]


class Hasty:
    """A device whose events have always passed."""

    def __init__(self, inner: LateDevice) -> None:
        self.inner = inner

    def mark(self) -> LateEvent:
        return self._passed()

    def run(self, way: Way, work: Callable[[], object]) -> LateEvent:
        self.inner.run(way, work)
        return self._passed()

    def drain(self, way: Way) -> None:
        return

    def _passed(self) -> LateEvent:
        event = LateEvent()
        event.set()
        return event


class Hostile(Hasty):
    """A device that fails."""

    def run(self, way: Way, work: Callable[[], object]) -> LateEvent:
        def fail() -> None:
            raise ValueError("an illegal memory access")

        return self.inner.run(way, fail)


# -- as a tier ------------------------------------------------------------------------------


def job(
    world: World, blocks: PagedBlocks, chunks: list[list[int]], *, save: bool, tier: Any = None
) -> Transfer:
    """Run a move between engine blocks and a tier."""
    size, n = world.cache.chunk_bytes, blocks.slots
    tier = tier or DramTier("dram", 8 * size, size)
    keys, slots = [bytes([i]) * 32 for i in range(n)], list(range(n))
    src, dst = (1, 0) if save else (0, 1)
    move = Move(src, dst, keys, [1] * n, slots, slots, slots)
    cache = world.cache
    transfer = Transfer(move, [tier, blocks], None, cache.part, lambda _: None, cache.staging)
    transfer.run_all()
    return transfer


@pytest.mark.parametrize("kind", ["dram", "memory of the device", "slow memory of the device"])
def test_moves_through_the_memory_that_fits(world: World, kind: str) -> None:
    """Between engine blocks and host memory; between two on a device without the host's."""
    size = world.cache.chunk_bytes
    on_device = "device" in kind and world.cache.on_device
    where = "cuda" if world.tensors[0].is_cuda else "cpu"
    tier: Any = (
        HbmTier("hbm", 8 * size, size, where, world.device)
        if on_device
        else DramTier("dram", 8 * size, size)
    )
    tier = LatencyTier(tier) if "slow" in kind else tier  # it lends no memory
    taken: list[bool] = []
    take = world.cache.staging.take

    def watched(count: int, *, device: bool = False) -> Any:
        taken.append(device)
        return take(count, device=device)

    world.cache.staging.take = watched  # type: ignore[method-assign]
    before = world.content()
    saved = job(world, PagedBlocks(world.cache, SOURCE, None), SOURCE, save=True, tier=tier)
    assert (saved.read, saved.write) == ([OK] * 3, [OK] * 3)
    goal = [[0, 1, 2], [3, 4, -1], [6, 7, 8]]
    fence = world.cache.fence()
    loaded = job(world, PagedBlocks(world.cache, goal, fence), goal, save=False, tier=tier)
    assert (loaded.read, loaded.write) == ([OK] * 3, [OK] * 3)
    after = world.content()
    came = dict(zip(flat(goal), flat(SOURCE), strict=True))
    for block in range(BLOCKS):
        assert same(after[block], before[came.get(block, block)]), block
    if "slow" in kind:
        assert taken
        assert (False not in taken) == on_device
    tier.close()


def test_no_copy_begins_after_blocks_were_taken_away(world: World) -> None:
    blocks = PagedBlocks(world.cache, [[1, 2, 4]], None)
    before = world.content()
    assert blocks.revoke()
    chunk = [np.full(world.cache.chunk_bytes, 7, np.uint8)]
    assert blocks.write(batch(0), chunk) == [BUSY]
    assert blocks.read(batch(0), chunk) == [BUSY]
    assert (chunk[0] == 7).all()
    assert all(same(a, b) for a, b in zip(before, world.content(), strict=True))


def test_blocks_are_not_given_up_under_a_copy(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = PagedBlocks(world.cache, [[1, 2, 4]], None)
    inside, go_on = threading.Event(), threading.Event()
    scatter = world.cache.scatter

    def slow(*args: Any) -> None:
        inside.set()
        assert go_on.wait(20)
        scatter(*args)

    monkeypatch.setattr(world.cache, "scatter", slow)
    found: list[Outcome] = []
    chunk = np.zeros(world.cache.chunk_bytes, np.uint8)
    thread = threading.Thread(target=lambda: found.extend(blocks.write(batch(0), [chunk])))
    thread.start()
    assert inside.wait(20)
    assert not blocks.revoke()
    go_on.set()
    thread.join(20)
    assert blocks.revoke()
    assert found == [OK]


def test_a_copy_that_raises_ends(world: World) -> None:
    blocks = PagedBlocks(world.cache, [[1, 2, 4]], None)
    with pytest.raises(BlockSizeError, match="3 bytes"):
        blocks.write(batch(0), [np.zeros(3, np.uint8)])
    assert blocks.revoke()


def test_tensors_that_are_not_understood_are_refused() -> None:
    def cache(tensor: torch.Tensor) -> None:
        PagedCache([tensor], 6, 1, batch=1, users=1)

    with pytest.raises(UsageError, match="no dimension of 6"):
        cache(torch.zeros(5, 4))
    with pytest.raises(UsageError, match="scatters"):
        cache(torch.zeros(6, 4, 8)[:, :, ::2])


@pytest.mark.parametrize("device", [False, True])
def test_staging_is_bounded_and_comes_back(monkeypatch: pytest.MonkeyPatch, device: bool) -> None:
    staging = Staging(4096, 2, 2)
    staging.add_device(torch.device("cpu"))
    memory = staging.memory
    staging.add_device(torch.device("cpu"))
    assert staging.memory is memory
    assert memory.shape == (4, 4096)

    def last_bytes() -> list[int]:
        with staging.take(2, device=device) as rows:
            return [int(row[-1]) for row in rows]

    with ExitStack() as first, ExitStack() as second, ThreadPoolExecutor(1) as pool:
        one = first.enter_context(staging.take(2, device=device))
        other = second.enter_context(staging.take(1, device=device))
        one[0][:], one[1][:], other[0][:] = 1, 2, 3
        assert [int(row[-1]) for row in (*one, *other)] == [1, 2, 3]
        monkeypatch.setattr("tieredkv.staging.WAIT", 0.01)
        with pytest.raises(NoStaging, match="all 2"):
            last_bytes()
        monkeypatch.setattr("tieredkv.staging.WAIT", 20.0)
        third = pool.submit(last_bytes)
        assert not wait([third], 0.05).done
        first.close()
        assert third.result(20) == [1, 2]
    with pytest.raises(NoStaging, match="3 blocks"), staging.take(3, device=device):
        pass
    staging.close()
    staging.close()
    assert staging.memory is None


def test_who_waits_for_a_buffer_may_make_one_when_another_could_not() -> None:
    begun, go_on = threading.Event(), threading.Event()
    made: list[str] = []

    def make() -> str:
        if not begun.is_set():
            begun.set()
            assert go_on.wait(20)
            raise ConfigError("no memory")
        made.append("one")
        return "one"

    def take() -> str:
        with ring.take() as item:
            return item

    ring = Ring(make, 1)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(take)
        assert begun.wait(20)
        second = pool.submit(take)
        assert not wait([second], 0.05).done
        go_on.set()
        with pytest.raises(NoStaging, match="no memory"):
            first.result(20)
        assert second.result(20) == "one"
    ring.fill()
    assert made == ["one"]


def test_without_staging_memory_nothing_is_lost(world: World) -> None:
    """It says nothing about the blocks, which a failed read would."""
    size = world.cache.chunk_bytes
    tier = LatencyTier(DramTier("dram", 8 * size, size))  # it lends no memory
    saved = job(world, PagedBlocks(world.cache, SOURCE, None), SOURCE, save=True, tier=tier)
    assert saved.write == [OK] * 3

    def none(count: int, *, device: bool = False) -> Any:
        raise NoStaging("all 2 staging buffers are in use")

    world.cache.staging.take = none  # type: ignore[method-assign]
    loaded = job(world, PagedBlocks(world.cache, SOURCE, None), SOURCE, save=False, tier=tier)
    assert (loaded.read, loaded.write) == ([BUSY] * 3, [BUSY] * 3)
    tier.close()


def test_a_device_without_room_for_staging_is_named() -> None:
    with pytest.raises(ConfigError, match=r"lower mover\.batch"):
        Staging(1 << 58, 2, 2).add_device(torch.device("cpu"))
