"""A25-A27: slow and hung tiers, and processes that die."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.bugs.world import (
    BUSY,
    MISSING,
    OK,
    SIZE,
    TOKENS,
    Faulty,
    blocks_of,
    chain,
    dram,
    eventually_stored,
    get,
    kill,
    line,
    nvme,
    opened,
    process,
    put,
)
from tieredkv import DirectoryInUse, Outcome
from tieredkv.testing import Fault, Gate

QUEUE = 32 * SIZE


def test_A25_stores_to_a_slow_tier_are_bounded_and_loads_are_not_delayed(tmp_path: Path) -> None:
    wrap, hot = Faulty(), chain(4, seed=1000)
    limits = {"store_queue": QUEUE, "room_wait": 0.01}
    with opened(dram(64), nvme(tmp_path), wrap=wrap, block_bytes=SIZE, mover=limits) as store:
        wrap.tiers["nvme"].latency = 0.05
        slowest, queued = 0.0, 0
        outcomes: list[Outcome] = []
        with store.pin(hot) as empty:
            assert empty.blocks == 0
        assert put(store, hot) == [OK] * 4
        with store.pin(hot):
            for seed in range(500):
                outcomes += put(store, chain(4, seed))
                queued = max(queued, store.stats().queued_store_bytes)
                if seed % 10 == 0:
                    began = time.monotonic()
                    assert get(store, hot) == [OK] * 4
                    slowest = max(slowest, time.monotonic() - began)
        stats = store.stats()
        assert 0 < queued <= QUEUE
        assert slowest < 0.5, "a load waited for stores"
        lost = outcomes.count(BUSY)
        assert outcomes.count(OK) + lost + outcomes.count(MISSING) == 2000
        assert stats.dropped_tokens == lost * TOKENS
        assert stats.stored_tokens == (outcomes.count(OK) + 4) * TOKENS
        assert lost + stats.forgotten_blocks > 1000
        assert stats.blocks + stats.forgotten_blocks == outcomes.count(OK) + 4


def test_A25_background_stores_leave_threads_for_loads(tmp_path: Path) -> None:
    cold, wrap, gate = chain(2, seed=1000), Faulty(), Gate(op="write")
    with opened(dram(16), nvme(tmp_path), wrap=wrap, mover={"room_wait": 0.01}) as store:
        assert put(store, cold) == [OK] * 2
        assert store.flush(10)
        store.clear("dram")
        wrap.tiers["nvme"].hang = gate
        for seed in range(50):  # more dirty blocks than threads
            put(store, chain(2, seed))
        assert gate.wait_entered()
        assert store.lookup(cold).tiers == ["nvme"] * 2
        began = time.monotonic()
        assert get(store, cold, deadline=20) == [OK] * 2
        assert time.monotonic() - began < 5
        gate.release()


def test_A25_async_puts_are_refused_at_once_when_the_queue_is_full(tmp_path: Path) -> None:
    wrap, gate = Faulty(), Gate(op="write")
    limits = {"store_queue": QUEUE}
    with opened(nvme(tmp_path), wrap=wrap, block_bytes=SIZE, mover=limits) as store:
        warm = chain(2, seed=1000)
        assert put(store, warm) == [OK] * 2
        wrap.tiers["nvme"].hang = gate
        futures: list[Future[list[Outcome]]] = []
        for seed in range(200):
            keys = chain(4, seed)
            futures.append(store.put_async(keys, blocks_of(keys)))
        refused = [f.result(0) for f in futures if f.done()]
        assert len(refused) >= 200 - 2 * QUEUE // (4 * SIZE)
        assert set(map(tuple, refused)) == {(BUSY,) * 4}
        gate.release()
        accepted = [f.result(10) for f in futures]
        assert [OK] * 4 in accepted
        assert get(store, warm) == [OK] * 2


@pytest.mark.parametrize("kind", ["dram", "nvme"])
def test_A26_a_first_put_that_hangs_makes_nobody_wait(kind: str, tmp_path: Path) -> None:
    keys, wrap = chain(6), Faulty()
    gate = Gate(op="write", when=keys[2:4])
    spec = dram(16) if kind == "dram" else nvme(tmp_path)
    limits = {"put_deadline": 0.3}
    with opened(spec, wrap=wrap, mover=limits) as store:
        assert put(store, keys[:2]) == [OK] * 2
        wrap.tiers[kind].inline = False
        wrap.tiers[kind].hang = gate
        hung = store.put_async(keys[:4], blocks_of(keys[2:4]), start=2)
        assert gate.wait_entered()
        began = time.monotonic()
        assert store.lookup(keys).blocks == 2
        assert not store.contains(keys[2])
        assert get(store, keys) == [OK] * 2 + [MISSING] * 4
        assert store.prefetch(keys).result(5) == 0
        with store.pin(keys) as pin:
            assert pin.blocks == 2
        assert time.monotonic() - began < 2, "somebody waited for the write"
        began = time.monotonic()
        assert put(store, keys[:4], start=2) == [BUSY] * 2
        later = put(store, keys, start=2)
        assert later[:2] == [BUSY] * 2
        assert OK not in later
        assert time.monotonic() - began < 5
        assert hung.result(5) == [BUSY] * 2
        gate.release()
        assert eventually_stored(store, keys, 2)
        assert get(store, keys) == [OK] * 6


def test_A26_a_write_back_that_hangs_hides_nothing(tmp_path: Path) -> None:
    keys, wrap, gate = chain(4), Faulty(), Gate(op="write")
    with opened(dram(16), nvme(tmp_path), wrap=wrap, block_bytes=SIZE) as store:
        wrap.tiers["nvme"].hang = gate
        assert put(store, keys) == [OK] * 4
        assert gate.wait_entered()
        began = time.monotonic()
        assert store.lookup(keys).tiers == ["dram"] * 4
        assert get(store, keys) == [OK] * 4
        assert not store.flush(0.1)
        assert time.monotonic() - began < 3
        gate.release()
        assert store.flush(10)


def test_A26_a_failed_first_put_is_told_to_those_who_joined() -> None:
    keys, wrap, gate = chain(2), Faulty(), Gate(op="write")
    with opened(dram(4), wrap=wrap, block_bytes=SIZE) as store:
        faulty = wrap.tiers["dram"]
        faulty.inline, faulty.hang, faulty.error = False, gate, Fault(op="write")
        first = store.put_async(keys, blocks_of(keys))
        assert gate.wait_entered()
        second = store.put_async(keys, blocks_of(keys))
        gate.release()
        assert OK not in first.result(10) + second.result(10)
        faulty.error = None
        assert put(store, keys) == [OK] * 2


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def test_A27_a_killed_store_leaves_no_pool_and_no_lock(tmp_path: Path) -> None:
    specs = [dram(4096), nvme(tmp_path)]
    code = (
        "import os\n"
        f"with w.opened(*{specs!r}) as s:\n"
        "    assert w.OK in w.put(s, w.chain(4)) and s.flush(10)\n"
        "    maps = open('/proc/self/maps').read()\n"
        "    print(sum(map(maps.count, ('/dev/shm', '/SYSV', '/memfd'))), flush=True)\n"
        "    input()"
    )
    for _ in range(3):
        child = process(code)
        try:
            assert line(child) == "0", "the pool is shared memory: somebody has to clean it up"
            with pytest.raises(DirectoryInUse, match=f"process {child.pid}"), opened(*specs):
                pass  # the lock of a living process is respected
            mine = {name for name in shared_memory() if str(child.pid) in name}
            assert mine == set()
        finally:
            kill(child)
    with opened(*specs) as store:  # that of a dead one is not
        assert get(store, chain(4)) == [OK] * 4
