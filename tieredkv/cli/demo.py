"""`tieredkv demo`: replay a workload against a real store and verify every byte."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.table import Table

from tieredkv.cli.progress import progress, table_console
from tieredkv.config import Config
from tieredkv.config_load import parse
from tieredkv.errors import UsageError
from tieredkv.metrics import Stats
from tieredkv.sim.generate import stream
from tieredkv.sim.replay_bytes import Contents, Replay, Tally
from tieredkv.sim.trace import Request, TraceError, read_trace
from tieredkv.store import TieredKVStore
from tieredkv.types import Fingerprint

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

FLUSH_DEADLINE = 60.0


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one run."""

    workload: str
    seed: int
    config: Config
    tally: Tally
    stats: Stats
    problems: list[str]
    """What `check()` found, and a flush or close that did not end."""
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.tally.verification_errors and not self.problems

    def as_json(self) -> dict[str, Any]:
        tally = self.tally
        return {
            "workload": self.workload,
            "seed": self.seed,
            "block_tokens": self.config.block_tokens,
            "block_bytes": self.config.block_bytes,
            "requests": tally.requests,
            "input_tokens": tally.input_tokens,
            "hit_tokens": tally.hit_tokens,
            "potential_tokens": tally.potential_tokens,
            "hit_rate": _share(tally.hit_tokens, tally.input_tokens),
            "potential": _share(tally.potential_tokens, tally.input_tokens),
            "tiers": {
                tier.name: {
                    "capacity_bytes": config.capacity,
                    "mode": tier.mode,
                    "hit_tokens": tier.hit_tokens,
                    "hit_rate": _share(tier.hit_tokens, tally.input_tokens),
                    "read_bytes": tier.read_bytes,
                    "written_bytes": tier.written_bytes,
                    "evicted_blocks": tier.evicted_blocks,
                }
                for tier, config in zip(self.stats.tiers, self.config.tiers, strict=True)
            },
            "latency_ms": {
                name: dict(zip(("p50", "p99"), _p50_p99_ms(values), strict=True))
                for name, values in tally.seconds.items()
            },
            "get_outcomes": dict(tally.get_outcomes),
            "put_outcomes": dict(tally.put_outcomes),
            "forgotten_blocks": self.stats.forgotten_blocks,
            "verification_errors": tally.verification_errors,
            "problems": self.problems,
            "seconds": round(self.seconds, 3),
        }


@app.command()
def demo(
    preset: Annotated[
        str, typer.Option(help="Generated workload: card942, scaling, ...")
    ] = "card942",
    trace: Annotated[Path | None, typer.Option(help="A trace file instead of a preset.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many are replayed, at most.")] = 2000,
    bytes_per_token: Annotated[
        int, typer.Option(min=1, help="Stands in for the size of a model's KV cache.")
    ] = 32,
    sessions: Annotated[int | None, typer.Option(help="Of the preset; default: its own.")] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds replay equal requests.")] = 0,
    hbm: Annotated[str, typer.Option(help="Capacity of the first tier.")] = "16MiB",
    dram: Annotated[str, typer.Option(help="Capacity of the second tier.")] = "32MiB",
    nvme: Annotated[str, typer.Option(help="Capacity of the third tier.")] = "512MiB",
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Where the NVMe tier gets a temporary directory."),
    ] = None,
    output: Annotated[Literal["table", "json"], typer.Option("--format")] = "table",
) -> None:
    """Replay requests on HBM, DRAM and NVMe tiers: look up, load, verify every byte, store.

    Ends with exit code 1 if a byte was wrong or the store finds itself inconsistent.
    """
    if directory is not None and not directory.is_dir():
        raise UsageError(f"--dir {directory} is no directory; create it first")
    source = read_trace(trace) if trace else stream(preset, sessions, seed)
    workload = trace.name if trace else preset
    first = next(source, None)
    if first is None:
        raise TraceError(f"{trace}: no requests; give a trace that has some")
    with tempfile.TemporaryDirectory(prefix="tieredkv-demo-", dir=directory) as place:
        config = _config(first.block_size, bytes_per_token, (hbm, dram, nvme), Path(place))
        with progress() as bar:
            task = bar.add_task(f"replaying {workload}", total=requests)
            chosen = islice(chain([first], source), requests)
            report = run(config, chosen, workload, seed, lambda: bar.advance(task))
    if output == "json":
        typer.echo(json.dumps(report.as_json()))
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(1)


def run(
    config: Config,
    requests: Iterable[Request],
    workload: str,
    seed: int,
    done: Callable[[], None] | None = None,
) -> Report:
    """Replay `requests` on a store of its own and close it; `done` after each request."""
    started = perf_counter()
    assert config.block_bytes is not None
    contents = Contents(config.block_bytes, seed)
    store = TieredKVStore(config, fingerprint=Fingerprint(model="demo"))
    problems = []
    try:
        tally = Replay(store, contents).run(requests, done)
        if not store.flush(FLUSH_DEADLINE):
            problems.append(f"flush did not end within {FLUSH_DEADLINE} s")
        problems += store.check()
        stats = store.stats()
    finally:
        closed = store.close()
    if not closed:
        problems.append("close left operations hanging")
    return Report(workload, seed, config, tally, stats, problems, perf_counter() - started)


def _config(
    block_tokens: int, bytes_per_token: int, sizes: tuple[str, str, str], place: Path
) -> Config:
    block_bytes = block_tokens * bytes_per_token
    if block_bytes % 8:
        raise UsageError(
            f"--bytes-per-token {bytes_per_token} makes blocks of {block_bytes} bytes; choose it "
            "so that they are a multiple of 8"
        )
    hbm, dram, nvme = sizes
    document = {
        "block_tokens": block_tokens,
        "block_bytes": block_bytes,
        "tiers": [
            {"kind": "hbm", "capacity": hbm},
            {"kind": "dram", "capacity": dram},
            {
                "kind": "nvme",
                "capacity": nvme,
                "path": str(place / "nvme"),
                "segment": "64MiB",
                "min_free": "256MiB",
            },
        ],
        # The replay is faster than any engine: puts wait for room instead of dropping.
        "mover": {"room_wait": 30.0},
    }
    return parse(document, "the demo's options").config


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _p50_p99_ms(values: Any) -> tuple[float, float]:
    if not len(values):
        return 0.0, 0.0
    p50, p99 = np.percentile(np.asarray(values), (50, 99)) * 1e3
    return round(float(p50), 4), round(float(p99), 4)


def _print(report: Report) -> None:
    """The report as tables."""
    figures = report.as_json()
    console = table_console()
    sizes = " -> ".join(
        f"{tier.name} {config.capacity.human_readable()} ({tier.mode})"
        for tier, config in zip(report.stats.tiers, report.config.tiers, strict=True)
    )
    console.print(f"{report.workload}, seed {report.seed}: {sizes}")
    console.print(
        f"{figures['requests']:,} requests, {figures['input_tokens']:,} input tokens, blocks of "
        f"{figures['block_tokens']} tokens = {figures['block_bytes']:,} bytes, "
        f"{report.seconds:.1f} s\n"
    )
    hits = Table("", "hit rate", "read GB", "written GB", "evicted blocks", box=None)
    for name, tier in figures["tiers"].items():
        moved = [f"{tier[key] / 1e9:.2f}" for key in ("read_bytes", "written_bytes")]
        hits.add_row(name, f"{tier['hit_rate']:.1%}", *moved, f"{tier['evicted_blocks']:,}")
    hits.add_row("all tiers", f"{figures['hit_rate']:.2%}")
    hits.add_row("infinite cache", f"{figures['potential']:.2%}")
    console.print(hits)
    times = Table("", "p50 ms", "p99 ms", box=None)
    for name, pair in figures["latency_ms"].items():
        times.add_row(name, f"{pair['p50']:.3f}", f"{pair['p99']:.3f}")
    console.print(times)
    console.print(
        f"get {_counts(figures['get_outcomes'])}; put {_counts(figures['put_outcomes'])}; "
        f"{figures['forgotten_blocks']:,} blocks forgotten"
    )
    console.print(f"verification errors: {figures['verification_errors']}")
    for problem in report.problems:
        console.print(f"problem: {problem}")


def _counts(outcomes: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in outcomes.items()) or "none"
