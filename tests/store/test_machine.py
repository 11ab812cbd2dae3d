"""Any sequence of calls and faults against a dict: the store may forget, it never lies."""

from __future__ import annotations

import os
import random
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition as given_that
from hypothesis.stateful import rule

from tests.store.machine import Calls
from tests.store.world import (
    DISK,
    SIZE,
    Shape,
    core_of,
    durable,
    settle,
)
from tieredkv import Outcome
from tieredkv.testing import Fault, Gate
from tieredkv.testing.faults import FaultSpec
from tieredkv.tiers.nvme.tier import NvmeTier

FAULTS: dict[str, FaultSpec] = {
    "fails": Fault(),
    "fails writes": Fault(op="write"),
    "fails some writes": Fault(lambda at: at.key[0] % 2 == 0, op="write"),
    "fails reads": Fault(op="read"),
    "fails some reads": Fault(lambda at: at.key[0] % 2 == 0, op="read"),
    "corrupts": Fault(lambda at: at.key[1] % 2 == 0, op="read", outcome=Outcome.CORRUPT),
    "is busy": Fault(outcome=Outcome.BUSY),
    "raises": OSError,
    "answers nothing": Fault(reply="none"),
    "answers too little": Fault(lambda at: at.index > 0, reply="few"),
}
HURRY = {"put_deadline": 0.02, "room_wait": 0.01}


class Machine(Calls):
    """Also closes and reopens the store, and breaks its tiers and its disk."""

    paths = Calls.paths

    # -- durability -----------------------------------------------------------------------

    @given_that(lambda self: self.versions % 2 == 0)
    @rule()
    def flush(self) -> None:
        done = self.store.flush(20.0 if self.healthy else 0.05)
        if not done or not self.healthy:
            return
        settle(self.store)
        # `delay` leaves out what it does not expect back
        every = self.shape.write == "through" or self.shape.policy != "delay"
        if self.shape.write in ("on_evict", "through") and every and self.owed and not self.rotten:
            level = core_of(self.store).planner.res.levels[-1]
            stored = {key for key in self.parent if self.store.contains(key)}
            if not core_of(self.store).planner.room.evicted[-1]:
                assert level.pool.used <= level.pool.limit
                assert durable(self.store, list(stored)) == stored, "flush left something"

    @rule(flush=st.booleans())
    def reopen(self, flush: bool) -> None:
        if self.gates:
            self.heal()
        whole = self.healthy
        if flush:
            self.store.flush(20.0)
        settle(self.store)
        before = durable(self.store, list(self.parent))
        disk = core_of(self.store).planner.res.levels[-1].pool
        full = disk.free == 0  # of blocks that are pinned, or that others hang on
        closed = self.store.close(20.0)
        assert closed or not whole or self.rotten or full
        self.open()
        after = {key for key in self.parent if self.store.contains(key)}
        if flush and whole:
            assert before <= after, "a durable block was lost"
        if flush:
            assert after <= before or not whole, "more came back than was durable"
        self.read_all()

    # -- faults ---------------------------------------------------------------------------

    @rule(which=st.integers(0, 2), kind=st.sampled_from(sorted(FAULTS)))
    def break_tier(self, which: int, kind: str) -> None:
        tier = list(self.tiers.values())[which % len(self.tiers)]
        tier.error = FAULTS[kind]
        self.upset()

    @given_that(lambda self: not self.gates)
    @rule(which=st.integers(0, 2), op=st.sampled_from(["read", "write", None]))
    def hang(self, which: int, op: str | None) -> None:
        tier = list(self.tiers.values())[which % len(self.tiers)]
        if tier.inline:
            return
        tier.hang = Gate(op=op)  # type: ignore[arg-type]
        self.gates.append(tier.hang)
        core_of(self.store)._limits = self.limits.model_copy(update=HURRY)
        self.upset()

    def upset(self) -> None:
        self.trouble, self.owed, self.pins = True, False, []

    @given_that(lambda self: "nvme" in self.tiers and not self.gates and self.versions % 4 == 0)
    @rule(seed=st.integers(0, 99))
    def rot(self, seed: int) -> None:
        """A bit flips on the disk, below the verification."""
        settle(self.store)
        level = core_of(self.store).planner.res.levels[-1]
        tier = self.tiers["nvme"].inner
        assert isinstance(tier, NvmeTier)
        runs = core_of(self.store).planner.res.tree.runs.values()
        slots = [slot for run in runs for slot in run.slots[-1] or () if slot >= 0]
        if not slots:
            return
        slot = random.Random(seed).choice(slots)
        segment = tier.segments.get(slot // tier.segments.geometry.table_slots)
        assert segment is not None
        offset = segment.geometry.offset(slot % tier.segments.geometry.table_slots)
        fd = os.open(segment.path, os.O_RDWR)
        try:
            at = offset + seed % SIZE
            byte = os.pread(fd, 1, at)[0]
            os.pwrite(fd, bytes([byte ^ 1]), at)
            os.fsync(fd)
        finally:
            os.close(fd)
        self.rotten, self.owed, self.pins = True, False, []
        assert level.durable


SHAPES = {
    "Dram": Shape(dram=6),
    "HbmDram": Shape(hbm=3, dram=5, policy="arc"),
    "OnEvict": Shape(dram=4, write="on_evict"),
    "OnEvictSlowMemory": Shape(dram=4, write="on_evict", inline=False),
    "Through": Shape(dram=4, write="through", policy="lfu"),
    "ReadOnlyDisk": Shape(dram=5, write="off", policy="fifo"),
    "All": Shape(hbm=3, dram=4, write="on_evict", policy="arc"),
    "AllThrough": Shape(hbm=2, dram=5, write="through"),
    "Delay": Shape(hbm=3, dram=4, write="on_evict", policy="delay"),
    "DelayThrough": Shape(dram=5, write="through", policy="delay"),
    "DiskAlone": Shape(write="through", policy="arc", disk=DISK - 10_000),
}
EXAMPLES = int(os.environ.get("TIEREDKV_CRASHES", "0"))
PROFILE = settings(
    max_examples=EXAMPLES or 25,
    stateful_step_count=60 if EXAMPLES else 40,
    derandomize=not EXAMPLES,
    phases=(Phase.generate, Phase.shrink),
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)

for name, shape in SHAPES.items():
    machine: Any = type(name, (Machine,), {"shape": shape, "__module__": __name__})
    globals()[f"Test{name}"] = machine.TestCase
    machine.TestCase.settings = PROFILE
