"""Decisions of the planner about what is written to the durable tier, and when."""

from __future__ import annotations

from tests.index.planner_world import (
    FAILED,
    OK,
    A,
    B,
    Choosy,
    World,
)
from tieredkv.testing.index_suite import chain

# -- the durable tier -------------------------------------------------------------------------


def test_admission_decides_what_is_written_and_is_asked_again_after_a_hit() -> None:
    choosy = Choosy()
    world = World(8, disk=8, admission=choosy)
    world.store(A[:3])
    assert world.write_back() == []
    assert choosy.asked == [3]
    assert world.write_back() == []
    assert choosy.asked == [3], "turned down until it is used"
    assert world.planner.durable(A[2]) is None
    choosy.admits = True
    _, reads = world.planner.plan_get(A[:3], 0, world.now)
    world.moving += reads
    world.end(reads[0])
    assert [len(move) for move in world.write_back()] == [3]
    world.finish_all()
    assert world.planner.durable(A[2]) is True


def test_what_admission_turns_down_is_dropped_and_not_demoted() -> None:
    world = World(4, disk=8, admission=Choosy())
    world.store(A[:4])
    assert world.store(B[:2]).short == 0
    assert (world.known(A), world.free(1)) == (2, 8)


def test_a_full_tier_is_demoted_before_it_is_evicted() -> None:
    world = World(4, disk=8)
    world.store(A[:4])
    plan = world.put(B[:2])
    assert plan.wait
    assert plan.moves == []
    assert world.known(A) == 4
    rounds = 0
    while plan.wait:  # the root has to be written before the tail that makes room
        rounds += 1
        world.finish_all()
        plan = world.store(B[:2])
    assert (plan.short, rounds) == (0, 2)
    assert world.planner.match(A[:4]).spans == (("memory-0", 2), ("disk", 2))


def test_force_drops_what_could_be_demoted() -> None:
    world = World(4, disk=8)
    world.store(A[:4])
    assert world.store(B[:2], force=True).short == 0
    assert world.known(A) == 2


def test_a_disk_that_takes_nothing_is_only_read() -> None:
    world = World(4, disk=8, accepts=False)
    world.store(A[:4])
    assert world.store(B[:2]).wait is False
    assert (world.known(A), world.free(1)) == (2, 8)


def test_ancestors_are_written_before_descendants() -> None:
    world = World(16, disk=16)
    world.store(A[:2])
    world.store(A[:4])
    run = world.res.tree.find(A[3])
    assert run is not None
    assert world.room.write_chain(run, world.now, 3) == 3
    moves = world.drain()
    assert [move.keys for move in moves] == [A[:3]]
    assert world.room.write_chain(run, world.now, 3) == -1, "its own write has to end first"
    world.finish_all()
    assert sorted(world.records) == sorted(A[:3])


def test_a_block_does_not_enter_the_disk_without_its_predecessor() -> None:
    world = World(8, disk=8)
    world.store(A[:4])
    (move,) = world.write_back()
    world.end(move, [OK, FAILED, OK, OK])
    world.commit()
    assert list(world.records) == A[:1]
    assert world.free(1) == 7
    assert world.known(A) == 4


def test_a_failing_disk_is_not_tried_again_until_something_changes() -> None:
    """Also when the failure was an ancestor's, which is not itself waiting to be written."""
    world = World(8, disk=8)
    world.store(A[:2])
    world.write_back()
    world.finish_all()
    world.store(A[:4])
    world.planner.clear(1, 2)
    world.drain()
    run = world.res.tree.find(A[3])
    assert run is not None
    assert list(world.res.dirty) == [run.id]
    (move,) = world.write_back(2)
    assert move.keys == A[:2], "the ancestors first"
    world.end(move, [FAILED, FAILED])
    assert world.write_back() == [], "it would spin"
    refused, _ = world.planner.begin_flush()
    assert refused
    assert world.write_back() != [], "a flush asks again"


def test_the_watermark_is_kept_ahead_of_need() -> None:
    world = World(64, disk=64, low=4)
    for number in range(16):
        world.now += 1.0
        world.store(chain([number + 3] * 4), force=True)
        world.write_back()
        world.finish_all()
    assert world.free(1) >= 4
    assert world.room.evicted[1] > 0
    assert len(world.records) == 64 - world.free(1)


def test_slots_of_an_eviction_come_back_with_its_commit() -> None:
    world = World(disk=4)
    world.store(A[:4])
    world.commit()
    plan = world.put(B[:2])
    assert plan.wait, "the evicted slots are still named by records"
    assert world.free(0) == 0
    assert world.res.levels[0].pool.expected == 2
    world.commit()
    assert world.store(B[:2]).short == 0
    world.commit()
    assert sorted(world.records) == sorted(A[:2] + B[:2])


def test_an_eviction_whose_commit_failed_is_tried_again() -> None:
    world = World(disk=4)
    world.store(A[:4])
    world.commit()
    world.put(B[:2])
    world.commit(ok=False)
    assert world.free(0) == 0, "their records live on, so must their slots"
    assert world.res.levels[0].pool.expected == 2
    world.drain()
    world.commit()
    assert world.free(0) == 2
    assert sorted(world.records) == sorted(A[:2])


def test_blocks_whose_commit_failed_are_lost_on_that_tier_alone() -> None:
    world = World(8, disk=8)
    world.store(A[:3])
    (move,) = world.write_back()
    world.end(move)
    assert world.planner.durable(A[2]) is True
    world.commit(ok=False)
    assert world.planner.durable(A[2]) is not True
    assert world.known(A) == 3
    world.finish_all()
    assert world.free(1) == 8
    alone = World(disk=4)
    alone.store(A[:2])
    alone.commit(ok=False)
    assert alone.known(A) == 0
    alone.finish_all()
    assert alone.free(0) == 4


# -- reset ------------------------------------------------------------------------------------


def test_outcomes_that_come_after_a_reset_revive_nothing() -> None:
    world = World(8, disk=8)
    world.store(A[:3])
    (write,) = world.write_back()
    waiting = world.put(B[:3])
    assert world.planner.clear(None, 2) == 6
    world.drain()
    assert (world.known(A), world.known(B)) == (0, 0)
    assert world.free(1) == 5, "a write may still land in these slots"
    world.end(write)
    world.end(waiting.moves[0])
    assert (world.known(A), world.known(B)) == (0, 0)
    assert (world.free(0), world.free(1)) == (8, 8)
    assert world.pending == {}


def test_a_write_from_before_a_reset_of_its_tier_does_not_count() -> None:
    world = World(8, disk=8)
    world.store(A[:3])
    (write,) = world.write_back()
    world.planner.clear(1, 2)
    world.drain()
    world.end(write)
    assert world.planner.match(A).spans == (("memory-0", 3),)
    assert world.planner.durable(A[0]) is False
    assert world.free(1) == 8


def test_two_resets_return_a_slot_once() -> None:
    """The answer to an eviction from before the first reset is still on its way."""
    world = World(disk=4)
    world.store(A[:4])
    world.commit()
    world.planner.delete(A[2:3])
    world.drain()
    for epoch in (2, 3):
        world.planner.clear(None, epoch)
        world.drain()
        assert world.free(0) == 4
    world.commit(ok=False)
    assert world.free(0) == 4


def test_a_reset_of_memory_leaves_no_block_hidden_for_ever() -> None:
    """A complete run waits below one that is still being written, and loses its copies."""
    world = World(8)
    first, second = world.put(A[:2]), world.put(A[:4])
    world.end(second.moves[0])
    world.planner.clear(0, None)
    world.drain()
    world.end(first.moves[0])
    assert world.known(A) == 2
    assert world.store(A[:4]).known == 2
    assert world.known(A) == 4
