"""The script for a machine with a GPU: what a step does, and what is made of it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[2] / "tools" / "gpu_check.py"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    return module


def test_steps_are_told_apart_by_how_they_end(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = '{"metric": "gpu.x", "value": 2.5, "unit": "GB/s", "ratio": 0.5, "reference": 5.0}'
    good = check.step("good", "-c", f"print('a line'); print('{row}'); print('{{no json')")
    assert check.step("env", "-c", "import os; print(os.environ['X'])", X="7").text == "7\n"
    bad = check.step("bad", "-c", "raise SystemExit('it ends badly')")
    monkeypatch.setattr(check, "BUDGET", 0.0)  # then a second is left
    late = check.step("late", "-c", "import time; time.sleep(60)")
    assert (good.code, bad.code, late.code) == (0, 1, -1)
    assert [found["metric"] for found in good.rows] == ["gpu.x"]
    lines = check.table([good, bad, late]).splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["good", "ok"],
        ["gpu.x", "2.5"],
        ["bad", "FAILED"],
        ["late", "TOO"],
    ]
    assert "it ends badly" in lines[2]


def test_what_it_runs_exists(check: ModuleType) -> None:
    assert all((check.ROOT / suite).exists() for suite in (*check.SUITES, *check.ON_KVIKIO))


def test_without_wheels_nothing_is_installed(check: ModuleType, tmp_path: Path) -> None:
    assert check.install(tmp_path).code == 0
