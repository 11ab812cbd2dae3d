"""`tieredkv trace`: generate, measure and convert request traces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from tieredkv.cli.progress import progress, table_console
from tieredkv.sim.generate import PRESETS, stream
from tieredkv.sim.trace import (
    Request,
    TraceStats,
    WrittenFormat,
    read_trace,
    stats,
    to_json,
    trace_format,
    write_trace,
)

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def root() -> None:
    """Generate, measure and convert request traces."""


@app.command("generate")
def generate_command(
    preset: Annotated[str, typer.Argument(help="One of " + ", ".join(PRESETS) + ".")],
    sessions: Annotated[
        int | None, typer.Option(help="How many start; by default as many as published.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal traces.")] = 0,
    block_size: Annotated[int, typer.Option(help="Tokens per block.")] = 512,
    out: Annotated[
        Path | None, typer.Option(help="File, compressed if it ends in .gz or .zst; else stdout.")
    ] = None,
) -> None:
    """Write a synthetic workload, one request per line."""
    requests = stream(preset, sessions, seed, block_size)
    if out is None:
        for request in requests:
            typer.echo(to_json(request))
    else:
        count = write_trace(out, requests)
        typer.echo(f"{out}: {count:,} requests", err=True)


@app.command("stats")
def stats_command(
    files: Annotated[list[Path], typer.Argument(help="Trace files of any known format.")],
    output: Annotated[Literal["table", "json"], typer.Option("--format")] = "table",
) -> None:
    """Measure traces: turns, pauses, tokens, and what an infinite cache would hit.

    `--format json` prints one object per file.
    """
    measured: list[tuple[Path, TraceStats]] = []
    for path in files:
        with _reading(path) as requests:
            measured.append((path, stats(requests)))
        if output == "json":
            typer.echo(json.dumps({"file": str(path), **asdict(measured[-1][1])}))
    if output == "table":
        _print_table(measured)


@app.command("convert")
def convert_command(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A trace of any known format.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help=".gz and .zst compress.")],
    to: Annotated[
        WrittenFormat | None,
        typer.Option(help="Format of OUT; by default ours, and Mooncake's for ours."),
    ] = None,
) -> None:
    """Convert a trace into our schema, or into Mooncake's.

    Read are ours, Mooncake FAST25, Qwen-Bailian and LMCache's lookup-hash log.
    """
    if to is None:
        to = "mooncake" if trace_format(source) == "tieredkv" else "tieredkv"
    with _reading(source) as requests:
        count = write_trace(target, requests, to)
    typer.echo(f"{target}: {count:,} requests in {to} format", err=True)


@contextmanager
def _reading(path: Path) -> Iterator[Iterator[Request]]:
    """The requests of a file under a progress bar."""
    with progress() as bar:
        size = path.stat().st_size if path.is_file() else None
        task = bar.add_task(path.name, total=size)
        yield read_trace(path, lambda position: bar.update(task, completed=position))


def _print_table(measured: list[tuple[Path, TraceStats]]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for path, _ in measured:
        table.add_column(path.name, justify="right")
    columns = [_cells(figures) for _, figures in measured]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    table_console().print(table)


def _cells(s: TraceStats) -> dict[str, str]:
    unique = max(1, s.unique_blocks)
    return {
        "requests": f"{s.requests:,}",
        "sessions": f"{s.sessions:,}",
        "duration": f"{s.duration:,.0f} s",
        "turns p50/p90/p99": "/".join(f"{x:.0f}" for x in s.turns_p50_p90_p99),
        "start-to-start gap p50/p90/p99": "/".join(map(_seconds, s.gap_p50_p90_p99)) + " s",
        "input tokens": f"{s.input_tokens:,}",
        "output tokens": f"{s.output_tokens:,}",
        "hit, infinite cache": f"{s.hit_share:.1%}",
        "block": f"{s.block_size} tokens",
        "unique blocks": f"{s.unique_blocks:,}",
        "used once": f"{s.once_share:.1%}",
        "peak live blocks": f"{s.peak_live_blocks:,} ({s.peak_live_blocks / unique:.1%})",
    }


def _seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
