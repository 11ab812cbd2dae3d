"""Plots of replays and of a trace's delays. Needs matplotlib, imported when first asked for."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tieredkv.errors import UsageError
from tieredkv.sim.delays import Delays
from tieredkv.sim.report import Group, groups, hit, short_names, ttft
from tieredkv.sim.result import BOUNDS, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_KINDS = 6
"""Curves of delays in one plot: the most frequent ways to end a turn."""
_COLOURS = ("#d55e00", "#0a84c6", "#009e73", "#b8609a", "#c79000", "#6a5acd", "#8c564b", "#3aa6a0")
"""Readable on white and on black, also for the colour-blind (after Okabe and Ito)."""
_INK = "#123456"
"""Stands for the text colour of the page until the SVG is written."""
_DASHES = (":", "-.", "--")
"""Of the bounds, and of further shares of hints."""
_TICKS = {0.1: "0.1 s", 1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min", 3600: "1 h", 36e3: "10 h"}


@dataclass(frozen=True, slots=True)
class Plot:
    """One chart of one trace."""

    title: str
    draw: Callable[[Axes], None]


def require() -> None:
    """Raise UsageError with the remedy where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"plots need matplotlib ({error}): pip install 'tieredkv[plot]'"
        ) from error


def plots(
    results: Sequence[Result], delays: Mapping[str, Mapping[str, Delays]]
) -> dict[str, list[Plot]]:
    """The charts of each trace; `delays` as `delays.measure` gives them, by trace."""
    by_trace: dict[str, list[Group]] = {}
    for group in groups(results):
        by_trace.setdefault(group.trace, []).append(group)
    charts: dict[str, list[Plot]] = {}
    for trace, found in by_trace.items():
        charts[trace] = [Plot("Token hit rate, %", _curves(found, hit))]
        if any(line.first.ttft for group in found for line in group.lines):
            charts[trace].append(Plot("Mean time to first token, s", _curves(found, ttft("mean"))))
        kinds = dict(list(delays.get(trace, {}).items())[:MOST_KINDS])
        if any(kind.returned for kind in kinds.values()):
            charts[trace] += [
                Plot("Delays before the next turn", _densities(kinds)),
                Plot("Sessions whose next turn is later", _survivals(kinds)),
            ]
    return charts


def write_png(path: Path, charts: Mapping[str, Sequence[Plot]]) -> None:
    """Two charts in a row, those of a trace together. Raises UsageError where the file cannot
    be written."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = sum((len(found) + 1) // 2 for found in charts.values())
    names = short_names(charts)
    with rc_context(_style("#222222")):
        figure = Figure(figsize=(11.0, 4.0 * rows), layout="constrained")
        grid = iter(figure.subplots(rows, 2, squeeze=False).flat)
        for trace, found in charts.items():
            for plot in found:
                axes = next(grid)
                plot.draw(axes)
                axes.set_title(f"{names[trace]}: {plot.title}" if len(charts) > 1 else plot.title)
            if len(found) % 2:
                next(grid).set_axis_off()
        try:
            figure.savefig(path, format="png", dpi=130, metadata={"Software": None})
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}; choose a writable place") from error


def svg(plot: Plot, salt: str) -> str:
    """The chart as an `<svg>` element that takes text colour and font from its page.

    `salt` keeps the ids of several charts in one page apart.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    out = io.StringIO()
    with rc_context(_style(_INK) | {"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure = Figure(figsize=(5.6, 3.7), layout="constrained")
        figure.patch.set_visible(False)
        plot.draw(figure.subplots())
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]+; ", "", text)
    text = re.sub(r' id="[a-zA-Z0-9_.]+_\d+"', "", text).replace("xlink:href", "href")
    text = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" role="img">', text)
    return re.sub(r"\s*\n\s*", "\n", text).strip()


def _style(ink: str) -> dict[Any, Any]:
    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    return {
        **dict.fromkeys(names, ink),
        "grid.color": ink,
        "grid.alpha": 0.15,
        "axes.grid": True,
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": "medium",
        "legend.frameon": False,
        "legend.fontsize": "small",
        "font.size": 10,
        "lines.linewidth": 1.8,
    }


Points = dict[tuple[str, float | None], list[tuple[float, float]]]
"""(policy, share of hints; None where it does not matter) -> (capacity in bytes, figure)."""


def _curves(
    found: Sequence[Group], value: Callable[[Result], float | None]
) -> Callable[[Axes], None]:
    """A figure against capacity, one line per policy and share of hints; of one capacity a
    line of dots. Bounds know of no hints and are drawn once."""

    def draw(axes: Axes) -> None:
        ticks: dict[float, str] = {}
        points: Points = {}
        shares = list(dict.fromkeys(group.hints for group in found))
        for group in found:
            size = _bytes(group)
            ticks[size] = group.capacity
            for line in group.lines:
                y = line.mean(value)
                if y is None or (line.bound and group.hints != shares[0]):
                    continue
                hints = None if line.bound or len(shares) == 1 else group.hints
                points.setdefault((line.first.policy, hints), []).append((size, y))
        policies = dict.fromkeys(policy for policy, _ in sorted(points, key=_bounds_last))
        colours = dict(zip((p for p in policies if _coloured(p)), cycle(_COLOURS), strict=False))
        looks = {
            key: _look(key[0], colours, shares.index(key[1]) if key[1] is not None else 0)
            for key in sorted(points, key=_bounds_last)
        }
        if len(ticks) == 1:
            _dots(axes, points, looks, *ticks.values())
            return
        for key, look in looks.items():
            x, ys = zip(*sorted(points[key]), strict=True)
            axes.plot(x, ys, label=_name(*key), **look)
        _capacity_axis(axes, ticks)
        axes.legend(ncols=1 + (len(looks) > 8))

    return draw


def _dots(
    axes: Axes, points: Points, looks: Mapping[tuple[str, float | None], Any], capacity: str
) -> None:
    """One row per policy, with its figure; there is no curve through one capacity."""
    names = []
    for row, (key, look) in enumerate(looks.items()):
        ((_, x),) = points[key]
        names.append(_name(*key))
        axes.plot([x], [row], **{"marker": "|", "markersize": 9} | look | {"linestyle": "none"})
        axes.annotate(f"{x:#.4g}", (x, row), (7, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.18, y=0.08)
    axes.set_xlabel(f"at {capacity}")


def _name(policy: str, hints: float | None) -> str:
    return policy if hints is None else f"{policy}, {hints:.0%} hints"


def _bounds_last(key: tuple[str, float | None]) -> int:
    return BOUNDS.index(key[0]) + 1 if key[0] in BOUNDS else 0


def _coloured(policy: str) -> bool:
    """The yardsticks have no colour."""
    return policy != "lru" and policy not in BOUNDS


def _look(policy: str, colours: Mapping[str, str], dashes: int) -> dict[str, Any]:
    if policy in BOUNDS:
        return {"color": _ink(), "linestyle": _DASHES[_bounds_last((policy, None)) - 1], "lw": 1.1}
    marker = "s" if policy == "lru" else "o"
    filled = {} if dashes == 0 else {"markerfacecolor": "none"}
    line = ("-", *_DASHES)[dashes % (1 + len(_DASHES))]
    colour = colours.get(policy, _ink())
    return {"color": colour, "linestyle": line, "marker": marker, "markersize": 4.5, **filled}


def _ink() -> str:
    from matplotlib import rcParams

    return str(rcParams["text.color"])


def _bytes(group: Group) -> float:
    """Capacity of all tiers; an infinite cache has none."""
    sizes = (
        sum(blocks for _, blocks in line.first.tiers) * line.first.block_bytes
        for line in group.lines
        if line.first.policy != "infinite"
    )
    return float(max(sizes, default=1))


def _capacity_axis(axes: Axes, ticks: Mapping[float, str]) -> None:
    from matplotlib.ticker import NullFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ticks), [_short(text) for text in ticks.values()])
    if len(ticks) > 5:
        axes.tick_params(axis="x", labelrotation=35)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("capacity")
    axes.margins(x=0.06)


def _short(text: str) -> str:
    """Labels of several tiers are stacked."""
    return text.replace(" ", "\n") if "=" in text else text


def _densities(kinds: Mapping[str, Delays]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for (name, delays), colour in zip(kinds.items(), cycle(_COLOURS), strict=False):
            points = delays.density()
            if points:
                x, shares = zip(*points, strict=True)
                label = f"{name} ({delays.returned.total():,})"
                axes.plot(x, [100 * share for share in shares], color=colour, label=label)
        _time_axis(axes, kinds, "delay")
        axes.set_ylabel("% of the delays")
        axes.set_ylim(bottom=0)
        axes.legend()

    return draw


def _survivals(kinds: Mapping[str, Delays]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for (name, delays), colour in zip(kinds.items(), cycle(_COLOURS), strict=False):
            points = list(_steps(delays))
            if points:
                x, shares = zip(*points, strict=True)
                axes.plot(x, shares, color=colour, label=name, drawstyle="steps-post")
        _time_axis(axes, kinds, "time since the turn ended")
        axes.set_ylabel("share not yet back")
        axes.set_ylim(0, 1.02)
        axes.legend()

    return draw


def _steps(delays: Delays) -> Iterator[tuple[float, float]]:
    curve = delays.survival()
    if curve:
        yield curve[0][0] / 2, 1.0
        yield from curve


def _time_axis(axes: Axes, kinds: Mapping[str, Delays], label: str) -> None:
    edges = [t for kind in kinds.values() for t, _ in kind.survival()]
    low, high = min(edges), max(edges)
    axes.set_xscale("log")
    axes.set_xlim(low / 2, high * 1.5)
    shown = {t: text for t, text in _TICKS.items() if low / 2 <= t <= high * 1.5}
    axes.set_xticks(list(shown), list(shown.values()))
    axes.minorticks_off()
    axes.set_xlabel(label)
