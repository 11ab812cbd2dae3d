"""What each eviction policy hits, and whether `delay` reaches its bars.

    python -m benches eviction [--json] [--quick] [--trace A,B] [--policy A,B] [--hinted A,B]
                               [--capacity X,X] [--hints X,X] [--part A,B] [--sessions N] [--jobs N]
                               [--markdown docs/policies.md]

Parts: `table` (one tier, by policy and capacity, without and with finish hints), `tiers` (three
tiers), `inputs` (`delay` without some of what it is told), `wrong` (`delay` with reversed,
permuted and swapped statistics), `cost` (time inside `delay`), `speed` (of the simulator). All of
it on all traces takes hours; `all` runs the quick form. Bars are those of `delay` in
eviction_rows; without `--json` tables take the place of figures that have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benches import eviction_cost as costs
from benches import eviction_inputs as inputs
from benches import eviction_rows as rows
from benches import eviction_tables as tables
from benches.common import Result
from benches.eviction_size import QUICK, THREE_TIERS, Size, Source, parse, sources
from benches.eviction_wrong import KINDS, wrong
from tieredkv.cli.progress import progress
from tieredkv.sim.lab_runs import BASELINE, run_all
from tieredkv.sim.result import Result as Replay
from tieredkv.sim.spec import Spec

__all__ = ["Size", "parse", "run"]


def run(size: Size = QUICK) -> Iterator[Result]:
    with sources(size) as found:
        for source in found:
            for part in (_table, _three_tiers, _inputs):
                yield from _shown(size, *part(source, size))
        for timed in _timed(found, size):
            yield from _shown(size, *timed)


Part = tuple[list[Result], list[tables.Table]]


def _shown(size: Size, lines: list[Result], made: list[tables.Table]) -> Iterator[Result]:
    if size.markdown is not None and made:
        tables.merge(size.markdown, made)
    pivots = [table for table in made if not table.lines] if size.tables else []
    for table in pivots:
        table.show()
    for result in lines:
        if not pivots or result.bar is not None:
            yield result


def _table(source: Source, size: Size) -> Part:
    """One tier; with it the runs with wrong statistics, which are compared with its LRU."""
    parts = {"table", "wrong"} & set(size.parts)
    if not parts:
        return [], []
    lines: list[Result] = []
    made: list[tables.Table] = []
    capacities = size.single()
    plain = size.policies if "table" in parts else (BASELINE,)
    replays = _run(size.spec(source.trace, plain, capacities), size.jobs, source.name)
    if "table" in parts:
        shares = tuple(share for share in size.hints if share)
        hinted = list(replays)
        if shares:
            spec = size.spec(source.trace, size.hinted, capacities, shares)
            hinted += _run(spec, size.jobs, f"{source.name}, hints")
        lines += rows.one_tier(source.name, hinted, source.whole)
        made.append(tables.one_tier(source.name, source.note, hinted))
    if "wrong" in parts:
        found: list[Result] = []
        for kind in KINDS:
            spec = size.spec(source.trace, (rows.OURS,), capacities)
            with wrong(kind):
                astray = _run(spec, size.jobs, f"{source.name}, {kind}")
            found += rows.wrong_statistics(source.name, kind, astray, replays)
        title = f"`{source.name}`, wrong statistics"
        made.append(tables.figures(title, f"Hit rates beside LRU's; {source.note}.", found))
        lines += found
    return lines, made


def _three_tiers(source: Source, size: Size) -> Part:
    if "tiers" not in size.parts:
        return [], []
    shares = tuple(dict.fromkeys((0.0, *size.hints)))
    replays: list[Replay] = []
    for policy, admission in ((BASELINE, "all"), (rows.OURS, "delay")):
        spec = size.spec(source.trace, (policy,), THREE_TIERS, shares)
        found = _run(replace(spec, admission=admission), size.jobs, f"{source.name}, {policy}")
        replays += [one for one in found if one.policy == policy or policy == BASELINE]
    table = tables.three_tiers(source.name, source.note, replays)
    return list(rows.three_tiers(source.name, replays, source.whole)), [table]


def _inputs(source: Source, size: Size) -> Part:
    if "inputs" not in size.parts:
        return [], []
    lines, table = inputs.measure(source, size)
    return lines, [table]


def _timed(found: Sequence[Source], size: Size) -> Iterator[Part]:
    """Times of this machine: the cost on agents, the speed on the longest trace."""
    for part, preferred, measure, note in (
        ("cost", "agentic", costs.cost, "Pure Python, 0.5x live"),
        ("speed", "claude", costs.speed, "Whole replays, 10 % of the unique blocks"),
    ):
        if part in size.parts and found:
            source = _preferred(found, preferred)
            lines = list(measure(source, size))
            title = f"{part.capitalize()} on `{source.name}`"
            yield lines, [tables.figures(title, f"{note}; {source.note}.", lines)]


def _preferred(found: Sequence[Source], part: str) -> Source:
    return next((source for source in found if part in source.name), found[0])


def _run(spec: Spec, jobs: int, title: str) -> list[Replay]:
    with progress() as bar:
        task = bar.add_task(title, total=None)
        return run_all(spec, jobs, lambda _: bar.advance(task))
