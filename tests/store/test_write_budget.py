"""`write_budget`: a hard limit on what a day writes to NVMe, which nothing waits for."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.index.planner_world import A, B, C, Choosy, World
from tests.store.world import (
    FP,
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
from tieredkv import CapacityError, Config, Outcome, TieredKVStore
from tieredkv.eviction.base import Admission
from tieredkv.index.prefix_tree import Run
from tieredkv.planner.plans import DAY, TokenBucket
from tieredkv.testing import ManualClock
from tieredkv.testing.index_suite import chain as keys_of
from tieredkv.types import Move

OK, BUSY, FAILED = Outcome.OK, Outcome.BUSY, Outcome.FAILED
HOUR = 3600.0


# -- the bucket -----------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "batch"), [(2, 1), (2, 8), (7.5, 3), (240, 8), (90_000, 64)])
@pytest.mark.parametrize("seed", range(3))
def test_no_day_takes_more_than_its_tokens(tokens: float, batch: int, seed: int) -> None:
    rng, bucket, now = random.Random(seed), TokenBucket.daily(tokens, batch), 0.0
    taken: list[tuple[float, int]] = []
    while now < 5 * DAY:
        # pauses and rushes, and clocks that are set back a little
        now += rng.choice([-1.0, 0.0, 1.0, 60.0, HOUR, DAY / 3]) * rng.random()
        taken.append((now, bucket.take(rng.randrange(1, 2 + int(tokens)), now)))
    for begin, _ in taken:
        day = sum(count for at, count in taken if begin <= at <= begin + DAY)
        assert day <= tokens


@pytest.mark.parametrize(("tokens", "batch"), [(2, 1), (7.5, 3), (240, 8), (90_000, 64)])
def test_all_of_the_budget_but_what_a_burst_sets_aside_can_be_had(
    tokens: float, batch: int
) -> None:
    bucket = TokenBucket.daily(tokens, batch)
    whole = sum(bucket.take(1 << 30, 60.0 * minute) for minute in range(5 * 24 * 60))
    burst = max(tokens / 25, min(batch, tokens / 2))
    assert 5 * (tokens - burst) - 1 < whole <= 5 * (tokens - burst) + burst


def test_what_is_saved_up_is_an_hours_worth_or_a_batch() -> None:
    assert TokenBucket.daily(2500, 8).take(10_000, 0.0) == 100
    assert TokenBucket.daily(100, 8).take(10_000, 0.0) == 8
    assert TokenBucket.daily(10, 8).take(10_000, 0.0) == 5
    assert TokenBucket.daily(0, 8).take(10_000, 0.0) == 10_000
    bucket = TokenBucket.daily(2500, 8)
    assert bucket.take(100, 0.0) == 100
    assert bucket.available(100, 1.0) == 0
    assert 99 <= bucket.available(200, HOUR + 1) <= 100


# -- the planner ----------------------------------------------------------------------------


def budgeted(
    *slots: int, disk: int, day: float, batch: int = 1, admission: Admission | None = None
) -> World:
    world = World(*slots, disk=disk, admission=admission)
    world.room.budget = TokenBucket.daily(day, batch)
    return world


def on_disk(world: World, keys: Sequence[bytes]) -> int:
    return sum(world.planner.durable(key) is True for key in keys)


def written(moves: Sequence[Move], disk: int) -> int:
    return sum(len(move) for move in moves if move.dst == disk)


def test_what_is_over_budget_is_declined_and_written_when_budget_comes() -> None:
    world = budgeted(100, disk=100, day=24, batch=12)  # 12 at once, then one in two hours
    for keys in (A, B, C):
        world.store(keys)
    assert written(world.write_back(), 1) == 12
    world.finish_all()
    assert [on_disk(world, keys) for keys in (A, B, C)] == [8, 4, 0]
    assert world.write_back() == []
    assert not world.res.dirty
    assert world.room.over_budget == 12
    assert world.room.refused == 0
    world.now += 4 * HOUR + 1
    world.store(keys_of([3] * 2))  # whatever comes next makes the write-back look again
    assert written(world.write_back(), 1) == 2
    world.finish_all()
    assert [on_disk(world, keys) for keys in (A, B, C)] == [8, 6, 0], "first come, first served"


def test_a_chain_is_finished_before_others_are_begun() -> None:
    world = budgeted(100, disk=100, day=24, batch=1)
    for keys in (A, B, C):
        world.store(keys)
    for _ in range(24):
        assert written(world.write_back(), 1) == 1
        world.finish_all()
        done = [on_disk(world, keys) for keys in (A, B, C)]
        assert all(0 in pair or 8 in pair for pair in pairwise(done)), done
        assert written(world.write_back(), 1) == 0  # declines all that waits
        world.now += DAY / 23 + 1
    assert done == [8, 8, 8]


def test_what_is_on_its_way_is_not_turned_down() -> None:
    world = budgeted(100, disk=100, day=20, batch=10)
    for keys in (A, B, C):
        world.store(keys)
    assert written(world.write_back(), 1) == 10
    world.write_back()
    assert world.room.over_budget == 6 + 8
    assert len(world.res.dirty) == 1
    world.finish_all()
    assert [on_disk(world, keys) for keys in (A, B, C)] == [8, 2, 0]
    assert not world.res.dirty


def test_no_eviction_waits_for_budget() -> None:
    world = budgeted(8, disk=100, day=4, batch=2)
    world.store(A)
    assert written(world.write_back(), 1) == 2
    world.finish_all()
    plan = world.put(B)
    assert (plan.wait, plan.short) == (False, 0), "it waits for a write that nobody may start"
    for move in plan.moves:
        world.end(move)
    assert world.known(B) == 8
    assert world.known(A) == 2, "what the budget paid for is still there"
    assert not any(move.dst == 1 for move in world.moving)


def test_a_demotion_takes_no_more_than_the_budget() -> None:
    world = budgeted(8, disk=100, day=8, batch=3)
    world.store(A)
    plan = world.put(B)
    assert plan.wait
    assert written(world.moving, 1) == 3
    world.finish_all()
    plan = world.put(B)
    assert (plan.wait, plan.short) == (False, 0)
    assert world.known(A) == 3


def test_admission_decides_who_gets_the_budget() -> None:
    class Second(Choosy):
        def admit(self, run: Any, now: float) -> bool:
            return bool(run.key == B[-1])

    world = budgeted(100, disk=100, day=16, batch=8, admission=Second())
    for keys in (A, B, C):
        world.store(keys)
    world.write_back()
    world.finish_all()
    assert [on_disk(world, keys) for keys in (A, B, C)] == [0, 8, 0]
    world.write_back()
    assert world.room.over_budget == 0, "what nobody wants written is not refused by the budget"


def test_the_planner_says_of_what_is_declined_that_it_is_not_on_its_way() -> None:
    world = budgeted(100, disk=100, day=2, batch=1)
    world.store(A)
    world.write_back()
    world.finish_all()
    world.write_back()
    assert [world.planner.durable(key) for key in A] == [True] + [None] * 7
    refused, upto = world.planner.begin_flush()
    world.write_back()
    assert not world.planner.writes(1, upto), "a flush would wait for budget"
    assert world.planner.lacking(upto, world.now)
    assert world.room.refused == refused


def test_failed_writes_are_not_tried_again_for_the_sake_of_the_queue() -> None:
    world = budgeted(100, disk=100, day=40, batch=4)
    world.store(A)
    world.write_back()
    world.finish_all()
    world.write_back()  # the rest of the chain waits for budget
    world.now += 3 * HOUR
    world.store(B)
    (move, *_) = world.write_back()
    assert move.keys[0] == A[4]
    world.end(move, write=[FAILED] * len(move))
    world.finish_all()
    world.now += 3 * HOUR
    assert all(m.keys[0] in B for m in world.write_back()), "a dead disk is asked again and again"


def test_the_queue_forgets_what_has_gone() -> None:
    world = budgeted(16, disk=100, day=2, batch=1)
    runs: list[Run] = []
    for i in range(40):
        world.now += 1
        world.store(keys_of([100 + i] * 8), force=True)
        runs += world.res.tree.runs.values()
        world.write_back()
        world.finish_all()
    assert world.room.over_budget > 200
    world.now += DAY
    world.store(A, force=True)
    assert 0 < written(world.write_back(), 1) <= 1
    world.finish_all()


def test_a_put_straight_to_the_disk_is_short_of_what_the_budget_does_not_allow() -> None:
    world = budgeted(disk=100, day=12, batch=6)
    assert world.store(A[:4]).short == 0
    plan = world.store(B)
    assert (plan.short, plan.wait) == (6, False)
    assert world.known(B) == 2
    plan = world.store(C)
    assert (plan.short, plan.wait, plan.moves) == (8, False, [])
    world.now += 8 * HOUR + 1  # two more
    assert world.store(B).short == 4
    assert world.known(B) == 4


# -- the store ------------------------------------------------------------------------------


def limited(
    shape: Shape, root: Path, blocks: float, clock: ManualClock, **limits: Any
) -> TieredKVStore:
    """A store that may write so many blocks a day."""
    config = shape.config(root, **limits)
    nvme = config.tiers[-1].model_copy(update={"write_budget": int(blocks * SIZE)})
    config = config.model_copy(update={"tiers": (*config.tiers[:-1], nvme)})
    return TieredKVStore(config, FP, clock)


def put(store: TieredKVStore, keys: Sequence[bytes]) -> list[Outcome]:
    return store.put(keys, [payload(key) for key in keys])


DISK = 4 << 20


def test_days_of_puts_stay_below_the_budget(tmp_path: Path) -> None:
    clock = ManualClock()
    store = limited(Shape(dram=8, write="on_evict", disk=DISK), tmp_path, 48, clock)
    for i in range(400):
        assert put(store, chain((i, i, i))) == [OK] * 3
        clock.advance(DAY / 100)
        settle(store)
    stats = store.stats()
    assert 100 * SIZE < stats.tiers[1].written_bytes <= 4 * 48 * SIZE
    assert stats.over_budget_blocks > 400
    assert store.check() == []
    text = [m.name for m in store.metrics.registry.collect()]
    assert "tieredkv:over_budget_blocks" in text
    assert store.close() is False, "close says that not all was written"


def test_flush_answers_at_once_that_the_budget_forbids_it(tmp_path: Path) -> None:
    clock = ManualClock()
    store = limited(Shape(dram=256, write="on_evict", disk=DISK), tmp_path, 20, clock)
    chains = [chain((i,)) for i in range(200)]
    for keys in chains:
        assert put(store, keys) == [OK]
    begin = time.monotonic()
    assert not store.flush(PATIENCE)
    assert time.monotonic() - begin < PATIENCE / 2
    kept = durable(store, [keys[0] for keys in chains])
    assert 0 < len(kept) <= 10
    assert not store.flush(PATIENCE)
    assert durable(store, [keys[0] for keys in chains]) == kept
    clock.advance(DAY)
    assert not store.flush(PATIENCE)
    assert len(durable(store, [keys[0] for keys in chains])) > len(kept)
    store.close()


def test_through_acknowledges_what_was_paid_for_and_nothing_else(tmp_path: Path) -> None:
    clock = ManualClock()
    shape = Shape(dram=64, write="through", disk=DISK)
    store = limited(shape, tmp_path, 8, clock, put_deadline=PATIENCE)
    keys = chain((0, 1, 2, 3, 4, 5))
    begin = time.monotonic()
    outcomes = store.put_async(keys, [payload(key) for key in keys]).result(PATIENCE)
    assert time.monotonic() - begin < PATIENCE / 2, "it waits for budget"
    paid = outcomes.count(OK)
    assert 0 < paid < 6
    assert outcomes == [OK] * paid + [FAILED] * (6 - paid)
    assert durable(store, keys) == set(keys[:paid])
    assert store.lookup(keys).blocks == 6, "memory has all of it"
    clock.advance(DAY)
    again = store.put_async(keys, [payload(key) for key in keys]).result(PATIENCE)
    assert again.count(OK) > paid
    store.close()


def test_nvme_alone_says_busy(tmp_path: Path) -> None:
    clock = ManualClock()
    store = limited(Shape(write="through", disk=DISK), tmp_path, 8, clock, batch=4 * SIZE)
    assert put(store, chain((0, 1, 2, 3, 4, 5))) == [OK] * 4 + [BUSY] * 2
    assert put(store, chain((9,))) == [BUSY]
    clock.advance(DAY / 2)
    assert put(store, chain((9,))) == [OK]
    assert store.close()


def test_a_restart_brings_no_more_than_an_hours_worth(tmp_path: Path) -> None:
    clock = ManualClock()
    shape = Shape(dram=64, write="on_evict", disk=DISK)
    for life in range(3):
        store = limited(shape, tmp_path, 50, clock, batch=SIZE)
        for i in range(20):
            put(store, chain((life * 100 + i,)))
        store.flush(PATIENCE)
        settle(store)
        assert store.stats().tiers[1].written_bytes == 2 * SIZE
        store.close()


def test_a_budget_that_pays_for_nothing_is_refused(tmp_path: Path) -> None:
    shape = Shape(dram=8, write="on_evict", disk=DISK)
    with pytest.raises(CapacityError, match=r"write_budget of .* a day is less than two blocks"):
        limited(shape, tmp_path, 1.5, ManualClock())
    limited(shape, tmp_path, 2, ManualClock()).close()  # nothing stayed open or locked


def test_no_budget_is_no_limit(tmp_path: Path) -> None:
    assert (
        Config.model_validate(
            {"tiers": [{"kind": "nvme", "path": "/x", "capacity": "1GiB"}]}
        ).model_dump()["tiers"][0]["write_budget"]
        == 0
    )
    store, _ = open_store(Shape(dram=64, write="on_evict", disk=DISK), tmp_path, ManualClock())
    for i in range(40):
        put(store, chain((i,)))
    assert store.flush(PATIENCE)
    assert core_of(store).planner.room.over_budget == 0
    assert store.close()
