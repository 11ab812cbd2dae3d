"""The report of one call as a single page that loads nothing: inline SVG, one style sheet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from tieredkv import __version__
from tieredkv.config_file import parse_yaml, read_document
from tieredkv.sim.plots import Plot, svg
from tieredkv.sim.report import Column, breakdown, columns, groups, heads, short_names, summary
from tieredkv.sim.result import Result
from tieredkv.sim.spec import Spec, label

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --soft: #5c6470; --line: #d9dde3;
  --page: #fff; --card: #f6f7f9; --mark: #e6f0fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa3af;
  --line: #333a44; --page: #14171c; --card: #1c2027; --mark: #1d3247; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.2rem; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .6rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
.summary { font-size: 1.08rem; margin: .4rem 0; } .soft, caption { color: var(--soft); }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: .88rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; text-align: right; white-space: nowrap; }
thead th { border-bottom: 1px solid var(--line); color: var(--soft); font-weight: 600; }
th[scope=row], thead th.name { text-align: left; } th[scope=row] { font-weight: 400; }
tbody + tbody tr:first-child > * { border-top: 1px solid var(--line); }
tr.best > * { background: var(--mark); font-weight: 600; } tr.bound { color: var(--soft); }
.plots { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
figure { margin: 0; padding: .8rem; background: var(--card); border-radius: 8px; }
figcaption { font-weight: 600; font-size: .92rem; } svg { width: 100%; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg text { font-family: system-ui, sans-serif; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
"""


def render(
    spec: Spec,
    results: Sequence[Result],
    charts: Mapping[str, Sequence[Plot]],
    constants: Mapping[str, Mapping[str, Any]],
) -> str:
    """The page. `constants`: heading -> name -> value, the cost model in force."""
    body = [
        "<h1>KV cache simulation</h1>",
        *(f'<p class="summary">{escape(text)}</p>' for text in summary(results)),
        _table("Results", results, columns(results)),
        *_figures(charts),
        _table("Hit rate by category, %", results, breakdown(results, "by_category")),
        _table(
            "Hit rate by time since the session's last turn, %",
            results,
            breakdown(results, "by_gap"),
        ),
        "<h2>Settings</h2>",
        _pairs(settings(spec)),
        "<h2>Cost constants</h2>",
        '<p class="soft">Sources: tieredkv/sim/cost.yaml; estimates are of one request on an '
        "idle replica.</p>",
        *(f"<h3>{escape(name)}</h3>{_pairs(values)}" for name, values in constants.items()),
        f'<p class="soft">tieredkv {escape(__version__)}. In bold the best policy of each '
        "setting. optimum knows the future and plays by the policies' rules, bound knows it and "
        "has no rules, infinite never evicts.</p>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>KV cache simulation</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )


def constants_in_force(spec: Spec) -> dict[str, dict[str, Any]]:
    """The constants of the cost model that the replays of `spec` use, by entry."""
    known = resources.files("tieredkv.sim").joinpath("cost.yaml").read_text("utf-8")
    presets = parse_yaml(known, "cost.yaml")
    overrides = read_document(Path(spec.cost_file)) if spec.cost_file else {}

    def entry(section: str, name: str) -> dict[str, Any]:
        values = presets[section].get(name, {}) | overrides.get(section, {}).get(name, {})
        return {
            key: f"{value:g}" if _number(value) else value
            for key, value in values.items()
            if value is not None
        }

    tiers = dict.fromkeys(tier.name for setting in spec.capacities for tier in setting)
    return {
        **({f"model {spec.model}": entry("models", spec.model)} if spec.model else {}),
        f"GPU {spec.gpu}": entry("gpus", spec.gpu),
        **{f"tier {name}": entry("tiers", name) for name in tiers},
        "prefill": presets["prefill"] | overrides.get("prefill", {}),
    }


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def settings(spec: Spec) -> dict[str, str]:
    """Option -> value, as text."""
    tier_policies = ", ".join(f"{name}={policy}" for name, policy in spec.tier_policies.items())
    return {
        "traces": ", ".join(spec.traces),
        "policies": ", ".join(spec.policies),
        "capacities": "; ".join(label(tiers) for tiers in spec.capacities),
        **({"policies of single tiers": tier_policies} if tier_policies else {}),
        "model": f"{spec.model or 'none'} on {spec.tp} x {spec.gpu}",
        **(
            {"bytes per token": f"{spec.bytes_per_token:,}"}
            if spec.bytes_per_token is not None
            else {}
        ),
        **({"cost file": spec.cost_file} if spec.cost_file else {}),
        "loop": spec.loop,
        "warm-up": f"{spec.warmup:.0%} of the requests",
        "seeds": ", ".join(map(str, spec.seeds)),
        "finish hints": ", ".join(f"{share:.0%}" for share in spec.hints) + " of the sessions",
        "NVMe writes": spec.write.replace("_", " "),
    }


def _table(title: str, results: Sequence[Result], figures: Sequence[Column]) -> str:
    if not figures:
        return ""
    found = groups(results)
    keys = heads(found)
    names = [*(heading for heading, _ in keys), "policy"]
    head = "".join(f'<th class="name" scope="col">{escape(name)}</th>' for name in names)
    head += "".join(f'<th scope="col">{escape(column.heading)}</th>' for column in figures)
    bodies = []
    for group in found:
        best = group.best()
        rows = []
        for line in group.lines:
            names = [*(key(group) for _, key in keys), line.first.policy]
            cells = "".join(f'<th scope="row">{escape(name)}</th>' for name in names)
            cells += "".join(f"<td>{escape(line.cell(column))}</td>" for column in figures)
            mark = ' class="bound"' if line.bound else ' class="best"' if line is best else ""
            rows.append(f"<tr{mark}>{cells}</tr>")
        bodies.append("<tbody>" + "\n".join(rows) + "</tbody>")
    return (
        f'<h2>{escape(title)}</h2>\n<div class="scroll"><table><thead><tr>{head}</tr></thead>\n'
        + "\n".join(bodies)
        + "</table></div>"
    )


def _figures(charts: Mapping[str, Sequence[Plot]]) -> Iterator[str]:
    names = short_names(charts)
    for number, (trace, plots) in enumerate(charts.items()):
        yield f"<h2>{escape(names[trace])}</h2>"
        yield '<div class="plots">'
        for place, plot in enumerate(plots):
            drawn = svg(plot, f"{number}-{place}").replace(
                'role="img"', f'role="img" aria-label="{escape(plot.title)}"', 1
            )
            yield f"<figure><figcaption>{escape(plot.title)}</figcaption>{drawn}</figure>"
        yield "</div>"


def _pairs(values: Mapping[str, Any]) -> str:
    rows = (f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in values.items())
    return "<dl>" + "".join(rows) + "</dl>"
