"""What importing the package costs, and that its public names are there."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tieredkv
from tieredkv import errors

ROOT = Path(__file__).parent.parent
LIGHT = [
    "import tieredkv",
    "from tieredkv import Config; Config.model_validate",
    "import tieredkv.config_load",
    "import tieredkv.sim.trace",
    "import tieredkv.sim.generate",
    "from typer.testing import CliRunner; from tieredkv.cli.app import app\n"
    "assert CliRunner().invoke(app, ['--help']).exit_code == 0",
]


def modules_after(code: str) -> set[str]:
    code += "\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=True,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("code", LIGHT, ids=lambda code: code.split(";")[0])
def test_no_torch_where_none_is_needed(code: str) -> None:
    assert "torch" not in modules_after(code)


def test_import_of_the_package_is_nearly_free() -> None:
    assert not modules_after("import tieredkv") & {"numpy", "pydantic", "yaml", "lmdb", "typer"}


@pytest.mark.parametrize("name", tieredkv.__all__)
def test_public_names_resolve(name: str) -> None:
    assert getattr(tieredkv, name) is not None
    assert name in dir(tieredkv)


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nope'"):
        importlib.import_module("tieredkv").Nope  # noqa: B018


def test_every_error_is_public_and_one_tree() -> None:
    classes = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert classes.keys() <= set(tieredkv.__all__)
    assert all(issubclass(value, errors.TieredKVError) for value in classes.values())


def test_metadata_agrees_with_the_files() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"tieredkv": "tieredkv.cli.app:main"}
    assert (ROOT / "tieredkv" / "py.typed").exists()
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert f"## {tieredkv.__version__}" in changes


def test_ci_pins_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "requirements" / "ci.txt").read_text().splitlines()
    pinned = {
        line.split("==")[0].lower().replace("_", "-") for line in lines if not line.startswith("#")
    }
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert {name.split(">=")[0].lower() for name in wanted} <= pinned
    assert all(line.startswith("#") or "==" in line for line in lines)


def test_ci_script_parses() -> None:
    script = ROOT / ".ci" / "run"
    subprocess.run(["bash", "-n", script], check=True, timeout=10)
    assert os.access(script, os.X_OK)
