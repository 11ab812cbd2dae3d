"""The built-in policies pass the public suite; a policy with any one defect does not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tieredkv.eviction import ArcPolicy, FifoPolicy, LfuPolicy, LruPolicy
from tieredkv.eviction.base import Access, EvictionPolicy, Kind, Victim
from tieredkv.testing.policy_suite import PolicySuite
from tieredkv.testing.policy_world import no_pins

Pinned = Callable[[int], int]


class TestLru(PolicySuite):
    def make(self, capacity: int, block_bytes: int, seed: int) -> EvictionPolicy:
        return LruPolicy(capacity, block_bytes, seed)


class TestFifo(PolicySuite):
    def make(self, capacity: int, block_bytes: int, seed: int) -> EvictionPolicy:
        return FifoPolicy(capacity, block_bytes, seed)


class TestLfu(PolicySuite):
    def make(self, capacity: int, block_bytes: int, seed: int) -> EvictionPolicy:
        return LfuPolicy(capacity, block_bytes, seed)


class TestArc(PolicySuite):
    def make(self, capacity: int, block_bytes: int, seed: int) -> EvictionPolicy:
        return ArcPolicy(capacity, block_bytes, seed)


class EvictsOnAsking(LruPolicy):
    def victims(self, nbytes: int, now: float, pinned: Pinned) -> list[Victim]:
        chosen = super().victims(nbytes, now, pinned)
        for victim in chosen[:1]:
            super().forget(victim.run, True)
        return chosen


class TouchesOnAsking(LruPolicy):
    """Moves what it names to the end: legal answers, but asking has an effect."""

    def victims(self, nbytes: int, now: float, pinned: Pinned) -> list[Victim]:
        chosen = super().victims(nbytes, now, pinned)
        for run, _ in chosen:
            self._order.remove(self._place[run])
            self._place[run] = (1, now + 1e6, run)
            self._order.add(self._place[run])
        return chosen


class Unseeded(LruPolicy):
    def rank(self, access: Access) -> float:
        return random.random()


class IgnoresPins(LruPolicy):
    def victims(self, nbytes: int, now: float, pinned: Pinned) -> list[Victim]:
        return super().victims(nbytes, now, no_pins)


class StopsAtAPin(LruPolicy):
    def victims(self, nbytes: int, now: float, pinned: Pinned) -> list[Victim]:
        chosen: list[Victim] = []
        for run, taken in super().victims(nbytes, now, no_pins):
            if pinned(run):
                break
            chosen.append(Victim(run, taken))
        return chosen


class TakesWholeRuns(LruPolicy):
    def victims(self, nbytes: int, now: float, pinned: Pinned) -> list[Victim]:
        chosen = super().victims(nbytes, now, pinned)
        return [Victim(run, self._nbytes[run] - pinned(run)) for run, _ in chosen]


class TakesOneRun(LruPolicy):
    def victims(self, nbytes: int, now: float, pinned: Pinned) -> list[Victim]:
        return super().victims(nbytes, now, pinned)[:1]


class CutsBlocks(LruPolicy):
    def __init__(self, capacity: int, block_bytes: int, seed: int = 0) -> None:
        super().__init__(capacity, 1, seed)


class NamesTwice(LruPolicy):
    def victims(self, nbytes: int, now: float, pinned: Pinned) -> list[Victim]:
        chosen = super().victims(nbytes, now, pinned)
        half = [Victim(run, taken // 2) for run, taken in chosen]
        return half + half


class NamesForgotten(LruPolicy):
    def forget(self, run: int, evicted: bool) -> None:
        if evicted:
            super().forget(run, evicted)


class NamesNothings(LruPolicy):
    def victims(self, nbytes: int, now: float, pinned: Pinned) -> list[Victim]:
        return [*super().victims(nbytes, now, pinned), *(Victim(run, 0) for run in self._nbytes)]


class IgnoresResize(LruPolicy):
    def record(self, access: Access) -> None:
        if access.kind is not Kind.RESIZE:
            super().record(access)


class IgnoresEnd(LruPolicy):
    def record(self, access: Access) -> None:
        if access.kind is not Kind.END:
            super().record(access)


class ForgetsTheEnd(LruPolicy):
    """A trim makes an ended run ordinary again."""

    def record(self, access: Access) -> None:
        if access.kind is Kind.RESIZE:
            self.forget(access.run, False)
        super().record(access)


class ChokesOnUnknown(LruPolicy):
    def forget(self, run: int, evicted: bool) -> None:
        del self._nbytes[run]
        self._order.remove(self._place.pop(run))


class Leaks(LruPolicy):
    def __init__(self, capacity: int, block_bytes: int, seed: int = 0) -> None:
        super().__init__(capacity, block_bytes, seed)
        self.ghosts: list[int] = []

    def forget(self, run: int, evicted: bool) -> None:
        super().forget(run, evicted)
        self.ghosts.append(run)


class Scans(LruPolicy):
    """A linear search in C per question."""

    def record(self, access: Access) -> None:
        super().record(access)
        self.used = sum(self._nbytes.values())


class Sorts(LruPolicy):
    def victims(self, nbytes: int, now: float, pinned: Pinned) -> list[Victim]:
        self._order = type(self._order)(sorted(self._place.values(), key=lambda p: -p[1]))
        return super().victims(nbytes, now, pinned)


DEFECTS: dict[type, str] = {
    EvictsOnAsking: "test_asking_changes_nothing",
    TouchesOnAsking: "test_asking_changes_nothing",
    Unseeded: "test_same_seed_same_decisions",
    IgnoresPins: "test_pinned_bytes_stay",
    StopsAtAPin: "test_pinned_bytes_stay",
    TakesWholeRuns: "test_any_amount_is_covered_or_all_is_named",
    TakesOneRun: "test_any_amount_is_covered_or_all_is_named",
    CutsBlocks: "test_any_amount_is_covered_or_all_is_named",
    NamesTwice: "test_any_amount_is_covered_or_all_is_named",
    NamesForgotten: "test_forgotten_and_unknown_runs_are_ignored",
    NamesNothings: "test_any_amount_is_covered_or_all_is_named",
    IgnoresResize: "test_sizes_are_those_of_the_last_record",
    IgnoresEnd: "test_ended_runs_go_first",
    ForgetsTheEnd: "test_ended_runs_go_first",
    ChokesOnUnknown: "test_forgotten_and_unknown_runs_are_ignored",
    Leaks: "test_memory_does_not_grow_with_forgotten_runs",
    Scans: "test_work_grows_slowly_with_the_number_of_runs",
    Sorts: "test_work_grows_slowly_with_the_number_of_runs",
}


def suite_for(policy: type) -> Any:
    class Suite(PolicySuite):
        def make(self, capacity: int, block_bytes: int, seed: int) -> Any:
            return policy(capacity, block_bytes, seed)

    return Suite()


@pytest.mark.parametrize("policy", DEFECTS, ids=lambda policy: policy.__name__)
def test_the_suite_finds(policy: type) -> None:
    getattr(suite_for(LruPolicy), DEFECTS[policy])()
    with pytest.raises((AssertionError, KeyError)):
        getattr(suite_for(policy), DEFECTS[policy])()


@pytest.mark.parametrize("policy", [TakesOneRun, NamesForgotten, IgnoresResize, CutsBlocks])
def test_random_events_find_it_too(policy: type) -> None:
    with pytest.raises((AssertionError, KeyError)):
        suite_for(policy).test_random_events_get_legal_answers()


def test_every_check_has_a_defect_that_it_finds() -> None:
    checks = {name for name in vars(PolicySuite) if name.startswith("test_")}
    assert checks - set(DEFECTS.values()) == {"test_random_events_get_legal_answers"}


def test_ended_first_is_optional() -> None:
    suite = suite_for(IgnoresEnd)
    with pytest.raises(AssertionError):
        suite.test_ended_runs_go_first()
    suite.ended_first = False
    suite.test_ended_runs_go_first()
