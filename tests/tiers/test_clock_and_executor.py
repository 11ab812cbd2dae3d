"""Time and background work under control of the test."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tieredkv.executor import Executor
from tieredkv.testing import ManualClock, StepExecutor
from tieredkv.types import Clock


def test_clock_moves_only_by_hand() -> None:
    manual = ManualClock(5)
    clock: Clock = manual
    assert (clock(), clock()) == (5.0, 5.0)
    assert manual.advance(2.5) == 7.5
    assert clock() == 7.5
    with pytest.raises(ValueError, match="backwards"):
        manual.advance(-1)


def test_steps_in_order() -> None:
    ran: list[int] = []
    executor = StepExecutor()
    typed: Executor = executor
    for i in range(4):
        typed.submit(lambda i=i: ran.append(i))  # type: ignore[misc]
    assert (ran, executor.pending) == ([], 4)
    assert executor.step() == 1
    assert ran == [0]
    assert executor.step(2) == 2
    assert (ran, executor.pending) == ([0, 1, 2], 1)
    assert executor.step(5) == 1
    assert executor.step() == 0


def test_run_all_includes_jobs_submitted_meanwhile() -> None:
    ran: list[int] = []
    executor = StepExecutor()

    def job(left: int) -> None:
        ran.append(left)
        if left:
            executor.submit(lambda: job(left - 1))

    executor.submit(lambda: job(3))
    assert executor.run_all() == 4
    assert ran == [3, 2, 1, 0]
    assert executor.run_all() == 0


def test_run_all_is_bounded() -> None:
    executor = StepExecutor()

    def again() -> None:
        executor.submit(again)

    executor.submit(again)
    with pytest.raises(RuntimeError, match="pending after running 50"):
        executor.run_all(limit=50)


def test_a_failing_job_reaches_the_test_and_is_gone() -> None:
    executor = StepExecutor()
    executor.submit(lambda: 1 / 0)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        executor.step()
    assert executor.pending == 0


def test_close_runs_what_is_left_and_accepts_no_more() -> None:
    ran: list[int] = []
    executor = StepExecutor()
    executor.submit(lambda: ran.append(1))
    assert executor.close(1.0) is True
    assert ran == [1]
    with pytest.raises(RuntimeError, match="submit after close"):
        executor.submit(lambda: None)


def test_the_kit_needs_neither_pytest_nor_torch() -> None:
    code = (
        "import sys; import tieredkv.testing, tieredkv.buffers\n"
        "import tieredkv.tiers.dram, tieredkv.tiers.hbm\n"
        "print([m for m in ('torch', 'pytest') if m in sys.modules])"
    )
    path = {"PYTHONPATH": ":".join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=path, timeout=60
    )
    assert (result.stdout, result.stderr) == ("[]\n", "")
