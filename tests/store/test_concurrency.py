"""Many threads on overlapping chains: no wrong byte, no exception, nothing leaked."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from tests.store.world import (
    SIZE,
    Path_,
    Shape,
    chain,
    core_of,
    leaks,
    open_store,
    payload,
    settle,
)
from tieredkv import Config, Outcome, TieredKVStore
from tieredkv.errors import ClosedError
from tieredkv.executor import DaemonExecutor
from tieredkv.mover import Mover
from tieredkv.testing import Fault, FaultyTier, Gate, StepExecutor
from tieredkv.tiers.base import BlockBuffers, Tier
from tieredkv.types import Batch, Fingerprint

SECONDS = 10.0 if "TIEREDKV_CRASHES" in os.environ else 1.2
THREADS = 4
SHAPES = {
    "dram": Shape(dram=8),
    "hbm+dram": Shape(hbm=3, dram=6),
    "dram+nvme": Shape(dram=5, write="on_evict"),
    "slow dram+nvme": Shape(dram=5, write="on_evict", inline=False),
    "through": Shape(dram=5, write="through", policy="arc"),
    "all": Shape(hbm=3, dram=4, write="on_evict"),
    "nvme": Shape(write="through"),
}


def random_path(rng: random.Random) -> Path_:
    return tuple(rng.randrange(2) for _ in range(rng.randint(1, 7)))


class Crowd:
    """Threads that call at random; the first error ends all of them."""

    def __init__(self, store: TieredKVStore) -> None:
        self.store = store
        self.errors: list[BaseException] = []
        self.calls = self.good = 0

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        threads = [
            threading.Thread(target=self.work, args=(seed, until), daemon=True)
            for seed in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 60.0)
            assert not thread.is_alive(), "a call hangs"
        if self.errors:
            raise self.errors[0]

    def work(self, seed: int, until: float) -> None:
        rng = random.Random(seed)
        try:
            while time.monotonic() < until and not self.errors:
                self.call(rng)
                self.calls += 1
        except BaseException as error:
            self.errors.append(error)

    def call(self, rng: random.Random) -> None:
        keys = chain(random_path(rng))
        blocks = [payload(key) for key in keys]
        kind = rng.random()
        if kind < 0.35:
            self.store.put(keys, blocks, turn=rng.choice([None, "a", "b"]))
        elif kind < 0.45:
            outcomes = self.store.put_async(keys, blocks).result(60.0)
            assert len(outcomes) == len(keys)
        elif kind < 0.75:
            self.read(keys, rng)
        elif kind < 0.82:
            with self.store.pin(keys, 5.0) as pin:
                assert self.store.lookup(keys).blocks >= 0
                assert pin.blocks <= len(keys)
        elif kind < 0.88:
            assert 0 <= self.store.prefetch(keys).result(60.0) <= len(keys)
        elif kind < 0.94:
            self.store.delete(keys[-1:])
        elif kind < 0.96:
            self.store.session("a").finish()
        elif kind < 0.98:
            self.store.flush(10.0)
        else:
            names = [tier.name for tier in self.store.stats().tiers]
            self.store.clear(rng.choice([None, *names]))

    def read(self, keys: Sequence[bytes], rng: random.Random) -> None:
        buffer = bytearray(len(keys) * SIZE)
        if rng.random() < 0.3:
            outcomes = self.store.get_async(keys, buffer).result(60.0)
        else:
            outcomes = self.store.get(keys, buffer)
        for i, outcome in enumerate(outcomes):
            if outcome is Outcome.OK:
                self.good += 1
                assert buffer[i * SIZE : (i + 1) * SIZE] == payload(keys[i]), "wrong bytes"


@pytest.mark.parametrize("name", SHAPES)
def test_a_crowd(name: str, tmp_path: Path) -> None:
    store, _ = open_store(SHAPES[name], tmp_path, room_wait=0.05)
    crowd = Crowd(store)
    try:
        for _ in range(2):
            crowd.run(SECONDS / 2)
            settle(store)
            assert store.check() == []
        assert crowd.good > 20, f"{crowd.calls} calls, hardly a hit: it proves nothing"
        store.clear()
        settle(store)
        assert leaks(store) == []
        assert store.check() == []
        assert store.stats().corrupt_blocks == 0
    finally:
        assert store.close()


def test_a_crowd_on_a_failing_disk(tmp_path: Path) -> None:
    store, tiers = open_store(SHAPES["all"], tmp_path, room_wait=0.02)
    tiers["nvme"].error = Fault(lambda at: (at.call + at.slot) % 5 == 0)
    crowd = Crowd(store)
    crowd.run(SECONDS)
    tiers["nvme"].error = None
    settle(store)
    assert store.check() == []
    store.clear()
    settle(store)
    assert leaks(store) == []
    assert store.close()


# -- one block, put and got by two threads --------------------------------------------------


def test_a_second_put_joins_the_first(tmp_path: Path) -> None:
    store, tiers = open_store(Shape(dram=8, inline=False), tmp_path)
    gate = tiers["dram"].hang = Gate(op="write")
    keys = chain((0, 1))
    first = store.put_async(keys, [payload(key) for key in keys])
    assert gate.wait_entered()
    second = store.put_async(keys, [payload(key, 1) for key in keys])
    assert not store.contains(keys[0])
    assert store.get(keys, bytearray(2 * SIZE)) == [Outcome.MISSING] * 2
    gate.release()
    assert first.result(10.0) == second.result(10.0) == [Outcome.OK] * 2
    out = bytearray(2 * SIZE)
    assert store.get(keys, out) == [Outcome.OK] * 2
    assert out == b"".join(payload(key) for key in keys)
    assert store.close()


# -- buffers of operations that outlive their deadline ---------------------------------------


class HalfWay(FaultyTier):
    """Copies half of the first block, waits at the gate, and copies the rest."""

    gate: Gate

    def write(self, batch: Batch, sources: BlockBuffers) -> list[Outcome]:
        arrays = [np.frombuffer(source, np.uint8) for source in sources]
        halves = [array[: SIZE // 2].copy() for array in arrays]
        self.gate.hold()
        whole = [
            np.concatenate([half, array[SIZE // 2 :]]).data
            for half, array in zip(halves, arrays, strict=True)
        ]
        return self.inner.write(batch, whole)


def test_a_put_that_is_late_stores_no_mixture(tmp_path: Path) -> None:
    gate = Gate()

    def wrap(tier: Tier) -> Tier:
        slow = HalfWay(tier)
        slow.gate = gate
        return slow

    config = Shape(dram=4).config(tmp_path, put_deadline=0.05)
    with TieredKVStore(config, Fingerprint("m"), None, wrap) as store:
        keys = chain((0,))
        buffer = bytearray(payload(keys[0]))
        assert store.put(keys, [buffer]) == [Outcome.BUSY]
        buffer[:] = bytes(SIZE)  # the caller's again
        gate.release()
        settle(store)
        out = bytearray(SIZE)
        assert store.get(keys, out) != [Outcome.OK] or out == payload(keys[0])
        assert store.check() == []
        assert store.stats().quarantined_transfers == 0


def test_a_late_read_keeps_slot_and_buffer(tmp_path: Path) -> None:
    """While a read hangs its slot is not reused, even if the block has been deleted."""
    store, tiers = open_store(Shape(dram=2, inline=False), tmp_path, room_wait=0.05)
    keys = chain((0, 0))
    assert store.put(keys, [payload(key) for key in keys]) == [Outcome.OK] * 2
    gate = tiers["dram"].hang = Gate(op="read")
    assert store.get(keys, bytearray(2 * SIZE), deadline=0.05) == [Outcome.BUSY] * 2
    assert store.stats().quarantined_transfers == 1
    assert store.delete(keys) == 2
    assert store.check() == []
    other = chain((1,))
    assert store.put(other, [payload(other[0])]) == [Outcome.BUSY], "a slot in use was reused"
    gate.release()
    settle(store)
    assert store.stats().quarantined_transfers == 0
    assert store.put(other, [payload(other[0])]) == [Outcome.OK]
    assert store.check() == []
    assert store.close()


def test_promotion_never_puts_old_bytes_under_a_new_block(tmp_path: Path) -> None:
    """Between reading a block and copying it up, it was deleted and stored anew."""
    store, tiers = open_store(Shape(hbm=4, dram=4), tmp_path)
    core, keys = core_of(store), chain((0,))
    assert store.put(keys, [payload(keys[0])]) == [Outcome.OK]
    with core.lock:  # down to dram alone
        core.planner.room.demote(0, 1, 1.0)
        moves = core._drain().moves
    core._start(moves)
    assert store.clear("hbm") == 0
    assert store.lookup(keys).tiers == ["dram"]
    inner = tiers["dram"].inner
    read = inner.read

    def replaced(batch: Batch, targets: BlockBuffers) -> list[Outcome]:
        outcomes = read(batch, targets)
        inner.read = read  # type: ignore[method-assign]
        assert store.delete(keys) == 1
        core.planner.res.levels[0].accepts = False
        with core.lock:  # the new one goes to dram, so that the old one would be copied up
            core.planner.res.levels[0].pool.hold(held := core.planner.res.levels[0].pool.take(4))
        assert store.put(keys, [payload(keys[0], 1)]) == [Outcome.OK]
        with core.lock:
            core.planner.res.levels[0].pool.release(held)
            core.planner.res.levels[0].pool.give(held)
            core.planner.res.levels[0].accepts = True
        return outcomes

    inner.read = replaced  # type: ignore[method-assign]
    out = bytearray(SIZE)
    assert store.get(keys, out) == [Outcome.OK]
    assert out == payload(keys[0])
    assert store.get(keys, out) == [Outcome.OK]
    assert out == payload(keys[0], 1), "bytes of the old block"
    assert store.check() == []
    assert store.close()


# -- close ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dram+nvme", "through", "nvme", "slow dram+nvme"])
def test_close_with_work_in_flight(name: str, tmp_path: Path) -> None:
    store, tiers = open_store(SHAPES[name], tmp_path)
    tiers["nvme"].latency = 0.01
    futures: list[Future[list[Outcome]]] = []
    paths = [(0, i % 2, 1, i) for i in range(12)]
    for path in paths:
        keys = chain(path)
        futures.append(store.put_async(keys, [payload(key) for key in keys]))
        futures.append(store.get_async(keys, bytearray(len(keys) * SIZE)))
    assert store.close(30.0)
    for future in futures:
        assert future.done()
        if future.exception() is not None:
            assert isinstance(future.exception(), ClosedError)
    with pytest.raises(ClosedError):
        store.get(chain((0,)), bytearray(SIZE))
    assert store.close()
    again, _ = open_store(SHAPES[name], tmp_path)
    assert again.check() == []
    assert again.close()


def test_threads_that_call_while_the_store_closes(tmp_path: Path) -> None:
    for _ in range(5):
        store, _ = open_store(SHAPES["all"], tmp_path)
        crowd = Crowd(store)

        def work(seed: int, crowd: Crowd = crowd) -> None:
            crowd.work(seed, time.monotonic() + 10.0)

        threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        store.close(20.0)  # False where pins left no room on the disk; it is closed all the same
        for thread in threads:
            thread.join(20.0)
            assert not thread.is_alive()
        assert crowd.errors
        assert all(isinstance(error, ClosedError) for error in crowd.errors), crowd.errors


def test_close_gives_up_on_a_device_that_hangs(tmp_path: Path) -> None:
    store, tiers = open_store(Shape(dram=4, write="on_evict"), tmp_path)
    keys = chain((0, 1))
    gate = tiers["nvme"].hang = Gate(op="write")
    store.put(keys, [payload(key) for key in keys])
    began = time.monotonic()
    assert not store.close(0.3)
    assert time.monotonic() - began < 5.0
    gate.release()


# -- queues ---------------------------------------------------------------------------------


def test_queues_are_bounded_and_loads_go_first() -> None:
    executor = StepExecutor()
    mover = Mover(executor, 2, load_limit=100, store_limit=50)
    ran: list[str] = []

    def job(name: str) -> Callable[[], None]:
        return lambda: ran.append(name)

    assert mover.submit(job("s1"), 30, load=False)
    assert not mover.submit(job("s2"), 30, load=False), "beyond the limit"
    assert mover.submit(job("s3"), 20, load=False)
    assert mover.submit(job("l1"), 100, load=True), "loads have their own limit"
    assert not mover.submit(job("l2"), 1, load=True)
    assert mover.queued_bytes == (100, 50)
    executor.run_all()
    assert ran == ["l1", "s1", "s3"]
    assert mover.queued_bytes == (0, 0)
    assert mover.submit(job("huge"), 1000, load=False), "alone it must pass, or it never could"
    assert mover.close(1.0)
    assert not mover.submit(job("late"), 1, load=False)
    assert ran[-1] == "huge"


def test_a_full_store_queue_drops_stores_and_not_loads(tmp_path: Path) -> None:
    base = Shape(dram=8, inline=False).config(tmp_path, store_queue=2 * SIZE, put_deadline=0.3)
    tiers: list[FaultyTier] = []

    def wrap(tier: Tier) -> Tier:
        tiers.append(FaultyTier(tier))
        return tiers[0]

    with TieredKVStore(Config.model_validate(base.model_dump()), Fingerprint("m"), None, wrap) as s:
        known = chain((9,))
        assert s.put(known, [payload(known[0])]) == [Outcome.OK]
        gate = tiers[0].hang = Gate(op="write")
        stuck = s.put_async(chain((0, 0)), [bytes(SIZE)] * 2)
        assert gate.wait_entered()
        assert s.put_async(chain((1,)), [bytes(SIZE)]).result(10.0) == [Outcome.BUSY]
        out = bytearray(SIZE)
        assert s.get(known, out) == [Outcome.OK]
        assert out == payload(known[0])
        gate.release()
        assert len(stuck.result(10.0)) == 2
        assert s.stats().queued_store_bytes == 0
        assert s.check() == []


def test_a_hung_thread_does_not_hold_up_the_others() -> None:
    executor = DaemonExecutor(2, "test")
    mover = Mover(executor, 2, 1 << 20, 1 << 20)
    blocked, free = threading.Event(), threading.Event()
    assert mover.submit(lambda: [blocked.wait(20.0)].clear(), 1, load=False)
    assert mover.submit(free.set, 1, load=True)
    assert free.wait(10.0)
    assert not mover.close(0.05)
    blocked.set()
    assert executor.close(10.0)
