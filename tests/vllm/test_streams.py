"""The worker's copies on the streams of a device, on real engines: here one that runs late.

The engine computes on the CPU. What it has computed, and what it needs, is copied by streams
that do nothing before they must, so whoever does not wait for an event gets other tokens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.conversation import difference, play, reusable, script
from tests.vllm.engines import core, engine, generate
from tests.vllm.modes import (
    SECONDS,
    check_nothing_leaked,
    connector,
    dram,
    nvme,
    settle,
    settled,
    worker,
)
from tieredkv.testing import LateDevice

if TYPE_CHECKING:
    from vllm import LLM

TALK = script(11, sessions=3, turns=3)
PROMPT = [(7 * i + i * i % 97) % 256 for i in range(256)]
OTHER = [(11 * i + i * i % 89) % 256 for i in range(192)]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    """What the connector takes for the streams of the engine's device."""
    with LateDevice(0.003) as device:
        monkeypatch.setattr("tieredkv.connector.paged.streams_of", lambda _: device)
        yield device


@pytest.mark.parametrize(("load", "tier"), [("async", "dram"), ("sync", "dram"), ("async", "nvme")])
def test_outputs_are_identical_and_hits_exact(
    model: Path, tmp_path: Path, late: LateDevice, load: str, tier: str
) -> None:
    tiers = [dram()] if tier == "dram" else [nvme(tmp_path)]
    with engine(model, enable_prefix_caching=False) as llm:
        expected = play(TALK, partial(generate, llm))
    with engine(model, connector(tiers, load=load)) as llm:
        assert worker()._cache.on_device
        alone = play(TALK, settled(llm, forget=True), together=False)
        busy = play(TALK, partial(generate, llm))  # saves and loads run beside other requests
        check_nothing_leaked(llm)
    by_turn = sorted(alone, key=lambda turn: (turn.index, turn.session))
    assert difference(expected, by_turn) is None
    assert [turn.cached for turn in alone] == reusable(alone, 64)
    assert difference(expected, busy) is None
    assert any(turn.cached for turn in busy)


def test_the_engine_goes_on_while_the_streams_do_not(model: Path, late: LateDevice) -> None:
    """Neither a save nor a load that has not ended keeps other requests waiting."""
    with engine(model, connector([dram()])) as llm:
        (first,) = generate(llm, [PROMPT])
        settle(llm)
        assert llm.reset_prefix_cache()
        go_on = {"out": threading.Event(), "in": threading.Event()}
        late.run("out", partial(go_on["out"].wait, SECONDS))
        other = ask(llm, "other", OTHER)
        tokens = finish(llm, other)  # computed, but not saved
        assert worker()._saving
        late.run("in", partial(go_on["in"].wait, SECONDS))
        waits, beside = ask(llm, "waits", PROMPT), ask(llm, "beside", OTHER[:100])
        assert finish(llm, beside)
        assert waits in core(llm).scheduler.requests
        assert worker()._loading.keys() == {waits}
        go_on["in"].set()
        go_on["out"].set()
        assert finish(llm, waits) == first.tokens
        settle(llm)
        check_nothing_leaked(llm)
        assert llm.reset_prefix_cache()
        (again,) = generate(llm, [OTHER])
        assert (again.tokens, again.cached) == (tokens, len(OTHER))


def test_memory_is_ready_before_the_engine_is(model: Path, late: LateDevice) -> None:
    """Locking pages later would break the capture of graphs, and hold up what runs."""
    with engine(model, connector([dram()])):
        (tier,) = worker().tiers
        assert tier.wait_ready(0.0)
        ring = worker()._cache.staging._host
        assert len(ring._free) == ring._made == ring._size


def test_copies_wait_for_the_steps_before_and_not_for_this_one(
    model: Path, late: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM starts loads behind the step's computation, where a new fence would wait for it."""
    seen: list[str] = []
    with engine(model, connector([dram()])) as llm:
        runner = core(llm).model_executor.driver_worker.worker.model_runner
        for owner, name in (
            (worker(), "mark"),
            (worker(), "begin"),
            (late, "mark"),
            (runner, "_model_forward"),
        ):
            real = getattr(owner, name)

            def watched(*args: Any, real: Any = real, name: str = name, **kwargs: Any) -> Any:
                seen.append(name)
                return real(*args, **kwargs)

            monkeypatch.setattr(owner, name, watched)
        generate(llm, [PROMPT], 80)  # what is computed is saved while more is
    steps = " ".join(seen).split("begin")
    saving = [step.split() for step in steps if "mark mark" in step]
    assert saving
    assert all(step in (["mark", "mark", "_model_forward"], ["mark", "mark"]) for step in saving)
    assert any("_model_forward" in step for step in saving)


def ask(llm: LLM, name: str, prompt: list[int]) -> str:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=16)
    found = llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
    return str(found)


def finish(llm: LLM, name: str) -> tuple[int, ...]:
    """Step until the request that goes by this name inside has ended; its tokens."""
    deadline = time.monotonic() + SECONDS / 2
    while time.monotonic() < deadline:
        for output in llm.llm_engine.step():
            if name.startswith(output.request_id) and output.finished:
                return tuple(output.outputs[0].token_ids)
    raise AssertionError(f"{name} has not ended")
