"""The ground that the tests of the connector stand on: what real vLLM does without it."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.vllm.conversation import Completion, Turn, difference, play, reusable, script
from tests.vllm.engines import (
    core,
    engine,
    example,
    generate,
    scheduler_connector,
    worker_connector,
)
from tests.vllm.model import build
from tests.vllm.processes import ROOT, SECONDS, call, server, spawn

BLOCK = 32
TALK = script(7, sessions=2, turns=3)
PROMPTS = [[(7 * i + j * j) % 256 for j in range(200)] for i in range(3)]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Turn]:
    """The conversation without any cache."""
    with engine(model, enable_prefix_caching=False) as llm:
        return play(TALK, partial(generate, llm))


def test_pins_are_what_is_installed_and_complete() -> None:
    pinned = dict(
        line.split("==")
        for line in (ROOT / "requirements" / "vllm.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    assert {name: version(name).split("+")[0] for name in pinned} == pinned
    shared = dict(
        line.split("==")
        for line in (ROOT / "requirements" / "ci.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    assert shared.keys() <= pinned.keys()


def test_outputs_are_the_same_in_every_engine_and_need_the_context(
    model: Path, models: Callable[..., Path], expected: list[Turn]
) -> None:
    assert sum(turn.cached for turn in expected) == 0
    with engine(model) as llm:
        cached = play(TALK, partial(generate, llm), together=False)
    by_turn = sorted(cached, key=lambda turn: (turn.index, turn.session))
    assert difference(expected, by_turn) is None
    assert [turn.cached for turn in cached] == reusable(cached, BLOCK)
    assert all(len(set(turn.output)) > 4 for turn in cached), "outputs say little"
    with engine(models(seed=1)) as llm:
        assert difference(expected, play(TALK, partial(generate, llm)))


def test_one_wrong_block_changes_the_output(model: Path) -> None:
    with engine(model) as llm:
        right = generate(llm, PROMPTS)
        worker = core(llm).model_executor.driver_worker.worker
        worker.model_runner.kv_caches[0][1].zero_()  # the first block of the first prompt
        wrong = generate(llm, PROMPTS)
    assert wrong[0].cached == 192
    assert wrong[0].tokens != right[0].tokens
    assert [answer.tokens for answer in wrong[1:]] == [answer.tokens for answer in right[1:]]


def test_connector_in_the_test_process(model: Path, expected: list[Turn], tmp_path: Path) -> None:
    for round_ in range(2):
        with engine(model, example(tmp_path), max_num_batched_tokens=2048) as llm:
            assert type(scheduler_connector(llm)).__name__ == "ExampleConnector"
            assert type(worker_connector()).__name__ == "ExampleConnector"
            turns = play(TALK, partial(generate, llm))
            with pytest.raises(RuntimeError, match="one per process"), engine(model):
                pass
        assert difference(expected, turns) is None
        # This connector finds whole prompts only: in the second engine, all of them.
        known = [(len(turn.prompt) - 2) // BLOCK * BLOCK for turn in turns]
        assert ([turn.cached for turn in turns] == known) == bool(round_)


def test_an_engine_that_fails_to_start_leaves_nothing_to_the_next(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no scheduler today")

    with monkeypatch.context() as patch:
        patch.setattr("vllm.v1.core.sched.scheduler.Scheduler.__init__", fails)
        with pytest.raises(RuntimeError, match="today"), engine(model, example(tmp_path)):
            pass
    with engine(model) as llm:
        assert generate(llm, PROMPTS)[0].cached == 0
        with pytest.raises(AssertionError, match="not initialized"):
            worker_connector()


def complete(
    model: str, connector: dict[str, Any] | None = None, **llm_args: Any
) -> list[list[int]]:
    """Runs in a child."""
    with engine(Path(model), connector, **llm_args) as llm:
        return [list(answer.tokens) for answer in generate(llm, PROMPTS)]


def test_two_ranks_in_processes_of_their_own(model: Path) -> None:
    with engine(model) as llm:
        one = [list(answer.tokens) for answer in generate(llm, PROMPTS)]
    two = call(complete, model=model, tensor_parallel_size=2)
    assert two == one


def test_server(model: Path, expected: list[Turn], tmp_path: Path) -> None:
    with server(model, example(tmp_path), max_num_batched_tokens=2048) as api:
        turns = play(TALK, api.complete)
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        answer = json.loads(api.request("/v1/chat/completions", chat))
        metrics = api.request("/metrics").decode()
        with pytest.raises(OSError, match="400") as bad:
            api.request("/v1/completions", {"model": "tiny", "prompt": [1], "max_tokens": -1})
    assert difference(expected, turns) is None
    assert any(turn.cached for turn in turns)
    assert answer["choices"][0]["message"]["content"]
    assert re.search(r"vllm:prompt_tokens_total\{.*\} [1-9]", metrics)
    assert "max_tokens" in bad.value.__notes__[0]
    assert any(tmp_path.iterdir()), "the connector saved nothing"


def fail(how: str) -> None:
    """Runs in a child."""
    sleeper = subprocess.Popen(["sleep", "600"])
    print("sleeper", sleeper.pid, flush=True)
    if how == "hang":
        sleeper.wait()
    raise ValueError(how)


@pytest.mark.parametrize(("how", "error"), [("raise", RuntimeError), ("hang", TimeoutError)])
def test_a_child_that_fails_shows_its_log_and_leaves_nothing(
    how: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the logs go with the test's files

    def late() -> None:
        with spawn(fail, how=how) as child:
            while "sleeper" not in child.log and child.popen.poll() is None:
                time.sleep(0.01)
            child.result(0.1 if how == "hang" else SECONDS)

    with pytest.raises(error) as failure:
        late()
    found = re.search(r"sleeper (\d+)", failure.value.__notes__[0])
    assert found
    assert not alive(int(found[1]))


def nest() -> None:
    """Runs in a child."""
    with spawn(fail, how="hang") as child:
        while "sleeper" not in child.log:
            time.sleep(0.01)
        print(child.log, flush=True)
        child.wait(600)


def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    with spawn(nest, env={"TMPDIR": str(tmp_path)}) as child:
        while not (found := re.search(r"sleeper (\d+)\n", child.log)):
            assert child.popen.poll() is None
            time.sleep(0.01)
        pid = int(found[1])
        assert alive(pid)
        child.kill()
    deadline = time.monotonic() + 60
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_server_that_does_not_start_shows_its_log(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    broken = server(model, env={"PYTHONHOME": "/nowhere"})
    with pytest.raises(RuntimeError, match="before it was ready") as failure, broken:
        pass
    assert "/nowhere" in failure.value.__notes__[0]
    with pytest.raises(TimeoutError, match="not ready"), server(model, seconds=0.1):
        pass


@pytest.mark.parametrize("kind", ["gemma3", "mla"])
def test_other_kinds_of_models_run(models: Callable[..., Path], kind: str) -> None:
    groups = {"gemma3": 2, "mla": 1}
    with engine(models(kind)) as llm:
        assert len(core(llm).scheduler.kv_cache_config.kv_cache_groups) == groups[kind]
        first = generate(llm, PROMPTS)
    assert len(set(first[0].tokens)) > 4


def test_models_are_reproducible_and_can_be_swapped_in_place(tmp_path: Path) -> None:
    def weights(seed: int) -> bytes:
        return (build(tmp_path, seed=seed) / "model.safetensors").read_bytes()

    assert weights(0) == weights(0) != weights(1)


def test_reusable_counts_chunks_known_before() -> None:
    def turn(prompt: str, output: str) -> Turn:
        return Turn(0, 0, tuple(prompt.encode()), tuple(output.encode()), 0)

    turns = [turn("abcd", "ef"), turn("abcdefgh", "i"), turn("abcx", "y"), turn("abcd", "e")]
    assert reusable(turns, 2) == [0, 4, 2, 2]
    assert reusable(turns, 4) == [0, 4, 0, 0]
    assert Completion((1,), 0).finish is None
