"""What the store says is stored, is; what it says is durable, comes back after a restart."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.index.planner_world import A, World
from tests.store.world import (
    PATIENCE,
    SIZE,
    Shape,
    chain,
    core_of,
    durable,
    open_store,
    payload,
    settle,
)
from tieredkv import Outcome, TieredKVStore
from tieredkv.index.durable import DurableIndex
from tieredkv.index.environment import TransactionFailed
from tieredkv.index.record import ROOT, Deletion, Piece
from tieredkv.testing import Fault, Gate, StepExecutor

OK, MISSING, BUSY, FAILED = Outcome.OK, Outcome.MISSING, Outcome.BUSY, Outcome.FAILED
ROOMY = 4 << 20
ALONE = Shape(write="through", disk=ROOMY)


class Commits:
    """The transactions of a store's index, to be held or to fail."""

    def __init__(self, store: TieredKVStore) -> None:
        assert store._disk is not None
        env: Any = store._disk.index._env
        self.failing = False
        self.open = threading.Event()
        self.open.set()
        self._real, env.write = env.write, self._write

    def _write(self, work: Any, forgets: bool = False) -> None:
        assert self.open.wait(PATIENCE)
        if self.failing:
            raise TransactionFailed("injected")
        self._real(work, forgets)


def put(store: TieredKVStore, keys: Sequence[bytes], start: int = 0) -> list[Outcome]:
    return store.put(keys, [payload(key) for key in keys[start:]], start)


def put_async(store: TieredKVStore, keys: Sequence[bytes]) -> list[Outcome]:
    return store.put_async(keys, [payload(key) for key in keys]).result(PATIENCE)


# -- puts -----------------------------------------------------------------------------------


def test_a_cancelled_put_never_looks_at_its_buffer(tmp_path: Path) -> None:
    store, tiers = open_store(Shape(dram=16, inline=False), tmp_path, threads=8)
    gate = tiers["dram"].hang = Gate(op="write")
    others = [chain((i,)) for i in range(4)]
    busy = [store.put_async(keys, [payload(keys[0])]) for keys in others]
    assert gate.wait_entered(4), "all threads for puts are taken"
    keys = chain((9,))
    buffer = bytearray(payload(keys[0]))
    future = store.put_async(keys, [buffer])
    assert future.cancel()
    buffer[:] = bytes(SIZE)  # the caller's again
    gate.release()
    assert [f.result(PATIENCE) for f in busy] == [[OK]] * 4
    assert store._puts.close(PATIENCE)  # whatever was queued has run
    assert store.lookup(keys).blocks == 0
    assert store.close()


@pytest.mark.parametrize("fails", [True, False])
def test_a_put_stands_only_if_the_head_before_it_does(fails: bool, tmp_path: Path) -> None:
    store, tiers = open_store(Shape(dram=8, inline=False), tmp_path, threads=4)
    dram = tiers["dram"]
    gate = dram.hang = Gate(op="write")
    dram.error = Fault(op="write", calls=[1]) if fails else None
    keys = chain((0, 1))
    with ThreadPoolExecutor(2) as pool:
        head = pool.submit(put, store, keys[:1])
        assert gate.wait_entered(1)
        tail = pool.submit(put, store, keys, 1)
        assert gate.wait_entered(2), "the tail is written while its head is"
        gate.release()
        assert head.result(PATIENCE) == [FAILED if fails else OK]
        assert tail.result(PATIENCE) == [MISSING if fails else OK]
    settle(store)
    assert store.lookup(keys).blocks == (0 if fails else 2)
    assert store.check() == []
    assert store.close()


def test_on_nvme_alone_a_second_put_waits_for_the_commit_too(tmp_path: Path) -> None:
    store, _ = open_store(ALONE, tmp_path, put_deadline=0.2)
    keys = chain((0, 1))
    assert put(store, chain((9,))) == [OK]
    commits = Commits(store)
    commits.open.clear()
    assert put(store, keys) == [BUSY, BUSY]
    assert store.contains(keys[0])
    assert put(store, keys) == [BUSY, BUSY], "acknowledged what no record says"
    commits.open.set()
    settle(store)
    assert put(store, keys) == [OK, OK]
    assert store.close()


def test_through_writes_again_what_nvme_evicted(tmp_path: Path) -> None:
    store, _ = open_store(Shape(dram=256, write="through"), tmp_path, put_deadline=2.0)
    keys = chain((0, 0, 0, 0))
    assert put_async(store, keys) == [OK] * 4
    slots = core_of(store).tiers[1].slots
    for i in range(1, slots // 4 + 3):
        assert put_async(store, chain((i, 0, 0, 0))) == [OK] * 4
    assert durable(store, keys) == set()
    assert store.lookup(keys).blocks == 4
    assert put_async(store, keys) == [OK] * 4
    assert durable(store, keys) == set(keys)
    assert store.check() == []
    assert store.close()


# -- flush ----------------------------------------------------------------------------------


def test_flush_tells_a_failed_commit_and_makes_up_for_it(tmp_path: Path) -> None:
    shape = Shape(dram=16, write="on_evict", disk=ROOMY)
    store, _ = open_store(shape, tmp_path)
    commits = Commits(store)
    commits.failing = True
    keys = chain((0, 1, 2, 3))
    assert put(store, keys) == [OK] * 4
    assert not store.flush(PATIENCE)
    assert durable(store, keys) == set()
    commits.failing = False
    assert store.flush(PATIENCE)
    assert durable(store, keys) == set(keys)
    assert store.check() == []
    assert store.close()
    again, _ = open_store(shape, tmp_path)
    assert again.lookup(keys).blocks == 4
    assert again.close()


def test_flush_waits_while_the_store_queue_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused move is an end as well: it must not wake the flush that caused it."""
    shape = Shape(dram=64, write="on_evict", disk=ROOMY)
    store, tiers = open_store(shape, tmp_path, store_queue=2 * SIZE, batch=SIZE)
    gate = tiers["nvme"].hang = Gate(op="write")
    for i in range(8):
        assert put(store, chain((i, 0, 0, 0))) == [OK] * 4
    assert gate.wait_entered()
    core, rounds = core_of(store), []
    real = core._write_back
    monkeypatch.setattr(core, "_write_back", lambda tier: (rounds.append(1), real(tier)))
    assert not store.flush(0.3)
    assert len(rounds) < 30
    gate.release()
    assert store.flush(PATIENCE)
    assert store.close()


# -- commits --------------------------------------------------------------------------------


def test_acknowledgements_that_come_late_take_none_back(tmp_path: Path) -> None:
    """A clear has the answers it preempts queued behind newer transactions."""
    store, _ = open_store(ALONE, tmp_path, put_deadline=5.0)
    assert store._disk is not None
    index: Any = store._disk.index
    submitted, release, real = threading.Semaphore(0), threading.Event(), index.submit

    def submit(*args: Any) -> None:
        real(*args)
        submitted.release()

    index.submit = submit
    index._executor.submit(lambda: release.wait(PATIENCE))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(put, store, chain((1,)))
        assert submitted.acquire(timeout=PATIENCE)
        store.clear()
        second = pool.submit(put, store, chain((2,)))
        assert submitted.acquire(timeout=PATIENCE)
        release.set()
        assert first.result(PATIENCE) != [OK]
        assert second.result(PATIENCE) == [OK]
    settle(store)
    assert store.flush(1.0), "waits for an answer that was given"
    assert store.close()


def test_a_deletion_names_the_block_and_not_its_key(tmp_path: Path) -> None:
    executor = StepExecutor()
    index = DurableIndex(tmp_path / "index", executor)
    index.set_block_bytes(1)
    answers: list[bool] = []
    for generation, slot in ((7, 0), (8, 3)):
        index.submit([Piece(A[:1], ROOT, [slot], generation, 0, 1.0, 1.0)], [], answers.append)
    late = [Deletion(A[0], 7, 0), Deletion(A[0], 8, 0), Deletion(A[0], 7, 3)]
    index.submit([], late, answers.append)
    executor.run_all()
    assert [piece.slots for piece in index.load(10)] == [[3]]
    index.submit([], [Deletion(A[0], 8, 3)], answers.append)
    executor.run_all()
    assert index.load(10) == []
    assert answers == [True] * 4
    assert index.close(1.0)


def test_a_deletion_that_is_repeated_spares_the_block_written_since(tmp_path: Path) -> None:
    executor = StepExecutor()
    index = DurableIndex(tmp_path / "index", executor)
    index.set_block_bytes(1)
    world, keys = World(8, disk=4), A[:4]

    def commit() -> None:
        for ticket, effects in sorted(world.pending.items()):
            del world.pending[ticket]
            assert effects.index is not None
            index.submit(
                effects.index.puts,
                effects.index.deletes,
                lambda ok, ticket=ticket: world.planner.committed(ticket, ok, world.now),
            )
            executor.run_all()
        world.drain()

    world.store(keys)
    for move in world.write_back():
        world.end(move)
    commit()
    world.room.make(1, 2, world.now)
    world.drain()
    commit()
    world.room.make(1, 3, world.now)  # evicts one more: this transaction will fail ...
    world.drain()
    run = world.res.tree.find(keys[0])
    assert run is not None
    assert world.room.write_chain(run, world.now, 8) > 0
    moves = world.drain()  # ... while the block is on its way back
    (ticket,) = world.pending
    del world.pending[ticket]
    world.planner.committed(ticket, False, world.now)  # to be repeated by the next drain
    for move in moves:
        world.end(move)
    while world.pending:
        commit()
    held = {key for key in keys if world.planner.durable(key)}
    assert held == {key for piece in index.load(100) for key in piece.keys}
    assert len(held) > 2
    assert index.close(1.0)
