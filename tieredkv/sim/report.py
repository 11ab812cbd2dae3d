"""Tables of replays, as text, JSON lines and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from rich.table import Table

from tieredkv.sim.result import BOUNDS, Result, Share

_MISSING = "-"
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a replay."""

    heading: str
    value: Callable[[Result], float | None]
    form: str = ",.1f"
    """Format specification."""


@dataclass(frozen=True, slots=True)
class Line:
    """The replays of one trace, capacity, share of hints and policy: one for each seed."""

    results: tuple[Result, ...]

    @property
    def first(self) -> Result:
        return self.results[0]

    @property
    def bound(self) -> bool:
        return self.first.policy in BOUNDS

    def mean(self, value: Callable[[Result], float | None]) -> float | None:
        """Mean over the seeds; None where no replay has the figure."""
        found = self._found(value)
        return sum(found) / len(found) if found else None

    def cell(self, column: Column) -> str:
        """`94.1`, over several seeds `94.1 ± 0.2` (half the range)."""
        found = self._found(column.value)
        if not found:
            return _MISSING
        mean = sum(found) / len(found)
        text = f"{mean:{column.form}}"
        spread = f"{(max(found) - min(found)) / 2:{column.form}}"
        return f"{text} ± {spread}" if float(spread.replace(",", "")) else text

    def _found(self, value: Callable[[Result], float | None]) -> list[float]:
        return [x for x in map(value, self.results) if x is not None]


@dataclass(frozen=True, slots=True)
class Group:
    """Lines that may be compared: one trace, capacity and share of hints."""

    trace: str
    name: str
    """The trace's, short."""
    capacity: str
    hints: float
    lines: tuple[Line, ...]

    def line(self, policy: str) -> Line | None:
        return next((line for line in self.lines if line.first.policy == policy), None)

    def best(self) -> Line | None:
        """The line of a real policy with the highest hit rate, the first of equals."""
        real = [line for line in self.lines if not line.bound]
        return max(real, key=lambda line: line.mean(hit) or 0.0) if real else None


def hit(result: Result) -> float:
    """Token hit rate in percent."""
    return 100 * result.hit_rate


def ttft(name: str) -> Callable[[Result], float | None]:
    return lambda result: result.ttft.get(name)


def closed(result: Result) -> float | None:
    return None if result.gap_closed is None else 100 * result.gap_closed


def groups(results: Iterable[Result]) -> list[Group]:
    """Results in tables: traces and capacities as they come, LRU first, the bounds last."""
    seeds: dict[tuple[str, str, float], dict[str, list[Result]]] = {}
    for result in results:
        policies = seeds.setdefault((result.trace, result.capacity, result.hints), {})
        policies.setdefault(result.policy, []).append(result)
    names = short_names(trace for trace, _, _ in seeds)
    return [
        Group(
            trace,
            names[trace],
            capacity,
            hints,
            tuple(Line(tuple(policies[policy])) for policy in sorted(policies, key=_place)),
        )
        for (trace, capacity, hints), policies in seeds.items()
    ]


def short_names(traces: Iterable[str]) -> dict[str, str]:
    """Trace -> its file's name without directory and suffixes, where that is unambiguous."""
    short = {trace: PurePath(trace).name.split(".jsonl")[0] or trace for trace in traces}
    counts = Counter(short.values())
    return {trace: name if counts[name] == 1 else trace for trace, name in short.items()}


def _place(policy: str) -> int:
    if policy in BOUNDS:
        return 2 + BOUNDS.index(policy)
    return 0 if policy == "lru" else 1


def columns(results: Sequence[Result]) -> list[Column]:
    """The figures that a table of these results has."""
    tiers = dict.fromkeys(name for result in results for name in result.hit_by_tier)
    single = len(tiers) < 2
    wear = Column("NVMe GB/day", _played(lambda r: r.nvme_bytes_per_day / _GB), ",.0f")
    return [
        Column("hit %", hit, ".2f"),
        *([] if single else [Column(f"{tier} %", _tier_hit(tier), ".2f") for tier in tiers]),
        Column("gap closed %", closed, ".0f"),
        Column("TTFT mean s", ttft("mean"), ".3f"),
        Column("p50 s", ttft("p50"), ".3f"),
        Column("p99 s", ttft("p99"), ".3f"),
        Column("recomputed M", lambda r: r.recomputed_tokens / 1e6, ",.2f"),
        Column("moved GB", _played(lambda r: sum(r.moved_bytes.values()) / _GB), ",.0f"),
        *([wear] if any("nvme" in dict(result.tiers) for result in results) else []),
    ]


def _played(value: Callable[[Result], float]) -> Callable[[Result], float | None]:
    """Bounds are counted, not played: they move nothing."""
    return lambda result: None if result.policy in BOUNDS else value(result)


def _tier_hit(tier: str) -> Callable[[Result], float | None]:
    def share(result: Result) -> float | None:
        tokens = result.hit_by_tier.get(tier)
        if tokens is None or not result.total.input_tokens:
            return None
        return 100 * tokens / result.total.input_tokens

    return share


def breakdown(results: Sequence[Result], field: str) -> list[Column]:
    """Hit rates of parts of the requests; `field` is `by_category` or `by_gap`."""
    labels = dict.fromkeys(label for result in results for label in getattr(result, field))
    return [Column(f"{label} %", _part(field, label), ".2f") for label in labels]


def _part(field: str, label: str) -> Callable[[Result], float | None]:
    def share(result: Result) -> float | None:
        part: Share | None = getattr(result, field).get(label)
        return 100 * part.hit_rate if part is not None and part.input_tokens else None

    return share


def heads(found: Sequence[Group]) -> list[tuple[str, Callable[[Group], str]]]:
    """What tells the groups apart, besides the policy."""
    return [
        *([("trace", _trace)] if len({g.trace for g in found}) > 1 else []),
        ("capacity", _capacity),
        *([("hints", _hints)] if len({g.hints for g in found}) > 1 else []),
    ]


def _trace(group: Group) -> str:
    return group.name


def _capacity(group: Group) -> str:
    return group.capacity


def _hints(group: Group) -> str:
    return f"{group.hints:.0%}"


def tables(results: Sequence[Result], parts: bool = False) -> Iterator[Table]:
    """The table of the results; with `parts` also those by category and by gap."""
    yield _table("", results, columns(results))
    if parts:
        yield _table("Hit rate by category", results, breakdown(results, "by_category"))
        title = "Hit rate by time since the session's last turn"
        yield _table(title, results, breakdown(results, "by_gap"))


def _table(title: str, results: Sequence[Result], figures: list[Column]) -> Table:
    found = groups(results)
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    keys = heads(found)
    for heading, _ in keys:
        table.add_column(heading)
    table.add_column("policy")
    for column in figures:
        table.add_column(column.heading, justify="right")
    for group in found:
        best = group.best()
        for number, line in enumerate(group.lines):
            table.add_row(
                *("" if number else key(group) for _, key in keys),
                line.first.policy,
                *(line.cell(column) for column in figures),
                style="dim" if line.bound else "bold" if line is best else None,
                end_section=number == len(group.lines) - 1,
            )
    return table


def to_json(results: Iterable[Result]) -> Iterator[str]:
    """One JSON object per replay."""
    for result in results:
        yield json.dumps(result.to_dict(), ensure_ascii=False)


def to_csv(results: Iterable[Result]) -> str:
    """One row per replay; nested figures as `hit_by_tier.dram`, tiers as `tiers.dram` (blocks)."""
    rows = [_flat(result.to_dict()) for result in results]
    names = dict.fromkeys(name for row in rows for name in row)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(names), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if key == "tiers":
            item = dict(item)
        if isinstance(item, dict):
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[prefix + key] = item
    return flat


def summary(results: Sequence[Result]) -> list[str]:
    """One sentence per trace, about the capacity where policies differ most."""
    by_trace: dict[str, list[Group]] = {}
    for group in groups(results):
        by_trace.setdefault(group.trace, []).append(group)
    return [_sentence(max(found, key=_room)) for found in by_trace.values()]


def _room(group: Group) -> float:
    """Percentage points between LRU and the optimum."""
    lru, optimum = group.line("lru"), group.line("optimum")
    return (optimum.mean(hit) or 0.0) - (lru.mean(hit) or 0.0) if lru and optimum else 0.0


def _sentence(group: Group) -> str:
    best, lru, optimum = group.best(), group.line("lru"), group.line("optimum")
    if best is None:
        return f"{group.name}: no policy was replayed."
    hints = f" with finish hints from {group.hints:.0%} of the sessions" if group.hints else ""
    found = [f"{best.first.policy} finds {best.mean(hit) or 0:.1f} % of the input tokens"]
    if lru and lru is not best:
        found.append(f"LRU {lru.mean(hit) or 0:.1f} %")
    if optimum:
        found.append(f"the optimum {optimum.mean(hit) or 0:.1f} %")
    text = f"{group.name} at {group.capacity}{hints}: {', '.join(found)}"
    share = best.mean(closed)
    if share is not None and (group.hints or lru is not best):
        gap = "the gap from LRU without hints" if group.hints else "the gap"
        text += f"; {share:.0f} % of {gap} is closed"
    wait, before = best.mean(ttft("mean")), lru.mean(ttft("mean")) if lru else None
    if wait is not None:
        text += f". The first token takes {wait:.3g} s on average"
        text += f" (LRU {before:.3g} s)" if before is not None and lru is not best else ""
    return text + "."
