"""Load or recompute: what takes longer to load than to compute is computed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import core, engine, generate, scheduler_connector, tiered, worker_connector
from tieredkv.connector.bandwidth import (
    DEPTH,
    HALF_LIFE,
    STEP,
    Bandwidth,
    Line,
    Prefill,
    worth_loading,
)
from tieredkv.testing import LatencyTier, ManualClock

CHUNK = 64
PROMPT = [(11 * i + i * i) % 256 for i in range(400)]
SLOW = 1.0
"""Seconds of a load that the tiny model's prefill beats on any machine."""


@pytest.fixture(autouse=True)
def automatic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the other tests, which are about loads, want."""
    monkeypatch.delenv("TIEREDKV_CONNECTOR_RECOMPUTE", raising=False)


# -- what loads take ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_latency_and_pace_are_told_apart(seed: int) -> None:
    rng, line = random.Random(seed), Line()
    latency, pace = rng.uniform(0, 0.1), rng.uniform(1e-4, 0.01)
    for i in range(40):
        blocks = rng.randrange(1, 200)
        line.add(blocks, (latency + pace * blocks) * rng.uniform(0.98, 1.02), float(i))
    for blocks in (1, 20, 400):
        assert line.at(blocks) == pytest.approx(latency + pace * blocks, rel=0.15, abs=0.01)
    assert line.at(0) == 0.0


def test_samples_of_one_size_make_a_line_through_the_origin() -> None:
    line = Line()
    assert line.at(5) == 0.0
    for i in range(3):
        line.add(10, 0.5, float(i))
    assert line.at(10) == pytest.approx(0.5)
    assert line.at(20) == pytest.approx(1.0)


@pytest.mark.parametrize("samples", [[(10, 0.9), (100, 0.1)], [(1, 0.01), (10, 0.9)]])
def test_samples_that_contradict_the_model_never_promise_less_than_nothing(
    samples: list[tuple[int, float]],
) -> None:
    line = Line()
    for blocks, seconds in samples:
        line.add(blocks, seconds, 0.0)
    estimates = [line.at(blocks) for blocks in (1, 10, 100, 1000)]
    assert estimates == sorted(estimates)
    assert estimates[0] > 0.0


def test_the_latest_samples_weigh_most_and_old_ones_little() -> None:
    line = Line()
    for i in range(50):
        line.add(10, 5.0, i * 0.1)
    for i in range(12):
        line.add(10, 0.1, 5.0 + i * 0.1)
    assert line.at(10) < 0.6
    stale = Line()
    for i in range(50):
        stale.add(10, 5.0, i * 0.1)
    stale.add(10, 0.1, 5.0 + 10 * HALF_LIFE)
    assert stale.at(10) < 0.15


def test_a_slow_tier_is_probed_by_one_load_at_a_time_and_the_slower_the_rarer() -> None:
    def probes(load: float) -> list[float]:
        """When loads were begun in an hour with a request a second; computing takes one."""
        clock, begun = ManualClock(), []
        bandwidth, until = Bandwidth(clock), 0.0
        bandwidth.begun("nvme")
        bandwidth.ended("nvme", 8, load)
        for second in range(3600):
            if until and clock() >= until:
                bandwidth.ended("nvme", 8, load)
                until = 0.0
            if bandwidth.seconds("nvme", 8) <= 1.0:
                assert not until, "several probe together"
                begun.append(float(second))
                bandwidth.begun("nvme")
                until = clock() + load
            clock.advance(1.0)
        return begun

    slow, slower, slowest = probes(2.0), probes(8.0), probes(64.0)
    assert len(slow) > len(slower) > len(slowest) > 4
    gaps = [b - a for a, b in pairwise(slower)]
    assert all(180 <= gap < 200 for gap in gaps), gaps  # three half-lives, and the load itself
    assert probes(8.0) == slower


def test_a_tier_that_became_fast_is_believed_after_one_probe() -> None:
    clock = ManualClock()
    bandwidth = Bandwidth(clock)
    assert bandwidth.seconds("nvme", 8) == 0.0
    for _ in range(20):
        bandwidth.begun("nvme")
        clock.advance(8.0)
        bandwidth.ended("nvme", 8, 8.0)
    assert bandwidth.seconds("nvme", 8) == pytest.approx(8.0)
    clock.advance(3.5 * HALF_LIFE)
    assert bandwidth.seconds("nvme", 8) < 1.0
    bandwidth.begun("nvme")
    assert bandwidth.seconds("nvme", 8) == pytest.approx(8.0), "a second probe"
    bandwidth.ended("nvme", 8, 0.01)
    assert bandwidth.seconds("nvme", 8) < 1.0
    assert bandwidth.seconds("dram", 8) == 0.0


def test_loads_that_failed_say_nothing_about_the_tier() -> None:
    bandwidth = Bandwidth(ManualClock())
    bandwidth.begun("nvme")
    bandwidth.ended("nvme", 8, 0.0)
    assert bandwidth.seconds("nvme", 8) == 0.0


# -- what computing takes -------------------------------------------------------------------


def test_the_rate_is_that_of_steps_that_do_little_but_prefill() -> None:
    clock = ManualClock()
    prefill = Prefill(None, clock)
    assert prefill.rate is None
    for tokens, requests, waits in [
        (64, 64, False),  # decodes
        (STEP - 1, 1, False),  # little of anything
        (4 * STEP, STEP, False),  # as many decodes as prefill
        (2 * STEP, 1, True),  # and loads
    ]:
        prefill.begun(tokens, requests, waits=waits)
        clock.advance(0.1)
        prefill.ended()
    assert prefill.rate is None
    for _ in range(5):
        prefill.begun(8 * STEP + 20, 21)
        clock.advance(0.1)
        prefill.ended()
        clock.advance(3.0)  # between steps nothing is computed
    assert prefill.rate == pytest.approx(80 * STEP + 200)
    assert Prefill(1234, clock).rate == 1234


def test_steps_that_overlap_are_timed_from_the_end_of_the_one_before() -> None:
    clock = ManualClock()
    prefill = Prefill(None, clock)
    prefill.begun(16, 16)  # a long step of decodes
    clock.advance(0.01)
    prefill.begun(10 * STEP, 1)  # scheduled while that runs
    clock.advance(0.99)
    prefill.ended()
    prefill.begun(16, 16)
    clock.advance(0.5)
    prefill.ended()
    assert prefill.rate == pytest.approx(20 * STEP)
    prefill.ended()
    prefill.ended()  # nothing is under way
    assert prefill.rate == pytest.approx(20 * STEP)


def test_steps_whose_end_is_never_heard_are_forgotten() -> None:
    clock = ManualClock()
    prefill = Prefill(None, clock)
    for _ in range(10 * DEPTH):
        prefill.begun(10 * STEP, 1)
        clock.advance(1.0)
    assert len(prefill._steps) <= DEPTH


# -- the decision ---------------------------------------------------------------------------


def paces(**tiers: tuple[float, float]) -> Any:
    return lambda tier, blocks: tiers[tier][0] + tiers[tier][1] * blocks


def cost(
    length: int, spans: list[tuple[str, int]], computed: int, seconds: Any, rate: float
) -> Any:
    """Of loading what lies before `length` and computing the others, block by block."""
    total = sum(count for _, count in spans)
    tiers = [tier for tier, count in spans for _ in range(count)][computed // CHUNK : length]
    load = sum(seconds(tier, tiers.count(tier)) for tier in set(tiers))
    return load + (total * CHUNK - max(computed, length * CHUNK)) / rate


@pytest.mark.parametrize("seed", range(200))
def test_no_length_is_better(seed: int) -> None:
    rng = random.Random(seed)
    names = ["dram", "pool", "nvme"]
    spans = [(rng.choice(names), rng.randrange(1, 12)) for _ in range(rng.randrange(1, 7))]
    total = sum(count for _, count in spans)
    computed = rng.choice([0, 0, rng.randrange(0, total * CHUNK)])
    seconds = paces(**{name: (rng.random() * 0.05, rng.random() * 0.02) for name in names})
    rate = CHUNK / rng.uniform(0.001, 0.03)
    found = worth_loading(spans, CHUNK, computed, seconds, rate)
    best = min(
        cost(length, spans, computed, seconds, rate)
        for length in range(computed // CHUNK, total + 1)
    )
    assert cost(found, spans, computed, seconds, rate) == pytest.approx(best)


def test_a_slow_tier_behind_a_fast_one_ends_the_match() -> None:
    spans = [("dram", 4), ("nvme", 4)]
    seconds = paces(dram=(0.0, 0.001), nvme=(0.0, 0.1))
    assert worth_loading(spans, CHUNK, 0, seconds, CHUNK / 0.01) == 4
    assert worth_loading(spans, CHUNK, 0, seconds, CHUNK / 0.2) == 8
    assert worth_loading(spans, CHUNK, 0, seconds, CHUNK / 1e-4) == 0
    assert worth_loading(spans, CHUNK, 4 * CHUNK, seconds, CHUNK / 0.01) == 4
    assert worth_loading(spans, CHUNK, 0, seconds, None) == 8, "nothing is known of the engine"
    assert worth_loading([], CHUNK, 0, seconds, 1.0) == 0


def test_a_slow_piece_in_the_middle_is_loaded_where_what_follows_is_worth_it() -> None:
    seconds = paces(dram=(0.0, 0.0), nvme=(0.0, 0.1))
    assert worth_loading([("nvme", 1), ("dram", 20)], CHUNK, 0, seconds, CHUNK / 0.01) == 21
    assert worth_loading([("nvme", 1), ("dram", 2)], CHUNK, 0, seconds, CHUNK / 0.01) == 0


# -- real engines ---------------------------------------------------------------------------


def settings(path: Path | None = None, **connector: Any) -> dict[str, Any]:
    tiers: list[dict[str, Any]] = [{"kind": "dram", "capacity": "64MiB"}]
    if path is not None:
        nvme = {"capacity": "64MiB", "min_free": 0, "segment": "1MiB", "write": "through"}
        tiers.append({"kind": "nvme", "path": str(path), **nvme})
    return {"block_tokens": CHUNK, "tiers": tiers, "connector": connector}


def side(llm: Any) -> Any:
    return scheduler_connector(llm).scheduler


def settle(llm: Any) -> None:
    """All jobs have ended, and what they wrote is committed."""
    shipping = side(llm).sides.shipping
    deadline = time.monotonic() + 60
    while shipping.waiting or shipping.planner._tickets:
        core(llm).step()
        assert time.monotonic() < deadline, "it does not come to an end"
        time.sleep(0.001)
    assert shipping.check() == []


def ask(llm: Any) -> tuple[tuple[int, ...], int]:
    """(answer to PROMPT, tokens of it that were loaded), with nothing in the engine's cache."""
    settle(llm)
    assert core(llm).scheduler.kv_cache_manager.reset_prefix_cache()
    (answer,) = generate(llm, [PROMPT])
    settle(llm)
    return answer.tokens, answer.cached


@contextmanager
def slow(index: int, seconds: float = SLOW) -> Iterator[None]:
    """The worker's tier takes so long for every read."""
    tiers = worker_connector().worker.tiers
    inner = tiers[index]
    tiers[index] = LatencyTier(inner, per_op=seconds)
    try:
        yield
    finally:
        tiers[index] = inner


def later(llm: Any, seconds: float) -> None:
    """So much time passes for what is known of the tiers."""
    bandwidth = side(llm).sides.loads._bandwidth
    clock = bandwidth._clock
    bandwidth._clock = lambda: clock() + seconds


@pytest.fixture(scope="module")
def answer(model: Path) -> tuple[int, ...]:
    with engine(model, enable_prefix_caching=False) as llm:
        return generate(llm, [PROMPT])[0].tokens


@pytest.fixture
def totals(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """All that the connector has counted."""
    from tieredkv.connector.stats import Counts

    found: dict[str, int] = {}
    add = Counts.add

    def counting(self: Counts, name: str, *labels: str, by: int = 1) -> None:
        found[name] = found.get(name, 0) + by
        add(self, name, *labels, by=by)

    monkeypatch.setattr(Counts, "add", counting)
    return found


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_slow_tier_is_recomputed_and_a_fast_one_loaded(
    model: Path, answer: tuple[int, ...], totals: dict[str, int], load: str
) -> None:
    rate = round(384 / (SLOW / 8))  # said, not measured: a busy machine must not decide
    with engine(model, tiered(settings(load=load, prefill_rate=rate))) as llm:
        assert generate(llm, [PROMPT])[0].tokens == answer
        for _ in range(3):
            assert ask(llm) == (answer, 384)
        assert totals.get("shortened_tokens", 0) == 0
        missed = totals["missed_tokens"]
        with slow(0):
            assert ask(llm) == (answer, 384), "nobody can know yet"
            reads = totals["hit_tokens"]
            for _ in range(3):
                assert ask(llm) == (answer, 0)
            assert totals["hit_tokens"] == reads
            assert totals["shortened_tokens"] == 3 * 384
            later(llm, 20 * HALF_LIFE)
            assert ask(llm) == (answer, 384), "no probe"
            assert ask(llm) == (answer, 0)
        later(llm, 20 * HALF_LIFE)
        for _ in range(3):
            assert ask(llm) == (answer, 384), "the probe was in vain"
        tail = len(PROMPT) - 384  # of every prompt, but of a loaded one only with `async`
        assert (totals["missed_tokens"] - missed) % tail == 0
        assert totals["missed_tokens"] - missed <= 9 * tail


def test_a_slow_disk_behind_fast_memory_shortens_the_match(
    model: Path, answer: tuple[int, ...], totals: dict[str, int], tmp_path: Path
) -> None:
    rate = round(384 / (SLOW / 4))  # said, not measured: a busy machine must not decide
    with engine(model, tiered(settings(tmp_path, prefill_rate=rate))) as llm:
        generate(llm, [PROMPT])
        assert ask(llm) == (answer, 384)
        shipping = side(llm).sides.shipping
        shipping.clear(0)
        with slow(1):
            assert ask(llm) == (answer, 384)
            with shipping.lock:  # what was loaded went into memory as well; make its tail leave
                planner = shipping.planner
                pool = planner.res.levels[0].pool
                assert planner.room.make(0, pool.free + 2, shipping.clock()) == pool.free
                (run,) = planner.res.tree.runs.values()
                match = planner.match(run.keys)
            assert match.spans == (("dram", 4), ("nvme", 2))
            assert ask(llm) == (answer, 256)
            assert planner.match(run.keys).spans == (("dram", 6),), "not promoted from the engine"
            assert ask(llm) == (answer, 384)
        assert totals["shortened_tokens"] == 128


@pytest.mark.parametrize(
    ("connector", "loaded"),
    [({"recompute": "never"}, 384), ({"prefill_rate": 1}, 384), ({"prefill_rate": 10**9}, 0)],
)
def test_the_configuration_decides(
    model: Path, answer: tuple[int, ...], connector: dict[str, Any], loaded: int
) -> None:
    with engine(model, tiered(settings(**connector))) as llm:
        generate(llm, [PROMPT])
        assert ask(llm) == (answer, 384), "before anything was measured, loading wins"
        with slow(0, 0.3):
            assert ask(llm) == (answer, loaded)
