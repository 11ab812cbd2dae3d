"""What every eviction policy has to satisfy: inherit `PolicySuite` and implement `make`.

    class TestMyPolicy(PolicySuite):
        def make(self, capacity, block_bytes, seed):
            return MyPolicy(capacity, block_bytes, seed)

Nothing here says which runs are good victims; the simulator measures that.
"""

from __future__ import annotations

import random
import sys
import tracemalloc
from types import FrameType
from typing import Any

from tieredkv.eviction.base import Access, EvictionPolicy, Kind
from tieredkv.testing.policy_world import World, no_pins


class PolicySuite:
    """Inherit, name the class `Test...`, implement `make`. Needs pytest only."""

    block_bytes = 4096
    capacity_blocks = 100
    ended_first = True
    """Set to False for a policy that may keep runs whose session has ended."""

    def make(self, capacity: int, block_bytes: int, seed: int) -> EvictionPolicy:
        """A new policy for a tier of `capacity` bytes."""
        raise NotImplementedError

    def world(self, seed: int, steps: int = 0, policy_seed: int = 0) -> World:
        capacity = self.capacity_blocks * self.block_bytes
        policy = self.make(capacity, self.block_bytes, policy_seed)
        world = World(policy, capacity, self.block_bytes, seed)
        for _ in range(steps):
            world.step()
        return world

    def test_random_events_get_legal_answers(self) -> None:
        for seed in range(20):
            world = self.world(seed, steps=300)
            assert any(world.log), "the walk never evicted: it proves nothing"
            everything = sum(world.sizes().values())
            world.evict(everything)
            assert not world.leaves

    def test_any_amount_is_covered_or_all_is_named(self) -> None:
        block = self.block_bytes
        world = self.world(1, steps=200)
        total = sum(world.sizes().values())
        for nbytes in (-1, 0, 1, block - 1, block, block + 1, 7 * block, total, total + 1):
            world.ask(nbytes)
        assert self.world(1).ask(block) == []

    def test_pinned_bytes_stay(self) -> None:
        for seed in range(20):
            world = self.world(seed, steps=100)
            total = sum(world.sizes().values())
            for nbytes in (self.block_bytes, 9 * self.block_bytes, total):
                world.ask(nbytes, world.pins())
            assert world.ask(total, world.sizes().__getitem__) == []

    def test_asking_changes_nothing(self) -> None:
        for seed in range(5):
            quiet, curious = self.world(seed), self.world(seed)
            for _ in range(200):
                quiet.step()
                first = curious.ask(5 * self.block_bytes)
                assert curious.ask(5 * self.block_bytes) == first
                curious.ask(1 << 40)
                curious.step()
            assert curious.log == quiet.log

    def test_same_seed_same_decisions(self) -> None:
        for seed in range(5):
            runs = [self.world(seed, steps=300, policy_seed=7).log for _ in range(3)]
            assert runs[0] == runs[1] == runs[2]

    def test_sizes_are_those_of_the_last_record(self) -> None:
        world = self.world(0)
        run = world.insert(4 * self.block_bytes)
        for blocks in (1, 6, 2):
            world.resize(run, blocks * self.block_bytes)
            world.ask(1 << 40)
        world.hit(run)
        world.ask(1 << 40)

    def test_forgotten_and_unknown_runs_are_ignored(self) -> None:
        world = self.world(0)
        runs = [world.insert(self.block_bytes) for _ in range(4)]
        world.forget(runs[0], evicted=True)
        world.forget(runs[1], evicted=False)
        assert {victim.run for victim in world.ask(1 << 40)} == set(runs[2:])
        for run in (runs[0], runs[1], 10_000):
            world.policy.forget(run, True)
            world.policy.forget(run, False)
        assert {victim.run for victim in world.ask(1 << 40)} == set(runs[2:])

    def test_ended_runs_go_first(self) -> None:
        if not self.ended_first:
            return
        for seed in range(5):
            world = self.world(seed)
            runs = [world.insert(2 * self.block_bytes) for _ in range(20)]
            for run in runs:
                world.now += 1.0
                world.hit(run)
            ended = set(world.rng.sample(runs, 6))
            for run in ended:
                world.record(Kind.END, run)
                world.resize(run, self.block_bytes)
            order = [victim.run for victim in world.ask(1 << 40)]
            assert set(order[:6]) == ended, f"{order}: sessions of {ended} have ended"

    def test_memory_does_not_grow_with_forgotten_runs(self) -> None:
        world = self.world(0)

        def churn(count: int) -> int:
            for number in range(count):
                world.now += 1.0
                world.forget(world.insert(self.block_bytes), evicted=bool(number % 2))
                world.inner.clear()
            return tracemalloc.get_traced_memory()[0]

        already = tracemalloc.is_tracing()
        if not already:
            tracemalloc.start()
        try:
            before = churn(2_000)
            grown = churn(10_000) - before
        finally:
            if not already:
                tracemalloc.stop()
        assert grown < 32_000, f"{grown} bytes more after 10,000 forgotten runs"

    def test_work_grows_slowly_with_the_number_of_runs(self) -> None:
        few, many = self._work(256), self._work(4096)
        assert many < 4 * few, f"{few:.0f} steps per event at 256 runs, {many:.0f} at 4,096"

    def _work(self, runs: int) -> float:
        """Lines of Python per hit + replacement + question, with `runs` leaves; comparing and
        adding times, counts and sizes are lines too."""
        policy = self.make(runs * self.block_bytes, self.block_bytes, 0)
        rng = random.Random(0)
        block, events = _CountedInt(self.block_bytes), 120

        def access(kind: Kind, run: int, now: float) -> Access:
            at, key = _CountedFloat(now), run.to_bytes(32, "big")
            return Access(kind, run, key, 1, block, 1, at, at, _CountedInt(0), first=key)

        for run in range(runs):
            policy.record(access(Kind.INSERT, run, rng.random()))
        policy.victims(self.block_bytes, 2.0, no_pins)  # what it may have put off until now
        hits = [access(Kind.HIT, run, 2.0) for run in rng.sample(range(runs // 2), events // 2)]
        counter = _LineCounter()
        with counter:
            for number in range(events):
                policy.record(hits[number % len(hits)])
                policy.victims(self.block_bytes, 3.0, no_pins)
                policy.forget(runs // 2 + number % (runs // 2), True)
                policy.record(access(Kind.INSERT, runs + number, 3.0))
        return counter.lines / events


class _LineCounter:
    def __enter__(self) -> None:
        self.lines = 0
        self._before = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.lines += event == "line"
        return self._trace


def _python_level(base: type, *names: str) -> dict[str, Any]:
    """These methods of `base`, each as a function in Python, which a tracer sees."""

    def wrap(method: Any) -> Any:
        def call(self: Any, other: Any) -> Any:
            return method(self, other)

        return call

    methods = {name: wrap(getattr(base, name)) for name in names}
    return {**methods, "__hash__": base.__hash__}


_COMPARE = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__add__", "__radd__")
_CountedFloat: Any = type("_CountedFloat", (float,), _python_level(float, *_COMPARE))
_CountedInt: Any = type("_CountedInt", (int,), _python_level(int, *_COMPARE))
