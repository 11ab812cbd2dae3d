"""Host memory: the contract, its limits, sharing of copies, and what a kill leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tieredkv.errors import BlockSizeError, CapacityError, ConfigError, UsageError
from tieredkv.testing import TierSuite
from tieredkv.tiers.base import Tier
from tieredkv.tiers.dram import DramTier
from tieredkv.tiers.slab import CopyPool, runs
from tieredkv.types import Batch, Outcome

MIB = 1 << 20


class TestDram(TierSuite):
    def make(self, tmp_path: Path) -> Tier:
        return DramTier("dram", self.blocks * self.block_bytes, self.block_bytes)


class TestDramOfOddBlocks(TestDram):
    block_bytes = 4095


class TestDramOfLargeUnalignedBlocks(TestDram):
    block_bytes = 256 * 1024 + 24


class TestDramWithSharedCopies(TestDram):
    block_bytes = MIB


@pytest.fixture
def tier() -> Iterator[DramTier]:
    tier = DramTier("dram", 16 * 4096, 4096)
    yield tier
    tier.close()


def batch(*slots: int) -> Batch:
    return Batch(slots, [b"k"] * len(slots), [1] * len(slots))


@pytest.mark.parametrize(
    ("capacity", "block_bytes", "slots"),
    [(4096, 4096, 1), (8191, 4096, 1), (100, 10, 10), (3 * 100_000, 100_000, 3)],
)
def test_capacity_is_payload(capacity: int, block_bytes: int, slots: int) -> None:
    tier = DramTier("dram", capacity, block_bytes)
    assert tier.slots == slots
    tier.close()


def test_less_than_one_block_is_refused() -> None:
    with pytest.raises(CapacityError, match="4095 is less than one block of 4096"):
        DramTier("dram", 4095, 4096)
    with pytest.raises(ConfigError, match="block_bytes 0"):
        DramTier("dram", 4095, 0)


@pytest.mark.parametrize("capacity", [1 << 60, 1 << 80])
def test_memory_that_cannot_be_had(capacity: int) -> None:
    with pytest.raises(ConfigError, match="lower the capacity"):
        DramTier("dram", capacity, 4096)


@pytest.mark.parametrize("block_bytes", [65536, 131072 + 8, MIB])
def test_large_slots_are_aligned_for_direct_io(block_bytes: int) -> None:
    tier = DramTier("dram", 4 * block_bytes, block_bytes)
    views = tier.views(range(4))
    assert views is not None
    assert all(np.frombuffer(v, np.uint8).ctypes.data % 4096 == 0 for v in views)
    del views
    tier.close()


def test_misuse_does_not_touch_a_neighbour(tier: DramTier) -> None:
    block = np.ones((1, 4096), np.uint8)
    for slots in ((16,), (-1,), (0, 1)):
        with pytest.raises(UsageError):
            tier.write(batch(*slots), block)
    for wrong in ([block[0, :1]], [block[0, :4095]], np.ones((1, 4095), np.uint8)):
        with pytest.raises(BlockSizeError):
            tier.write(batch(3), wrong)
    out = np.empty((16, 4096), np.uint8)
    tier.read(batch(*range(16)), out)
    assert not out.any()


def test_views_outlive_close(tier: DramTier) -> None:
    tier.write(batch(2), np.full((1, 4096), 9, np.uint8))
    views = tier.views([2])
    assert views is not None
    tier.close()
    assert views[0].tobytes() == b"\x09" * 4096


def test_close_gives_the_memory_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    tier = DramTier("dram", 64 * MIB, MIB)
    assert tier.wait_ready(30)
    assert resident() - before > 60 * MIB
    tier.close()
    assert resident() - before < 8 * MIB


def test_prefault_changes_no_content() -> None:
    tier = DramTier("dram", 64 * MIB, MIB)
    sources = np.random.default_rng(1).integers(0, 256, (64, MIB), np.uint8)
    tier.write(batch(*range(64)), sources)  # while the slab is being pre-faulted
    assert tier.wait_ready(30)
    out = np.empty_like(sources)
    tier.read(batch(*range(64)), out)
    assert (out == sources).all()
    tier.close()


def test_copies_release_the_gil() -> None:
    tier = DramTier("dram", 64 * MIB, 64 * MIB, copy_threads=1)
    assert tier.wait_ready(30)
    block = np.ones((1, 64 * MIB), np.uint8)
    stop = threading.Event()

    def copy() -> None:
        while not stop.is_set():
            tier.write(batch(0), block)
            tier.read(batch(0), [memoryview(block[0])])

    thread = threading.Thread(target=copy)
    thread.start()
    waits = []
    try:
        for _ in range(50):
            begin = time.perf_counter()
            time.sleep(0.0001)
            waits.append(time.perf_counter() - begin)
    finally:
        stop.set()
        thread.join(30)
        tier.close()
    assert sorted(waits)[25] < 0.004  # one copy takes ~8 ms: under the GIL so would each sleep


class TestCopyPool:
    ROWS = np.zeros((64, MIB), np.uint8)

    @pytest.fixture
    def pool(self) -> Iterator[CopyPool]:
        pool = CopyPool(4, "test-copy")
        yield pool
        pool.close()

    def run(self, pool: CopyPool, copy: Callable[..., None], count: int = 64) -> None:
        pool.run(copy, self.ROWS, range(count), self.ROWS[:count])

    def test_covers_every_block_once(self, pool: CopyPool) -> None:
        seen: list[int] = []

        def copy(rows: Any, slots: Any, buffers: Any, first: int, last: int) -> None:
            seen.extend(range(first, last))

        for count in (1, 7, 8, 63, 64):
            seen.clear()
            self.run(pool, copy, count)
            assert sorted(seen) == list(range(count))

    @pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: nothing to share")
    def test_uses_another_thread_for_large_batches_only(self, pool: CopyPool) -> None:
        threads: set[int] = set()

        def copy(rows: Any, slots: Any, buffers: Any, first: int, last: int) -> None:
            threads.add(threading.get_ident())
            time.sleep(0.005)

        self.run(pool, copy, 7)
        assert threads == {threading.get_ident()}
        self.run(pool, copy, 64)
        assert len(threads) > 1

    def test_waits_for_pieces_of_helpers(self, pool: CopyPool) -> None:
        done: list[int] = []

        def copy(rows: Any, slots: Any, buffers: Any, first: int, last: int) -> None:
            if threading.current_thread() is not threading.main_thread():
                time.sleep(0.05)
            done.append(first)

        self.run(pool, copy)
        assert sorted(done) == list(range(64))

    def test_raises_what_a_copy_raised(self, pool: CopyPool) -> None:
        def copy(rows: Any, slots: Any, buffers: Any, first: int, last: int) -> None:
            raise ValueError("released")

        with pytest.raises(ValueError, match="released"):
            self.run(pool, copy)


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([], []),
        ([4], [(0, 4, 1)]),
        ([4, 5, 6], [(0, 4, 3)]),
        ([6, 5, 4], [(0, 6, 1), (1, 5, 1), (2, 4, 1)]),
        ([1, 2, 9, 10, 3], [(0, 1, 2), (2, 9, 2), (4, 3, 1)]),
    ],
)
def test_runs(slots: list[int], expected: list[tuple[int, int, int]]) -> None:
    assert list(runs(slots, 0, len(slots))) == expected


def test_a_kill_leaves_nothing_behind() -> None:
    """A27: no shared-memory file of the pool's size stays."""
    before = set(os.listdir("/dev/shm"))
    code = (
        "import sys, time; from tieredkv.tiers.dram import DramTier\n"
        "t = DramTier('dram', 64 << 20, 1 << 20); t.wait_ready(30)\n"
        "print('ready', 'torch' in sys.modules, flush=True); time.sleep(60)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready False\n"
        assert set(os.listdir("/dev/shm")) == before
        child.send_signal(signal.SIGKILL)
        child.wait(30)
    assert set(os.listdir("/dev/shm")) == before


def test_bytes_are_checked_end_to_end_under_threads() -> None:
    """Large shared batches from several threads at once, on slots of their own."""
    tier = DramTier("dram", 64 * MIB, MIB, copy_threads=4)
    errors: list[str] = []

    def work(first: int) -> None:
        slots = list(range(first, 64, 4))
        for generation in range(4):
            source = np.full((16, MIB), first * 10 + generation, np.uint8)
            out = np.zeros_like(source)
            if tier.write(batch(*slots), source) != [Outcome.OK] * 16:
                errors.append("write")
            tier.read(batch(*slots), list(out))
            if not (out == source).all():
                errors.append(f"{first}/{generation}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    tier.close()
    assert errors == []


def test_pinning_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[int] = []

    def lock(address: int, nbytes: int, device: object) -> bool:
        locked.append(address)
        return True

    monkeypatch.setattr("tieredkv.tiers.slab.Slab.prefault", lambda self, stop: stop.wait(20))
    monkeypatch.setattr("tieredkv.tiers.dram.cuda_present", lambda: True)
    monkeypatch.setattr("tieredkv.tiers.dram.page_lock", lock)
    monkeypatch.setattr("tieredkv.tiers.dram.page_unlock", lambda address, device: None)
    tier = DramTier("dram", 16 * 4096, 4096)
    assert not tier.wait_ready(0.05)
    tier.give_up_pinning()
    assert tier.wait_ready(20)
    assert not locked
    assert not tier.pinned
    tier.close()
    monkeypatch.setattr("tieredkv.tiers.slab.Slab.prefault", lambda self, stop: None)
    tier = DramTier("dram", 16 * 4096, 4096)
    assert tier.wait_ready(20)
    assert tier.pinned
    assert len(locked) == 1
    tier.close()
