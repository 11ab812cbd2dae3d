"""What must not happen between two steps of a core that shares a pool."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.store.shared_pool import LEASE, Pool
from tests.store.stepped import SIZE, Shape, Side
from tests.store.world import chain, payload
from tieredkv import Outcome
from tieredkv.buffers import host_blocks
from tieredkv.testing import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def pool(clock: ManualClock) -> Pool:
    return Pool(100, clock)


def put(side: Side, keys: Sequence[bytes], version: int = 0) -> list[Outcome]:
    blocks = [payload(key, version, SIZE) for key in keys]
    return side.core.put(keys, host_blocks(blocks, len(keys), writable=False), 0, None)


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
