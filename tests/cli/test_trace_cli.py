"""`tieredkv trace` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tieredkv.cli.trace import app
from tieredkv.sim.generate import generate
from tieredkv.sim.trace import TraceError, read_trace

run = CliRunner().invoke


def test_generate_to_stdout_and_to_a_file(tmp_path: Path) -> None:
    shown = run(app, ["generate", "card942", "--sessions", "2", "--seed", "3"])
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    path = tmp_path / "t.jsonl.gz"
    written = run(
        app, ["generate", "card942", "--sessions", "2", "--seed", "3", "--out", str(path)]
    )
    assert written.exit_code == 0
    assert list(read_trace(path)) == generate("card942", 2, 3)
    assert len(lines) == len(list(read_trace(path)))
    assert json.loads(lines[0])["session"] == "card942-0"


def test_stats_of_several_files(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("a", "b.gz")]
    run(app, ["generate", "card942", "--sessions", "3", "--out", files[0]])
    run(app, ["convert", files[0], files[1]])
    table = run(app, ["stats", *files])
    assert table.exit_code == 0
    assert "hit, infinite cache" in table.stdout
    result = run(app, ["stats", *files, "--format", "json"])
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["file"] for row in rows] == files
    assert rows[0]["hit_tokens"] == rows[1]["hit_tokens"] > 0


def test_convert_defaults_to_the_other_format_and_back(tmp_path: Path) -> None:
    ours, raw, back = (str(tmp_path / name) for name in ("ours", "raw", "back"))
    run(app, ["generate", "card942", "--sessions", "3", "--out", ours])
    assert run(app, ["convert", ours, raw]).exit_code == 0
    assert "timestamp" in Path(raw).read_text().splitlines()[0]
    assert run(app, ["convert", raw, back]).exit_code == 0
    assert len(list(read_trace(back))) == len(list(read_trace(ours)))
    same = run(app, ["convert", ours, back, "--to", "tieredkv"])
    assert same.exit_code == 0
    assert Path(back).read_text() == Path(ours).read_text()
    assert run(app, ["convert", ours, ours]).exit_code == 0, "in place"
    assert Path(ours).read_text() == Path(raw).read_text()


def test_errors_reach_the_caller_and_leave_no_file(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_text('{"ts": 1}\n')
    out = tmp_path / "out"
    result = run(app, ["convert", str(bad), str(out)])
    assert isinstance(result.exception, TraceError)
    assert str(result.exception).startswith(f"{bad}:1: ")
    assert [p.name for p in tmp_path.iterdir()] == ["bad"]
    assert run(app, ["stats", str(bad), "--format", "xml"]).exit_code == 2


@pytest.mark.parametrize("verb", ["generate", "stats", "convert"])
def test_help(verb: str) -> None:
    assert run(app, [verb, "--help"]).exit_code == 0
