"""What each input of `delay` is worth: traces from which one was taken away."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benches import eviction_rows as rows
from benches.common import Result
from benches.eviction_size import Size, Source
from benches.eviction_tables import Table
from tieredkv.sim.lab_runs import BASELINE, requests_of, run_all
from tieredkv.sim.replay import service_of
from tieredkv.sim.request import Request
from tieredkv.sim.result import Result as Replay
from tieredkv.sim.trace import write_trace

WITHOUT: dict[str, dict[str, Any]] = {
    "all": {},
    "no finish reason": {"stop": None},
    "no category": {"category": ""},
    "neither of them": {"stop": None, "category": ""},
    "nor output length": {"stop": None, "category": "", "output_length": 0},
}


def measure(source: Source, size: Size) -> tuple[list[Result], Table]:
    """Figures and table of one trace; replays `delay` once per entry of `WITHOUT`."""
    head = ["inputs", *(f"{text}: hit % (gap closed)" for text in size.capacities)]
    note = f"`{rows.OURS}` without finish hints, one tier; {source.note}."
    table, lines = Table(f"`{source.name}`, inputs", [note], head), list[Result]()
    for inputs, gone in WITHOUT.items():
        replays = _replay(source, size, gone)
        found = [r for r in replays if r.policy == rows.OURS]
        table.rows.append([inputs, *(_cell(replay) for replay in found)])
        for ours in found:
            lru = next(r for r in replays if (r.policy, r.capacity) == (BASELINE, ours.capacity))
            where = f"eviction.{source.name}.{ours.capacity}.{inputs}".replace(" ", "_")
            reference = 100 * lru.hit_rate
            lines.append(rows.line(where, 100 * ours.hit_rate, "%", reference=reference))
    return lines, table


def _replay(source: Source, size: Size, gone: dict[str, Any]) -> list[Replay]:
    with tempfile.TemporaryDirectory(prefix="tieredkv-inputs-") as directory:
        path = Path(directory) / "trace.jsonl"
        write_trace(path, _stripped(source, size, gone), "tieredkv")
        spec = size.spec(str(path), (rows.OURS,), size.single())
        return run_all(spec, size.jobs, lambda _: None)


def _stripped(source: Source, size: Size, gone: dict[str, Any]) -> Iterator[Request]:
    for request in requests_of(source.trace, size.seed):
        # The time of service stays what it was: it may follow from what is taken away.
        yield replace(request, **gone, service=service_of(request))


def _cell(replay: Replay) -> str:
    gap = "" if replay.gap_closed is None else f" ({100 * replay.gap_closed:.0f} %)"
    return f"{100 * replay.hit_rate:.2f}{gap}"
