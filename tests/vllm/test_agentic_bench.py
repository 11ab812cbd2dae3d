"""The agentic benchmark, on a workload that says nothing: it runs, counts right, and finds a
cache that returns other bytes than were computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from benches import vllm_agentic as bench
from benches.vllm_arms import ARMS
from benches.vllm_engine import Answer, KvTransfer
from benches.vllm_workload import Load, reusable, sessions

SMALL = Load(sessions=4, turns=5, scale=32, haste=200, context=1536)


@contextmanager
def lying(engines: int) -> Iterator[list[KvTransfer]]:
    transfer: dict[str, Any] = {
        "kv_connector": "LyingConnector",
        "kv_connector_module_path": "tests.vllm.lying",
        "kv_role": "kv_both",
    }
    yield [transfer] * engines


def test_arms_agree_and_a_lie_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARMS, "lying", lying)
    arms = ("none", "example", "dram", "nvme", "mooncake", "vllm_mooncake", "lying")
    size = bench.Size(SMALL, layers=2, hidden=128, rounds=1, arms=arms, routings=("round_robin",))
    found = {result.metric: result for result in bench.run(size)}
    served = sum(len(turns) for turns in sessions(SMALL))

    for arm in arms:
        wrong = found[f"vllm_agentic.outputs.wrong.{arm}"]
        assert wrong.n == served
        assert wrong.ok == (arm != "lying"), arm
        for figure in ("ttft_p50", "ttft_p99", "e2e_p50", "e2e_p99", "throughput"):
            result = found[f"vllm_agentic.round_robin.{arm}.{figure}"]
            assert math.isfinite(result.value)
            assert result.value > 0
        first, last = (
            found[f"vllm_agentic.round_robin.{arm}.{k}"] for k in ("ttft_p50", "e2e_p50")
        )
        assert first.value < last.value

    hit = {arm: found[f"vllm_agentic.round_robin.{arm}.hit"].value for arm in arms}
    potential, chunks, unshared = (
        found[f"vllm_agentic.round_robin.{name}"].value
        for name in ("potential", "loss.chunks", "loss.unshared")
    )
    assert unshared > 1  # or the workload would not tell engines that share from others
    assert hit["none"] < hit["dram"]
    for arm in ("dram", "nvme"):
        # The order of arrival varies a little between arms, and with it what can be found.
        assert hit[arm] == pytest.approx(potential - chunks - unshared, abs=1.5), arm
    for arm in ("mooncake", "vllm_mooncake"):
        # Prompts that arrive together cannot use each other's.
        assert potential - chunks - unshared + 1 < hit[arm] <= potential - chunks + 0.1, arm


def test_sessions_continue_their_own_context() -> None:
    load = Load(sessions=3, turns=8)
    found = sessions(load)
    assert [len(turns) for turns in found] == [8, 8, 8]
    assert sorted(t.order for turns in found for t in turns)[0] == 0
    firsts = [turns[0].prompt([], []) for turns in found]
    common = found[1][0].shared
    assert common == found[2][0].shared > 500
    assert firsts[1][:common] == firsts[2][:common]
    assert firsts[1][common:][:8] != firsts[2][common:][:8]
    for turns, before in zip(found, firsts, strict=True):
        for turn in turns[1:]:
            answer = [1] * turns[turn.number - 1].output
            after = turn.prompt(before, answer)
            kept = [*before, *answer] if turn.keep is None else before[: turn.keep]
            assert after[: len(kept)] == kept
            assert len(kept) < len(after) <= load.context
            assert len(after) >= turn.length
            before = after
    assert sessions(load) == found != sessions(replace(load, seed=5))


def test_reusable_tokens() -> None:
    first, second = [1] * 10, [1] * 10 + [2, 3] + [4] * 6
    pairs = [(first, [2, 3]), (second, [5])]
    assert reusable(pairs, 1) == 11  # all but the last token of the answer, which has no KV
    assert reusable(pairs, 4) == 8
    assert reusable([(first, [2]), (first, [2])], 1) == 9  # one token must be computed
    assert reusable([(first, [2]), ([9, *first], [2])], 1) == 0


def test_which_answers_differ() -> None:
    sure = Answer((1, 2, 3), (1.0, 1.0, 1.0), 0, 0.0, 1.0)
    torn = Answer((1, 9, 3), (1.0, 1e-5, 1.0), 0, 0.0, 1.0)
    assert bench.differs(sure, replace(sure, cached=5, done=2.0)) == ""
    assert bench.differs(sure, torn) == "wrong"
    assert bench.differs(replace(sure, margins=(1.0, 1e-5, 1.0)), torn) == "tie"
    assert bench.differs(sure, replace(sure, tokens=(1, 2), margins=(1.0, 1.0))) == "wrong"
