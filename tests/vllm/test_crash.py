"""Engines that die in the middle of saves, and engines that share a directory by mistake."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import engine, generate, tiered
from tests.vllm.processes import call, spawn
from tieredkv.errors import DirectoryInUse

PROMPTS = [[(i * i + 7 * i + 31 * n) % 256 for i in range(500)] for n in range(12)]


def config(path: Path | str, **connector: Any) -> dict[str, Any]:
    nvme = {"kind": "nvme", "path": str(path), "capacity": "64MiB", "min_free": 0}
    nvme |= {"segment": "1MiB", "write": "through"}
    dram = {"kind": "dram", "capacity": "8MiB"}
    return tiered({"block_tokens": 64, "tiers": [dram, nvme], "connector": connector})


def serve(model: str, path: str) -> None:
    """Runs in a child, until it is killed."""
    with engine(Path(model), config(path)) as llm:
        for at in range(0, len(PROMPTS), 2):
            generate(llm, PROMPTS[at : at + 2], 4)
            print(f"turn {at}", flush=True)
        print("turn all", flush=True)
        while True:
            time.sleep(1)


def first(model: str, path: str) -> list[int]:
    """Runs in a child."""
    with engine(Path(model), config(path)) as llm:
        return list(generate(llm, PROMPTS[:1], 4)[0].tokens)


@pytest.mark.parametrize("turn", [0, 4])
def test_killed_in_the_middle_of_saves(model: Path, tmp_path: Path, turn: int) -> None:
    """A09."""
    with engine(model, enable_prefix_caching=False) as llm:
        right = [answer.tokens for answer in generate(llm, PROMPTS, 4)]
    with spawn(serve, model=model, path=tmp_path) as child:
        deadline = time.monotonic() + 120
        while f"turn {turn}" not in child.log:
            assert child.popen.poll() is None, child.log
            assert time.monotonic() < deadline, child.log
            time.sleep(0.005)
        child.kill()
    with engine(model, config(tmp_path)) as llm:
        found = generate(llm, PROMPTS, 4)
        assert [answer.tokens for answer in found] == right
        if turn:
            assert any(answer.cached for answer in found), "nothing survived"
        generate(llm, PROMPTS, 4)
    with engine(model, config(tmp_path)) as llm:
        again = generate(llm, PROMPTS, 4)
        assert [answer.tokens for answer in again] == right


def test_a_second_engine_on_the_same_directory_is_told_what_to_do(
    model: Path, tmp_path: Path
) -> None:
    with engine(model, config(tmp_path)) as llm:
        (answer,) = generate(llm, PROMPTS[:1], 4)
        with pytest.raises(RuntimeError) as caught:
            call(first, model=model, path=tmp_path)
        log = caught.value.__notes__[0]
        assert DirectoryInUse.__name__ in log
        assert str(tmp_path) in log
        assert generate(llm, PROMPTS[:1], 4)[0].tokens == answer.tokens, "the first one suffered"
    assert tuple(call(first, model=model, path=tmp_path)) == answer.tokens
