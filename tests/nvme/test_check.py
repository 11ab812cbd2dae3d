"""`tieredkv check` finds and repairs what can be wrong on disk."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.nvme.world import FP, MIB, MiniStore, content, flip, key_of, segment_file
from tieredkv.cli.check import check, check_directory
from tieredkv.errors import DirectoryError, DirectoryInUse
from tieredkv.index.record import ROOT, Piece
from tieredkv.types import Batch, Outcome

CHAIN = 6


def build(root: Path, **kw: object) -> MiniStore:
    """Chains 0 and 1 of six blocks each; block n is in slot n."""
    store = MiniStore(root, 4096, 2 * MIB, segment=64 << 10, **kw)
    for chain in range(2):
        numbers = list(range(chain * CHAIN, (chain + 1) * CHAIN))
        keys = [key_of(n) for n in numbers]
        blocks = [memoryview(content(key, 1, 4096)) for key in keys]
        b = Batch(numbers, keys, [1 + chain] * CHAIN, store.index.epoch)
        assert store.tier.write(b, blocks) == [Outcome.OK] * CHAIN
        assert store.commit([Piece(keys, ROOT, numbers, 1 + chain, 0, 1.0, 1.0)], [])
    return store


def offset(slot: int) -> int:
    return 4096 * 2 + slot * 4096


def test_a_good_directory(tmp_path: Path) -> None:
    store = build(tmp_path)
    with pytest.raises(DirectoryInUse, match="open in this process"):
        check_directory(tmp_path)
    store.close()
    report = check_directory(tmp_path)
    assert report.ok
    (found,) = report.directories
    assert found.good
    assert (found.blocks, found.verified, found.leftovers, found.bad) == (12, 12, 0, {})
    assert found.fingerprint["model"] == "model"
    assert found.block_bytes == 4096
    assert check_directory(Path(found.path)).directories[0].verified == 12


def test_a_bad_block_takes_its_descendants_with_it(tmp_path: Path) -> None:
    store = build(tmp_path)
    store.close()
    flip(segment_file(tmp_path), offset(2) + 9)
    report = check_directory(tmp_path)
    assert not report.ok
    assert report.directories[0].bad == {"corrupt": 1, "descendant": 3}
    assert report.directories[0].verified == 8
    assert check_directory(tmp_path).directories[0].blocks == 12  # nothing was changed
    repaired = check_directory(tmp_path, repair=True)
    assert repaired.ok
    assert repaired.directories[0].repaired
    after = check_directory(tmp_path)
    assert after.ok
    assert (after.directories[0].blocks, after.directories[0].leftovers) == (8, 4)
    store = MiniStore(tmp_path, 4096, 2 * MIB, segment=64 << 10)
    assert set(store.where) == {key_of(n) for n in (0, 1, 6, 7, 8, 9, 10, 11)}
    store.close()


def test_a_bad_segment(tmp_path: Path) -> None:
    build(tmp_path).close()
    path = segment_file(tmp_path)
    os.truncate(path, offset(3))
    report = check_directory(tmp_path)
    assert report.directories[0].bad == {"corrupt": 12}
    assert any("seg-000000.kv: truncated" in p for p in report.directories[0].problems)
    assert path.exists()  # an inspection changes nothing
    assert check_directory(tmp_path, repair=True).ok
    assert check_directory(tmp_path).directories[0].blocks == 0


def test_orphans_and_a_damaged_index(tmp_path: Path) -> None:
    store = build(tmp_path)
    assert store.commit([], [key_of(1)])
    store.close()
    report = check_directory(tmp_path)
    assert report.directories[0].problems == ["4 blocks: parent missing"]
    assert report.directories[0].blocks == 7
    assert check_directory(tmp_path, repair=True).ok
    assert check_directory(tmp_path).directories[0].good
    data = store.index.path / "data.mdb"
    os.truncate(data, 9000)
    report = check_directory(tmp_path)
    assert not report.ok
    assert "truncated" in report.directories[0].problems[0]
    assert data.stat().st_size == 9000
    assert check_directory(tmp_path, repair=True).ok
    after = check_directory(tmp_path).directories[0]
    assert after.good
    assert [Path(p).name for p in after.set_aside] == ["index.corrupt-0"]


def test_several_fingerprints_and_ranks(tmp_path: Path) -> None:
    build(tmp_path).close()
    build(tmp_path, fp=replace(FP, model="other")).close()
    report = check_directory(tmp_path)
    assert {d.fingerprint["model"] for d in report.directories} == {"model", "other"}
    first = Path(report.directories[0].path)
    (first / "rank-1").mkdir()  # a rank that has lost everything
    report = check_directory(tmp_path)
    assert [d.good for d in report.directories] == [False, True]
    assert report.directories[0].bad == {"corrupt": 12}


def test_nothing_to_check(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match="no fingerprint directory"):
        check_directory(tmp_path)
    with pytest.raises(DirectoryError, match="not a directory"):
        check_directory(tmp_path / "missing")


def test_the_command(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(check)
    build(tmp_path).close()
    run = CliRunner().invoke(app, [str(tmp_path), "--format", "json"])
    assert run.exit_code == 0
    assert json.loads(run.stdout)["directories"][0]["verified"] == 12
    flip(segment_file(tmp_path), offset(7) + 9)
    run = CliRunner().invoke(app, [str(tmp_path)])
    assert run.exit_code == 1
    assert "1 blocks corrupt" in run.stdout
    run = CliRunner().invoke(app, [str(tmp_path), "--repair", "--format", "json"])
    assert run.exit_code == 0
    assert json.loads(run.stdout)["directories"][0]["repaired"]
    run = CliRunner().invoke(app, [str(tmp_path)])
    assert run.exit_code == 0
    assert "good" in run.stdout
