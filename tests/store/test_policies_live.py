"""Every policy inside a real store, and what the store tells its policy."""

from __future__ import annotations

import random
from pathlib import Path
from typing import ClassVar

import pytest

from tests.store.world import (
    FP,
    SIZE,
    Path_,
    Shape,
    chain,
    core_of,
    durable,
    leaks,
    open_store,
    payload,
    settle,
)
from tieredkv import Outcome, TieredKVStore, Turn
from tieredkv.eviction import BUILTIN
from tieredkv.eviction.base import Access, Kind, RankedPolicy
from tieredkv.testing import ManualClock

SHAPES = [
    Shape(dram=7),
    Shape(hbm=3, dram=5),
    Shape(dram=5, write="on_evict"),
    Shape(hbm=2, dram=4, write="through"),
    Shape(write="through"),
]


def put(store: TieredKVStore, path: Path_, turn: Turn | str | None = None) -> list[Outcome]:
    keys = chain(path)
    return store.put(keys, [payload(key) for key in keys], turn=turn)


def hits(store: TieredKVStore, path: Path_) -> int:
    """Blocks that came back; their bytes are compared."""
    keys = chain(path)
    out = bytearray(len(keys) * SIZE)
    outcomes = store.get(keys, out)
    for i, outcome in enumerate(outcomes):
        if outcome is Outcome.OK:
            assert out[i * SIZE : (i + 1) * SIZE] == payload(keys[i])
    return outcomes.count(Outcome.OK)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.hbm}-{s.dram}-{s.write}")
@pytest.mark.parametrize("policy", BUILTIN)
def test_a_workload(policy: str, shape: Shape, tmp_path: Path) -> None:
    shape = Shape(shape.hbm, shape.dram, shape.write, policy)
    clock, rng = ManualClock(), random.Random(policy)
    store, _ = open_store(shape, tmp_path, clock)
    found = 0
    for _ in range(120):
        clock.advance(rng.random())
        path = tuple(rng.randrange(2) for _ in range(rng.randint(1, 5)))
        found += hits(store, path)
        outcomes = put(store, path, rng.choice([None, "a", "b"]))
        assert outcomes[0] is Outcome.OK
        if rng.random() < 0.05:
            store.session("a").finish()
        settle(store)
        assert store.check() == []
    stats = store.stats()
    assert found > 100
    assert stats.hit_tokens == found
    assert any(tier.evicted_blocks for tier in stats.tiers), "never full: it proves nothing"
    store.clear()
    settle(store)
    assert leaks(store) == []
    assert store.close()


@pytest.mark.parametrize("policy", BUILTIN)
def test_the_last_turn_of_a_finished_session_goes_first(policy: str, tmp_path: Path) -> None:
    clock = ManualClock()
    store, _ = open_store(Shape(dram=6, policy=policy), tmp_path, clock)
    for number, session in enumerate("abc"):
        clock.advance(1.0)
        put(store, (number, 0), session)
    for number in (0, 1, 2, 1, 1):  # b is the one most worth keeping
        clock.advance(1.0)
        assert hits(store, (number, 0)) == 2
    store.session("b").finish()
    clock.advance(1.0)
    put(store, (5, 5), "d")
    assert [store.lookup(chain((n, 0))).blocks for n in (0, 1, 2)] == [2, 0, 2]
    store.session("c").abandon(chain((2, 0)))
    clock.advance(1.0)
    put(store, (6, 6), "e")
    assert [store.lookup(chain((n, 0))).blocks for n in (0, 2)] == [2, 0]
    store.close()


def test_a_session_that_comes_back_is_not_over(tmp_path: Path) -> None:
    clock = ManualClock()
    store, _ = open_store(Shape(dram=4), tmp_path, clock)
    put(store, (0, 0), "a")
    store.session("a").finish()
    clock.advance(1.0)
    put(store, (1,), "b")
    clock.advance(1.0)
    assert hits(store, (0, 0)) == 2
    clock.advance(1.0)
    put(store, (2, 2))
    assert [store.lookup(chain(p)).blocks for p in [(0, 0), (1,), (2, 2)]] == [2, 0, 2]
    store.close()


class Witness(RankedPolicy):
    """Evicts what was used last, and remembers what it was told."""

    told: ClassVar[list[Access]] = []

    def rank(self, access: Access) -> float:
        return -access.last

    def record(self, access: Access) -> None:
        self.told.append(access)
        super().record(access)


def test_a_policy_of_the_users(tmp_path: Path) -> None:
    Witness.told.clear()
    clock = ManualClock()
    name = f"{__name__}:Witness"
    store, _ = open_store(Shape(dram=4, policy=name), tmp_path, clock)
    for number in range(4):
        clock.advance(1.0)
        put(store, (number,), Turn(f"s{number}", category="chat", finish_reason="stop"))
    clock.advance(1.0)
    assert hits(store, (1,)) == 1
    clock.advance(1.0)
    put(store, (9,))
    assert [store.contains(chain((n,))[0]) for n in (0, 1, 2, 3, 9)] == [1, 0, 1, 1, 1]
    first, hit = Witness.told[0], Witness.told[4]
    assert (first.kind, first.blocks, first.nbytes, first.depth) == (Kind.INSERT, 1, SIZE, 1)
    assert (first.born, first.last, first.hits) == (1.0, 1.0, 0)
    assert first.key == first.first == chain((0,))[0]
    assert first.turn == Turn("s0", category="chat", finish_reason="stop")
    assert (hit.kind, hit.born, hit.last, hit.hits) == (Kind.HIT, 2.0, 5.0, 1)
    store.close()


def test_facts_about_a_turn_reach_the_policy(tmp_path: Path) -> None:
    Witness.told.clear()
    store, _ = open_store(Shape(dram=4, policy=f"{__name__}:Witness"), tmp_path)
    put(store, (0, 0), "a")
    store.session("a").turn_ended("tool_use", "bash", 17)
    assert hits(store, (0, 0)) == 2
    turn = Witness.told[-1].turn
    assert turn == Turn("a", finish_reason="tool_use", next_tool="bash", output_tokens=17)
    store.close()


def test_each_tier_has_its_own_policy(tmp_path: Path) -> None:
    shape = Shape(hbm=2, dram=8, write="on_evict")
    config = shape.config(tmp_path).model_dump()
    config["tiers"][1]["eviction"] = {"policy": "arc"}
    with TieredKVStore(type(shape.config(tmp_path)).model_validate(config), FP) as store:
        put(store, (0,))
        names = [type(level.policy).__name__ for level in core_of(store).planner.res.levels]
        assert names == ["LruPolicy", "ArcPolicy", "LruPolicy"]


def test_a_prefix_is_never_evicted_before_what_hangs_on_it(tmp_path: Path) -> None:
    """Whatever a policy says: it only ever sees leaves, and blocks go from the tail."""
    for seed in range(5):
        clock, rng = ManualClock(), random.Random(seed)
        name = f"{__name__}:Witness"
        store, _ = open_store(
            Shape(dram=6, write="on_evict", policy=name), tmp_path / str(seed), clock
        )
        paths: set[Path_] = set()
        for _ in range(60):
            clock.advance(1.0)
            path = tuple(rng.randrange(2) for _ in range(rng.randint(1, 5)))
            put(store, path)
            paths.add(path)
            settle(store)
            for known in paths:
                stored = [store.contains(key) for key in chain(known)]
                assert stored == sorted(stored, reverse=True)
                on_disk = durable(store, chain(known))
                flags = [key in on_disk for key in chain(known)]
                assert flags == sorted(flags, reverse=True), "a durable block without its parent"
        store.close()
