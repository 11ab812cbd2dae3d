"""A11, A24: damage and failures are misses that are counted, never a wrong hit."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bugs.world import (
    BUSY,
    FAILED,
    KINDS,
    MISSING,
    OK,
    SIZE,
    TOKENS,
    Faulty,
    blocks_of,
    chain,
    compare,
    content,
    dram,
    get,
    nvme,
    opened,
    put,
    tier,
    tiers,
)
from tieredkv import Outcome
from tieredkv.testing import Fault, Gate

CORRUPT = Outcome.CORRUPT
SMALL = 1 << 17  # a segment file of 32 slots


def segments(root: Path) -> list[Path]:
    return sorted(root.glob("*/rank-0/seg-*.kv"))


def place(path: Path, key: bytes) -> int:
    """Where the block is in the file."""
    return path.read_bytes().index(content(key))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, key: bytes) -> None:
    at = place(path, key) + 1000
    overwrite(path, at, bytes([path.read_bytes()[at] ^ 4]))


@pytest.mark.parametrize("when", ["open", "closed"])
@pytest.mark.parametrize("what", ["flip", "zero", "swap blocks", "old block"])
def test_A11_a_damaged_block_is_a_miss_and_quarantined(
    what: str, when: str, tmp_path: Path
) -> None:
    keys, other = chain(4), chain(4, seed=1)

    def damage() -> None:
        (path,) = segments(tmp_path)
        if what == "flip":
            flip(path, keys[2])
        elif what == "zero":
            overwrite(path, place(path, keys[2]), bytes(SIZE))
        elif what == "old block":
            overwrite(path, place(path, keys[2]), content(keys[1]))
        else:
            at, there = place(path, keys[2]), place(path, keys[3])
            overwrite(path, at, content(keys[3]))
            overwrite(path, there, content(keys[2]))

    bad = 2 if what == "swap blocks" else 1
    specs = [nvme(tmp_path, engine="portable")]
    with opened(*specs) as store:
        assert put(store, keys) == put(store, other) == [OK] * 4
        if when == "open":
            damage()
            check_damaged(store, keys, other, bad)
    if when == "closed":
        damage()
        with opened(*specs) as store:
            check_damaged(store, keys, other, bad)
    with opened(*specs) as store:
        assert get(store, other) == get(store, keys) == [OK] * 4


def check_damaged(store: Any, keys: list[bytes], other: list[bytes], bad: int) -> None:
    assert get(store, keys) == [OK, OK] + [CORRUPT] * bad + [OK] * (2 - bad)
    assert store.lookup(keys).blocks == 2
    assert get(store, keys) == [OK, OK, MISSING, MISSING]
    assert get(store, other) == [OK] * 4
    assert store.stats().corrupt_blocks == bad
    assert tier(store.stats(), "nvme").quarantined_slots == bad
    assert put(store, keys) == [OK] * 4
    assert get(store, keys) == [OK] * 4


@pytest.mark.parametrize("what", ["swap", "truncate", "empty", "header"])
def test_A11_a_damaged_file_is_set_aside(what: str, tmp_path: Path) -> None:
    keys = chain(60)
    spec = nvme(tmp_path, segment=SMALL, engine="portable")
    with opened(spec) as store:
        assert put(store, keys) == [OK] * 60
    paths = segments(tmp_path)
    assert len(paths) > 1
    if what == "swap":
        spare = tmp_path / "spare"
        os.rename(paths[0], spare)
        os.rename(paths[1], paths[0])
        os.rename(spare, paths[1])
    elif what == "header":
        overwrite(paths[0], 20, b"\xff")
    else:
        os.truncate(paths[0], 0 if what == "empty" else paths[0].stat().st_size // 2)
    with opened(spec) as store:
        outcomes = get(store, keys)
        assert outcomes[0] is CORRUPT  # its file is not there any more
        assert store.lookup(keys).blocks == 0
        assert store.stats().corrupt_blocks >= 1
        assert list(tmp_path.glob("*/rank-0/*.quarantine"))
        assert put(store, keys) == [OK] * 60
        assert get(store, keys) == [OK] * 60


def test_A11_bytes_after_the_end_do_no_harm(tmp_path: Path) -> None:
    keys = chain(4)
    with opened(nvme(tmp_path)) as store:
        assert put(store, keys) == [OK] * 4
    (path,) = segments(tmp_path)
    overwrite(path, path.stat().st_size, b"x" * 10_000)
    with opened(nvme(tmp_path)) as store:
        assert get(store, keys) == [OK] * 4


@pytest.mark.parametrize("kind", ["dram", "nvme"])
def test_A11_a_hung_read_ends_at_the_deadline(kind: str, tmp_path: Path) -> None:
    hung, free, wrap = chain(2), chain(2, seed=1), Faulty()
    gate = Gate(op="read", when=hung)
    with opened(dram(8) if kind == "dram" else nvme(tmp_path), wrap=wrap) as store:
        assert put(store, hung) == put(store, free) == [OK] * 2
        wrap.tiers[kind].inline = False
        wrap.tiers[kind].hang = gate
        began = time.monotonic()
        assert get(store, hung, deadline=0.1) == [BUSY] * 2
        assert time.monotonic() - began < 5
        assert store.stats().quarantined_transfers == 1
        for _ in range(5):
            assert get(store, free, deadline=10) == [OK] * 2
        assert put(store, chain(2, seed=2)) == [OK] * 2
        began = time.monotonic()
        assert not store.close(timeout=0.2)
        assert time.monotonic() - began < 5
        gate.release()


def test_A11_a_late_read_does_not_touch_the_buffer(tmp_path: Path) -> None:
    keys, wrap, gate = chain(2), Faulty(), Gate(op="read")
    with opened(nvme(tmp_path), wrap=wrap) as store:
        assert put(store, keys) == [OK] * 2
        wrap.tiers["nvme"].hang = gate
        out = np.full((2, SIZE), 0xAA, np.uint8)
        assert store.get(keys, out, deadline=0.05) == [BUSY] * 2
        gate.release()
        limit = time.monotonic() + 10
        while store.stats().quarantined_transfers and time.monotonic() < limit:
            time.sleep(0.005)
        assert store.stats().quarantined_transfers == 0
        assert (out == 0xAA).all()
        assert get(store, keys) == [OK] * 2


def test_A11_a_device_that_hangs_in_every_thread_is_refused_at_once(tmp_path: Path) -> None:
    keys, wrap, gate = chain(16), Faulty(), Gate(op="read")
    with opened(nvme(tmp_path), wrap=wrap) as store:
        assert put(store, keys) == [OK] * 16
        wrap.tiers["nvme"].hang = gate
        assert get(store, keys, deadline=0.3) == [BUSY] * 16  # its parts take all threads
        began = time.monotonic()
        assert get(store, keys, deadline=20) == [BUSY] * 16
        assert put(store, chain(2, seed=1)) == [BUSY] * 2
        assert time.monotonic() - began < 5
        gate.release()
        limit = time.monotonic() + 10
        while store.stats().quarantined_transfers and time.monotonic() < limit:
            time.sleep(0.005)
        assert get(store, keys) == [OK] * 16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["error", "corrupt", "short_read", "few", "none", "raises"])
def test_A24_a_failed_block_is_no_hit_and_hurts_no_neighbour(
    kind: str, fault: str, tmp_path: Path
) -> None:
    keys, wrap = chain(6), Faulty()
    with opened(*tiers(kind, tmp_path), wrap=wrap) as store:
        assert put(store, keys) == [OK] * 6
        assert store.flush(10)  # or the write-back would meet the fault first
        faulty = wrap.tiers[kind.split("+")[0]]
        when = [keys[3]]
        if fault == "short_read":
            faulty.short_read = Fault(when)
        elif fault == "raises":
            faulty.error = Fault(when, raises=RuntimeError("injected"))
        elif fault in ("few", "none"):
            faulty.error = Fault(when, reply=fault)  # type: ignore[arg-type]
        else:
            faulty.error = Fault(when, outcome=CORRUPT if fault == "corrupt" else FAILED)
        out = np.full((6, SIZE), 0xAA, np.uint8)
        outcomes = store.get(keys, out)
        compare(keys, out, outcomes)
        assert outcomes[3] is not OK
        if fault in ("few", "none", "raises"):  # the tier has not said which: its whole call
            assert set(outcomes) <= {OK, FAILED}
            assert (outcomes == [FAILED] * 6) or kind == "nvme"  # in several calls
        else:
            bad = CORRUPT if fault == "corrupt" else FAILED
            assert outcomes == [OK, OK, OK, bad, OK, OK]
        stats = store.stats()
        assert stats.query_tokens == 6 * TOKENS
        assert stats.hit_tokens == outcomes.count(OK) * TOKENS
        assert stats.hit_tokens == sum(t.hit_tokens for t in stats.tiers)
        faulty.error = faulty.short_read = None
        assert put(store, keys) == [OK] * 6
        assert get(store, keys) == [OK] * 6


@pytest.mark.parametrize("kind", KINDS)
def test_A24_a_failed_write_is_reported_and_not_found(kind: str, tmp_path: Path) -> None:
    keys, wrap = chain(6), Faulty()
    with opened(*tiers(kind, tmp_path), wrap=wrap, block_bytes=SIZE) as store:
        faulty = wrap.tiers[kind.split("+")[0]]
        faulty.error = Fault([keys[3]], op="write")
        outcomes = put(store, keys)
        assert outcomes[:4] == [OK, OK, OK, FAILED]
        assert store.lookup(keys).blocks == 3
        assert get(store, keys) == [OK] * 3 + [MISSING] * 3
        assert store.stats().stored_tokens == 3 * TOKENS == store.stats().blocks * TOKENS
        assert OK not in outcomes[4:], "reported as stored, and not there"
        faulty.error = None
        assert put(store, keys) == [OK] * 6
        assert get(store, keys) == [OK] * 6


def test_A24_a_failed_promotion_is_no_copy(tmp_path: Path) -> None:
    keys, wrap = chain(4), Faulty()
    with opened(dram(8), nvme(tmp_path), wrap=wrap) as store:
        assert put(store, keys) == [OK] * 4
        assert store.flush(10)
        store.clear("dram")
        wrap.tiers["dram"].error = Fault([keys[2]], op="write")
        assert store.prefetch(keys).result(10) == 3
        assert store.lookup(keys).tiers == ["dram", "dram", "nvme", "dram"]
        assert get(store, keys) == [OK] * 4
        wrap.tiers["dram"].error = None
        wrap.tiers["nvme"].error = Fault(op="read")
        assert store.prefetch(keys).result(10) == 0
        assert get(store, keys)[:2] == [OK] * 2


def test_A24_async_gets_report_the_same() -> None:
    keys, wrap = chain(4), Faulty()
    with opened(dram(8), wrap=wrap) as store:
        assert store.put_async(keys, blocks_of(keys)).result(10) == [OK] * 4
        wrap.tiers["dram"].error = Fault([keys[1]], op="read")
        out = np.full((4, SIZE), 0xAA, np.uint8)
        done = threading.Event()
        future = store.get_async(keys, out)
        future.add_done_callback(lambda _: done.set())
        assert done.wait(10)
        compare(keys, out, future.result())
        assert future.result() == [OK, FAILED, OK, OK]
        assert store.stats().hit_tokens == 3 * TOKENS
