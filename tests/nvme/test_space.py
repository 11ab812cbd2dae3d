"""Limits hold: capacity of the root, free space, open files."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.nvme.world import (
    FP,
    MIB,
    MiniStore,
    batch,
    flip,
    get,
    key_of,
    opened,
    put,
    segment_file,
    sources,
)
from tieredkv.errors import DirectoryError
from tieredkv.tiers.nvme.directory import Directory
from tieredkv.tiers.nvme.segments import FIXED, MAX_SEGMENTS, plan
from tieredkv.tiers.nvme.usage import disk_usage, in_use
from tieredkv.types import Outcome

OK, CORRUPT, FAILED = Outcome.OK, Outcome.CORRUPT, Outcome.FAILED
B = replace(FP, model="B")


def du(path: Path) -> int:
    """Bytes below it; what vanishes while `du` looks makes its status 1, and its sum is good."""
    found = subprocess.run(["du", "-s", "-B1", str(path)], stdout=subprocess.PIPE, check=False)
    return int(found.stdout.split()[0])


def fill(tier: Any) -> None:
    for first in range(0, tier.slots, 32):
        put(tier, range(first, min(first + 32, tier.slots)))


@pytest.mark.parametrize("block", [1, 1536, 4096, 65536, 1 << 20])
@pytest.mark.parametrize("capacity", [MIB, 3 * MIB + 123, 64 * MIB])
@pytest.mark.parametrize("segment", [64 << 10, 256 << 20])
def test_plan_fits(block: int, capacity: int, segment: int) -> None:
    p = plan(capacity, block, segment, None)
    g = p.geometry
    full, rest = divmod(p.slots, g.table_slots)
    files = full * g.offset(g.table_slots) + (g.offset(rest) if rest else 0)
    assert files + p.index_bytes + (64 << 10) <= capacity or not p.slots
    assert p.slots or capacity < 2 * FIXED + 2 * block + g.table_bytes
    if block in (65536, 1 << 20) and capacity == 64 * MIB:
        assert p.slots * block > 0.9 * capacity  # and little is wasted


def test_a_large_capacity_means_larger_segments_not_more() -> None:
    p = plan(2 << 40, MIB, 256 * MIB, None)
    assert -(-p.slots // p.geometry.table_slots) <= MAX_SEGMENTS
    assert p.slots * MIB > 0.99 * (2 << 40)


@pytest.mark.parametrize("block", [4096, 65536])
def test_small_capacities_work(tmp_path: Path, block: int) -> None:
    with opened(tmp_path, block, MIB) as tier:
        assert tier.slots >= 8
        fill(tier)
        assert get(tier, range(tier.slots)) == [OK] * tier.slots
    assert du(tmp_path) <= MIB


def test_a14_the_root_never_outgrows_its_limit(tmp_path: Path) -> None:
    limit, size = 8 * MIB, 64 << 10
    root = tmp_path / "root"
    root.mkdir()
    foreign = root / "foreign.bin"
    foreign.write_bytes(os.urandom(3 * MIB))
    (root / ("0" * 64)).mkdir()  # looks like ours, has no marker
    (root / ("0" * 64) / "keep").write_bytes(b"x")
    before = foreign.read_bytes()
    theirs = du(foreign) + du(root / ("0" * 64))
    peak, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.01):
            peak = max(peak, du(root) - theirs)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for life in range(3):
            fp = replace(FP, weights=str(life // 2))  # the third life has new weights
            _fill_from_threads(MiniStore(root, size, limit, fp=fp, segment=MIB), life)
            peak = max(peak, du(root) - theirs)
    finally:
        stop.set()
        watcher.join(10)
    assert 0.8 * limit < peak <= limit + 8 * size
    assert foreign.read_bytes() == before
    assert (root / ("0" * 64) / "keep").read_bytes() == b"x"


def _fill_from_threads(store: MiniStore, life: int) -> None:
    tier, lock = store.tier, threading.Lock()
    free = list(range(tier.slots))
    used: list[tuple[int, bytes]] = []
    rng = random.Random(life)

    def work(worker: int) -> None:
        for n in range(40):
            key = key_of(life * 10_000 + worker * 1000 + n)
            with lock:
                if not free:
                    slot, old = used.pop(rng.randrange(len(used)))
                    store.where.pop(old, None)
                    free.append(slot)
                slot = free.pop()
            b = replace(batch([slot], 1), keys=[key])
            if tier.write(b, sources(b, tier.block_bytes)) == [OK]:
                with lock:
                    used.append((slot, key))

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, worker) for worker in range(8)]:
            future.result(60)
    store.close()


def test_unlocked_siblings_are_reclaimed_oldest_first(tmp_path: Path) -> None:
    paths = {}
    for n, model in enumerate(("old", "new", "live")):
        fp = replace(FP, model=model)
        with opened(tmp_path, 65536, 3 * MIB, fp=fp, segment=MIB) as tier:
            put(tier, range(16))
            paths[model] = tier._directory.path
        os.utime(paths[model] / "LOCK", (n, n))
    live = Directory.open(tmp_path, replace(FP, model="live"), 16)
    assert in_use(paths["live"])
    with opened(tmp_path, 65536, 5 * MIB, fp=B, segment=MIB) as tier:
        # "live" cannot be had, so it is no room of ours
        assert tier.slots * 65536 < 5 * MIB - disk_usage(paths["live"])
        put(tier, range(8))
        assert not paths["old"].exists()
        assert paths["new"].exists()
        put(tier, range(tier.slots))
        assert not paths["new"].exists()
        assert paths["live"].exists()
    live.close()
    assert du(tmp_path) <= 5 * MIB


def test_a_sibling_that_comes_alive_stops_the_growth(tmp_path: Path) -> None:
    with opened(tmp_path, 65536, 2 * MIB, fp=B, segment=512 << 10) as tier:
        fill(tier)
    clock = [0.0]
    with opened(tmp_path, 65536, 3 * MIB, segment=MIB, clock=lambda: clock[0]) as tier:
        before = tier.slots
        holder = Directory.open(tmp_path, B, 16)
        b = batch(range(before))
        outcomes = tier.write(b, sources(b, 65536))
        assert FAILED in outcomes
        assert tier.slots == outcomes.index(FAILED) < before
        assert "capacity" in (tier.health() or "")
        assert du(tmp_path) <= 3 * MIB
        holder.close()
        b = batch([before - 1])
        assert tier.write(b, sources(b, 65536)) == [FAILED]  # not tried again at once
        clock[0] = 60.0
        assert tier.write(b, sources(b, 65536)) == [OK]


def test_enospc_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.posix_fallocate

    def full(fd: int, offset: int, size: int) -> None:
        real(fd, offset, size // 2)  # what the kernel does: it keeps what it got
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened(tmp_path, segment=64 << 10) as tier:
        n = tier.segments.geometry.table_slots
        put(tier, range(n))
        monkeypatch.setattr(os, "posix_fallocate", full)
        b = batch(range(n - 2, n + 2), 2)
        assert tier.write(b, sources(b, 4096)) == [OK, OK, FAILED, FAILED]
        assert tier.slots == n
        assert "No space" in (tier.health() or "")
        names = sorted(p.name for p in segment_file(tmp_path).parent.iterdir())
        assert names == ["LOCK", "seg-000000.kv"]
    monkeypatch.undo()
    with opened(tmp_path, segment=64 << 10) as tier:
        assert tier.slots > n
        put(tier, range(n, n + 2))


def test_min_free_stops_the_growth(tmp_path: Path) -> None:
    with opened(tmp_path, min_free=1 << 60) as tier:
        assert tier.slots > 0
        b = batch([0])
        assert tier.write(b, sources(b, 4096)) == [FAILED]
        assert tier.slots == 0
        assert "min_free" in (tier.health() or "")


@pytest.mark.parametrize("moment", ["open", "growth"])
def test_emfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    real: Callable[..., int] = os.open

    def limited(path: Any, *args: Any, **kw: Any) -> int:
        if ".kv" in str(path):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *args, **kw)

    with opened(tmp_path) as tier:
        if moment == "growth":
            monkeypatch.setattr(os, "open", limited)
            b = batch([0])
            assert tier.write(b, sources(b, 4096)) == [FAILED]
            return
        put(tier, [0])
    monkeypatch.setattr(os, "open", limited)
    with pytest.raises(DirectoryError, match="ulimit"), opened(tmp_path):
        pass


def test_another_capacity_keeps_what_fits(tmp_path: Path) -> None:
    with opened(tmp_path, 65536, 4 * MIB, segment=MIB) as tier:
        fill(tier)
        slots, table = tier.slots, tier.segments.geometry.table_slots
    with opened(tmp_path, 65536, 2 * MIB, segment=MIB) as tier:
        small = tier.slots
        assert small < slots
        assert get(tier, range(small)) == [OK] * small
        assert get(tier, range(small, slots)) == [CORRUPT] * (slots - small)
    assert du(tmp_path) <= 2 * MIB
    with opened(tmp_path, 65536, 4 * MIB, segment=2 * MIB) as tier:
        assert tier.slots == slots
        assert tier.segments.geometry.table_slots == table  # of the existing files
        assert get(tier, range(small)) == [OK] * small
        fill(tier)
    assert du(tmp_path) <= 4 * MIB


def test_leftovers_are_removed(tmp_path: Path) -> None:
    with opened(tmp_path, segment=64 << 10) as tier:
        put(tier, range(40))
    path = segment_file(tmp_path)
    (path.parent / "seg-000009.kv.tmp").write_bytes(b"partial")
    (path.parent / "notes.tmp").write_bytes(b"not ours")
    gone = tmp_path / ("a" * 64 + ".tieredkv-reclaimed")
    (gone / "rank-0").mkdir(parents=True)
    flip(path, 3)
    with opened(tmp_path, 4096, MIB, segment=64 << 10) as tier:
        assert not (path.parent / "seg-000009.kv.tmp").exists()
        assert (path.parent / "notes.tmp").exists()
        assert not gone.exists()
        quarantine = path.with_name(path.name + ".quarantine")
        assert quarantine.exists()
        fill(tier)
        assert not quarantine.exists()  # its room was needed
    assert du(tmp_path) <= MIB
