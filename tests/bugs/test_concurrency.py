"""A17-A20: what readers, evictors and owners of buffers do to each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
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
    dram,
    eventually_stored,
    get,
    nvme,
    opened,
    put,
    tier,
    tiers,
)
from tieredkv import TieredKVStore
from tieredkv.testing import Gate, ManualClock


def race(*works: Callable[[], None]) -> list[BaseException]:
    """Run all at once; what they raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        try:
            start.wait(10)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return errors


@pytest.mark.parametrize("kind", ["hbm", "dram", "nvme", "dram+nvme"])
@pytest.mark.parametrize("how", ["delete", "clear", "evict"])
def test_A17_readers_meet_an_evictor(kind: str, how: str, tmp_path: Path) -> None:
    keys = chain(8)
    specs = tiers(kind, tmp_path)
    specs[0]["capacity"] = (1 << 19) if specs[0]["kind"] == "nvme" else 12 * SIZE
    outcomes = set()

    with opened(*specs, mover={"room_wait": 0.001}) as store:

        def read() -> None:
            for _ in range(40):
                outcomes.update(get(store, keys))
                assert store.lookup(keys).blocks in range(9)

        def evict() -> None:
            for seed in range(1, 30):
                put(store, keys)
                if how == "delete":
                    store.delete(keys[seed % 8 : seed % 8 + 1])
                elif how == "clear":
                    store.clear(store.config.tiers[seed % len(specs)].label)
                else:
                    put(store, chain(8, seed))

        assert race(read, read, read, evict) == []
        assert outcomes <= {OK, MISSING, BUSY}
        assert eventually_stored(store, keys)
        assert get(store, keys) == [OK] * 8
        assert store.flush(10)
        stats = store.stats()
        assert stats.corrupt_blocks == 0
        assert stats.hit_tokens <= stats.query_tokens
        found = stats.tiers[0]
        assert found.used_bytes == found.blocks * SIZE <= found.capacity_bytes


@pytest.mark.parametrize("kind", ["dram", "nvme"])
@pytest.mark.parametrize("how", ["delete", "clear", "evict"])
def test_A17_a_slot_that_is_being_read_is_not_given_away(
    kind: str, how: str, tmp_path: Path
) -> None:
    keys, wrap, gate = chain(2), Faulty(), Gate(op="read", timeout=30)
    spec = dram(4) if kind == "dram" else nvme(tmp_path)
    with opened(spec, wrap=wrap, mover={"room_wait": 0.01}) as store:
        assert put(store, keys) == [OK] * 2
        wrap.tiers[kind].inline = False
        wrap.tiers[kind].hang = gate
        out = np.zeros((2, SIZE), np.uint8)
        reading = store.get_async(keys, out)
        assert gate.wait_entered()
        if how == "delete":
            assert store.delete(keys) == 2
        elif how == "clear":
            assert store.clear() == 2
        for seed in range(1, 4):
            put(store, chain(2, seed))
        gate.release()
        assert reading.result(10) == [OK] * 2
        assert [bytes(row) for row in out] == blocks_of(keys)


def test_A18_forgotten_pins_expire() -> None:
    clock, keys = ManualClock(1000.0), chain(4)
    with opened(dram(4), clock=clock) as store:
        assert put(store, keys) == [OK] * 4
        for n in range(10_000):
            store.lookup(keys)
            store.pin(keys[: 1 + n % 4], ttl=10.0)
        assert store.stats().pins == 10_000
        assert store.stats().pinned_bytes == 4 * SIZE
        assert put(store, chain(4, seed=1)) == [BUSY] * 4
        clock.advance(11.0)
        assert put(store, chain(4, seed=1)) == [OK] * 4
        assert (store.stats().pins, store.stats().pinned_bytes) == (0, 0)


def test_A18_pins_end_with_their_block_and_lookups_pin_nothing(tmp_path: Path) -> None:
    keys = chain(4)
    with opened(dram(4), nvme(tmp_path), mover={"room_wait": 10}) as store:
        assert put(store, keys) == [OK] * 4
        for _ in range(1000):
            store.lookup(keys)
            store.contains(keys[3])
            get(store, keys[:2])
            with store.pin(keys) as pin:
                assert pin.blocks == 4
                get(store, keys[:2])
            pin.release()
        assert (store.stats().pins, store.stats().pinned_bytes) == (0, 0)
        with pytest.raises(RuntimeError), store.pin(keys):
            raise RuntimeError("the engine died")
        assert store.stats().pinned_bytes == 0
        pin = store.pin(keys)
        store.delete(keys)
        assert store.stats().pinned_bytes == 0
        assert put(store, keys) == [OK] * 4
        pin.release()
        assert (store.stats().pins, store.stats().pinned_bytes) == (0, 0)


@pytest.mark.parametrize("kind", ["hbm", "dram", "nvme", "dram+nvme"])
def test_A19_a_hit_that_went_before_the_load_is_reported_exactly(kind: str, tmp_path: Path) -> None:
    keys = chain(10)
    with opened(*tiers(kind, tmp_path)) as store:
        assert put(store, keys) == [OK] * 10
        assert store.lookup(keys).blocks == 10
        store.delete(keys[4:5])
        assert get(store, keys) == [OK] * 4 + [MISSING] * 6
        assert get(store, keys, start=3) == [OK] + [MISSING] * 6
        assert get(store, keys, start=4) == [MISSING] * 6
        assert store.lookup(keys).blocks == 4
        out = np.full((10, SIZE), 0xAA, np.uint8)
        assert store.get_async(keys, out).result(10) == [OK] * 4 + [MISSING] * 6
        assert (out[4:] == 0xAA).all()
        assert put(store, keys, start=4) == [OK] * 6
        assert get(store, keys) == [OK] * 10


def test_A19_a_hit_that_was_evicted_is_reported_exactly() -> None:
    keys = chain(10)
    with opened(dram(10)) as store:
        assert put(store, keys) == [OK] * 10
        assert store.lookup(keys).blocks == 10
        assert put(store, chain(6, seed=1)) == [OK] * 6
        assert get(store, keys) == [OK] * 4 + [MISSING] * 6


@pytest.mark.parametrize("kind", ["hbm", "dram", "nvme", "dram+nvme"])
@pytest.mark.parametrize("how", ["put", "put_async"])
def test_A20_the_buffer_is_the_callers_again_when_the_call_is_done(
    kind: str, how: str, tmp_path: Path
) -> None:
    keys, wrap = chain(4), Faulty()
    with opened(*tiers(kind, tmp_path), wrap=wrap, block_bytes=SIZE) as store:
        for faulty in wrap.tiers.values():
            faulty.latency = 0.02
        buffer = np.stack([np.frombuffer(block, np.uint8) for block in blocks_of(keys)])
        if how == "put":
            assert store.put(keys, buffer) == [OK] * 4
        else:
            assert store.put_async(keys, buffer).result(10) == [OK] * 4
        buffer[:] = 0xEE
        assert get(store, keys) == [OK] * 4
        assert store.flush(10)
        buffer[:] = 0xDD
        if kind == "dram+nvme":
            store.clear("dram")
        assert get(store, keys) == [OK] * 4


@pytest.mark.parametrize("kind", ["dram", "nvme"])
def test_A20_a_put_that_was_given_up_stores_nothing_later(kind: str, tmp_path: Path) -> None:
    keys, wrap, gate = chain(4), Faulty(), Gate(op="write")
    specs = tiers(kind, tmp_path)
    with opened(*specs, wrap=wrap, block_bytes=SIZE, mover={"put_deadline": 0.05}) as store:
        wrap.tiers[kind].inline = False
        wrap.tiers[kind].hang = gate
        buffer = np.stack([np.frombuffer(block, np.uint8) for block in blocks_of(keys)])
        assert store.put(keys, buffer) == [BUSY] * 4
        buffer[:] = 0xEE  # preempted: the memory belongs to another request now
        gate.release()
        limit = time.monotonic() + 10
        while store.stats().quarantined_transfers and time.monotonic() < limit:
            time.sleep(0.005)
        assert set(get(store, keys)) <= {MISSING, OK, FAILED}
        assert tier(store.stats(), kind).used_bytes == store.stats().blocks * SIZE


def test_A20_the_key_list_may_grow_while_the_put_runs() -> None:
    keys, wrap, gate = chain(6), Faulty(), Gate(op="write")
    with opened(dram(8), wrap=wrap, block_bytes=SIZE) as store:
        wrap.tiers["dram"].inline = False
        wrap.tiers["dram"].hang = gate
        blockers = [store.put_async(chain(1, n), blocks_of(chain(1, n))) for n in (1, 2)]
        assert gate.wait_entered(2)
        growing = keys[:2]
        queued = store.put_async(growing, blocks_of(keys[:2]))
        growing += keys[2:]  # the next turn
        gate.release()
        assert queued.result(10) == [OK] * 2
        assert [blocker.result(10) for blocker in blockers] == [[OK]] * 2
        assert get(store, keys) == [OK] * 2 + [MISSING] * 4


def test_A20_the_documentation_says_who_owns_the_buffer() -> None:
    for method, promise in (
        (TieredKVStore.put, "the buffers are the caller's again"),
        (TieredKVStore.put_async, "owns the buffers until the future is done"),
        (TieredKVStore.get, "do not reuse them before"),
        (TieredKVStore.get_async, "is the store's until the future is done"),
    ):
        assert promise in " ".join((method.__doc__ or "").split())
