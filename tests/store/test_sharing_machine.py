"""Two cores on one pool, in any sequence of calls, losses and outages: what one has stored the
other finds, nobody ever reads wrong bytes, and nobody touches what is not his.
"""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from hypothesis.stateful import precondition as given_that

from tests.store.shared_pool import GONE, LEASE, Pool
from tests.store.stepped import PATIENCE, SIZE, Shape, Side
from tests.store.world import Path_, chain, payload
from tieredkv import Outcome, Turn
from tieredkv.buffers import view_blocks
from tieredkv.testing import ManualClock

OK = Outcome.OK
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
SIDES = st.integers(0, 1)
SESSIONS = st.sampled_from([None, None, "a", "b"])


class Calls(RuleBasedStateMachine):
    """Blocks of a key are equal wherever they come from, but for those of a core that has left
    the pool: its weights are others."""

    shape = Shape()
    capacity = 10

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(1000.0)
        self.pool = Pool(self.capacity, self.clock)
        self.sides = [Side(self.shape, self.pool, self.clock) for _ in range(2)]
        self.deleted: list[set[bytes]] = [set(), set()]
        self.asked: list[tuple[Side, list[bytes], int, Any]] = []
        self.tried: set[Path_] = set()
        self.calm = True
        """Nothing has been lost, removed or given up, so that all is shared."""
        for which, side in enumerate(self.sides):
            side.catalogue.removing = lambda key, deleted, which=which: self.removing(
                which, key, deleted
            )

    def removing(self, which: int, key: bytes, deleted: bool) -> None:
        side = self.sides[which]
        mine = key in side.tier.written or (deleted and key in self.deleted[which])
        assert mine, "removed what another has stored"
        assert deleted or key not in side.held(), "removed what it counts on"

    def block(self, side: Side, key: bytes) -> bytes:
        return payload(key, 1 if side.apart else 0, SIZE)

    # -- calls ----------------------------------------------------------------------------

    @rule(which=SIDES, path=PATHS, session=SESSIONS, hurried=st.sampled_from([False, False, True]))
    def put(self, which: int, path: Path_, session: str | None, hurried: bool) -> None:
        side, keys = self.sides[which], chain(path)
        self.tried.add(path)
        host = view_blocks([self.block(side, key) for key in keys], len(keys), writable=False)
        self.calm &= not hurried
        side.core.hurried = hurried
        outcomes = side.core.put(keys, host, 0, Turn(session) if session else None)
        side.core.hurried = False
        good = outcomes.count(OK)
        assert outcomes[:good] == [OK] * good, "stored behind what is not"

    @rule(which=SIDES, path=PATHS, hurried=st.sampled_from([False, False, True]))
    def get(self, which: int, path: Path_, hurried: bool) -> None:
        self.read(self.sides[which], path, hurried)

    def read(self, side: Side, path: Path_, hurried: bool = False) -> list[Outcome]:
        keys = chain(path)
        side.core.discover(keys)
        out = [bytearray(SIZE) for _ in keys]
        host = view_blocks(out, len(keys), writable=True)
        self.calm &= not hurried
        side.core.hurried = hurried
        outcomes, _ = side.core.get(keys, host, 0, time.monotonic() + PATIENCE, True)
        side.core.hurried = False
        for key, block, outcome in zip(keys, out, outcomes, strict=True):
            assert outcome is not OK or block == self.block(side, key), "wrong bytes"
        return outcomes

    @rule(which=SIDES, path=PATHS)
    def lookup(self, which: int, path: Path_) -> None:
        self.sides[which].core.discover(chain(path))

    @rule(which=SIDES, path=PATHS)
    def ask(self, which: int, path: Path_) -> None:
        """As an engine does, which does not wait for the answer."""
        side, keys = self.sides[which], chain(path)
        unknown = side.core.unknown(keys)
        question = side.catalogue.ask(unknown)
        self.asked.append((side, keys, len(keys) - len(unknown), question))

    @given_that(lambda self: self.asked)
    @rule(at=st.integers(0, 9))
    def adopt(self, at: int) -> None:
        side, keys, known, question = self.asked[at % len(self.asked)]
        found = side.catalogue.answer(question, wait=0.0)
        if found is not None:
            self.asked.remove((side, keys, known, question))
            side.core.adopt(keys[: known + found], found)

    @rule(which=SIDES, path=PATHS)
    def prefetch(self, which: int, path: Path_) -> None:
        side = self.sides[which]
        side.core.prefetch(chain(path), side.shared)

    @rule(which=SIDES, path=PATHS, at=st.integers(0, 5))
    def delete(self, which: int, path: Path_, at: int) -> None:
        side, keys, at = self.sides[which], chain(path), at % len(path)
        self.calm = False
        self.deleted[which].add(keys[at])
        side.core.delete([keys[at]])
        side.core.discover(keys)
        assert side.core.planner.match(keys).blocks <= at, "found what was just deleted"

    @rule(which=SIDES, tier=st.sampled_from([None, 0, 1, 2]))
    def clear(self, which: int, tier: int | None) -> None:
        core = self.sides[which].core
        self.calm = False
        core.clear(None if tier is None else tier % len(core.tiers))

    @given_that(lambda self: not self.sides[1].apart and len(self.tried) % 4 == 0)
    @rule()
    def leave(self) -> None:
        self.calm = False
        self.sides[1].leave()

    @rule(which=SIDES, blocks=st.integers(1, 4))
    def shed(self, which: int, blocks: int) -> None:
        side = self.sides[which]
        self.calm = False
        before, idle = len(side.held()), side.idle
        assert side.catalogue.shed is not None
        side.catalogue.shed(blocks)
        if idle and len(side.core.tiers) == 1:
            assert len(side.held()) == max(0, before - blocks)

    @rule(session=st.sampled_from(["a", "b"]), hint=st.sampled_from(["begin", "end", "finish"]))
    def hint(self, session: str, hint: str) -> None:
        for side in self.sides:
            with side.core.lock:
                if hint == "begin":
                    side.core.planner.turn_began(session, self.clock.now)
                elif hint == "end":
                    side.core.planner.turn_ended(session, self.clock.now, next_tool="bash")
                else:
                    side.core.planner.end_session(session, self.clock.now)

    # -- time and the pool ------------------------------------------------------------------

    @rule(which=SIDES, jobs=st.integers(1, 3))
    def work(self, which: int, jobs: int) -> None:
        self.sides[which].executor.step(jobs)

    @rule(which=SIDES, steps=st.integers(1, 3))
    def tend(self, which: int, steps: int) -> None:
        side = self.sides[which]
        side.link.probe()
        for _ in range(steps):
            side.catalogue.step()

    @rule()
    def settle(self) -> None:
        for side in self.sides:
            side.settle()

    @rule(seconds=st.sampled_from([0.6, 3.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(seed=st.integers(0, 99), blocks=st.integers(1, 4))
    def lose(self, seed: int, blocks: int) -> None:
        self.calm = False
        here = list(self.pool.blocks)
        for key in random.Random(seed).sample(here, min(blocks, len(here))):
            del self.pool.blocks[key]

    @rule(blocks=st.integers(1, 4))
    def evict(self, blocks: int) -> None:
        self.calm = False
        self.pool.evict(blocks)

    @rule()
    def down_or_up(self) -> None:
        self.calm = False
        self.pool.up = not self.pool.up

    # -- laws -----------------------------------------------------------------------------

    @invariant()
    def sound(self) -> None:
        for side in self.sides:
            assert side.core.check() == []
            for level in side.core.planner.res.levels:
                assert level.pool.used <= level.slots
            assert len(side.held()) <= side.tier.slots
            assert not side.tier.intruders, "used by a core that has left the pool"
            assert all(pin >= 0.0 for pin in side.tier.pins)
            assert self.shape.soft_pin or side.tier.pins <= {0.0}

    @invariant()
    def pool_has_right_bytes(self) -> None:
        for key, block in self.pool.blocks.items():
            assert block == payload(key, 0, SIZE), "wrong bytes in the pool"

    @invariant()
    def own_is_counted_on(self) -> None:
        """Or nobody would ever remove it."""
        for side in self.sides:
            if side.idle:
                assert side.catalogue.own <= side.held(), "left in the pool and forgotten"

    def teardown(self) -> None:
        if sys.exc_info()[0] is not None:
            return  # a law is broken already: it is that one to be shown
        self.pool.up = True
        self.settle()
        self.clock.advance(LEASE + GONE)
        self.settle()
        if self.calm:
            self.all_is_shared()
        for side in self.sides:
            assert not side.catalogue.doomed
            assert not side.catalogue.leaving
            for path in sorted(self.tried):
                if not side.apart:
                    self.finds(side, path)
        self.sound()

    def all_is_shared(self) -> None:
        for side in self.sides:
            res, held = side.core.planner.res, side.held()
            evicted = side.core.planner.room.evicted[side.shared]
            if res.levels[side.shared].pool.free and not evicted:
                keys = {key for run in res.tree.runs.values() for key in run.keys}
                assert keys == held, "not published"

    def finds(self, side: Side, path: Path_) -> None:
        """What the pool has of the chain, as far as there is room."""
        keys, match = chain(path), side.core.planner.match
        local = match(keys).blocks
        there = next(
            (i for i, key in enumerate(keys[local:]) if key not in self.pool.blocks),
            len(keys) - local,
        )
        free = side.core.planner.res.levels[side.shared].pool.free
        room = self.shape.shared - local if len(side.core.tiers) == 1 else free
        side.core.discover(keys)
        found = match(keys).blocks
        assert found >= local + min(there, room), "not found"
        outcomes = self.read(side, path)
        assert set(outcomes[local:found]) <= {OK}, "found and not read"
        self.settle()


SHAPES = {
    "Shared": Shape(),
    "DramShared": Shape(dram=4),
    "LargeDramShared": Shape(dram=9, shared=4, soft_pin=False),
    "SharedDisk": Shape(disk=8, policy="arc"),
    "DramSharedDisk": Shape(dram=4, shared=5, disk=7),
    "DramSharedThrough": Shape(dram=4, disk=12, write="through"),
    "DramSharedDelay": Shape(dram=4, disk=8, policy="delay"),
    "RealShared": Shape(real=True),
    "RealDramSharedDisk": Shape(dram=4, shared=5, disk=7, soft_pin=False, real=True),
}
EXAMPLES = int(os.environ.get("TIEREDKV_CRASHES", "0"))
PROFILE = settings(
    max_examples=EXAMPLES or 100,
    stateful_step_count=60 if EXAMPLES else 40,
    derandomize=not EXAMPLES,
    phases=(Phase.generate, Phase.shrink),
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)

for name, shape in SHAPES.items():
    machine: Any = type(name, (Calls,), {"shape": shape, "__module__": __name__})
    globals()[f"Test{name}"] = machine.TestCase
    machine.TestCase.settings = PROFILE
