"""Decisions of the planner about puts, pins, promotions and resets, without bytes or time."""

from __future__ import annotations

import pytest

from tests.index.planner_world import (
    BUSY,
    CORRUPT,
    FAILED,
    OK,
    A,
    B,
    C,
    World,
    on_disk,
)
from tieredkv.testing.index_suite import chain
from tieredkv.types import Outcome

# -- put ------------------------------------------------------------------------------------


def test_a_block_shows_when_it_and_its_ancestors_are_written() -> None:
    world = World(8)
    first, second = world.put(A[:2]), world.put(A[:4])
    assert (second.known, second.pending) == (2, True)
    world.end(second.moves[0])
    assert world.known(A) == 0, "visible without its ancestors"
    world.end(first.moves[0])
    assert world.known(A) == 4


def test_a_second_put_joins_the_first() -> None:
    world = World(8)
    first, second = world.put(A[:3]), world.put(A[:3])
    assert (second.known, second.pending, second.moves) == (3, True, [])
    assert world.planner.visible(A[2]) is False
    world.end(first.moves[0])
    assert world.planner.visible(A[2]) is True
    third = world.put(A[:3])
    assert (third.known, third.pending, third.moves) == (3, False, [])
    assert world.free() == 5


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_a_put_that_diverges_inside_a_run_in_flight(first_ends_first: bool) -> None:
    world = World(12)
    other = A[:2] + chain([0, 0, 1, 1])[2:]
    first, second = world.put(A[:5]), world.put(other)
    assert (second.known, second.pending) == (2, True)
    order = [*first.moves, *second.moves]
    for move in order if first_ends_first else order[::-1]:
        world.end(move)
    assert (world.known(A), world.known(other)) == (5, 4)
    assert world.free() == 5


def test_a_split_between_two_writes_of_one_run_hides_nothing() -> None:
    """The head was written to one tier and the tail is still on its way to another."""
    world = World(2, 6)
    first = world.put(A[:4])
    assert [(move.dst, len(move)) for move in first.moves] == [(0, 2), (1, 2)]
    world.end(first.moves[0])
    second = world.put(A[:2] + chain([0, 0, 1])[2:], force=True)
    assert world.known(A) == 2, "the head is whole"
    for move in [*second.moves, first.moves[1]]:
        world.end(move)
    assert world.known(A) == 4
    assert world.known(A[:2] + chain([0, 0, 1])[2:]) == 3


@pytest.mark.parametrize("outcome", [FAILED, BUSY, CORRUPT])
def test_a_write_that_fails_in_the_middle_of_a_run(outcome: Outcome) -> None:
    world = World(8)
    plan = world.put(A[:5])
    world.end(plan.moves[0], [OK, OK, outcome, OK, OK])
    assert world.known(A) == 2
    assert world.planner.visible(A[2]) is None
    assert world.free() == 6, "slots behind the failure are lost"
    again = world.store(A[:5])
    assert again.known == 2
    assert world.known(A) == 5


def test_a_failure_takes_descendants_that_were_put_meanwhile() -> None:
    world = World(8)
    first, second = world.put(A[:2]), world.put(A[:4])
    world.end(first.moves[0], [OK, FAILED])
    assert world.known(A) == 1
    world.end(second.moves[0])
    assert world.known(A) == 1
    assert world.free() == 7


def test_a_delete_that_takes_what_was_still_being_written_shows_the_rest() -> None:
    world = World(2, 6)
    plan = world.put(A[:4])
    world.end(plan.moves[0])
    assert world.planner.delete(A[2:3]) == 2
    world.drain()
    assert world.known(A) == 2
    world.end(plan.moves[1])
    assert (world.known(A), world.free(1)) == (2, 6)


def test_a_put_takes_no_room_from_its_own_chain() -> None:
    world = World(4)
    world.store(A[:4])
    other = A[:2] + chain([0, 0, 1, 1])[2:]
    plan = world.store(other)
    assert (plan.known, plan.short) == (2, 0)
    assert world.known(other) == 4
    longer = world.store([*other, chain([0, 0, 1, 1, 1])[4]])
    assert longer.short == 1
    assert world.known(other) == 4


# -- pins -----------------------------------------------------------------------------------


def test_pins_hold_until_released_or_expired() -> None:
    world = World(4)
    world.store(A[:3])
    pin, blocks = world.planner.pin(A, 10.0, world.now)
    assert (blocks, len(world.planner.pins)) == (3, 1)
    assert world.store(B[:3]).short == 2
    assert (world.known(A), world.known(B)) == (3, 1)
    assert pin is not None
    world.planner.pins.release(pin)
    world.planner.pins.release(pin)
    assert world.store(C[:3]).short == 0
    world.planner.pin(C, 10.0, world.now)
    world.now += 9.0  # the put is at 10.0 after the pin
    assert world.store(A[:4]).short == 0
    assert len(world.planner.pins) == 0


def test_a_pin_survives_a_split_and_covers_only_its_part() -> None:
    world = World(5)
    world.store(A[:4])
    world.planner.pin(A[:2], 100.0, world.now)
    world.store(A[:1] + chain([0, 1])[1:])
    assert world.planner.pins.blocks() == 2
    assert world.store(B[:5]).short == 2
    assert world.known(A) == 2


@pytest.mark.parametrize("cut", [5, 3, 2, 1])
@pytest.mark.parametrize("of_turn", [False, True])
def test_a_pin_moves_up_when_its_deepest_block_goes(cut: int, of_turn: bool) -> None:
    world = World(6)
    world.store(A[:2])
    world.store(A[:6])  # a second run, so that the pin may have to leave its own
    pin = None
    if of_turn:
        world.planner.hold(A[:6], 10.0, world.now)
    else:
        pin, _ = world.planner.pin(A[:6], 10.0, world.now)
    world.planner.delete([A[cut]])
    assert world.planner.pins.blocks() == cut
    world.store(B[:6])
    assert (world.known(A), world.known(B)) == (cut, 6 - cut)
    if pin is not None:
        world.planner.pins.release(pin)
    else:
        world.now += 11.0
    assert world.store(C[:6]).short == 0
    assert len(world.planner.pins) == 0
    assert world.known(A) == 0


def test_turns_that_move_to_the_same_block_share_the_longer_pin() -> None:
    world = World(6)
    world.store(A[:3])
    world.planner.hold(A[:2], 100.0, world.now)
    world.planner.hold(A[:3], 10.0, world.now)
    world.planner.delete([A[2]])
    assert len(world.planner.pins) == 1
    world.now += 11.0
    world.store(B[:6])
    assert world.known(A) == 2


def test_pins_of_deleted_blocks_hold_nothing() -> None:
    world = World(4)
    world.store(A[:4])
    world.planner.pin(A, 100.0, world.now)
    assert world.planner.delete(A[1:2]) == 3
    world.drain()
    assert world.store(B[:3]).short == 0
    assert world.known(A) == 1
    world.store(A[:2])
    assert world.planner.pins.blocks() <= 2


# -- promotion ------------------------------------------------------------------------------


def test_promotions_keep_to_their_budget() -> None:
    world = World(8, disk=8, budget=2.0)
    on_disk(world, A[:6])

    def promote(now: float) -> int:
        moves = world.planner.plan_promote(A, range(6), 0, now)
        world.moving += moves
        for move in moves:
            world.end(move)
        return sum(map(len, moves))

    assert [promote(100.0), promote(100.0), promote(100.5), promote(101.0)] == [2, 0, 1, 1]
    assert promote(200.0) == 2, "at most a second's worth at once"
    assert world.planner.match(A).spans == (("memory-0", 6),)
    assert promote(300.0) == 0


def test_a_promotion_keeps_the_source_and_is_made_once() -> None:
    world = World(8, disk=8)
    on_disk(world, A[:4])
    moves = world.planner.plan_promote(A, range(4), 0, world.now)
    world.moving += moves
    assert [(m.src, m.dst, len(m)) for m in moves] == [(1, 0, 4)]
    assert world.planner.plan_promote(A, range(4), 0, world.now) == []
    assert world.planner.match(A).spans == (("disk", 4),)
    world.end(moves[0], read=[OK, OK, CORRUPT, OK], write=[OK, OK, CORRUPT, OK])
    assert world.known(A) == 2
    assert world.planner.corrupt == 1


def test_bytes_of_an_older_block_are_not_promoted() -> None:
    world = World(8, disk=8)
    on_disk(world, A[:2])
    _, reads = world.planner.plan_get(A[:2], 0, world.now)
    held = dict(zip(reads[0].depths, reads[0].generations, strict=True))
    assert world.planner.plan_promote(A, [0, 1], 0, world.now, {0: 7, 1: held[1]})[0].depths == [1]


# -- slots of reads ---------------------------------------------------------------------------


def test_a_slot_that_is_being_read_is_not_given_out() -> None:
    world = World(4)
    world.store(A[:4])
    _, reads = world.planner.plan_get(A[:4], 0, world.now)
    world.moving += reads
    assert world.planner.delete(A[:1]) == 4
    world.drain()
    assert world.free() == 0
    assert world.put(B[:1]).short == 1
    world.end(reads[0])
    assert world.free() == 4


@pytest.mark.parametrize(("outcome", "left"), [(CORRUPT, 3), (FAILED, 4), (BUSY, 0)])
def test_an_unreadable_copy_goes_with_all_that_hangs_on_it(outcome: Outcome, left: int) -> None:
    world = World(4)
    world.store(A[:4])
    _, reads = world.planner.plan_get(A[:4], 0, world.now)
    world.moving += reads
    world.end(reads[0], read=[outcome, OK, OK, OK])
    assert world.known(A) == (4 if outcome is BUSY else 0)
    assert world.free() == left
    assert world.res.levels[0].pool.lost == (outcome is CORRUPT)
