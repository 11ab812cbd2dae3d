"""Engines that share a real Mooncake pool: what one has prefilled the other ones load."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.mooncake.pool import MIB, Master, Owner, await_capacity, make_master, require
from tests.vllm.conversation import Turn, difference, play, script
from tests.vllm.engines import engine, generate
from tests.vllm.modes import (
    check_nothing_leaked,
    connector,
    count_hits,
    dram,
    nvme,
    settle,
    settled,
    side,
)
from tests.vllm.processes import call
from tests.vllm.test_processes import engines, everything, turns_of

TALK = script(3, sessions=2, turns=3)
SIZE = 64 * MIB
COMMON = 128
"""Tokens that both sessions begin with: the engine itself finds them in one batch."""


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Turn]:
    with engine(model, enable_prefix_caching=False) as llm:
        return play(TALK, partial(generate, llm))


@pytest.fixture
def pool() -> Iterator[tuple[Master, Owner]]:
    """With a master that takes its time to notice that an owner is gone."""
    require()
    with make_master(client_ttl=20) as master, Owner(master.address, SIZE) as owner:
        await_capacity(master, SIZE)
        yield master, owner


def shared(master: Master, **more: Any) -> dict[str, Any]:
    metrics = f"{master.host}:{master.metrics_port}"
    return {"kind": "mooncake", "master": master.address, "metrics": metrics, **more}


def stored(llm: Any) -> None:
    """Wait until all that can be in the pool is there."""
    settle(llm)
    planner = side(llm).sides.shipping.planner
    assert not planner.res.unshared
    runs = planner.res.tree.runs.values()
    assert all(run.full(planner.res.shared) for run in runs)


@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.parametrize("above", [[], [dram()]], ids=["alone", "below memory"])
def test_the_second_engine_hits_what_the_first_has_prefilled(
    above: list[dict[str, Any]],
    load: str,
    model: Path,
    expected: list[Turn],
    pool: tuple[Master, Owner],
) -> None:
    config = connector([*above, shared(pool[0])], load=load)
    with engine(model, config) as llm:
        assert difference(expected, play(TALK, settled(llm, forget=True))) is None
        stored(llm)
        check_nothing_leaked(llm)
    with engine(model, config) as llm:
        hits = count_hits(llm)
        turns = play(TALK, settled(llm, forget=True))
        check_nothing_leaked(llm)
    assert difference(expected, turns) is None
    assert [turn.cached for turn in turns] == everything(turns, load)
    assert hits["mooncake"] > 0
    assert ("dram" in hits) == bool(above), "a loaded prefix is promoted"


def test_the_disk_below_the_pool(
    model: Path, expected: list[Turn], pool: tuple[Master, Owner], tmp_path: Path
) -> None:
    below = shared(pool[0], capacity="256KiB")
    config = connector([dram("128KiB"), below, nvme(tmp_path)])
    with engine(model, config) as llm:
        hits = count_hits(llm)
        for round_ in range(2):
            turns = play(TALK, settled(llm, forget=True))
            assert difference(expected, turns) is None
            if round_:
                assert [turn.cached for turn in turns] == everything(turns)
        assert set(hits) == {"dram", "mooncake", "nvme"}
        check_nothing_leaked(llm)


def test_a_killed_owner_costs_misses_only(
    model: Path, expected: list[Turn], pool: tuple[Master, Owner]
) -> None:
    """In the middle of the conversation; the master goes on listing what is gone."""
    master, owner = pool
    config = connector([shared(master, capacity=SIZE)])
    with engine(model, config) as llm:
        complete, calls = settled(llm, forget=True), 0

        def killing(prompts: list[list[int]], limits: list[int]) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                owner.kill()
            return complete(prompts, limits)

        turns = play(TALK, killing)
        assert difference(expected, turns) is None
        owner.start()
        owner.ready()
        check_nothing_leaked(llm)


def test_a_killed_master_costs_misses_only_and_is_in_use_again(
    model: Path, expected: list[Turn], pool: tuple[Master, Owner]
) -> None:
    master, _ = pool
    config = connector([shared(master, capacity=SIZE)])
    with engine(model, config) as llm:
        complete = settled(llm, forget=True)
        play(TALK, complete)
        master.kill()
        began = time.monotonic()
        turns = play(TALK, complete)
        assert difference(expected, turns) is None
        # the first of both sessions count on what they could not load, and compute it
        assert [turn.cached for turn in turns[2:]] == [0, COMMON] * 2
        assert time.monotonic() - began < 60
        master.start()
        master.ready()
        await_capacity(master, SIZE)
        shipping = side(llm).sides.shipping
        deadline = time.monotonic() + 5
        while not shipping.shared.available:
            assert time.monotonic() < deadline, "not in use again after 5 s"
            time.sleep(0.01)
        play(TALK, complete)
        turns = play(TALK, complete)
        assert difference(expected, turns) is None
        assert [turn.cached for turn in turns] == everything(turns)
        check_nothing_leaked(llm)


def test_a_reset_leaves_the_pool_to_those_with_the_old_weights(
    model: Path, expected: list[Turn], pool: tuple[Master, Owner]
) -> None:
    config = connector([shared(pool[0])])
    with engine(model, config) as llm:
        play(TALK, settled(llm, forget=True))
        assert llm.reset_prefix_cache(reset_connector=True)
        turns = play(TALK, settled(llm, forget=True))
        assert difference(expected, turns) is None
        assert [turn.cached for turn in turns] == [0, COMMON] * 3
        check_nothing_leaked(llm)


def test_a_reset_before_the_first_request_leaves_the_pool_as_well(
    model: Path, expected: list[Turn], pool: tuple[Master, Owner]
) -> None:
    """As where weights are loaded into an engine that has just started."""
    config = connector([dram(), shared(pool[0])])
    with engine(model, config) as llm:
        play(TALK, settled(llm, forget=True))
        stored(llm)
    with engine(model, config) as llm:
        assert side(llm).sides is None
        assert llm.reset_prefix_cache(reset_connector=True)
        hits = count_hits(llm)
        assert difference(expected, play(TALK, settled(llm, forget=True))) is None
        assert set(hits) <= {"dram"}
        shipping = side(llm).sides.shipping
        assert not any(run.count[1] for run in shipping.planner.res.tree.runs.values())


def test_real_processes_with_two_ranks(
    model: Path, expected: list[Turn], pool: tuple[Master, Owner]
) -> None:
    config = connector([dram(), shared(pool[0])])
    hits: list[bool] = []
    # Two ranks take all of a small machine, and the master's answer may take over a second then,
    # after which the pool counts as down: that costs hits, so others may try as well.
    while len(hits) < 4 and not any(hits[1:]):
        (found,) = call(
            engines,
            model=model,
            connectors=[config],
            idle=2.0,
            tensor_parallel_size=2,
            enable_prefix_caching=False,
        )
        turns = turns_of(found)
        assert difference(expected, turns) is None
        hits.append([turn.cached for turn in turns] == everything(turns))
    assert hits[-1]
    assert not hits[0]  # the pool was empty
