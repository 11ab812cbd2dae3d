"""The command as users run it: a process with exit codes, stdout and stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from tests.config.cases import OK
from tieredkv.cli.app import app
from tieredkv.errors import DirectoryInUse

VERBS = ("demo", "trace", "check", "config", "doctor")


def run(*args: str, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("TIEREDKV_")}
    done = subprocess.run(
        [sys.executable, "-m", "tieredkv.cli.app", *args],
        env={**clean, "COLUMNS": "100", "NO_COLOR": "1", **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "c.yaml"
    path.write_text(OK)
    return str(path)


def test_help_and_version() -> None:
    text = run("--help").stdout
    assert all(verb in text for verb in VERBS)
    assert run("--version").stdout == "tieredkv 0.1.0\n"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str) -> None:
    text = run(verb, "--help").stdout
    assert f"tieredkv {verb}" in text
    assert "--install-completion" not in text


def test_config_show_json(file: str) -> None:
    done = run("config", "show", file, "--format", "json", TIEREDKV_PIN_TTL="5")
    rows = {row["key"]: row for row in json.loads(done.stdout)["settings"]}
    assert rows["pin_ttl"] == {"key": "pin_ttl", "value": 5.0, "source": "env TIEREDKV_PIN_TTL"}
    assert rows["tiers[0].capacity"]["value"] == 1 << 20
    assert rows["tiers[0].capacity"]["source"] == f"file {file}"


def test_config_show_table_gives_exact_sizes(file: str) -> None:
    env = {"TIEREDKV_CONFIG_FILE": file, "TIEREDKV_BLOCK_BYTES": "1025"}
    lines = [line.split() for line in run("config", "show", **env).stdout.splitlines()]
    assert lines[0] == ["key", "value", "source"]
    assert ["block_bytes", "1025", "env", "TIEREDKV_BLOCK_BYTES"] in lines
    assert ["tiers[1].capacity", "1GiB", "file", file] in lines
    assert ["tiers[1].write", "on_evict", "default"] in lines


def test_errors_are_lines_on_stderr_and_exit_2(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("tiers: [{kind: dram, capacty: 1}]\nevents: -1")
    done = run("config", "show", str(path), code=2)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    assert all(line.startswith(f"tieredkv: file {path}: ") for line in lines)


@pytest.mark.parametrize(
    "args", [("nope",), ("config", "show", "--format", "xml"), ("config", "x")]
)
def test_wrong_usage_exits_2(args: tuple[str, ...]) -> None:
    assert "Usage: tieredkv" in run(*args, code=2).stderr


def fake_check(directory: str, repair: bool = False) -> None:
    if directory == "used":
        raise DirectoryInUse("used: owned by process 5")
    typer.echo(f"{directory} {repair}")
    if directory == "broken":
        raise typer.Exit(1)


def test_verbs_get_their_options_and_keep_their_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tieredkv.cli.check", SimpleNamespace(check=fake_check))
    runner = CliRunner()
    good = runner.invoke(app, ["check", "fine", "--repair"])
    assert (good.exit_code, good.stdout) == (0, "fine True\n")
    assert runner.invoke(app, ["check", "--repair", "broken"]).exit_code == 1
    assert runner.invoke(app, ["check", "fine", "--nope"]).exit_code == 2
    # main() turns these into one line and exit code 2
    assert isinstance(runner.invoke(app, ["check", "used"]).exception, DirectoryInUse)
