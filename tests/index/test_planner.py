"""Decisions of the planner, without bytes, threads or time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tieredkv.eviction import LruPolicy
from tieredkv.eviction.base import Access, Admission
from tieredkv.planner import Planner
from tieredkv.plans import Effects, PutPlan
from tieredkv.residency import Level, Residency
from tieredkv.room import Room
from tieredkv.testing.index_suite import chain
from tieredkv.types import Move, Outcome, Turn

OK, BUSY, FAILED, CORRUPT = Outcome.OK, Outcome.BUSY, Outcome.FAILED, Outcome.CORRUPT


class Choosy(Admission):
    """Admits only what it is told to."""

    def __init__(self) -> None:
        self.admits = False
        self.asked: list[int] = []

    def admit(self, run: Access, now: float) -> bool:
        self.asked.append(run.blocks)
        return self.admits


class World:
    """A planner whose moves and commits end when the test says so."""

    def __init__(
        self,
        *slots: int,
        disk: int = 0,
        accepts: bool = True,
        low: int = 0,
        admission: Admission | None = None,
        budget: float = 0.0,
    ) -> None:
        sizes = [(f"memory-{i}", n, False) for i, n in enumerate(slots)]
        if disk:
            sizes.append(("disk", disk, True))
        levels = [
            Level(name, LruPolicy(n, 1), n, durable, accepts or not durable)
            for name, n, durable in sizes
        ]
        self.res = Residency(levels, 1, None)
        self.room = Room(self.res, admission, low)
        self.planner = Planner(self.res, self.room, epoch=1, promotion_budget=budget)
        self.disk = len(slots)
        self.now = 0.0
        self.moving: list[Move] = []
        self.tickets: list[int] = []
        self.records: dict[bytes, int] = {}
        self.pending: dict[int, Effects] = {}

    def put(
        self, keys: Sequence[bytes], *, force: bool = False, turn: Turn | None = None
    ) -> PutPlan:
        """Plan only."""
        self.now += 1.0
        plan = self.planner.plan_put(keys, 0, turn, self.now, force=force)
        self.moving += plan.moves
        self.drain()
        return plan

    def store(self, keys: Sequence[bytes], **options: bool) -> PutPlan:
        """Put, and let the writes of the put end well."""
        plan = self.put(keys, **options)
        for move in plan.moves:
            self.end(move)
        return plan

    def drain(self) -> list[Move]:
        effects = self.planner.drain()
        self.moving += effects.moves
        if effects.index is not None:
            self.pending[effects.index.ticket] = effects
        self.sound()
        return effects.moves

    def end(
        self,
        move: Move,
        write: Sequence[Outcome] | None = None,
        read: Sequence[Outcome] | None = None,
    ) -> list[Move]:
        """A move ends, by default well; what the planner wants next."""
        self.moving.remove(move)
        read = ([OK] * len(move) if read is None else read) if move.src is not None else []
        write = ([OK] * len(move) if write is None else write) if move.dst is not None else []
        self.planner.finish(move, read, write, self.now)
        return self.drain()

    def commit(self, ok: bool = True) -> None:
        """Answer every index change handed out so far."""
        for ticket, effects in sorted(self.pending.items()):
            del self.pending[ticket]
            assert effects.index is not None
            if ok:
                for gone in effects.index.deletes:
                    self.records.pop(gone[0], None)
                for piece in effects.index.puts:
                    self.records.update(zip(piece.keys, piece.slots, strict=True))
            self.planner.committed(ticket, ok, self.now)
        self.drain()

    def finish_all(self) -> None:
        """Let everything end well, and what follows from it."""
        while self.moving or self.pending:
            for move in list(self.moving):
                self.end(move)
            self.commit()

    def write_back(self, blocks: int = 100) -> list[Move]:
        self.room.write_back(self.now, blocks)
        return self.drain()

    def sound(self) -> None:
        problems = self.planner.check(self.moving)
        assert not problems, problems

    def known(self, keys: Sequence[bytes]) -> int:
        return self.planner.match(keys).blocks

    def free(self, tier: int = 0) -> int:
        return self.res.levels[tier].pool.free


A, B, C = chain([0] * 8), chain([1] * 8), chain([2] * 8)


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


def on_disk(world: World, keys: Sequence[bytes]) -> None:
    """Store, write back, and leave the only copy on the disk."""
    world.store(keys)
    world.write_back()
    world.finish_all()
    world.planner.clear(0, None)
    world.drain()
    assert world.planner.match(keys).spans == (("disk", len(keys)),)


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
