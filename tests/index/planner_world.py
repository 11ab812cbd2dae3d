"""A planner in a world where moves and commits end when the test says so."""

from __future__ import annotations

from collections.abc import Sequence

from tieredkv.eviction import LruPolicy
from tieredkv.eviction.base import Access, Admission
from tieredkv.planner import Planner
from tieredkv.planner.level import Level
from tieredkv.planner.plans import Effects, PutPlan
from tieredkv.planner.residency import Residency
from tieredkv.planner.room import Room
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

    def store(self, keys: Sequence[bytes], force: bool = False) -> PutPlan:
        """Put, and let the writes of the put end well."""
        plan = self.put(keys, force=force)
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


def on_disk(world: World, keys: Sequence[bytes]) -> None:
    """Store, write back, and leave the only copy on the disk."""
    world.store(keys)
    world.write_back()
    world.finish_all()
    world.planner.clear(0, None)
    world.drain()
    assert world.planner.match(keys).spans == (("disk", len(keys)),)
