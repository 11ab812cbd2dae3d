"""Interleaved pairs, medians and their intervals.

This class of machine is shared and noisy: absolute times drift by a factor of two within
minutes. So ours and the reference run alternately, each pair gives one ratio, and what is
judged is the median of the ratios.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

PAIRS = 15


@dataclass(frozen=True, slots=True)
class Result:
    """One line of output."""

    metric: str
    value: float
    """Median of ours, in `unit`."""
    unit: str
    reference: float | None
    """Median of the limit measured in the same run, in `unit`."""
    ratio: float | None
    """Median over the pairs of ours / reference."""
    bar: float | None
    """What `ratio` (or `value`, where there is no reference) has to reach."""
    ok: bool | None
    """None where there is no bar."""
    n: int
    spread: tuple[float, float]
    """Interval that holds the true median of what `bar` is compared with (>= 95 %)."""

    def json(self) -> str:
        return json.dumps({k: _rounded(v) for k, v in asdict(self).items()})

    def text(self) -> str:
        verdict = {True: "ok", False: "MISSED", None: ""}[self.ok]
        versus = "" if self.reference is None else f" / {self.reference:.4g}"
        ratio = "" if self.ratio is None else f" = {self.ratio:.3f}"
        interval = f"[{self.spread[0]:.3f}, {self.spread[1]:.3f}]"
        bar = "" if self.bar is None else f" bar {self.bar:g}"
        figure = f"{self.value:.4g}{versus} {self.unit}{ratio}"
        return f"{self.metric:<34} {figure} {interval} n={self.n}{bar} {verdict}".rstrip()


def compare(
    metric: str,
    unit: str,
    ours: Callable[[], float],
    reference: Callable[[], float],
    *,
    bar: float | None = None,
    higher_is_better: bool = True,
    pairs: int = PAIRS,
) -> Result:
    """Run both alternately, each returning one figure in `unit`, and judge ours / reference.

    The order within a pair alternates too, so that neither always inherits warm caches. One
    pair before the first is thrown away.
    """
    ours(), reference()
    left, right = [], []
    for i in range(pairs):
        if i % 2:
            right.append(reference())
            left.append(ours())
        else:
            left.append(ours())
            right.append(reference())
    return paired(metric, unit, left, right, bar=bar, higher_is_better=higher_is_better)


def paired(
    metric: str,
    unit: str,
    ours: Sequence[float],
    reference: Sequence[float],
    *,
    bar: float | None = None,
    higher_is_better: bool = True,
) -> Result:
    """Judge the median of ours / reference, figures measured side by side."""
    ratios = [a / b for a, b in zip(ours, reference, strict=True)]
    ratio = statistics.median(ratios)
    return Result(
        metric,
        statistics.median(ours),
        unit,
        statistics.median(reference),
        ratio,
        bar,
        _reached(ratio, bar, higher_is_better),
        len(ratios),
        interval(ratios),
    )


def absolute(
    metric: str,
    unit: str,
    samples: list[float],
    *,
    bar: float | None = None,
    higher_is_better: bool = False,
) -> Result:
    """Judge the median of figures that have no reference."""
    value = statistics.median(samples)
    ok = _reached(value, bar, higher_is_better)
    return Result(metric, value, unit, None, None, bar, ok, len(samples), interval(samples))


@contextmanager
def work_directory() -> Iterator[Path]:
    """A new directory on the disk under test: below TIEREDKV_BENCH_DIR, or the system's
    temporary directory."""
    parent = os.environ.get("TIEREDKV_BENCH_DIR")
    with tempfile.TemporaryDirectory(prefix="tieredkv-bench-", dir=parent) as path:
        yield Path(path)


def seconds(fn: Callable[[], object]) -> float:
    """How long one call takes."""
    begin = time.perf_counter()
    fn()
    return time.perf_counter() - begin


def interval(samples: list[float]) -> tuple[float, float]:
    """Order statistics that hold the median with a probability of at least 95 %.

    With fewer than 6 samples there are none: the range is returned.
    """
    ordered, n = sorted(samples), len(samples)
    rank, tail = 0, 0.5**n
    while rank + 1 < (n + 1) // 2 and 2 * (tail + math.comb(n, rank + 1) * 0.5**n) <= 0.05:
        rank += 1
        tail += math.comb(n, rank) * 0.5**n
    return ordered[rank], ordered[n - 1 - rank]


def _reached(figure: float, bar: float | None, higher_is_better: bool) -> bool | None:
    if bar is None:
        return None
    return figure >= bar if higher_is_better else figure <= bar


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return [_rounded(v) for v in value] if isinstance(value, tuple) else value
