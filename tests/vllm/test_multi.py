"""Inside a MultiConnector, before and after another connector that may fail its loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conversation import Turn, difference, play, reusable, script
from tests.vllm.engines import core, engine, example, generate, worker_connector
from tests.vllm.modes import (
    check_nothing_leaked,
    connector,
    count_hits,
    dram,
    nvme,
    settle,
    settled,
    worker,
)

TALK = script(5, sessions=2, turns=3)
WIDE: dict[str, Any] = {"max_num_batched_tokens": 2048}  # as the ExampleConnector wants


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Turn]:
    with engine(model, enable_prefix_caching=False) as llm:
        return play(TALK, settled_without(llm), together=False)


def settled_without(llm: Any) -> Any:
    return lambda prompts, limits: generate(llm, prompts, limits)


def multi(children: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }


def other() -> Any:
    """The worker's side of the connector beside ours."""
    (found,) = [c for c in worker_connector().sub_connectors if not hasattr(c, "_geometry")]
    return found


@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
@pytest.mark.parametrize("load", ["async", "sync"])
def test_beside_another_connector(
    first: bool, load: str, model: Path, expected: list[Turn], tmp_path: Path
) -> None:
    ours = connector([dram("1MiB"), nvme(tmp_path / "ours")], load=load)
    theirs = example(tmp_path / "theirs")
    config = multi([ours, theirs] if first else [theirs, ours])
    for round_ in range(2):
        with engine(model, config, **WIDE) as llm:
            loaded = count_hits(llm)
            turns = play(TALK, settled(llm, forget=True), together=False)
            check_nothing_leaked(llm)
        assert difference(expected, turns) is None
        hits = sum(loaded.values())
        if first:
            known = reusable([*turns, *turns][: len(turns) * (round_ + 1)], 64)[-len(turns) :]
            # their connector fills in where ours has nothing
            assert hits == sum(known)
        elif round_:
            assert hits == 0  # it knows all whole prompts, and comes first
            assert all(turn.cached for turn in turns)
        else:
            assert hits == sum(reusable(turns, 64))


@pytest.mark.parametrize("load", ["async", "sync"])
def test_our_loads_fail_beside_another(
    load: str, model: Path, expected: list[Turn], tmp_path: Path
) -> None:
    from tieredkv.types import Outcome

    config = multi([connector([dram()], load=load), example(tmp_path / "theirs")])
    with engine(model, config, **WIDE) as llm:
        play(TALK, settled(llm, forget=True), together=False)
        tier = worker().tiers[0]
        tier.views = lambda slots: None
        failed: list[int] = []

        def read(batch: Any, targets: Any) -> list[Outcome]:
            failed.extend(batch.slots)
            return [Outcome.CORRUPT] * len(batch)

        tier.read = read
        turns = play(TALK, settled(llm, forget=True), together=False)
        check_nothing_leaked(llm)
    assert difference(expected, turns) is None
    assert failed


def test_their_loads_fail_and_nothing_wrong_is_kept(
    model: Path, expected: list[Turn], tmp_path: Path
) -> None:
    """Their sync load leaves the blocks as they are and reports them: what is stored then must
    be what was computed anew."""
    config = multi([example(tmp_path / "theirs"), connector([dram()])])
    with engine(model, config, **WIDE) as llm:
        play(TALK, settled(llm, forget=True), together=False)
        assert llm.reset_prefix_cache(reset_connector=True)  # theirs forgets nothing
        child = other()
        broken: list[int] = []

        def load(*args: Any, **kwargs: Any) -> None:
            for request in child._get_connector_metadata().requests:
                if not request.is_store:
                    broken.extend({int(slot) // 32 for slot in request.slot_mapping})

        def errors() -> set[int]:
            found = set(broken)
            broken.clear()
            return found

        child.start_load_kv, child.get_block_ids_with_load_errors = load, errors
        for cache in core(llm).model_executor.driver_worker.worker.model_runner.kv_caches:
            cache.fill_(3.0)  # not what was there by chance
        turns = play(TALK, settled(llm, forget=True), together=False)
        assert difference(expected, turns) is None
        check_nothing_leaked(llm)
        # now from our own tier alone
        scheduler = core(llm).scheduler.connector.sub_connectors
        theirs = next(c for c in scheduler if not hasattr(c, "_geometry"))
        theirs.get_num_new_matched_tokens = lambda request, computed: (0, False)
        again = play(TALK, settled(llm, forget=True), together=False)
        settle(llm)
    assert difference(expected, again) is None
    assert [turn.cached for turn in again] == reusable([*turns, *again], 64)[len(turns) :]
