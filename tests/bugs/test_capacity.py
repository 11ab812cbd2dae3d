"""A14-A16: limits hold, nothing is counted twice, a refused put leaves no trace."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.bugs.world import (
    BUSY,
    FAILED,
    MISSING,
    OK,
    SIZE,
    Faulty,
    blocks_of,
    chain,
    disk_usage,
    dram,
    eventually_stored,
    get,
    hbm,
    nvme,
    opened,
    put,
    resident,
    tier,
)
from tieredkv import BlockSizeError, CapacityError, Outcome, TieredKVStore
from tieredkv.testing import Fault, Gate
from tieredkv.tiers.nvme.segments import plan

LIMIT = 4 << 20
BIG = 1 << 16


def only(kind: str, blocks: int, root: Path) -> dict[str, Any]:
    """One tier with exactly so many slots."""
    if kind == "nvme":
        sizes = range(256 << 10, LIMIT, 512)
        capacity = next(n for n in sizes if plan(n, SIZE, 256 << 20, None).slots == blocks)
        return nvme(root, capacity)
    return hbm(blocks) if kind == "hbm" else dram(blocks)


class Watch:
    """Samples what a directory takes on disk, until the block ends."""

    def __init__(self, root: Path) -> None:
        self.root, self.most = root, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            self.most = max(self.most, disk_usage(self.root))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.most = max(self.most, disk_usage(self.root))


@pytest.mark.parametrize("memory", [0, 8])
def test_A14_the_directory_never_grows_past_its_limit(memory: int, tmp_path: Path) -> None:
    foreign = {
        tmp_path / "notes.txt": b"mine",
        tmp_path / ("f" * 64) / "seg-000000.kv": b"x" * 9000,
    }
    for path, data in foreign.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    before = disk_usage(tmp_path)
    specs = [*([dram(memory, BIG)] if memory else []), nvme(tmp_path, LIMIT, segment=1 << 20)]

    def work(store: TieredKVStore, first: int) -> None:
        for seed in range(first, first + 10):
            assert FAILED not in put(store, chain(8, seed), size=BIG)

    with Watch(tmp_path) as watch:
        for restart in range(3):
            with opened(*specs) as store:
                threads = [
                    threading.Thread(target=work, args=(store, 1000 * restart + 100 * n))
                    for n in range(4)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                assert store.flush(30)
    assert LIMIT // 2 < watch.most - before <= LIMIT
    assert {path: path.read_bytes() for path in foreign} == foreign
    with opened(*specs) as store:
        found = tier(store.stats(), "nvme")
        assert 0 < found.used_bytes <= found.capacity_bytes < LIMIT


@pytest.mark.parametrize("kind", ["hbm", "dram", "nvme"])
def test_A15_a_block_that_is_put_twice_counts_once(kind: str, tmp_path: Path) -> None:
    a, b = chain(1, seed=1), chain(1, seed=2)
    with opened(only(kind, 2, tmp_path)) as store:
        assert put(store, a) == put(store, a) == put(store, b) == [OK]
        found = tier(store.stats(), kind)
        assert (found.slots, found.blocks, found.used_bytes) == (2, 2, 2 * SIZE)
        assert get(store, a) == get(store, b) == [OK]
        assert found.evicted_blocks == 0


@pytest.mark.parametrize("kind", ["hbm", "dram", "nvme"])
def test_A15_puts_of_one_block_at_once_count_once(kind: str, tmp_path: Path) -> None:
    keys = chain(4)
    with opened(only(kind, 8, tmp_path)) as store:
        futures = [store.put_async(keys, blocks_of(keys)) for _ in range(16)]
        assert [future.result(10) for future in futures] == [[OK] * 4] * 16
        assert tier(store.stats(), kind).used_bytes == 4 * SIZE
        assert store.stats().blocks == 4


def test_A15_the_copy_in_every_tier_counts_once(tmp_path: Path) -> None:
    keys = chain(4)
    with opened(dram(8), nvme(tmp_path)) as store:
        for _ in range(3):
            assert put(store, keys) == [OK] * 4
            assert store.flush(10)
            store.clear("dram")
            assert store.prefetch(keys).result(10) == 4
        stats = store.stats()
        assert [t.used_bytes for t in stats.tiers] == [4 * SIZE] * 2
        assert stats.blocks == 4


@pytest.mark.parametrize("kind", ["hbm", "dram", "nvme"])
def test_A16_a_put_refused_for_pins_can_be_repeated(kind: str, tmp_path: Path) -> None:
    a, b, c = (chain(2, seed) for seed in range(3))
    with opened(only(kind, 4, tmp_path), mover={"room_wait": 0.01}) as store:
        assert put(store, a) == put(store, b) == [OK] * 2
        before = resident(store)
        with store.pin(a), store.pin(b):
            assert put(store, c) == [BUSY] * 2
            assert resident(store) == before
            assert store.lookup(c).blocks == 0
            assert get(store, c) == [MISSING] * 2
            assert store.check() == []
        assert put(store, c) == [OK] * 2
        assert get(store, c) == [OK] * 2
        assert tier(store.stats(), kind).used_bytes == 4 * SIZE


@pytest.mark.parametrize("cause", ["error", "hang"])
@pytest.mark.parametrize("kind", ["dram", "nvme"])
def test_A16_a_put_that_failed_can_be_repeated(kind: str, cause: str, tmp_path: Path) -> None:
    keys, wrap, gate = chain(4), Faulty(), Gate(op="write")
    spec = only(kind, 4, tmp_path)
    with opened(spec, wrap=wrap, block_bytes=SIZE, mover={"put_deadline": 0.1}) as store:
        faulty = wrap.tiers[kind]
        faulty.inline = False
        if cause == "hang":
            faulty.hang = gate
        else:
            faulty.error = Fault(op="write")
        assert put(store, keys) == [BUSY if cause == "hang" else FAILED] * 4
        assert store.lookup(keys).blocks == 0
        gate.release()
        faulty.error = None
        assert eventually_stored(store, keys)
        assert get(store, keys) == [OK] * 4
        assert tier(store.stats(), kind).used_bytes == 4 * SIZE


@pytest.mark.parametrize("kind", ["hbm", "dram", "nvme"])
def test_A16_a_block_larger_than_the_tier_evicts_nothing(kind: str, tmp_path: Path) -> None:
    a, big = chain(2), chain(1, seed=1)
    with opened(only(kind, 4, tmp_path)) as store:
        assert put(store, a) == [OK] * 2
        for _ in range(2):
            with pytest.raises(BlockSizeError, match="65536"):
                put(store, big, size=16 * SIZE)
        assert get(store, a) == [OK] * 2
        assert store.lookup(big).blocks == 0
        assert put(store, big) == [OK]


@pytest.mark.parametrize("kind", ["hbm", "dram", "nvme"])
def test_A16_a_first_block_larger_than_the_tier_binds_nobody(kind: str, tmp_path: Path) -> None:
    keys = chain(2)
    with opened(only(kind, 4, tmp_path)) as store:
        for _ in range(2):
            with pytest.raises(CapacityError):
                put(store, keys, size=1 << 20)
        assert put(store, keys) == [OK] * 2
        assert get(store, keys) == [OK] * 2


@pytest.mark.parametrize("kind", ["hbm", "dram", "nvme"])
def test_A16_a_chain_longer_than_the_tier_is_stored_from_its_root(
    kind: str, tmp_path: Path
) -> None:
    keys = chain(9)
    with opened(only(kind, 4, tmp_path), mover={"room_wait": 0.01}) as store:
        outcomes = put(store, keys)
        assert outcomes == [OK] * 4 + [BUSY] * 5
        assert get(store, keys) == [OK] * 4 + [MISSING] * 5
        assert put(store, keys, start=4) == [BUSY] * 5
        assert get(store, keys[:4]) == [OK] * 4
        assert put(store, keys, start=6) == [Outcome.MISSING] * 3
