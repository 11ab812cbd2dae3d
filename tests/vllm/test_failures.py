"""What goes wrong below a real engine: the output stays the same, and nothing hangs."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conversation import Turn, difference, play, script
from tests.vllm.engines import (
    core,
    engine,
    generate,
    scheduler_connector,
    tiered,
    worker_connector,
)
from tests.vllm.model import build
from tieredkv.errors import ConfigError, TieredKVError
from tieredkv.testing import Fault, FaultyTier, Gate
from tieredkv.testing.faults import BlockCall
from tieredkv.tiers.nvme.tier import NvmeTier

CHUNK = 64
TALK = script(11, sessions=2, turns=3)
PROMPT = [(11 * i + i * i) % 256 for i in range(400)]
OTHER = [(5 * i + i * i) % 256 for i in range(400)]


def settings(path: Path | None, *, dram: str | None = "64MiB", **more: Any) -> dict[str, Any]:
    """A configuration with an NVMe tier below `path`, and a DRAM tier of `dram` above."""
    connector = more.pop("connector", {})
    nvme = {"capacity": "64MiB", "min_free": 0, "segment": "1MiB", "write": "through"}
    nvme |= more.pop("nvme", {})
    tiers: list[dict[str, Any]] = []
    if dram is not None:
        tiers.append({"kind": "dram", "capacity": dram})
    if path is not None:
        tiers.append({"kind": "nvme", "path": str(path), **nvme})
    return {"block_tokens": CHUNK, "tiers": tiers, "connector": connector, **more}


def side(llm: Any) -> Any:
    return scheduler_connector(llm).scheduler


def shipping(llm: Any) -> Any:
    return side(llm).sides.shipping


def steps(llm: Any, until: Callable[[], bool], seconds: float = 30) -> None:
    """Step an idle engine, as a busy one would."""
    deadline = time.monotonic() + seconds
    while not until():
        core(llm).step()
        assert time.monotonic() < deadline, "it does not come to an end"
        time.sleep(0.001)


def settle(llm: Any) -> None:
    """All jobs have ended, and what they wrote is committed."""
    steps(llm, lambda: not shipping(llm).waiting)
    if shipping(llm).index is not None:
        assert shipping(llm)._await_commit(time.monotonic() + 20)
        steps(llm, lambda: not shipping(llm).waiting)
    assert shipping(llm).check() == []
    pool = core(llm).scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert not side(llm)._requests


def chunks(llm: Any, tier: int) -> dict[int, bytes]:
    """Slots in use of a tier, and their keys."""
    runs = shipping(llm).planner.res.tree.runs.values()
    return {
        slot: key
        for run in runs
        for slot, key in zip(run.slots[tier] or (), run.keys, strict=False)
        if slot >= 0
    }


def drop(llm: Any, tier: str | None = None) -> None:
    """Forget the engine's own cache, and what a tier has."""
    assert core(llm).scheduler.kv_cache_manager.reset_prefix_cache()
    if tier is not None:
        levels = shipping(llm).planner.res.levels
        shipping(llm).clear(next(i for i, level in enumerate(levels) if level.name == tier))


def rot(tier: Any, slot: int) -> None:
    """Flip a bit of the payload, below everything that could notice."""
    inner = getattr(tier, "inner", tier)
    assert isinstance(inner, NvmeTier)
    size = inner.segments.geometry.table_slots
    segment = inner.segments.get(slot // size)
    assert segment is not None
    fd = os.open(segment.path, os.O_RDWR)
    try:
        at = segment.geometry.offset(slot % size) + 1000
        byte = os.pread(fd, 1, at)[0]
        os.pwrite(fd, bytes([byte ^ 4]), at)
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def wrapped(index: int) -> Iterator[FaultyTier]:
    """The worker's tier, wrapped; faults and gates end with the block."""
    tiers = worker_connector().worker.tiers
    inner = tiers[index]
    faulty = FaultyTier(inner)
    tiers[index] = faulty
    try:
        yield faulty
    finally:
        if faulty.hang is not None:
            faulty.hang.release()
        tiers[index] = inner


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Turn]:
    with engine(model, enable_prefix_caching=False) as llm:
        return play(TALK, partial(generate, llm))


@pytest.fixture(scope="module")
def answers(model: Path) -> dict[int, tuple[int, ...]]:
    """What the model says after the first n tokens of PROMPT, and, for -n, of OTHER."""
    lengths = [400, 380, 360, 340, 320, 300, 280]
    with engine(model, enable_prefix_caching=False) as llm:
        found = generate(llm, [PROMPT[:n] for n in lengths] + [OTHER[:n] for n in lengths])
    return dict(zip(lengths + [-n for n in lengths], (a.tokens for a in found), strict=True))


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_corrupted_slot_is_recomputed_and_stored_anew(
    model: Path, answers: dict[int, tuple[int, ...]], tmp_path: Path, load: str
) -> None:
    """A11, A12, A24."""
    config = settings(tmp_path, dram=None, connector={"load": load})
    with engine(model, tiered(config)) as llm:
        generate(llm, [PROMPT])
        settle(llm)
        for at in (3, 0):  # in the middle, at the first block
            keys = sorted(chunks(llm, 0).items())
            assert len(keys) == 6
            drop(llm)
            rot(worker_connector().worker.tiers[0], keys[at][0])
            (answer,) = generate(llm, [PROMPT])
            assert answer.tokens == answers[400]
            settle(llm)
            assert len(chunks(llm, 0)) == 6, "not stored anew"
            drop(llm)
            (answer,) = generate(llm, [PROMPT])
            assert answer.tokens == answers[400]
            assert answer.cached == 384
            settle(llm)


def test_several_requests_that_need_the_corrupted_slot(
    model: Path, answers: dict[int, tuple[int, ...]], tmp_path: Path
) -> None:
    for load in ("async", "sync"):
        config = settings(tmp_path / load, dram=None, connector={"load": load})
        with engine(model, tiered(config)) as llm:
            generate(llm, [PROMPT])
            settle(llm)
            drop(llm)
            rot(worker_connector().worker.tiers[0], min(chunks(llm, 0)))
            lengths = (400, 380, 360)
            found = generate(llm, [PROMPT[:n] for n in lengths])
            assert [a.tokens for a in found] == [answers[n] for n in lengths]
            settle(llm)
            drop(llm)
            (answer,) = generate(llm, [PROMPT])
            assert (answer.tokens, answer.cached) == (answers[400], 384), load


def test_swapped_weights_at_the_same_path_find_nothing(tmp_path: Path) -> None:
    """A06."""
    model = build(tmp_path / "model", seed=0)
    connector = tiered(settings(tmp_path / "nvme"))
    with engine(model, connector) as llm:
        generate(llm, [PROMPT])
        settle(llm)
    with engine(model, connector) as llm:
        assert generate(llm, [PROMPT])[0].cached == 384, "nothing survives at all"
    build(tmp_path / "model", seed=1)
    with engine(model, enable_prefix_caching=False) as llm:
        (right,) = generate(llm, [PROMPT])
    with engine(model, connector) as llm:
        (answer,) = generate(llm, [PROMPT])
        assert (answer.tokens, answer.cached) == (right.tokens, 0)
        settle(llm)


def every_other(at: BlockCall) -> bool:
    return (at.index + at.call) % 2 == 1


ERRORS: list[dict[str, Any]] = [
    {"raises": OSError(28, "No space left on device")},
    {"when": every_other},
    {"reply": "none"},
]


@pytest.mark.parametrize("load", ["async", "sync"])
def test_failing_reads_and_writes_of_every_tier(
    model: Path, answers: dict[int, tuple[int, ...]], tmp_path: Path, load: str
) -> None:
    """A24. The tier above is emptied, so that the other one is read."""
    lengths = (400, 340)
    prompts = [text[:n] for text in (PROMPT, OTHER) for n in lengths]
    right = [answers[sign * n] for sign in (1, -1) for n in lengths]
    with engine(model, tiered(settings(tmp_path, connector={"load": load}))) as llm:
        for index in (0, 1):
            for at, fault in enumerate(ERRORS):
                generate(llm, prompts)
                settle(llm)
                op = ("read", "write")[(index + at) % 2]
                drop(llm)
                if op == "write":
                    shipping(llm).clear(None)
                elif index:
                    shipping(llm).clear(0)
                with wrapped(index) as faulty:
                    faulty.error = Fault(**fault, op=op)
                    found = generate(llm, prompts)
                    settle(llm)
                    assert faulty.injected["error"], (index, fault)
                assert [a.tokens for a in found] == right, (index, fault)
        generate(llm, prompts)
        settle(llm)
        drop(llm)
        found = generate(llm, prompts)
        assert [a.tokens for a in found] == right
        assert [a.cached for a in found] == [384, 320] * 2
        settle(llm)


def test_short_reads_are_no_hits(
    model: Path, answers: dict[int, tuple[int, ...]], tmp_path: Path
) -> None:
    with engine(model, tiered(settings(tmp_path, dram=None))) as llm:
        generate(llm, [PROMPT])
        settle(llm)
        drop(llm)
        with wrapped(0) as faulty:
            faulty.short_read = Fault(when=lambda at: at.index == 2)
            (answer,) = generate(llm, [PROMPT])
            assert faulty.injected["short_read"] == 1
        assert answer.tokens == answers[400]
        settle(llm)


@pytest.mark.parametrize("dram", [None, "64MiB"])
def test_a_full_disk(model: Path, expected: list[Turn], tmp_path: Path, dram: str | None) -> None:
    """Room for a dozen chunks of 64 KiB."""
    config = settings(tmp_path, dram=dram, nvme={"capacity": "1MiB", "segment": "256KiB"})
    with engine(model, tiered(config)) as llm:
        for _ in range(2):
            turns = play(TALK, partial(generate, llm))
            assert difference(expected, turns) is None
            settle(llm)
            drop(llm)
        slots = shipping(llm).planner.res.levels[-1].slots
        assert 0 < slots < 20
        used = sum(f.stat().st_blocks * 512 for f in tmp_path.rglob("*") if f.is_file())
        assert used <= 1 << 20


def test_frozen_reads(model: Path, answers: dict[int, tuple[int, ...]], tmp_path: Path) -> None:
    """A11, A26."""
    config = settings(tmp_path, dram=None, connector={"load_deadline": 1.0})
    with engine(model, tiered(config)) as llm:
        generate(llm, [PROMPT])
        settle(llm)
        drop(llm)
        with wrapped(0) as faulty:
            gate = faulty.hang = Gate(op="read")
            begin = time.monotonic()
            (answer,) = generate(llm, [PROMPT])
            took = time.monotonic() - begin
            assert answer.tokens == answers[400]
            assert 1.0 <= took < 20
            reads = faulty.calls["read"]
            drop_local(llm)
            (answer,) = generate(llm, [PROMPT[:380]])
            assert answer.tokens == answers[380]
            assert faulty.calls["read"] == reads, "a tier that hangs was asked again"
            pool = core(llm).scheduler.kv_cache_manager.block_pool
            steps(llm, lambda: pool.get_num_free_blocks() == pool.num_gpu_blocks - 1)
            assert gate.waiting > 0
            gate.release()
            settle(llm)
            drop(llm)
            (answer,) = generate(llm, [PROMPT])
            assert (answer.tokens, answer.cached) == (answers[400], 384)
            settle(llm)


def drop_local(llm: Any) -> None:
    """Forget the engine's own cache as far as nothing holds it."""
    pool = core(llm).scheduler.kv_cache_manager.block_pool
    steps(llm, lambda: pool.get_num_free_blocks() == pool.num_gpu_blocks - 1)
    drop(llm)


def test_frozen_reads_that_a_step_waits_for(
    model: Path, answers: dict[int, tuple[int, ...]], tmp_path: Path
) -> None:
    connector = {"load": "sync", "load_deadline": 1.0}
    with engine(model, tiered(settings(tmp_path, dram=None, connector=connector))) as llm:
        generate(llm, [PROMPT])
        settle(llm)
        drop(llm)
        with wrapped(0) as faulty:
            gate = faulty.hang = Gate(op="read")
            (answer,) = generate(llm, [PROMPT])
            assert answer.tokens == answers[400]
            reads = faulty.calls["read"]
            drop_local(llm)
            (answer,) = generate(llm, [PROMPT[:380]])
            assert answer.tokens == answers[380]
            asked = faulty.calls["read"] - reads
            gate.release()
            settle(llm)
        drop(llm)
        (answer,) = generate(llm, [PROMPT])
        assert (answer.tokens, answer.cached) == (answers[400], 384)
        assert asked == 0, "a tier that hangs was asked again, and the whole engine waited"


@pytest.mark.parametrize("index", [0, 1])
def test_frozen_writes(
    model: Path, answers: dict[int, tuple[int, ...]], tmp_path: Path, index: int
) -> None:
    """A25: more requests than the hanging tier may hold engine blocks for."""
    with engine(model, tiered(settings(tmp_path, mover={"put_deadline": 1.0}))) as llm:
        generate(llm, [PROMPT[:40]])
        settle(llm)
        with wrapped(index) as faulty:
            gate = faulty.hang = Gate(op="write")
            begin = time.monotonic()
            for sign, text in ((1, PROMPT), (-1, OTHER)):
                found = generate(llm, [text[:n] for n in (400, 380, 360, 340)])
                assert [a.tokens for a in found] == [
                    answers[sign * n] for n in (400, 380, 360, 340)
                ]
            assert time.monotonic() - begin < 20
            assert gate.waiting
            pool = core(llm).scheduler.kv_cache_manager.block_pool
            steps(llm, lambda: pool.get_num_free_blocks() == pool.num_gpu_blocks - 1)
            gate.release()
            settle(llm)
        drop(llm)
        found = generate(llm, [PROMPT, OTHER])
        assert [a.tokens for a in found] == [answers[400], answers[-400]]
        settle(llm)


def test_a_fault_that_nothing_can_notice_changes_the_output(
    model: Path, answers: dict[int, tuple[int, ...]]
) -> None:
    """The tests above could not fail if wrong bytes went unseen."""
    with engine(model, tiered(settings(None))) as llm:
        generate(llm, [PROMPT])
        settle(llm)
        drop(llm)
        with wrapped(0) as faulty:
            faulty.flip_bit = Fault(op="read", bit=8 * 4000 + 30)
            (answer,) = generate(llm, [PROMPT])
        assert answer.cached == 384
        assert answer.tokens != answers[400]


def test_the_failure_policy_fail_is_warned_of(
    model: Path, answers: dict[int, tuple[int, ...]], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    config = settings(tmp_path, dram=None)
    with (
        caplog.at_level(logging.WARNING, "tieredkv"),
        engine(model, tiered(config, kv_load_failure_policy="fail")) as llm,
    ):
        assert "set it to 'recompute'" in caplog.text
        generate(llm, [PROMPT])
        settle(llm)
        drop(llm)
        rot(worker_connector().worker.tiers[0], sorted(chunks(llm, 0))[2])
        (answer,) = generate(llm, [PROMPT])
        assert answer.finish == "error"
        settle(llm)
        (answer,) = generate(llm, [PROMPT])
        assert (answer.tokens, answer.finish) == (answers[400], "length")
        settle(llm)


# --- what cannot start ----------------------------------------------------------------


def refused(model: Path, config: dict[str, Any], kind: type[Exception], **args: Any) -> str:
    with pytest.raises(kind) as caught, engine(model, tiered(config), **args):
        pass
    assert isinstance(caught.value, TieredKVError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"blok_tokens": 64}, ["blok_tokens", "block_tokens"]),
        ({"block_tokens": 48}, ["48", "32", "multiple"]),
        ({"tiers": []}, ["tiers", "empty"]),
        ({"tiers": [{"kind": "drum", "capacity": "1GiB"}]}, ["drum", "dram"]),
        ({"tiers": [{"kind": "hbm", "capacity": "1GiB"}]}, ["hbm", "gpu_memory_utilization"]),
        ({"connector": {"lod": "sync"}}, ["lod", "load"]),
        ({"connector": {"load": "later"}}, ["later", "async"]),
        ({"connector": {"engine": "../up"}}, ["engine", "../up"]),
    ],
)
def test_a_wrong_configuration_says_what_to_change(
    model: Path, config: dict[str, Any], words: list[str]
) -> None:
    """A07, A08."""
    message = refused(model, {**settings(None), **config}, ConfigError)
    assert all(word in message for word in words), message


def test_what_cannot_be_stored_is_refused(models: Callable[..., Path]) -> None:
    assert "MLA" in refused(models("mla"), settings(None), ConfigError)
    message = refused(models(), settings(None), ConfigError, prefix_caching_hash_algo="xxhash")
    assert "must be sha256" in message


def test_a_hybrid_model_is_refused_or_right(models: Callable[..., Path], tmp_path: Path) -> None:
    model = models("gemma3")
    with engine(model, enable_prefix_caching=False) as llm:
        (right,) = generate(llm, [PROMPT])
    try:
        with engine(model, tiered(settings(tmp_path))) as llm:
            (first,) = generate(llm, [PROMPT])
            settle(llm)
            drop(llm)
            (second,) = generate(llm, [PROMPT])
    except ConfigError as error:
        assert "full attention" in str(error)  # noqa: PT017
    else:
        assert (first.tokens, second.tokens) == (right.tokens, right.tokens)
        assert second.cached
