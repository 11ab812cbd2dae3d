"""`tieredkv plan`: the cheapest tier sizes that reach a hit rate or a time to first token."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.table import Table

from tieredkv.cli.progress import progress, table_console
from tieredkv.config_file import read_document
from tieredkv.errors import UsageError
from tieredkv.sim.cost import DEFAULT_MODEL, CostModel
from tieredkv.sim.curve import Curve, miss_ratio_curve
from tieredkv.sim.generate import stream
from tieredkv.sim.request import Request
from tieredkv.sim.sizing import Best, Plan, Sizing
from tieredkv.sim.spec import parse_pairs, parse_tier
from tieredkv.sim.trace import read_trace

GENERATED = "generate:"
CURVE_POINTS = 60


@dataclass(frozen=True, slots=True)
class Report:
    """What one call found."""

    trace: str
    curve: Curve
    cost: CostModel
    sizing: Sizing
    prices: Mapping[str, float]
    targets: Mapping[str, float | None]
    found: Plan | Best

    def as_json(self) -> dict[str, Any]:
        curve, cost, found = self.curve, self.cost, self.found
        capacity = _shown(curve)
        reached = isinstance(found, Plan)
        return {
            "trace": self.trace,
            "requests": curve.requests,
            "input_tokens": curve.input_tokens,
            "block_tokens": curve.block_tokens,
            "block_bytes": self.sizing.block_bytes,
            "unique_blocks": curve.unique_blocks,
            "sample": curve.sample,
            "model": cost.model,
            "gpu": cost.gpu,
            "tp": cost.tp,
            "price_per_gib": dict(self.prices),
            **self.targets,
            "reached": reached,
            "plan": _plan_json(found) if isinstance(found, Plan) else None,
            "best": None if isinstance(found, Plan) else _seconds_or_null(asdict(found)),
            "infinite": _plan_json(self.sizing.infinite()),
            "curve": {
                "capacity_bytes": (capacity * self.sizing.block_bytes).tolist(),
                "hit_rate": np.round(curve.at(capacity), 6).tolist(),
                "error": np.round(curve.error_at(capacity), 6).tolist(),
            },
        }


def plan(
    trace: Annotated[str, typer.Argument(help="A trace file, or generate:PRESET.")],
    target_hit: Annotated[
        float | None, typer.Option(help="Share of the input tokens to be hit, e.g. 0.92.")
    ] = None,
    target_ttft: Annotated[
        float | None, typer.Option(help="Mean seconds to the first token; needs a model.")
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(help="TIER=PRICE per GiB, any currency; these tiers are used. Repeat."),
    ] = None,
    limit: Annotated[
        list[str] | None, typer.Option(help="TIER=SIZE, the most it may have. Repeat.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help=f"Preset; {DEFAULT_MODEL} unless --bytes-per-token is given.")
    ] = None,
    bytes_per_token: Annotated[
        int | None, typer.Option(min=1, help="Of KV cache; instead of the model's.")
    ] = None,
    gpu: Annotated[str, typer.Option(help="Preset of the GPU.")] = "h100",
    tp: Annotated[int, typer.Option(min=1, help="GPUs that share one replica.")] = 4,
    cost_file: Annotated[
        Path | None, typer.Option(help="YAML that replaces constants of the cost model.")
    ] = None,
    sample: Annotated[
        float, typer.Option(help="Share of the blocks to look at; 1 is exact.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the sampled blocks.")] = 0,
    output: Annotated[Literal["table", "json"], typer.Option("--format")] = "table",
    plot: Annotated[Path | None, typer.Option(help="Draw the curve to a .png or .svg.")] = None,
) -> None:
    """Size tiers for a trace: hit rate against capacity under LRU, and the cheapest sizes.

    Ends with exit code 1 if no sizes reach the target.
    """
    pyplot = _pyplot(plot) if plot else None
    prices = _prices(price or [])
    limits = _limits(limit or [])
    overrides = read_document(cost_file) if cost_file else None
    model = model or (DEFAULT_MODEL if bytes_per_token is None else None)
    cost = CostModel.load(model, gpu, tp, bytes_per_token, overrides)
    if target_hit is None and target_ttft is None:
        raise UsageError("no target: pass --target-hit SHARE, --target-ttft SECONDS, or both")
    with _requests(trace, seed) as requests:
        curve = miss_ratio_curve(requests, sample, seed)
    sizing = Sizing(curve, cost, prices, limits)
    targets = {"target_hit": target_hit, "target_ttft": target_ttft}
    name = trace if trace.startswith(GENERATED) else Path(trace).name
    found = sizing.cheapest(target_hit, target_ttft)
    report = Report(name, curve, cost, sizing, prices, targets, found)
    if output == "json":
        typer.echo(json.dumps(report.as_json()))
    else:
        _print(report)
    if plot is not None:
        _draw(pyplot, report, plot)
    if isinstance(found, Best):
        typer.echo(_unreached(report, found), err=True)
        raise typer.Exit(1)


@contextmanager
def _requests(trace: str, seed: int) -> Iterator[Iterator[Request]]:
    if trace.startswith(GENERATED):
        yield stream(trace.removeprefix(GENERATED), seed=seed)
        return
    path = Path(trace)
    with progress() as bar:
        size = path.stat().st_size if path.is_file() else None
        task = bar.add_task(path.name, total=size)
        yield read_trace(path, lambda position: bar.update(task, completed=position))


def _prices(texts: list[str]) -> dict[str, float]:
    prices = {}
    for name, text in parse_pairs("--price", texts).items():
        try:
            prices[name] = float(text)
        except ValueError:
            raise UsageError(f"--price {name}={text}: {text!r} is no number") from None
    if not prices:
        raise UsageError("no --price: pass --price TIER=PRICE per GiB for each tier to use")
    return prices


def _limits(texts: list[str]) -> dict[str, int]:
    limits = {}
    for name, text in parse_pairs("--limit", texts).items():
        size = parse_tier(f"{name}={text}")
        if size.unit != "bytes":
            raise UsageError(f"--limit {name}={text}: write bytes, such as 512GiB")
        limits[name] = int(size.amount)
    return limits


def _unreached(report: Report, best: Best) -> str:
    parts = []
    hit, ttft = report.targets["target_hit"], report.targets["target_ttft"]
    allowed = "with everything kept" if not report.sizing.limited else "within the limits"
    if hit is not None:
        parts.append(f"hit rate {hit:g} (best {allowed}: {best.hit_rate:.4f})")
    if ttft is not None:
        parts.append(f"mean TTFT {ttft:g} s (best {allowed}: {best.ttft:.3f} s)")
    return f"target not reached: {' and '.join(parts)}"


def _plan_json(plan: Plan) -> dict[str, Any]:
    return _seconds_or_null(asdict(plan))


def _seconds_or_null(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and isnan(v) else v for k, v in values.items()}


def _shown(curve: Curve) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Capacities to print and draw: each a constant factor from the next."""
    full = int(curve.capacity[-1])
    return np.unique(np.geomspace(max(1, full / 1000), max(1, full), CURVE_POINTS).astype(np.int64))


def _print(report: Report) -> None:
    curve, cost, found = report.curve, report.cost, report.found
    console = table_console()
    console.print(
        f"{report.trace}: {curve.requests:,} requests, {curve.input_tokens:,} input tokens, "
        f"{curve.unique_blocks:,} unique blocks of {_size(report.sizing.block_bytes)}; "
        f"{cost.model or 'no model'}, {cost.tp} x {cost.gpu}; "
        + ("exact" if curve.sample == 1 else f"sampled {curve.sample:.3g}, 99 % intervals")
    )
    shape = Table("capacity", "hit rate", box=None, pad_edge=False)
    for capacity in _shown(curve)[:: CURVE_POINTS // 12]:
        error = float(curve.error_at(capacity))
        text = f"{float(curve.at(capacity)):.2%}" + (f" ± {error:.2%}" if error else "")
        shape.add_row(_size(int(capacity) * report.sizing.block_bytes), text)
    console.print(shape)
    console.print()
    table = Table("", "size", "hit rate", "cost", "mean TTFT", box=None, pad_edge=False)
    if isinstance(found, Plan):
        for tier in found.tiers:
            table.add_row(
                tier.name, _size(tier.nbytes), f"{tier.hit_rate:.2%}", f"{tier.cost:,.2f}"
            )
        _total(table, "cheapest", found)
    fastest = report.sizing.names[0]
    _total(table, f"infinite {fastest}", report.sizing.infinite(), priced=False)
    console.print(table)


def _total(table: Table, name: str, plan: Plan, priced: bool = True) -> None:
    rate = f"{plan.hit_rate:.2%}" + (f" ± {plan.error:.2%}" if plan.error else "")
    ttft = "" if isnan(plan.ttft) else f"{plan.ttft:.3f} s"
    size = _size(sum(tier.nbytes for tier in plan.tiers))
    table.add_row(name, size, rate, f"{plan.cost:,.2f}" if priced else "", ttft)


def _size(nbytes: float) -> str:
    units = iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while nbytes >= 1024 and unit != "TiB":
        nbytes, unit = nbytes / 1024, next(units)
    return f"{nbytes:.4g} {unit}"


def _pyplot(path: Path) -> Any:
    """matplotlib without a display; loaded before anything is computed."""
    if path.suffix not in (".png", ".svg", ".pdf") or not path.parent.is_dir():
        raise UsageError(f"--plot {path}: name a .png, .svg or .pdf in an existing directory")
    try:
        import matplotlib
    except ImportError:
        raise UsageError(
            "--plot needs matplotlib; install it: pip install 'tieredkv[plot]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _draw(pyplot: Any, report: Report, path: Path) -> None:
    curve, found = report.curve, report.found
    capacity = _shown(curve)
    size = capacity * report.sizing.block_bytes / (1 << 30)
    rate, error = curve.at(capacity), curve.error_at(capacity)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(size, rate, label="LRU")
    if error.any():
        axes.fill_between(size, rate - error, rate + error, alpha=0.25, label="99 % interval")
    axes.axhline(curve.infinite, linestyle=":", color="gray", label="infinite cache")
    if report.targets["target_hit"] is not None:
        axes.axhline(report.targets["target_hit"], linestyle="--", color="green", label="target")
    if isinstance(found, Plan):
        total = 0
        for tier in found.tiers:
            total += tier.nbytes
            if tier.nbytes:
                axes.axvline(total / (1 << 30), color="black", linewidth=0.8)
                axes.text(total / (1 << 30), 0.02, f"{tier.name} ", ha="right")
    axes.set(xscale="log", ylim=(0, 1), xlabel="capacity, GiB", ylabel="token hit rate")
    axes.set_title(report.trace)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
