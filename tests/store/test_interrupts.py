"""Interrupts, late ends and dead disks: nothing is left behind, nobody waits for nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.store.world import (
    PATIENCE,
    SIZE,
    Shape,
    busy,
    chain,
    core_of,
    durable,
    leaks,
    open_store,
    payload,
    settle,
)
from tieredkv import Outcome, TieredKVStore, Turn
from tieredkv.index.environment import TransactionFailed
from tieredkv.testing import Fault, FaultyTier, Gate, ManualClock
from tieredkv.transfer import Transfer

OK, MISSING, BUSY = Outcome.OK, Outcome.MISSING, Outcome.BUSY
ROOMY = 4 << 20


def put(store: TieredKVStore, keys: Sequence[bytes], **more: Any) -> list[Outcome]:
    return store.put(keys, [payload(key) for key in keys], **more)


def blocks(first: int, count: int) -> list[bytes]:
    return chain((first, *[0] * (count - 1)))


def sound(store: TieredKVStore, keys: Sequence[bytes]) -> None:
    """The store works on as if nothing had happened, and ends at once."""
    settle(store)
    assert store.check() == []
    assert put(store, keys) == [OK] * len(keys)
    out = bytearray(SIZE * len(keys))
    assert store.get(keys, out) == [OK] * len(keys)
    assert out == b"".join(map(payload, keys))
    settle(store)
    assert store.clear() >= len(keys)
    assert leaks(store) == []
    assert store.close(5.0)


# -- interrupts -----------------------------------------------------------------------------


def interrupt(tier: FaultyTier, op: Any) -> None:
    """Ctrl-C in the tier's next read or write, in the thread of the caller."""
    tier.error = Fault(op=op, calls=[tier.calls[op] + 1], raises=KeyboardInterrupt())


def test_an_interrupt_in_a_put(tmp_path: Path) -> None:
    store, tiers = open_store(Shape(dram=8), tmp_path, put_deadline=1.0)
    keys = blocks(1, 4)
    interrupt(tiers["dram"], "write")
    with pytest.raises(KeyboardInterrupt):
        put(store, keys)
    assert not busy(store)
    sound(store, keys)


def test_an_interrupt_in_one_part_of_a_demotion(tmp_path: Path) -> None:
    store, tiers = open_store(Shape(hbm=8, dram=64), tmp_path)
    assert put(store, blocks(1, 8)) == [OK] * 8
    interrupt(tiers["hbm"], "read")
    with pytest.raises(KeyboardInterrupt):
        put(store, blocks(2, 8))
    assert not busy(store), "the other parts never end"
    sound(store, blocks(2, 8))


def test_an_interrupt_in_one_of_two_tiers_of_a_put(tmp_path: Path) -> None:
    store, tiers = open_store(Shape(hbm=8, dram=64), tmp_path, put_deadline=1.0)
    keys = blocks(1, 20)
    interrupt(tiers["hbm"], "write")
    with pytest.raises(KeyboardInterrupt):
        put(store, keys)
    assert not busy(store), "the second move never ends"
    sound(store, keys)


def interrupted(patch: pytest.MonkeyPatch, gate: Gate, call: Callable[[], object]) -> None:
    """Ctrl-C while the call waits for what the gate holds."""
    real = Transfer.expire

    def expire(self: Transfer, timeout: float) -> list[Outcome]:
        if timeout <= 0.0:
            return real(self, timeout)
        assert gate.wait_entered()
        raise KeyboardInterrupt

    with patch.context() as patched:
        patched.setattr(Transfer, "expire", expire)
        with pytest.raises(KeyboardInterrupt):
            call()


def test_an_interrupt_while_a_put_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, tiers = open_store(Shape(write="through", disk=ROOMY), tmp_path)
    keys = blocks(1, 4)
    buffer = bytearray(b"".join(map(payload, keys)))
    gate = tiers["nvme"].hang = Gate(op="write")
    interrupted(monkeypatch, gate, lambda: store.put(keys, buffer))
    buffer[:] = bytes(len(buffer))  # the caller's again
    gate.release()
    settle(store)
    out = bytearray(len(buffer))
    for key, outcome, at in zip(keys, store.get(keys, out), range(0, len(out), SIZE), strict=True):
        assert outcome is MISSING or out[at : at + SIZE] == payload(key), "stored a mixture"
    sound(store, keys)


def test_an_interrupt_while_a_get_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, tiers = open_store(Shape(write="through", disk=ROOMY), tmp_path)
    keys = blocks(1, 4)
    assert put(store, keys) == [OK] * 4
    buffer = bytearray(4 * SIZE)
    gate = tiers["nvme"].hang = Gate(op="read")
    interrupted(monkeypatch, gate, lambda: store.get(keys, buffer))
    buffer[:] = bytes([2]) * len(buffer)  # the caller's again
    gate.release()
    settle(store)
    assert set(buffer) == {2}, "written to after the call"
    assert store.lookup(keys).blocks == 4
    sound(store, keys)


def test_a_tier_that_raises_after_the_deadline_loses_nothing(tmp_path: Path) -> None:
    """It raises because its buffers were taken away: the stored copy is as good as before."""
    store, tiers = open_store(Shape(dram=8, inline=False), tmp_path)
    keys = blocks(1, 2)
    assert put(store, keys) == [OK] * 2
    gate = tiers["dram"].hang = Gate(op="read")
    tiers["dram"].error = Fault(op="read", calls=[1, 2], raises=ValueError("released"))
    assert store.get(keys, bytearray(2 * SIZE), deadline=0.05) == [BUSY] * 2
    gate.release()
    settle(store)
    assert store.lookup(keys).blocks == 2
    tiers["dram"].error = None
    sound(store, keys)


# -- disks that fail ------------------------------------------------------------------------


def test_a_dead_disk_is_not_tried_by_every_put(tmp_path: Path) -> None:
    store, tiers = open_store(Shape(dram=16, write="on_evict", disk=ROOMY), tmp_path)
    nvme = tiers["nvme"]
    nvme.error = Fault(op="write")
    for i in range(4):
        assert put(store, blocks(i, 4)) == [OK] * 4
        settle(store)
    tried = nvme.calls["write"]
    for i in range(10, 20):
        assert put(store, blocks(i, 4)) == [OK] * 4
        settle(store)
    # a chain is tried once, in parts of two blocks, and once more with its whole parent
    assert nvme.calls["write"] - tried <= 10 * 4
    assert store.check() == []
    store.close(1.0)


def test_a_dead_disk_is_not_asked_for_what_it_evicted(tmp_path: Path) -> None:
    """Memory is full of runs that NVMe has evicted, and what it holds is pinned: no demotion
    can make room."""
    store, tiers = open_store(Shape(dram=64, write="on_evict", disk=400_000), tmp_path)
    for i in range(16):
        assert put(store, blocks(i, 4)) == [OK] * 4
        assert store.flush(PATIENCE)
    held = [keys for keys in (blocks(i, 4) for i in range(16)) if durable(store, keys)]
    assert 2 < len(held) < 10
    for keys in held:
        store.pin(keys, 1000.0)
    nvme = tiers["nvme"]
    nvme.error, tried = Fault(op="write"), nvme.calls["write"]
    for i in range(100, 104):
        assert put(store, blocks(i, 4)) == [OK] * 4
        settle(store)
    assert nvme.calls["write"] - tried <= 4 * 4
    assert store.check() == []
    store.close(1.0)


def test_a_put_does_not_hammer_an_index_that_fails(tmp_path: Path) -> None:
    """NVMe alone, full, and evictions cannot be committed: no room will come."""
    store, _ = open_store(Shape(write="through"), tmp_path, put_deadline=1.0)
    for i in range(core_of(store).tiers[0].slots // 4 + 1):
        put(store, blocks(i, 4))
    settle(store)
    assert store._disk is not None
    env: Any = store._disk.index._env
    calls, real = [], env.write

    def fail(work: Any, forgets: bool = False) -> None:
        calls.append(1)
        raise TransactionFailed("injected")

    env.write = fail
    for i in range(100, 103):
        assert OK not in put(store, blocks(i, 4))
    tried = len(calls)
    env.write = real
    assert tried <= 20
    settle(store)
    assert store.check() == []
    put(store, blocks(200, 4))  # may find no room, but has it made
    settle(store)
    assert put(store, blocks(200, 4)) == [OK] * 4
    assert store.close(5.0)


def test_one_slow_commit_is_forgotten(tmp_path: Path) -> None:
    store, _ = open_store(Shape(write="through"), tmp_path, put_deadline=1.0)
    size = core_of(store).tiers[0].slots // 4
    for i in range(6):
        put(store, blocks(i, size))
    settle(store)
    assert store._disk is not None
    env: Any = store._disk.index._env
    held, real = threading.Event(), env.write

    def slow(*args: Any, **kwargs: Any) -> None:
        assert held.wait(PATIENCE)
        real(*args, **kwargs)

    env.write = slow
    assert put(store, blocks(50, size)) == [BUSY] * size
    env.write = real
    held.set()
    settle(store)
    for i in range(100, 110):
        assert put(store, blocks(i, size)) == [OK] * size
    assert store.close()


def test_a_tier_smaller_than_the_one_above_keeps_to_lru(tmp_path: Path) -> None:
    """What NVMe evicted is not written again, and so does not outlive what is newer."""
    store, _ = open_store(Shape(dram=128, write="on_evict"), tmp_path)
    for i in range(100):
        assert put(store, blocks(i, 4)) == [OK] * 4
        assert store.flush(PATIENCE)
    stored = [i for i in range(100) if store.contains(blocks(i, 4)[0])]
    assert stored == list(range(100 - len(stored), 100))
    assert len(stored) >= 32
    newest = [i for i in stored if durable(store, blocks(i, 4))]
    assert newest == stored[-len(newest) :]
    assert store.check() == []
    assert store.close()


# -- the end --------------------------------------------------------------------------------


def left(before: set[threading.Thread], names: tuple[str, ...] = ("",)) -> list[str]:
    """Names (that begin so) of threads that were not there before and do not end."""
    deadline = time.monotonic() + PATIENCE
    threads = {t for t in set(threading.enumerate()) - before if t.name.startswith(names)}
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]


def test_close_releases_its_threads_even_if_a_device_hangs(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    shape = Shape(dram=64, write="on_evict", disk=ROOMY)
    store, tiers = open_store(shape, tmp_path, threads=3, batch=SIZE)
    gate = tiers["nvme"].hang = Gate(op="write")
    for i in range(8):
        assert put(store, blocks(i, 4)) == [OK] * 4
    assert gate.wait_entered()
    assert not store.close(0.2)
    began = time.monotonic()
    assert not store.close(PATIENCE), "a second call says the same"
    assert time.monotonic() - began < PATIENCE / 2
    gate.release()
    lanes = ("tieredkv-mover", "tieredkv-put", "tieredkv-get")  # tiers and index stay open
    assert left(before, lanes) == []


def test_an_idle_store_needs_no_time_to_close(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    for _ in range(3):
        store, _ = open_store(Shape(dram=4, write="on_evict"), tmp_path)
        assert store.close(0.0)
        assert store.close(0.0)
    assert left(before) == []


@pytest.mark.parametrize("fate", ["kept", "deleted"])
def test_the_pins_of_turns_are_bounded(fate: str, tmp_path: Path) -> None:
    clock = ManualClock(1.0)
    store, _ = open_store(Shape(dram=8), tmp_path, clock)
    turn = Turn(session="s", ttl=86400.0)
    for i in range(2500):
        keys = blocks(i if fate == "deleted" else 0, 2)
        assert put(store, keys, turn=turn) == [OK] * 2
        if fate == "deleted":
            assert store.delete(keys) == 2
        clock.advance(1.0)
    pins = core_of(store).planner.pins
    assert len(pins) <= (fate == "kept")
    assert len(pins._turns) <= len(pins)
    assert len(pins._expiry) <= 2 * len(pins) + 65
    clock.advance(86400.0)
    store.lookup(keys)
    assert store.get(keys, bytearray(2 * SIZE)) == [OK if fate == "kept" else MISSING] * 2
    assert len(pins) == 0
    assert store.close()
