"""What one engine stores the next one finds, whatever processes they have."""

from __future__ import annotations

import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conversation import Turn, difference, play, script
from tests.vllm.engines import engine, generate
from tests.vllm.modes import check_nothing_leaked, connector, dram, nvme, settled
from tests.vllm.processes import call

TALK = script(3, sessions=2, turns=3)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Turn]:
    with engine(model, enable_prefix_caching=False) as llm:
        return play(TALK, partial(generate, llm))


def turns_of(found: list[list[Any]]) -> list[Turn]:
    return [Turn(s, i, tuple(prompt), tuple(output), hit) for s, i, prompt, output, hit in found]


def engines(
    model: str, connectors: list[dict[str, Any]], idle: float = 0.0, **llm_args: Any
) -> list[list[list[Any]]]:
    """Runs in a child: the conversation on an engine per connector, one after the other, each
    left idle for some seconds. Turns as lists."""
    plays = []
    for config in connectors:
        with engine(Path(model), config, **llm_args) as llm:
            turns = play(TALK, partial(generate, llm))
            time.sleep(idle)
        plays.append([[t.session, t.index, t.prompt, t.output, t.cached] for t in turns])
    return plays


def everything(turns: list[Turn], load: str = "async") -> list[int]:
    """Hits of a play whose every turn was stored before, in chunks of 64 tokens."""
    found = [len(turn.prompt) // 64 * 64 for turn in turns]
    if load == "async":
        return found
    # a load that the step waits for leaves a block to compute
    return [min(hit, (len(t.prompt) - 1) // 32 * 32) for hit, t in zip(found, turns, strict=True)]


@pytest.mark.parametrize("load", ["async", "sync"])
def test_restart_in_one_process(
    load: str, model: Path, expected: list[Turn], tmp_path: Path
) -> None:
    """Also from tiers with DRAM to none, and back."""
    config = connector([dram("512KiB"), nvme(tmp_path)], load=load)
    alone = connector([nvme(tmp_path)], load=load)
    for round_, tiers in enumerate((config, alone, config)):
        with engine(model, tiers) as llm:
            turns = play(TALK, settled(llm, forget=True))
            check_nothing_leaked(llm)
        assert difference(expected, turns) is None
        if round_:
            assert [turn.cached for turn in turns] == everything(turns, load)


def test_producer_and_consumer(model: Path, expected: list[Turn], tmp_path: Path) -> None:
    def run(role: str) -> list[Turn]:
        config = connector([dram(), nvme(tmp_path)], kv_role=role)
        with engine(model, config, enable_prefix_caching=False) as llm:
            turns = play(TALK, settled(llm))
            check_nothing_leaked(llm)
        assert difference(expected, turns) is None
        return turns

    longer = script(4, sessions=1, turns=1)
    assert sum(turn.cached for turn in run("kv_consumer")) == 0  # it stores nothing
    assert sum(turn.cached for turn in run("kv_producer")) == 0  # it loads nothing
    turns = run("kv_consumer")
    assert [turn.cached for turn in turns] == everything(turns)
    config = connector([nvme(tmp_path)], kv_role="kv_consumer")
    for _ in range(2):
        with engine(model, config) as llm:
            assert [t.cached for t in play(longer, settled(llm, forget=True))] == [0]


def test_real_processes_and_a_restart(model: Path, expected: list[Turn], tmp_path: Path) -> None:
    """The first engine stores in the background and is idle before it ends: it goes on stepping
    until all is written. Its successors run in further processes, and in this one."""
    writes = connector([dram(), nvme(tmp_path, "on_evict")])
    reads = connector([nvme(tmp_path)], load="sync")
    found = call(
        engines, model=model, connectors=[writes, reads], idle=2.0, enable_prefix_caching=False
    )
    first, second = map(turns_of, found)
    assert difference(expected, first) is None
    assert any(turn.cached for turn in first)
    assert difference(expected, second) is None
    assert [turn.cached for turn in second] == everything(second, "sync")
    with engine(model, reads) as llm:
        third = play(TALK, settled(llm, forget=True))
    assert difference(expected, third) is None
    assert [turn.cached for turn in third] == everything(third, "sync")


def _open(path: Path, rank: int, together: Any, errors: Any) -> None:
    from tieredkv.tiers.nvme.directory import Directory
    from tieredkv.types import Fingerprint

    fingerprint = Fingerprint(model="m", weights="w", dtype="f", layout="l", world=(2, 1))
    together.wait()
    try:
        Directory.open(path, fingerprint, 64, rank, index=False).close()
        errors.put(None)
    except Exception as error:
        errors.put(repr(error))


def test_ranks_create_a_directory_together(tmp_path: Path) -> None:
    context, found = get_context("fork"), []
    for i in range(20):
        together, errors = context.Barrier(2), context.Queue()
        ranks = [
            context.Process(target=_open, args=(tmp_path / str(i), rank, together, errors))
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        found += [errors.get(timeout=30) for _ in ranks]
        for rank in ranks:
            rank.join()
    assert found == [None] * 40


def test_two_ranks(model: Path, expected: list[Turn], tmp_path: Path) -> None:
    config = connector([dram(), nvme(tmp_path)])
    found = call(
        engines,
        model=model,
        connectors=[config],
        idle=2.0,
        tensor_parallel_size=2,
        enable_prefix_caching=False,
    )
    (first,) = map(turns_of, found)
    again = call(
        engines,
        model=model,
        connectors=[connector([nvme(tmp_path)])],
        tensor_parallel_size=2,
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        enable_prefix_caching=False,
    )
    (second,) = map(turns_of, again)
    assert difference(expected, first) is None
    assert difference(expected, second) is None
    assert [turn.cached for turn in second] == everything(second)
