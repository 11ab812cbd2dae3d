"""The tables of the eviction bench: on the terminal, and in docs/policies.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from rich.table import Table as RichTable

from benches.common import Result
from benches.eviction_rows import OURS, keyed, writes
from tieredkv.cli.progress import table_console
from tieredkv.errors import UsageError
from tieredkv.sim.result import BOUNDS
from tieredkv.sim.result import Result as Replay

BEGIN = "<!-- tables of `python -m benches eviction --markdown docs/policies.md` begin -->"
END = "<!-- tables end -->"
HEADING = "### "
SHOWN = ("optimum", "infinite")


@dataclass(slots=True)
class Table:
    """One table; replaces the one with the same title."""

    title: str
    notes: list[str]
    head: list[str]
    rows: list[list[str]] = field(default_factory=list)
    lines: bool = False
    """It shows what is printed line by line as well."""

    def show(self) -> None:
        console = table_console()
        console.print(f"\n{self.title.replace('`', '')}")
        for note in self.notes:
            console.print(note.replace("`", ""))
        table = RichTable(*self.head)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in self.rows:
            table.add_row(*(cell.replace("**", "") for cell in row))
        console.print(table)

    def markdown(self) -> str:
        lines = [f"{HEADING}{self.title}", "", *self.notes, ""]
        lines += [_row(self.head), _row(["---", *["---:"] * (len(self.head) - 1)])]
        return "\n".join([*lines, *map(_row, self.rows), ""])


def one_tier(name: str, note: str, replays: Sequence[Replay]) -> Table:
    """Hit rates by capacity and policy; the best online policy without hints is bold."""
    found = keyed(replays)
    shares = sorted({hints for _, hints, _ in found})
    columns = [
        (policy, hints)
        for hints in shares
        for policy in dict.fromkeys(policy for _, h, policy in found if h == hints)
        if policy not in BOUNDS
    ]
    columns += [(policy, 0.0) for policy in SHOWN if any(p == policy for _, _, p in found)]
    gaps = [share for share in shares if any(k[1:] == (share, OURS) for k in found)]
    head = ["capacity", *(_name(policy, hints) for policy, hints in columns)]
    if gaps:
        head.append(f"gap closed by {OURS}" + _shares(gaps))
    table = Table(f"`{name}`, one tier", _notes(note, replays), head)
    for capacity in dict.fromkeys(capacity for capacity, _, _ in found):
        online = [found.get((capacity, h, p)) for p, h in columns if not h and p not in BOUNDS]
        best = max((r.hit_rate for r in online if r), default=1.0)
        row = [capacity]
        for policy, hints in columns:
            replay = found.get((capacity, hints, policy))
            text = f"{100 * replay.hit_rate:.2f}" if replay else ""
            bold = replay in online and replay is not None and replay.hit_rate == best
            row.append(f"**{text}**" if bold else text)
        if gaps:
            row.append(" / ".join(_gap(found.get((capacity, share, OURS))) for share in gaps))
        table.rows.append(row)
    return table


def three_tiers(name: str, note: str, replays: Sequence[Replay]) -> Table:
    """Hit rate, time to first token and NVMe writes by policy."""
    capacity, names = replays[0].capacity, [name for name, _ in replays[0].tiers]
    parts = f"of it {' / '.join(names)}"
    head = ["policy", "hit %", parts, "mean TTFT s", "p90 s", "NVMe blocks written per hour"]
    notes = [*_notes(note, replays), "`delay` with `admission: delay`, `lru` writes all."]
    notes.append(f"Tiers: {capacity.replace('xlive', 'x live')}.")
    table = Table(f"`{name}`, three tiers", notes, head)
    for replay in replays:
        if replay.policy in BOUNDS and (replay.hints or replay.policy != "optimum"):
            continue
        written = "" if replay.policy in BOUNDS else f"{writes(replay):,.0f}"
        figures = [f"{replay.ttft[name]:.3f}" for name in ("mean", "p90")]
        whole = max(1, replay.total.input_tokens)
        by_tier = " / ".join(f"{100 * replay.hit_by_tier[n] / whole:.1f}" for n in names)
        hit = f"{100 * replay.hit_rate:.2f}"
        table.rows.append([_name(replay.policy, replay.hints), hit, by_tier, *figures, written])
    return table


def figures(title: str, note: str, results: Iterable[Result]) -> Table:
    """Lines of output as they are."""
    head = ["figure", "value", "reference", "ratio", "bar", "reached"]
    table = Table(title, [f"{note} Measured {date.today()}."], head, lines=True)
    for result in results:
        ratio = "" if result.ratio is None else f"{result.ratio:.3f}"
        reference = "" if result.reference is None else f"{result.reference:,.4g}"
        bar = "" if result.bar is None else f"{result.bar:,g}"
        reached = {None: "", True: "yes", False: "**no**"}[result.ok]
        metric = result.metric.removeprefix("eviction.")
        value = f"{result.value:,.4g} {result.unit}"
        table.rows.append([metric, value, reference, ratio, bar, reached])
    return table


def merge(path: Path, tables: Iterable[Table]) -> None:
    """Replace tables of the same title between the marks in `path`, and add new ones behind.

    Raises UsageError without both marks, or if the file cannot be read or written.
    """
    try:
        text = path.read_text(encoding="utf-8")
        before, begin, rest = text.partition(BEGIN)
        between, end, after = rest.partition(END)
        if not begin or not end:
            raise UsageError(f"{path}: the lines {BEGIN!r} and {END!r} are needed, in this order")
        kept: dict[str, str] = {}
        for part in re.split(rf"^(?={HEADING})", between, flags=re.MULTILINE):
            if part.startswith(HEADING):
                kept[part.split("\n", 1)[0]] = part.strip()
        for table in tables:
            kept[HEADING + table.title] = table.markdown().strip()
        body = "\n\n".join(kept.values())
        path.write_text(f"{before}{begin}\n\n{body}\n\n{end}{after}", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name a Markdown file") from error


def _notes(note: str, replays: Sequence[Replay]) -> list[str]:
    first = replays[0]
    return [
        f"{note[0].upper()}{note[1:]}: {first.requests:,} requests, blocks of "
        f"{first.block_tokens} tokens. Measured {date.today()}."
    ]


def _name(policy: str, hints: float) -> str:
    return f"{policy}, hints {hints:.0%}" if hints else policy


def _shares(shares: Sequence[float]) -> str:
    if shares == [0.0]:
        return ""
    return ", hints " + " / ".join(f"{share:.0%}" for share in shares)


def _gap(replay: Replay | None) -> str:
    if replay is None or replay.gap_closed is None:
        return "-"
    return f"{100 * replay.gap_closed:.0f} %"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
