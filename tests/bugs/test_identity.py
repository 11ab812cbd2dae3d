"""A01-A07: two different things never share a block, equal things always do."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bugs.world import (
    FP,
    KINDS,
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
    nvme,
    opened,
    output,
    process,
    put,
    tiers,
)
from tieredkv import Fingerprint, TieredKVStore, UsageError
from tieredkv.keys import fingerprint_digest
from tieredkv.testing import Gate


def named(blocks: int, name: str, value: Any, seed: int = 0) -> list[bytes]:
    extras: dict[str, Any] = {name: value}
    return chain(blocks, seed, **extras)


def directories(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()]


def test_A01_another_process_with_another_hash_seed_hits(tmp_path: Path) -> None:
    root = repr(str(tmp_path))
    writer = (
        f"with w.opened(w.nvme({root})) as s:\n"
        "    keys = w.chain(8, lora='a', salt='s', media=[(3, 'image')])\n"
        "    assert w.put(s, keys) == [w.OK] * 8\n"
        "    print(keys[-1].hex(), hash('a'))"
    )
    reader = (
        f"with w.opened(w.nvme({root})) as s:\n"
        "    keys = w.chain(8, lora='a', salt='s', media=[(3, 'image')])\n"
        "    assert s.lookup(keys).blocks == 8\n"
        "    assert w.get(s, keys) == [w.OK] * 8\n"
        "    print(keys[-1].hex(), hash('a'))"
    )
    wrote = output(process(writer, PYTHONHASHSEED="1"))[0].split()
    read = output(process(reader, PYTHONHASHSEED="2"))[0].split()
    assert wrote[0] == read[0]
    assert wrote[1] != read[1], "both processes had one hash seed: this proves nothing"
    assert len(directories(tmp_path)) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["lora", "salt", "tenant"])
def test_A02_one_extra_never_gets_anothers_blocks(kind: str, name: str, tmp_path: Path) -> None:
    mine = named(4, name, "a")
    others = [named(4, name, value) for value in ("b", "", b"a", "A", "a\0", None)]
    others.append(named(4, {"lora": "salt", "salt": "tenant", "tenant": "lora"}[name], "a"))
    with opened(*tiers(kind, tmp_path)) as store:
        assert put(store, mine) == [OK] * 4
        for other in others:
            assert get(store, other) == [MISSING] * 4
        assert get(store, mine) == [OK] * 4
        for other in others:
            assert put(store, other) == [OK] * 4
        for keys in (mine, *others):
            assert get(store, keys) == [OK] * 4


def _store_both_ways(store: TieredKVStore, keys: list[bytes]) -> None:
    assert put(store, keys[:2]) == [OK] * 2
    assert store.put_async(keys, blocks_of(keys[2:]), start=2).result(10) == [OK] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_A03_a_salt_counts_at_every_entry_point(kind: str, tmp_path: Path) -> None:
    mine = chain(4, salt="t1")
    with opened(*tiers(kind, tmp_path), events=100) as store:
        _store_both_ways(store, mine)
        assert {key for event in store.take_events() for key in event.keys} == set(mine)
        for other in (chain(4, salt="t2"), chain(4), chain(4, tenant="t1")):
            out = np.zeros((4, SIZE), np.uint8)
            assert store.lookup(other).blocks == 0
            assert not any(map(store.contains, other))
            assert get(store, other) == [MISSING] * 4
            assert store.get_async(other, out).result(10) == [MISSING] * 4
            assert not out.any()
            assert store.prefetch(other).result(10) == 0
            assert store.session("s").resume(other).result(10) == 0
            assert put(store, other, start=2) == [MISSING] * 2
            later = store.put_async(other, blocks_of(other[2:]), start=2)
            assert later.result(10) == [MISSING] * 2
            with store.pin(other) as pin:
                assert pin.blocks == 0
            store.session("s").abandon(other)
            assert store.delete(other) == 0
        assert get(store, mine) == [OK] * 4
        assert store.stats().blocks == 4


def _lookalikes() -> list[str]:
    """Digests that are equal in their first or last 16, 32 and 48 bits, and in both."""
    base = hashlib.sha256(b"image").hexdigest()
    found = [base]
    for bits in (16, 32, 48):
        cut, other = bits // 4, hashlib.sha256(b"%d" % bits).hexdigest()
        found += [base[:cut] + other[cut:], other[:-cut] + base[-cut:]]
        found.append(base[:cut] + other[cut:-cut] + base[-cut:])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_A04_digests_that_look_alike_are_different_blocks(kind: str, tmp_path: Path) -> None:
    chains = [chain(2, media=[(0, digest)]) for digest in _lookalikes()]
    with opened(*tiers(kind, tmp_path)) as store:
        for keys in chains:
            assert get(store, keys) == [MISSING] * 2
            assert put(store, keys) == [OK] * 2
        for keys in chains:
            assert get(store, keys) == [OK] * 2
        assert store.stats().blocks == 2 * len(chains)


def test_A04_names_on_disk_are_not_truncated(tmp_path: Path) -> None:
    weights = _lookalikes()
    for value in weights:
        with opened(nvme(tmp_path, 64 << 20, segment=1 << 18), fp=replace(FP, weights=value)) as s:
            assert put(s, chain(1)) == [OK]
    assert len(directories(tmp_path)) == len(weights)
    names = {fingerprint_digest(replace(FP, weights=str(n)), 16).hex() for n in range(20_000)}
    assert len(names) == 20_000


CHANGES: list[dict[str, Any]] = [
    {"layout": "hnd"},
    {"dtype": "fp16"},
    {"model": "model2"},
    {"weights": "w2"},
    {"world": (2, 1)},
    {"world": (1, 2)},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_A05_bytes_of_another_layout_are_never_served(
    change: dict[str, Any], tmp_path: Path
) -> None:
    keys, other = chain(4), replace(FP, **change)
    with opened(nvme(tmp_path)) as store:
        assert put(store, keys) == [OK] * 4
    with opened(nvme(tmp_path), fp=other) as store:
        assert store.lookup(keys).blocks == 0
        assert get(store, keys) == [MISSING] * 4
    with opened(nvme(tmp_path)) as store:
        assert get(store, keys) == [OK] * 4


def test_A05_block_tokens_are_part_of_the_layout(tmp_path: Path) -> None:
    keys = chain(4)
    with opened(nvme(tmp_path)) as store:
        assert put(store, keys) == [OK] * 4
    with opened(nvme(tmp_path), block_tokens=32) as store:
        assert get(store, keys) == [MISSING] * 4


@pytest.mark.parametrize("change", CHANGES[:1] + CHANGES[3:4], ids=str)
def test_A05_A06_space_of_the_old_version_is_reclaimed(
    change: dict[str, Any], tmp_path: Path
) -> None:
    capacity, size, count = 4 << 20, 1 << 16, 40
    old, new = chain(count), chain(count, seed=1)
    with opened(nvme(tmp_path, capacity)) as store:
        assert put(store, old, size=size) == [OK] * count
    (first,) = directories(tmp_path)
    with opened(nvme(tmp_path, capacity), fp=replace(FP, **change)) as store:
        assert put(store, new, size=size) == [OK] * count
        assert get(store, new, size=size) == [OK] * count
        assert disk_usage(tmp_path) <= capacity
        assert first not in directories(tmp_path)


def test_A06_old_weights_miss_before_and_after_a_restart(tmp_path: Path) -> None:
    keys = chain(4)
    with opened(dram(8), nvme(tmp_path)) as store:
        assert put(store, keys) == [OK] * 4
        assert store.flush(10)
    for _ in range(2):
        with opened(dram(8), nvme(tmp_path), fp=replace(FP, weights="w2")) as store:
            assert store.lookup(keys).blocks == 0
            assert get(store, keys) == [MISSING] * 4


@pytest.mark.parametrize("how", ["clear", "clear nvme", "delete"])
def test_A06_what_was_invalidated_does_not_come_back(how: str, tmp_path: Path) -> None:
    keys = chain(4)
    with opened(dram(8), nvme(tmp_path)) as store:
        assert put(store, keys) == [OK] * 4
        assert store.flush(10)
        if how == "delete":
            assert store.delete(keys[:1]) == 4
        else:
            store.clear("nvme" if "nvme" in how else None)
        kept = 4 if how == "clear nvme" else 0
        assert get(store, keys) == [OK] * kept + [MISSING] * (4 - kept)
        if kept:
            store.clear("dram")
        assert get(store, keys) == [MISSING] * 4
    with opened(dram(8), nvme(tmp_path)) as store:
        assert store.lookup(keys).blocks == 0
        assert get(store, keys) == [MISSING] * 4
        assert put(store, keys) == [OK] * 4


def test_A06_a_write_that_was_under_way_revives_nothing(tmp_path: Path) -> None:
    keys, wrap, gate = chain(4), Faulty(), Gate(op="write")
    with opened(dram(8), nvme(tmp_path), wrap=wrap, block_bytes=SIZE) as store:
        wrap.tiers["nvme"].hang = gate
        assert put(store, keys) == [OK] * 4
        assert gate.wait_entered()
        store.clear()
        assert store.check() == []
        gate.release()
        assert store.flush(10)
        assert get(store, keys) == [MISSING] * 4
    with opened(dram(8), nvme(tmp_path)) as store:
        assert store.lookup(keys).blocks == 0
        assert get(store, keys) == [MISSING] * 4


HOSTILE = [
    "../x",
    "a/../../x",
    "/etc/passwd",
    "a\0b",
    "a" * 300,
    "con",
    "ä",
    "a\u0308",
    "\ud800",
    " ",
    ".",
    "..",
    "",
    "A" * 300,
]


@pytest.mark.parametrize("field", ["model", "weights", "dtype", "layout"])
def test_A07_hostile_names_stay_inside_and_apart(field: str, tmp_path: Path) -> None:
    root, keys = tmp_path / "deep" / "root", chain(1)
    for value in HOSTILE:
        change: dict[str, Any] = {field: value}
        fp = replace(Fingerprint("m"), **change)
        with opened(nvme(root, 64 << 20, segment=1 << 18), fp=fp) as store:
            assert get(store, keys) == [MISSING]
            assert put(store, keys) == [OK]
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["root"]
    outside = [p for p in root.rglob("*") if not p.resolve().is_relative_to(root.resolve())]
    assert outside == []
    assert len(directories(root)) == len(HOSTILE)


@pytest.mark.parametrize("name", ["salt", "tenant", "lora", "session"])
def test_A07_names_of_requests_reach_no_path(name: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    with opened(nvme(root)) as store:
        assert put(store, chain(1, seed=99)) == [OK]
        before = sorted(os.walk(tmp_path))
        for number, value in enumerate(HOSTILE):
            if name == "session":
                keys = chain(1, seed=number)
                if not value:
                    with pytest.raises(UsageError, match="session ''"):
                        put(store, keys, turn=value)
                    continue
                assert put(store, keys, turn=value) == [OK]
                store.session(value).turn_ended("end_turn")
            else:
                keys = named(1, name, value)
                assert get(store, keys) == [MISSING]
                assert put(store, keys) == [OK]
            assert get(store, keys) == [OK]
        assert sorted(os.walk(tmp_path)) == before


def test_A03_what_one_tenant_reads_into_a_buffer_is_not_left_for_another() -> None:
    """A miss leaves the caller's buffer as it was, also beside hits of the same call."""
    mine, short = chain(4, salt="t1"), chain(2, salt="t1")
    with opened(dram(8)) as store:
        assert put(store, short) == [OK] * 2
        out = np.full((4, SIZE), 0xAA, np.uint8)
        outcomes = store.get(mine, out)
        compare(mine, out, outcomes)
        assert outcomes == [OK, OK, MISSING, MISSING]
        assert (out[2:] == 0xAA).all()
