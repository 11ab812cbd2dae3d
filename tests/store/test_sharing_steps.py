"""What must not happen between two steps of a core that shares a pool."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from tests.store.shared_pool import LEASE, Pool
from tests.store.stepped import SIZE, Shape, Side
from tests.store.world import chain, payload
from tieredkv import Outcome
from tieredkv.buffers import view_blocks
from tieredkv.executor import DaemonExecutor
from tieredkv.mover import Mover
from tieredkv.staging import Staging
from tieredkv.testing import ManualClock
from tieredkv.transfer import Transfer
from tieredkv.types import Batch, Move


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def pool(clock: ManualClock) -> Pool:
    return Pool(100, clock)


def put(side: Side, keys: Sequence[bytes], version: int = 0) -> list[Outcome]:
    blocks = [payload(key, version, SIZE) for key in keys]
    return side.core.put(keys, view_blocks(blocks, len(keys), writable=False), 0, None)


def found(side: Side, keys: Sequence[bytes]) -> int:
    side.core.discover(keys)
    return side.core.planner.match(keys).blocks


@pytest.mark.parametrize("real", [False, True])
def test_what_is_deleted_while_it_is_being_shared_stays_deleted(
    pool: Pool, clock: ManualClock, real: bool
) -> None:
    one, other = (Side(Shape(dram=4, real=real), pool, clock) for _ in range(2))
    keys = chain((0, 1))
    assert put(one, keys) == [Outcome.OK] * 2
    assert not one.idle, "its copies wait for the mover"
    assert one.core.delete(keys) == 2
    while one.catalogue.step():
        pass  # of what is to be removed, nothing is there yet
    one.executor.run_all()
    assert set(pool.blocks) == set(keys), "they come late"
    assert found(one, keys) == 0
    clock.advance(LEASE)
    one.settle()
    assert found(other, keys) == 0
    assert not pool.blocks
    assert not one.catalogue.own


@pytest.mark.parametrize("again", [False, True])
def test_what_is_cleared_while_it_is_being_shared_leaves_the_pool(
    pool: Pool, clock: ManualClock, again: bool
) -> None:
    side = Side(Shape(dram=4), pool, clock)
    keys = chain((0, 1))
    put(side, keys)
    side.core.clear(None)
    if again:
        put(side, keys)
    side.settle()
    assert set(pool.blocks) == side.catalogue.own == side.held()
    assert side.core.check() == []


@pytest.mark.parametrize("gone", ["left", "down"])
def test_nothing_is_prefetched_into_a_pool_that_accepts_nothing(
    pool: Pool, clock: ManualClock, gone: str
) -> None:
    side = Side(Shape(dram=4, disk=12), pool, clock)
    if gone == "left":
        side.leave()
    else:
        pool.up = side.link.closed = False
    for symbol in range(2):
        keys = chain((symbol,) * 4)
        assert put(side, keys, version=1) == [Outcome.OK] * 4
        side.executor.run_all()
    keys = chain((0,) * 4)
    assert side.core.planner.match(keys).spans == (("nvme", 4),)
    assert side.core.prefetch(keys, side.shared).result(0) == 0
    side.executor.run_all()
    assert not side.tier.intruders
    assert not pool.blocks


def test_what_could_not_be_shared_is_shared_later(pool: Pool, clock: ManualClock) -> None:
    side, keys = Side(Shape(dram=4), pool, clock), chain((0, 1))
    put(side, keys)
    pool.up = False
    side.executor.run_all()
    assert not pool.blocks
    pool.up = True
    side.settle()
    put(side, chain((1,)))
    side.settle()
    assert set(pool.blocks) == {*keys, *chain((1,))}


def test_what_is_stored_anew_while_it_is_being_removed_is_shared_later(
    pool: Pool, clock: ManualClock
) -> None:
    side, keys = Side(Shape(dram=4), pool, clock), chain((0, 1))
    put(side, keys)
    side.settle()
    side.core.delete(keys)
    put(side, keys)
    side.executor.run_all()
    assert not side.held(), "the pool was to get rid of them first"
    assert side.idle, "and they are not tried again at once"
    side.settle()
    put(side, chain((1,)))
    side.settle()
    assert set(pool.blocks) == side.held() == {*keys, *chain((1,))}


@pytest.mark.parametrize("real", [False, True])
def test_a_pool_that_comes_back_empty_is_filled_again_from_memory(
    pool: Pool, clock: ManualClock, real: bool
) -> None:
    one, other = (Side(Shape(dram=8, real=real), pool, clock) for _ in range(2))
    keys = chain((0, 1, 2))
    put(one, keys)
    one.settle()
    assert found(other, keys) == 3
    pool.blocks.clear()  # as after the restart of a master
    pool.up = False
    put(one, chain((1,)))
    one.executor.run_all()
    pool.up = True
    for side in (one, other):
        side.settle()
    put(one, chain((2,)))
    one.settle()
    assert set(pool.blocks) == {*keys, *chain((1,)), *chain((2,))}
    clock.advance(20.0)
    assert found(other, [*keys, *chain((7,))]) == 3
    for side in (one, other):
        side.settle()
        assert side.core.check() == []
    assert one.catalogue.own == set(pool.blocks)


def test_blocks_that_nobody_has_asked_for_are_not_adopted(pool: Pool, clock: ManualClock) -> None:
    """What was known when the question began has gone when the answer comes."""
    one, other = (Side(Shape(dram=4, real=True), pool, clock) for _ in range(2))
    keys = chain((0, 1, 2))
    put(one, keys)
    one.settle()
    for key in keys[:2]:
        del pool.blocks[key]
    other.link.closed = False  # so that what it stores stays in its memory
    put(other, keys[:2])
    other.link.closed = True
    unknown = other.core.unknown(keys)
    assert list(unknown) == list(keys[2:])
    question = other.core.shared.ask(unknown)  # type: ignore[union-attr]
    other.catalogue.step()
    assert other.core.shared.answer(question, wait=0.0) == 1  # type: ignore[union-attr]
    other.core.planner.delete(keys[:1])  # stands for an eviction
    other.core.adopt(keys, 1)
    assert other.core.planner.match(keys).blocks == 0


def test_a_blip_of_the_pool_does_not_send_the_disk_through_it(
    pool: Pool, clock: ManualClock
) -> None:
    side = Side(Shape(dram=4, shared=6, disk=100, real=True), pool, clock)
    for symbol in range(10):
        put(side, chain((symbol, 1, 2, 3)))
        side.settle()
        clock.advance(1.0)
    side.tier.written.clear()
    side.link.failures += 1
    put(side, chain((99, 1)))
    side.settle()
    assert len(side.tier.written) <= 4 + 2, "memory, and what is new"


def test_bytes_of_a_deleted_block_are_not_those_of_its_successor(
    pool: Pool, clock: ManualClock
) -> None:
    """The first copy comes late, when the second one is on its way as well."""
    side, keys = Side(Shape(dram=2, real=True), pool, clock), chain((0,))
    put(side, keys)
    side.core.delete(keys)
    while side.catalogue.step():
        pass
    put(side, keys, version=1)
    side.settle()
    for _ in range(3):
        clock.advance(LEASE)
        side.settle()
    assert pool.blocks.get(keys[0]) in (None, payload(keys[0], 1, SIZE))
    assert (keys[0] in side.held()) <= (keys[0] in pool.blocks)


class Slow:
    """A tier without memory of its own, which notes what it is given."""

    inline = durable = False
    block_bytes, slots = SIZE, 100

    def __init__(self, name: str, far: bool = False) -> None:
        self.name, self.far = name, far
        self.hang = threading.Event()
        self.written: list[Batch] = []

    def write(self, batch: Batch, sources: object) -> list[Outcome]:
        if self.far:
            assert self.hang.wait(20)
        self.written.append(batch)
        return [Outcome.OK] * len(batch)

    def read(self, batch: Batch, targets: object) -> list[Outcome]:
        return [Outcome.OK] * len(batch)

    def views(self, slots: Sequence[int]) -> None:
        return None

    def close(self) -> None:
        pass


def test_a_pin_arrives_through_a_staging_copy() -> None:
    tiers = [Slow("a"), Slow("b")]
    move = Move(0, 1, [b"k"], [1], [0], [0], [0], pin=7.0)
    Transfer(move, tiers, None, 1, lambda transfer: None, Staging(SIZE, 1, 1)).run_all()
    assert [batch.pin for batch in tiers[1].written] == [7.0]


def test_copies_to_a_machine_that_hangs_leave_threads_to_the_others() -> None:
    far, near = Slow("far", far=True), Slow("near")
    mover = Mover(DaemonExecutor(4, "test"), 4, 1 << 30, 1 << 30)

    def start(tier: Slow) -> Transfer:
        move = Move(None, 0, [b"k"], [1], [0], [], [0])
        transfer = Transfer(move, [tier], [bytes(SIZE)], 1, lambda transfer: None)
        assert mover.start(transfer, SIZE, load=False)
        return transfer

    hanging = [start(far) for _ in range(10)]
    assert start(near).expire(10) == [Outcome.OK]
    assert all(transfer.running for transfer in hanging)
    far.hang.set()
    assert [transfer.expire(10) for transfer in hanging] == [[Outcome.OK]] * 10
    assert mover.close(10)
