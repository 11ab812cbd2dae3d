"""The benchmark frame: intervals, verdicts and the output format."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest

from benches import __main__ as cli
from benches import dram
from benches.common import Result, absolute, compare, interval


@pytest.mark.parametrize(
    ("n", "low", "high"), [(5, 0, 4), (6, 0, 5), (9, 1, 7), (15, 3, 11), (30, 9, 20)]
)
def test_interval_uses_the_binomial_ranks(n: int, low: int, high: int) -> None:
    assert interval([float(i) for i in reversed(range(n))]) == (low, high)


def test_compare_judges_the_median_of_the_ratios() -> None:
    ours, reference = itertools.cycle([9.0, 10.0, 12.0]), itertools.cycle([10.0])
    result = compare("m", "GB/s", lambda: next(ours), lambda: next(reference), bar=0.95, pairs=9)
    assert (result.value, result.reference, result.ratio, result.n) == (10.0, 10.0, 1.0, 9)
    assert result.spread == (0.9, 1.2)
    assert result.ok is True


@pytest.mark.parametrize(
    ("bar", "higher", "ok"),
    [(0.5, True, True), (0.51, True, False), (0.5, False, True), (0.49, False, False)],
)
def test_verdicts(bar: float, higher: bool, ok: bool) -> None:
    result = compare("m", "s", lambda: 1, lambda: 2, bar=bar, higher_is_better=higher, pairs=9)
    assert result.ok is ok
    assert absolute("m", "s", [0.5] * 9, bar=bar, higher_is_better=higher).ok is ok
    assert absolute("m", "s", [0.5] * 9).ok is None


def test_ours_and_reference_alternate() -> None:
    order: list[str] = []

    def ran(name: str) -> float:
        order.append(name)
        return 1.0

    compare("m", "s", lambda: ran("a"), lambda: ran("b"), pairs=4)
    assert "".join(order) == "ab" + "abbaabba"


@pytest.mark.parametrize(("ratio", "status"), [(1.0, 0), (0.5, 1)])
def test_json_lines_and_exit_status(
    ratio: float,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run() -> Iterator[Result]:
        yield compare("dram.x", "GB/s", lambda: ratio, lambda: 1, bar=0.95, pairs=9)
        yield absolute("dram.y", "us", [1 / 3] * 9)

    monkeypatch.setattr(dram, "run", run)
    assert cli.main(["dram", "--json"]) == status
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    names = {"metric", "value", "unit", "reference", "ratio", "bar", "ok", "n", "spread"}
    assert set(first) == set(second) == names
    assert (first["metric"], first["ratio"], first["ok"]) == ("dram.x", ratio, not status)
    assert (second["value"], second["reference"], second["ok"]) == (0.33333, None, None)
    assert cli.main(["dram"]) == status
    assert "dram.x" in capsys.readouterr().out


def test_unknown_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["nonsense"])
    assert "dram" in capsys.readouterr().err
