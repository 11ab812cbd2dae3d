"""With the connector every output is what it is without, in every mode, and hits are exact."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conversation import Completion, Turn, difference, play, reusable, script
from tests.vllm.engines import core, engine, generate
from tests.vllm.modes import (
    BLOCK,
    check_nothing_leaked,
    connector,
    count_hits,
    count_preemptions,
    dram,
    gate,
    nvme,
    settle,
    settled,
    wait,
    worker,
)

TALK = script(11, sessions=3, turns=3)
PLAIN: dict[str, Any] = {"enable_prefix_caching": False}
CHUNKED: dict[str, Any] = {"max_num_batched_tokens": 96}
TIGHT: dict[str, Any] = {"num_gpu_blocks_override": 26, "max_model_len": 800}


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Turn]:
    """The conversation without any cache."""
    with engine(model, **PLAIN) as llm:
        return play(TALK, partial(generate, llm))


def by_turn(turns: list[Turn]) -> list[Turn]:
    return sorted(turns, key=lambda turn: (turn.index, turn.session))


MODES = [
    # load, tiers, tokens of a chunk, arguments of the engine
    ("async", "dram", 32, {}),
    ("sync", "dram", 64, {}),
    ("async", "dram", 128, PLAIN),
    ("sync", "dram", 32, PLAIN),
    ("async", "through", 64, CHUNKED),
    ("sync", "through", 128, CHUNKED),
    ("async", "through", 32, TIGHT),
    ("sync", "through", 64, TIGHT),
    ("async", "on_evict", 64, {}),
    ("sync", "on_evict", 32, PLAIN),
    ("async", "nvme", 128, {}),
    ("sync", "nvme", 64, PLAIN),
]
# The short form still has each load, kind of tiers, chunk and arguments.
CHOSEN = MODES if "TIEREDKV_CRASHES" in os.environ else [MODES[i] for i in (0, 3, 4, 7, 9, 10)]


def tiers_of(kind: str, path: Path) -> list[dict[str, Any]]:
    """`through` and `on_evict`: a small DRAM in front of an NVMe that holds everything."""
    small = dram("512KiB")
    return {
        "dram": [dram()],
        "small": [small],
        "through": [small, nvme(path)],
        "on_evict": [small, nvme(path, "on_evict")],
        "nvme": [nvme(path)],
    }[kind]


def name(mode: tuple[str, str, int, dict[str, Any]]) -> str:
    load, kind, chunk, args = mode
    return "-".join([load, kind, str(chunk), *(f"{k}={v}" for k, v in args.items())])


@pytest.mark.parametrize("mode", CHOSEN, ids=name)
def test_outputs_are_identical_and_hits_exact(
    mode: tuple[str, str, int, dict[str, Any]], model: Path, expected: list[Turn], tmp_path: Path
) -> None:
    load, kind, chunk, args = mode
    config = connector(tiers_of(kind, tmp_path), chunk=chunk, load=load)
    with engine(model, config, **args) as llm:
        alone = play(TALK, settled(llm, forget=True), together=False)
        again = play(TALK, settled(llm, forget=True))
        busy = play(TALK, partial(generate, llm))  # saves run beside other requests
        check_nothing_leaked(llm)
    assert difference(expected, by_turn(alone)) is None
    assert [turn.cached for turn in alone] == reusable(alone, chunk)
    assert any(turn.cached for turn in alone)
    assert difference(expected, again) is None
    known = reusable([*alone, *again], chunk)[len(alone) :]
    assert [turn.cached for turn in again] == known
    assert difference(expected, busy) is None
    assert all(turn.cached >= hit for turn, hit in zip(busy, known, strict=True))


@pytest.mark.parametrize("load", ["async", "sync"])
def test_tiers_that_cannot_hold_all(model: Path, expected: list[Turn], load: str) -> None:
    with engine(model, connector([dram("512KiB")], load=load), **TIGHT) as llm:
        alone = play(TALK, settled(llm, forget=True), together=False)
        busy = [play(TALK, partial(generate, llm)) for _ in range(2)]
        check_nothing_leaked(llm)
    assert difference(expected, by_turn(alone)) is None
    assert [difference(expected, turns) for turns in busy] == [None, None]
    found = [turn.cached for turn in alone]
    assert all(hit <= most for hit, most in zip(found, reusable(alone, 64), strict=True))
    assert any(found)


def tokens(seed: int, count: int) -> list[int]:
    return [(seed * 31 + 7 * i + i * i % 97) % 256 for i in range(count)]


@pytest.mark.parametrize("load", ["async", "sync"])
def test_prompts_that_end_with_a_chunk_and_prompts_below_one(model: Path, load: str) -> None:
    prompts = [tokens(1, 256), tokens(2, 64), tokens(3, 65), tokens(4, 63), tokens(5, 1)]
    limits = [8] * len(prompts)
    with engine(model, **PLAIN) as llm:
        want = [answer.tokens for answer in generate(llm, prompts, limits)]
    with engine(model, connector([dram()], load=load)) as llm:
        complete = settled(llm, forget=True)
        plays = [complete(prompts, limits) for _ in range(3)]
        alone = [complete([prompt], [8])[0] for prompt in prompts]
        llm.reset_prefix_cache()
        longest = complete([prompts[0]], [1])[0]  # all that is asked for is the last logits
        check_nothing_leaked(llm)
    for answers in [*plays, alone]:
        assert [answer.tokens for answer in answers] == want
    assert longest.tokens == want[0][:1]
    assert [answer.cached for answer in plays[0]] == [0] * 5
    # The engine counts a whole prompt and computes its last token again; a load that the step
    # waits for leaves a block to compute.
    whole = [256, 64] if load == "async" else [256 - BLOCK, 64 - BLOCK]
    for answers in [*plays[1:], alone]:
        assert [answer.cached for answer in answers] == [*whole, 64, 0, 0]


@pytest.mark.parametrize(
    ("load", "chunk", "policy"),
    [("async", 32, "fcfs"), ("sync", 64, "fcfs"), ("async", 64, "priority")],
)
def test_preempted_requests_resume(
    model: Path, load: str, chunk: int, policy: str, tmp_path: Path
) -> None:
    prompts = [tokens(i, 150) for i in range(4)]
    args: dict[str, Any] = {"scheduling_policy": policy}
    priority = [3, 1, 2, 0] if policy == "priority" else None
    with engine(model, **args) as llm:
        want = [answer.tokens for answer in generate(llm, prompts, 200)]
    config = connector([dram("512KiB"), nvme(tmp_path)], chunk=chunk, load=load)
    with engine(model, config, **TIGHT, **args) as llm:
        preempted, loaded = count_preemptions(llm), count_hits(llm)
        for _ in range(2):
            answers = complete_with(llm, prompts, 200, priority)
            assert [answer.tokens for answer in answers] == want
        check_nothing_leaked(llm)
    assert len(preempted) >= 2
    assert sum(loaded.values())


def complete_with(
    llm: Any, prompts: list[list[int]], limit: int, priority: list[int] | None
) -> list[Completion]:
    from vllm import SamplingParams, TokensPrompt

    if priority is None:
        return generate(llm, prompts, limit)
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
        SamplingParams(max_tokens=limit, temperature=0, ignore_eos=True, detokenize=False),
        priority=priority,
        use_tqdm=False,
    )
    return [Completion(tuple(output.outputs[0].token_ids), 0) for output in outputs]


def add(llm: Any, name: str, prompt: list[int], limit: int = 32) -> str:
    """Hand a request to the engine without waiting; its id there."""
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(max_tokens=limit, temperature=0, ignore_eos=True, detokenize=False)
    return str(llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params))


def running(llm: Any, name: str) -> Any:
    """The engine's own object for the request that was added as `name`."""
    (found,) = [r for r in core(llm).scheduler.requests.values() if r.request_id.startswith(name)]
    return found


@pytest.mark.parametrize("tiers", ["dram", "through"])
def test_aborts_leave_nothing(model: Path, tiers: str, tmp_path: Path) -> None:
    prompts = [tokens(i, 400) for i in range(3)]
    with engine(model, **PLAIN) as llm:
        want = [answer.tokens for answer in generate(llm, prompts)]
    config = connector(tiers_of(tiers, tmp_path))
    with engine(model, config, **CHUNKED) as llm:
        step, abort = llm.llm_engine.step, partial(llm.llm_engine.abort_request, internal=True)
        # at once, in the prefill, in the decode
        for low, high in ((-1, 0), (1, 399), (401, 460)):
            request = add(llm, "r", prompts[0], 64)
            while not low <= running(llm, "r").num_computed_tokens <= high:
                step()
            abort([request])
            check_nothing_leaked(llm)
            assert llm.reset_prefix_cache()
        assert generate(llm, [prompts[0]])[0].tokens == want[0]
        settle(llm)
        assert llm.reset_prefix_cache()
        with gate(worker().tiers[0]) as (begun, go_on):
            request = add(llm, "load", prompts[0])
            wait(lambda: step() or begun.is_set(), "the load")
            assert running(llm, "load").status.name == "WAITING_FOR_REMOTE_KVS"
            abort([request])
            step()
            # others come and go while the load hangs; its blocks are nobody else's
            answers = generate(llm, prompts[1:])
            assert [answer.tokens for answer in answers] == want[1:]
            assert core(llm).scheduler.requests, "the blocks of the load are free already"
            go_on.set()
        check_nothing_leaked(llm)
        assert llm.reset_prefix_cache()
        answers = generate(llm, prompts)
        assert [answer.tokens for answer in answers] == want
        assert answers[0].cached == 384
        check_nothing_leaked(llm)


@pytest.mark.parametrize("load", ["async", "sync"])
def test_several_outputs_of_one_prompt(model: Path, load: str) -> None:
    from vllm import SamplingParams, TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=tokens(i, 200)) for i in range(2)]
    params = SamplingParams(n=2, seed=5, temperature=0.9, max_tokens=40, ignore_eos=True)

    def sample(llm: Any) -> list[list[int]]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(one.token_ids) for output in outputs for one in output.outputs]

    with engine(model) as llm:
        want = sample(llm)
    assert want[0] != want[1]
    with engine(model, connector([dram()], load=load), **TIGHT) as llm:
        loaded = count_hits(llm)
        for _ in range(3):
            assert sample(llm) == want
            settle(llm)
            assert llm.reset_prefix_cache()
        assert loaded["dram"] >= 2 * 2 * 192
        check_nothing_leaked(llm)


def test_salts_are_namespaces(model: Path, tmp_path: Path) -> None:
    from vllm import SamplingParams, TokensPrompt

    def ask(llm: Any, salt: str | None) -> Completion:
        prompt = TokensPrompt(prompt_token_ids=tokens(1, 200))
        if salt is not None:
            prompt["cache_salt"] = salt
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        settle(llm)
        assert llm.reset_prefix_cache()
        return Completion(tuple(output.outputs[0].token_ids), output.num_cached_tokens)

    with engine(model, connector([dram(), nvme(tmp_path)])) as llm:
        answers = [ask(llm, salt) for salt in ("a", "b", None, "a", "b", None)]
        check_nothing_leaked(llm)
    assert [answer.cached for answer in answers] == [0, 0, 0, 192, 192, 192]
    assert len({answer.tokens for answer in answers}) == 1


def test_a_reset_forgets_also_on_disk(model: Path, tmp_path: Path) -> None:
    prompts = [tokens(1, 400), tokens(2, 300)]
    config = connector([dram(), nvme(tmp_path)])
    with engine(model, config) as llm:
        want = [answer.tokens for answer in generate(llm, prompts)]
        settle(llm)
        assert llm.reset_prefix_cache(reset_connector=True)
        answers = generate(llm, prompts)
        assert [(a.tokens, a.cached) for a in answers] == [(tokens_, 0) for tokens_ in want]
        settle(llm)
        assert llm.reset_prefix_cache(reset_connector=True)
        check_nothing_leaked(llm)
    with engine(model, config) as llm:
        assert [answer.cached for answer in generate(llm, prompts)] == [0, 0]
        check_nothing_leaked(llm)


def forget_all(llm: Any) -> bool:
    """Preempt all requests and forget everything; False, after a step, while blocks are held."""
    try:
        return bool(llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True))
    except RuntimeError:
        llm.llm_engine.step()
        return False


def test_a_reset_while_requests_run(model: Path, tmp_path: Path) -> None:
    prompt = tokens(1, 400)
    config = connector([dram(), nvme(tmp_path)])
    with engine(model, config, **CHUNKED) as llm:
        want = generate(llm, [prompt])[0].tokens
        for low, high in ((1, 399), (401, 410)):  # in the prefill, in the decode
            settle(llm)
            assert llm.reset_prefix_cache(reset_connector=True)
            add(llm, "r", prompt, 16)
            while not low <= running(llm, "r").num_computed_tokens <= high:
                llm.llm_engine.step()
            wait(lambda: forget_all(llm), "a moment without saves under way")
            assert running(llm, "r").num_computed_tokens == 0
            outputs: list[Any] = []
            while llm.llm_engine.has_unfinished_requests():
                outputs += llm.llm_engine.step()
            assert tuple(outputs[-1].outputs[0].token_ids) == want
            check_nothing_leaked(llm)
        assert llm.reset_prefix_cache()
        answer = generate(llm, [prompt])[0]
        assert (answer.tokens, answer.cached) == (want, 384)
        check_nothing_leaked(llm)


def test_a_reset_while_a_save_runs(model: Path) -> None:
    """vLLM empties its own cache first, and cannot while a save holds blocks. A moment later it
    can."""
    with engine(model, connector([dram()]), **CHUNKED) as llm:
        generate(llm, [tokens(2, 40)])  # the tiers are open
        settle(llm)
        with gate(worker().tiers[0], "write") as (begun, _):
            add(llm, "r", tokens(1, 400), 16)
            wait(lambda: llm.llm_engine.step() is None or begun.is_set(), "the save")
            with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
                llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        settle(llm)
        assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        check_nothing_leaked(llm)
