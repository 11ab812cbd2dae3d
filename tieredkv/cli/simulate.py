"""`tieredkv simulate`: replay traces under policies and capacities, and report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from tieredkv.cli.progress import progress, table_console
from tieredkv.config import BUILTIN_ADMISSIONS
from tieredkv.errors import UsageError
from tieredkv.plugins import ADMISSIONS, unknown_plugin
from tieredkv.sim import plots, report
from tieredkv.sim.cost import DEFAULT_MODEL
from tieredkv.sim.delays import Delays, measure
from tieredkv.sim.generate import PRESETS
from tieredkv.sim.html import constants_in_force, render
from tieredkv.sim.lab_runs import GENERATE, requests_of, run_all
from tieredkv.sim.result import BOUNDS, Result
from tieredkv.sim.spec import (
    Spec,
    parse_capacities,
    parse_integers,
    parse_pairs,
    parse_shares,
    parse_words,
)

DEFAULT_SETTINGS = ["dram=5%", "dram=10%", "dram=20%"]

Traces = Annotated[
    list[str],
    typer.Argument(metavar="TRACE...", help="Trace files, or generate:PRESET for our generator."),
]
Policies = Annotated[
    str, typer.Option("--policy", metavar="A,B", help="Eviction policies; LRU is always there.")
]
Tiers = Annotated[
    list[str] | None,
    typer.Option(
        "--tier",
        metavar="NAME=SIZE",
        help="A tier (hbm, dram, mooncake, nvme): 1TiB, 10% of the unique blocks, or 0.5live "
        "of the peak live set. Repeat for several tiers.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--capacity",
        metavar="NAME=SIZE[,...]",
        help="One setting: sizes that replace or add to --tier. Repeat for several settings.",
    ),
]
TierPolicies = Annotated[
    list[str] | None,
    typer.Option("--tier-policy", metavar="NAME=POLICY", help="Policy of one tier. Repeatable."),
]
Model = Annotated[
    str | None, typer.Option(help=f"Preset; {DEFAULT_MODEL} unless --bytes-per-token is given.")
]
TokenBytes = Annotated[
    int | None, typer.Option(help="KV cache of one token; replaces the model's.")
]
Gpu = Annotated[str, typer.Option(help="Preset of the cost model.")]
Ranks = Annotated[int, typer.Option(help="GPUs per replica.")]
CostFile = Annotated[
    Path | None, typer.Option(help="YAML with constants that replace the cost model's.")
]
Loop = Annotated[
    Literal["open", "closed"],
    typer.Option(help="Arrivals: at the trace's times, or `think` after the last response."),
]
Warmup = Annotated[float, typer.Option(help="Share of the requests replayed but not measured.")]
Seeds = Annotated[str, typer.Option("--seed", metavar="N,N", help="One or several.")]
Hints = Annotated[
    str, typer.Option(metavar="X,X", help="Shares of the sessions that say when they finish.")
]
Write = Annotated[Literal["on_evict", "through"], typer.Option(help="When blocks go to NVMe.")]
Admission = Annotated[str, typer.Option(help="Which blocks go to NVMe: all, delay, or a plug-in.")]
Jobs = Annotated[int | None, typer.Option(help="Processes; by default one per CPU.")]
Output = Annotated[Literal["table", "json", "csv"], typer.Option("--format")]
Breakdown = Annotated[
    bool, typer.Option("--breakdown", help="Also hit rates by category and by pause.")
]
Html = Annotated[Path | None, typer.Option(help="Write a self-contained report.")]
Picture = Annotated[Path | None, typer.Option(help="Write the plots as PNG.")]


def simulate(
    traces: Traces,
    policies: Policies = "lru,delay",
    tiers: Tiers = None,
    capacities: Settings = None,
    tier_policies: TierPolicies = None,
    bytes_per_token: TokenBytes = None,
    model: Model = None,
    gpu: Gpu = "h100",
    tp: Ranks = 4,
    cost_file: CostFile = None,
    loop: Loop = "open",
    warmup: Warmup = 0.0,
    seeds: Seeds = "0",
    hints: Hints = "0",
    write: Write = "on_evict",
    admission: Admission = "all",
    jobs: Jobs = None,
    output: Output = "table",
    breakdown: Breakdown = False,
    html: Html = None,
    plot: Picture = None,
) -> None:
    """Replay traces with the planner and the policies of production, on a virtual clock.

    Every table has LRU, two clairvoyant bounds and an infinite cache beside the policies asked
    for. Estimated times come from the cost model (docs/simulator.md).
    """
    settings = capacities or (None if tiers else DEFAULT_SETTINGS)
    spec = Spec(
        traces=tuple(dict.fromkeys(traces)),
        policies=parse_words("--policy", policies),
        capacities=parse_capacities(tiers or [], settings or []),
        tier_policies=parse_pairs("--tier-policy", tier_policies or []),
        model=model or (DEFAULT_MODEL if bytes_per_token is None else None),
        gpu=gpu,
        tp=tp,
        bytes_per_token=bytes_per_token,
        cost_file=str(cost_file) if cost_file else None,
        loop=loop,
        warmup=warmup,
        seeds=parse_integers("--seed", seeds),
        hints=parse_shares("--hints", hints),
        write=write,
        admission=admission,
    )
    jobs = (os.cpu_count() or 1) if jobs is None else jobs
    _check(spec, jobs, [path for path in (html, plot) if path])
    results = _run(spec, jobs)
    _print(results, output, breakdown)
    if html or plot:
        _draw(spec, results, html, plot)


def _check(spec: Spec, jobs: int, outputs: list[Path]) -> None:
    """What would otherwise fail after minutes."""
    if jobs < 1:
        raise UsageError(f"--jobs {jobs}: pass at least 1")
    for trace in spec.traces:
        preset = trace.removeprefix(GENERATE)
        if preset != trace and preset not in PRESETS:
            raise UsageError(f"{trace}: unknown preset; one of {', '.join(PRESETS)}")
        if preset == trace and not Path(trace).is_file():
            raise UsageError(f"{trace}: no such file; name a trace or {GENERATE}PRESET")
    if reason := unknown_plugin(ADMISSIONS, spec.admission, BUILTIN_ADMISSIONS):
        raise UsageError(f"--admission: {reason}")
    for path in outputs:
        plots.require()
        if not path.parent.is_dir():
            raise UsageError(f"{path}: the directory does not exist; create {path.parent}")


def _run(spec: Spec, jobs: int) -> list[Result]:
    policies = len({"lru", *spec.policies}) + len(BOUNDS)
    if any(policy != "lru" for policy in spec.tier_policies.values()):
        policies += 1  # LRU everywhere, besides LRU in the other tiers
    settings = len(spec.traces) * len(spec.capacities) * len(spec.seeds) * len(spec.hints)
    with progress() as bar:
        task = bar.add_task("replays", total=policies * settings)
        return run_all(spec, jobs, lambda _: bar.advance(task))


def _print(results: list[Result], output: str, breakdown: bool) -> None:
    if output == "json":
        for line in report.to_json(results):
            typer.echo(line)
    elif output == "csv":
        typer.echo(report.to_csv(results), nl=False)
    else:
        for sentence in report.summary(results):
            typer.echo(sentence)
        for table in report.tables(results, breakdown):
            typer.echo()
            table_console().print(table)


def _draw(spec: Spec, results: list[Result], html: Path | None, plot: Path | None) -> None:
    delays: dict[str, dict[str, Delays]] = {}
    for trace in spec.traces:
        delays[trace] = measure(requests_of(trace, spec.seeds[0]))
    charts = plots.plots(results, delays)
    if plot:
        plots.write_png(plot, charts)
    if html:
        page = render(spec, results, charts, constants_in_force(spec))
        try:
            html.write_text(page, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{html}: {error.strerror}; choose a writable place") from error
