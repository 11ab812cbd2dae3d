"""Calls of a store, and the laws that hold after each of them, against a dict."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.stateful import precondition as given_that

from tests.store.world import (
    SIZE,
    Path_,
    Shape,
    chain,
    core_of,
    key_of,
    leaks,
    open_store,
    payload,
    settle,
)
from tieredkv import Outcome, Turn
from tieredkv.planner.plans import PutPlan
from tieredkv.session import PinGuard
from tieredkv.testing import Gate, ManualClock
from tieredkv.tiers.nvme.usage import disk_usage

SYMBOLS = st.integers(0, 2)
PATHS = st.lists(SYMBOLS, min_size=1, max_size=7).map(tuple)
SESSIONS = st.sampled_from(["a", "b"])


class Calls(RuleBasedStateMachine):
    """`allowed` is the oracle: the bytes that may come back under each key.

    While a store is open those are the bytes of the put that the planner last gave room; an
    older record may survive on the disk, so that all of `ever` may come back after a restart.
    """

    shape = Shape(dram=6)
    paths: Bundle[Path_] = Bundle("paths")

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="tieredkv-machine-"))
        self.clock = ManualClock(1000.0)
        self.allowed: dict[bytes, set[bytes]] = {}
        self.ever: dict[bytes, set[bytes]] = {}
        self.parent: dict[bytes, bytes | None] = {}
        self.tried: set[Path_] = set()
        self.versions = 0
        self.rotten = False
        self.open()

    def open(self) -> None:
        self.store, self.tiers = open_store(self.shape, self.root, self.clock)
        self.pins: list[tuple[PinGuard, list[bytes], float]] = []
        self.gates: list[Gate] = []
        self.trouble = False
        self.owed = True  # everything stored should become durable
        self.limits = core_of(self.store)._limits
        self.allowed = {key: set(blocks) for key, blocks in self.ever.items()}
        self.watch_puts()

    def watch_puts(self) -> None:
        """Whether a put is a repetition is decided under the planner's lock: learn it there."""
        planner = core_of(self.store).planner
        plan_put = planner.plan_put

        def watched(*args: Any, **kwargs: Any) -> PutPlan:
            plan = plan_put(*args, **kwargs)
            for move in plan.moves:
                for key in move.keys:
                    block = payload(key, self.versions)
                    self.allowed[key] = {block}
                    self.ever.setdefault(key, set()).add(block)
            return plan

        planner.plan_put = watched  # type: ignore[method-assign]

    def teardown(self) -> None:
        try:
            self.heal()
            self.read_all()
            self.store.clear()
            settle(self.store)
            assert leaks(self.store) == []
            assert self.store.check() == []
            assert self.store.close()
        finally:
            for gate in self.gates:
                gate.release()
            self.store.close(1.0)
            shutil.rmtree(self.root)

    # -- puts and gets --------------------------------------------------------------------

    @initialize(target=paths, path=PATHS)
    def first(self, path: Path_) -> Path_:
        self.put(path, 0, False, None, False)
        return path

    @rule(target=paths, path=PATHS, stack=st.booleans(), later=st.booleans())
    def put_new(self, path: Path_, stack: bool, later: bool) -> Path_:
        self.put(path, 0, stack, None, later)
        return path

    @rule(
        target=paths,
        base=paths,
        more=PATHS,
        session=SESSIONS,
        ttl=st.sampled_from([None, 5.0]),
        priority=st.sampled_from([0, 0, -3, 10**6]),
    )
    def extend(
        self, base: Path_, more: Path_, session: str, ttl: float | None, priority: int
    ) -> Path_:
        path = (base + more)[:9]
        turn = Turn(session, ttl=ttl, priority=priority)
        self.put(path, len(base) % len(path), False, turn, False)
        return path

    @rule(target=paths, base=paths, cut=st.integers(0, 8), symbol=SYMBOLS)
    def diverge(self, base: Path_, cut: int, symbol: int) -> Path_:
        path = (*base[: cut % len(base)], symbol, symbol)
        self.put(path, 0, True, None, False)
        return path

    @rule(path=paths, stack=st.booleans())
    def put_again(self, path: Path_, stack: bool) -> None:
        self.put(path, 0, stack, None, True)

    def put(self, path: Path_, start: int, stack: bool, turn: Turn | None, later: bool) -> None:
        keys = chain(path)
        self.parent.update(zip(keys, [None, *keys], strict=False))
        self.tried.add(path)
        self.versions += 1
        known = [self.store.contains(key) for key in keys]
        blocks = [payload(key, self.versions) for key in keys[start:]]
        buffers = b"".join(blocks) if stack else blocks
        if later and not self.gates:
            outcomes = self.store.put_async(keys, buffers, start, turn).result(60.0)
            if self.shape.write == "through" and Outcome.FAILED in outcomes:
                return  # stored in memory, but the disk is full of what others hang on
        else:
            outcomes = self.store.put(keys, buffers, start, turn)
        if turn is not None and turn.ttl and outcomes[0] is not Outcome.MISSING:
            self.add_pin(PinGuard(None, None, 0), keys, turn.ttl)
        assert len(outcomes) == len(blocks)
        if self.healthy:
            settle(self.store)
            self.judge_put(keys, start, known, outcomes)

    def judge_put(
        self,
        keys: list[bytes],
        start: int,
        known: list[bool],
        outcomes: list[Outcome],
    ) -> None:
        if start and not known[start - 1]:
            assert set(outcomes) == {Outcome.MISSING}
            return
        good = outcomes.count(Outcome.OK)
        assert outcomes == [Outcome.OK] * good + [Outcome.BUSY] * (len(outcomes) - good)
        for i in range(good):
            assert self.store.contains(keys[start + i])
        slots = core_of(self.store).planner.res.levels[0].pool
        if not self.store.stats().pins and len(keys) <= slots.limit - slots.lost:
            assert good == len(outcomes), "a chain that fits was refused"

    @rule(path=paths, start=st.integers(0, 9), stack=st.booleans())
    def get(self, path: Path_, start: int, stack: bool) -> None:
        keys = chain(path)
        start %= len(keys)
        blocks = self.store.lookup(keys).blocks
        wanted = len(keys) - start
        stacked = bytearray(wanted * SIZE)
        listed = [bytearray(SIZE) for _ in range(wanted)]
        deadline = 0.02 if self.gates else None
        outcomes = self.store.get(keys, stacked if stack else listed, start, deadline)
        assert len(outcomes) == wanted
        for i, outcome in enumerate(outcomes):
            if outcome is Outcome.OK:
                found = bytes(stacked[i * SIZE : (i + 1) * SIZE] if stack else listed[i])
                assert found in self.allowed.get(keys[start + i], set()), "wrong bytes"
        if self.healthy and not self.rotten:
            hits = max(0, blocks - start)
            assert outcomes == [Outcome.OK] * hits + [Outcome.MISSING] * (wanted - hits)

    @rule(path=paths)
    def get_whole(self, path: Path_) -> None:
        self.get(path, 0, True)

    def read_all(self) -> None:
        """Every stored block, each at the end of its chain."""
        for path in sorted(self.tried):
            if self.store.contains(key_of(path)):
                self.get(path, 0, True)
                settle(self.store)

    # -- retention ------------------------------------------------------------------------

    def add_pin(self, guard: PinGuard, keys: list[bytes], ttl: float) -> None:
        kept = self.store.lookup(keys).blocks
        self.pins.append((guard, keys[:kept], self.clock.now + ttl))

    @rule(path=paths, ttl=st.sampled_from([1.0, 10.0]))
    def pin(self, path: Path_, ttl: float) -> None:
        guard = self.store.pin(chain(path), ttl)
        self.add_pin(guard, chain(path), ttl)
        assert guard.blocks == len(self.pins[-1][1]) or self.gates

    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        if not self.pins:
            return
        guard, keys, expires = self.pins.pop(which % len(self.pins))
        if guard._core is None:  # of a turn: ends by time
            self.pins.append((guard, keys, expires))
        guard.release()

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.pins = [pin for pin in self.pins if pin[2] > self.clock.now]

    @rule(path=paths)
    def prefetch(self, path: Path_) -> None:
        future = self.store.prefetch(chain(path))
        if not self.gates:
            assert 0 <= future.result(60.0) <= len(path)

    @rule(
        session=SESSIONS,
        path=paths,
        hint=st.sampled_from(["end", "finish", "abandon", "fork", "resume"]),
    )
    def hint(self, session: str, path: Path_, hint: str) -> None:
        handle = self.store.session(session)
        if hint == "end":
            handle.turn_ended("tool_use", "bash", 10)
        elif hint == "finish":
            handle.finish()
        elif hint == "abandon":
            handle.abandon(chain(path))
        elif hint == "resume":
            future = handle.resume(chain(path))
            if not self.gates:
                assert 0 <= future.result(60.0) <= len(path)
        else:
            handle.fork("b" if session == "a" else "a")

    # -- removal --------------------------------------------------------------------------

    @rule(path=paths, at=st.integers(0, 8))
    def delete(self, path: Path_, at: int) -> None:
        key = chain(path)[at % len(path)]
        self.store.delete([key])
        gone = {key}
        for child in sorted(self.parent, key=self.depth):
            if self.parent[child] in gone:
                gone.add(child)
        self.forget(gone)

    @given_that(lambda self: self.versions % 3 == 0)
    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.forget(set(self.parent))
        self.rotten = False

    @rule(which=st.integers(0, 2))
    def clear_tier(self, which: int) -> None:
        names = list(self.tiers)
        self.store.clear(names[which % len(names)])
        self.owed = False
        self.pins = []

    def depth(self, key: bytes) -> int:
        up = self.parent[key]
        return 0 if up is None else 1 + self.depth(up)

    def forget(self, gone: set[bytes]) -> None:
        """These are not to come back, not even from writes that still hang."""
        for key in gone:
            self.allowed.pop(key, None)
            self.ever.pop(key, None)
            assert not self.store.contains(key)
        self.pins = [
            (guard, [key for key in keys if key not in gone], expires)
            for guard, keys, expires in self.pins
        ]

    # -- state ---------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        return not self.trouble

    @given_that(lambda self: self.trouble)
    @rule()
    def heal(self) -> None:
        for tier in self.tiers.values():
            tier.error, tier.hang = None, None
        for gate in self.gates:
            gate.release()
        core_of(self.store)._limits = self.limits
        settle(self.store)
        self.gates, self.trouble, self.pins = [], False, []

    # -- laws -----------------------------------------------------------------------------

    @invariant()
    def sound(self) -> None:
        if self.healthy:
            settle(self.store)
        assert self.store.check() == []

    @invariant()
    def prefix_closed(self) -> None:
        if not self.healthy:
            return
        stored = {key for key in self.parent if self.store.contains(key)}
        for key in stored:
            up = self.parent[key]
            assert up is None or up in stored, "a block without its parent"
            assert self.allowed.get(key), "a block that nobody stored"

    @invariant()
    def pinned_stay(self) -> None:
        if self.healthy and not self.rotten:
            for _, keys, _ in self.pins:
                assert all(self.store.contains(key) for key in keys), "a pinned block has gone"

    @invariant()
    def within_capacity(self) -> None:
        for tier in self.store.stats().tiers:
            assert tier.used_bytes <= tier.capacity_bytes
        if self.shape.write is not None:
            assert disk_usage(self.root) <= self.shape.disk
