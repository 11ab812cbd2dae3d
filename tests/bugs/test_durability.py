"""A09, A10, A12, A13: what is on disk is found again, complete, or it is a miss."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bugs.world import (
    FAILED,
    MISSING,
    OK,
    SIZE,
    Faulty,
    blocks_of,
    chain,
    compare,
    disk_usage,
    dram,
    get,
    kill,
    line,
    nvme,
    opened,
    process,
    put,
    tier,
)
from tieredkv import Outcome
from tieredkv.testing import Fault, Gate
from tieredkv.tiers.nvme.engines import DirectEngine


def segment(root: Path) -> Path:
    (found,) = root.glob("*/rank-0/seg-*.kv")
    return found


@pytest.mark.parametrize("write", ["on_evict", "through"])
@pytest.mark.parametrize("memory", [0, 4, 64])
def test_A09_all_blocks_hit_after_a_clean_close(memory: int, write: str, tmp_path: Path) -> None:
    specs = [*([dram(memory)] if memory else []), nvme(tmp_path, write=write)]
    chains = [chain(8, seed) for seed in range(4)]
    with opened(*specs) as store:
        for keys in chains:
            for end in (2, 4, 6, 8):  # never more than the smallest memory at once
                stored = store.put_async(keys[:end], blocks_of(keys[end - 2 : end]), end - 2)
                assert stored.result(10) == [OK] * 2
                assert store.flush(10)
    with opened(*specs) as store:
        assert store.stats().blocks == 32
        assert tier(store.stats(), "nvme").used_bytes == 32 * SIZE
        for keys in chains:
            assert get(store, keys) == [OK] * 8


ACKNOWLEDGE = {
    "flush": "w.put(s, keys); assert s.flush(10)",
    "through": "assert s.put_async(keys, w.blocks_of(keys)).result(10) == [w.OK] * 4",
    "nvme alone": "assert w.put(s, keys) == [w.OK] * 4",
}


@pytest.mark.parametrize("how", ACKNOWLEDGE)
def test_A09_acknowledged_blocks_survive_a_kill(how: str, tmp_path: Path) -> None:
    specs = [nvme(tmp_path, write="through" if how == "through" else "on_evict")]
    if how != "nvme alone":
        specs.insert(0, dram(64))
    child = process(
        f"with w.opened(*{specs!r}) as s:\n"
        "    for seed in range(10**6):\n"
        "        keys = w.chain(4, seed)\n"
        f"        {ACKNOWLEDGE[how]}\n"
        "        print(seed, flush=True)"
    )
    try:
        while int(line(child)) < 5:
            pass
    finally:
        kill(child)
    with opened(*specs) as store:
        for seed in range(6):
            assert get(store, chain(4, seed)) == [OK] * 4
        found = tier(store.stats(), "nvme")
        assert found.used_bytes == found.blocks * SIZE >= 24 * SIZE
        slots = found.slots
        for seed in range(100, 100 + slots // 8 + 1):  # leftovers make room
            assert put(store, chain(8, seed)) == [OK] * 8
        assert not store.contains(chain(4, 0)[3])
        assert tier(store.stats(), "nvme").used_bytes <= slots * SIZE


@pytest.mark.parametrize("slow", ["dram", "nvme"])
def test_A10_a_block_is_not_read_while_it_is_written(slow: str, tmp_path: Path) -> None:
    wrap, gate = Faulty(), Gate(op="write")
    with opened(*([dram(8)] if slow == "dram" else [nvme(tmp_path)]), wrap=wrap) as store:
        assert put(store, chain(1, seed=9)) == [OK]
        wrap.tiers[slow].hang, keys = gate, chain(4)
        writer = store.put_async(keys, blocks_of(keys))
        assert gate.wait_entered()
        assert store.lookup(keys).blocks == 0
        assert get(store, keys) == [MISSING] * 4
        reads: list[list[Outcome]] = []
        readers = [threading.Thread(target=lambda: reads.append(get(store, keys))) for _ in "12"]
        joined = store.put_async(keys, blocks_of(keys))
        for reader in readers:
            reader.start()
        gate.release()
        for reader in readers:
            reader.join(10)
        assert writer.result(10) == joined.result(10) == [OK] * 4
        assert set(map(tuple, reads)) <= {(OK,) * 4, (MISSING,) * 4}
        assert get(store, keys) == [OK] * 4


def test_A10_a_block_that_is_being_promoted_comes_from_below(tmp_path: Path) -> None:
    keys, wrap, gate = chain(4), Faulty(), Gate(op="write")
    with opened(dram(8), nvme(tmp_path), wrap=wrap) as store:
        assert put(store, keys) == [OK] * 4
        assert store.flush(10)
        store.clear("dram")
        wrap.tiers["dram"].hang = gate
        wrap.tiers["dram"].inline = False
        copied = store.prefetch(keys)
        assert gate.wait_entered()
        assert store.lookup(keys).tiers == ["nvme"] * 4
        assert get(store, keys, deadline=10) == [OK] * 4
        gate.release()
        assert copied.result(10) == 4
        assert store.lookup(keys).tiers == ["dram"] * 4
        assert get(store, keys) == [OK] * 4


def test_A12_a_block_that_vanished_is_asked_for_once(tmp_path: Path) -> None:
    keys, wrap = chain(4), Faulty()
    with opened(nvme(tmp_path), wrap=wrap) as store:
        assert put(store, keys) == [OK] * 4
        os.truncate(segment(tmp_path), SIZE)
        assert store.lookup(keys).blocks == 4
        assert get(store, keys) == [Outcome.CORRUPT] * 4
        reads = wrap.tiers["nvme"].calls["read"]
        for _ in range(100):
            assert store.lookup(keys).blocks == 0
            assert get(store, keys) == [MISSING] * 4
        assert wrap.tiers["nvme"].calls["read"] == reads
        assert store.stats().corrupt_blocks == 4
        assert put(store, keys) == [OK] * 4
        assert get(store, keys) == [OK] * 4


def test_A12_a_file_deleted_between_two_runs_is_a_miss(tmp_path: Path) -> None:
    keys = chain(4)
    with opened(dram(8), nvme(tmp_path)) as store:
        assert put(store, keys) == [OK] * 4
    segment(tmp_path).unlink()
    with opened(dram(8), nvme(tmp_path)) as store:
        first = get(store, keys)
        assert OK not in first
        for _ in range(100):
            assert store.lookup(keys).blocks == 0
            assert get(store, keys) == [MISSING] * 4
        assert put(store, keys) == [OK] * 4
        assert store.flush(10)
    with opened(dram(8), nvme(tmp_path)) as store:
        assert get(store, keys) == [OK] * 4


@pytest.mark.parametrize("kind", ["dram", "nvme"])
@pytest.mark.parametrize("error", [FAILED, Outcome.CORRUPT, OSError])
def test_A12_a_failed_read_is_not_repeated_for_ever(kind: str, error: Any, tmp_path: Path) -> None:
    keys, wrap = chain(4), Faulty()
    with opened(dram(8) if kind == "dram" else nvme(tmp_path), wrap=wrap) as store:
        assert put(store, keys) == [OK] * 4
        wrap.tiers[kind].error = (
            Fault(op="read", raises=OSError(5, "injected"))
            if error is OSError
            else Fault(op="read", when=[keys[1]], outcome=error)
        )
        first = get(store, keys)
        bad = [FAILED] * 4 if error is OSError else [OK, error, OK, OK]
        assert first == bad
        left = bad.index(error if error is not OSError else FAILED)
        reads = wrap.tiers[kind].calls["read"]
        for _ in range(100):
            assert store.lookup(keys).blocks == left
            assert get(store, keys, start=left) == [MISSING] * (4 - left)
        assert wrap.tiers[kind].calls["read"] == reads
        wrap.tiers[kind].error = None
        assert put(store, keys) == [OK] * 4
        assert get(store, keys) == [OK] * 4


@pytest.mark.parametrize("engine", ["auto", "portable"])
@pytest.mark.parametrize("size", [4096, 4095, 1536, 1, 5000])
def test_A13_any_size_and_alignment_works(size: int, engine: str, tmp_path: Path) -> None:
    keys = chain(4)
    flat = np.frombuffer(b"\0" + b"".join(blocks_of(keys, size)), np.uint8)
    source = flat[1:].reshape(4, size)  # off by one byte from whatever alignment there is
    out = np.zeros(4 * size + 1, np.uint8)[1:].reshape(4, size)
    with opened(nvme(tmp_path, engine=engine)) as store:
        assert store.put(keys, source) == [OK] * 4
        outcomes = store.get(keys, out)
        assert outcomes == [OK] * 4
        compare(keys, out, outcomes)
        assert tier(store.stats(), "nvme").mode in ("direct", "portable")
    with opened(nvme(tmp_path, engine=engine)) as store:
        assert get(store, keys, size=size) == [OK] * 4


def test_A13_refused_direct_io_falls_back_once_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: DirectEngine, path: Path) -> Any:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(DirectEngine, "open", refuse)
    keys = chain(4)
    with caplog.at_level(logging.WARNING), opened(nvme(tmp_path)) as store:
        assert put(store, keys) == [OK] * 4
        assert get(store, keys) == [OK] * 4
        found = tier(store.stats(), "nvme")
        assert (found.mode, found.healthy, found.blocks) == ("portable", True, 4)
        labels = {"tier": "nvme", "mode": "portable"}
        assert store.metrics.registry.get_sample_value("tieredkv:mode", labels) == 1
    assert len([r for r in caplog.records if "O_DIRECT" in r.getMessage()]) == 1


def test_A13_a_tier_whose_stores_fail_is_not_healthy(tmp_path: Path) -> None:
    keys, wrap = chain(4), Faulty()
    with opened(nvme(tmp_path), wrap=wrap, block_bytes=SIZE) as store:
        wrap.tiers["nvme"].error = Fault(op="write")
        assert put(store, keys) == [FAILED] * 4
        assert not tier(store.stats(), "nvme").healthy
        assert store.metrics.registry.get_sample_value("tieredkv:healthy", {"tier": "nvme"}) == 0
        assert store.lookup(keys).blocks == 0
        wrap.tiers["nvme"].error = None
        assert put(store, keys) == [OK] * 4
        assert tier(store.stats(), "nvme").healthy
        assert disk_usage(tmp_path) > 0
