"""Tables, summaries, plots and the page, from results made by hand."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from tieredkv.errors import ConfigError, UsageError
from tieredkv.sim import plots, report
from tieredkv.sim.delays import measure
from tieredkv.sim.generate import generate
from tieredkv.sim.html import constants_in_force, render, settings
from tieredkv.sim.result import Result, Share
from tieredkv.sim.spec import Spec, parse_capacities

SPEC = Spec(
    traces=("dir/one.jsonl.gz", "generate:agentic"),
    policies=("delay",),
    capacities=parse_capacities(["nvme=40%"], ["dram=5%", "dram=10%"]),
    model="llama-3.1-70b",
)


def result(policy: str, hit: float, blocks: int = 100, seed: int = 0, **fields: object) -> Result:
    tokens = round(hit * 1_000_000)
    made = Result(
        trace="dir/one.jsonl.gz",
        policy=policy,
        capacity=f"dram={blocks}",
        tiers=[("dram", blocks), ("nvme", 4 * blocks)],
        block_tokens=512,
        block_bytes=1 << 20,
        seed=seed,
        hints=0.0,
        requests=1000,
        duration=43_200.0,
        total=Share(1000, 1_000_000, tokens, 950_000),
        hit_by_tier={"dram": tokens * 3 // 4, "nvme": tokens // 4},
        by_category={"chat": Share(400, 400_000, 100_000, 0), "none": Share(600, 600_000, 0, 0)},
        by_gap={"first turn": Share(10, 10, 0, 0), "< 15 s": Share(5, 1000, 500, 0)},
        ttft={"mean": 2 - hit, "p50": 1.0, "p90": 3.0, "p99": 4.0},
        moved_bytes={"hbm>dram": 3 * 10**9, "dram>nvme": 10**9},
        nvme_written_bytes=10**9,
        seconds=1.0,
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def sweep() -> list[Result]:
    """Two capacities; the gap between LRU and the optimum is widest at the first."""
    made = []
    for blocks, (lru, delay, optimum) in {100: (0.6, 0.7, 0.8), 200: (0.8, 0.84, 0.88)}.items():
        made += [
            result("infinite", 0.95, blocks),
            result("delay", delay, blocks, gap_closed=0.5),
            result("bound", 0.9, blocks),
            result("optimum", optimum, blocks),
            result("lru", lru, blocks, gap_closed=0.0),
        ]
    return made


def shown(results: list[Result], parts: bool = False) -> str:
    out = io.StringIO()
    for table in report.tables(results, parts):
        Console(file=out, width=300).print(table)
    return out.getvalue()


def test_derived_figures() -> None:
    made = result("lru", 0.6)
    assert made.hit_rate == 0.6
    assert made.recomputed_tokens == 350_000
    assert made.nvme_bytes_per_day == 2e9
    assert Share().hit_rate == 0.0
    assert result("lru", 0.99).recomputed_tokens == 0
    assert result("lru", 0.6, duration=0.0).nvme_bytes_per_day == 0.0


def test_the_table_has_every_figure_lru_first_and_the_bounds_last() -> None:
    lines = shown(sweep()).splitlines()
    assert lines[0].split("  ")[0] == "capacity"
    assert [line[10:].split()[0] for line in lines[1:]] == [
        *("lru", "delay", "optimum", "bound", "infinite"),
        *("lru", "delay", "optimum", "bound", "infinite"),
    ]
    assert lines[2].split() == [
        *("delay", "70.00", "52.50", "17.50", "50", "1.300", "1.000", "4.000", "0.25", "4", "2"),
    ]
    optimum = lines[3].split()
    assert optimum[4] == "-", "a bound closes no gap"
    assert optimum[-2:] == ["-", "-"], "and moves nothing"
    assert optimum[-3] == "0.15"


def test_one_tier_needs_no_column_per_tier() -> None:
    names = [c.heading for c in report.columns([result("lru", 0.5, hit_by_tier={"dram": 1})])]
    assert "dram %" not in names
    assert "dram %" in [c.heading for c in report.columns(sweep())]


def test_wear_is_a_figure_of_nvme_only() -> None:
    assert "NVMe GB/day" in [c.heading for c in report.columns(sweep())]
    memory = [result("lru", 0.5, tiers=[("dram", 100)])]
    assert "NVMe GB/day" not in [c.heading for c in report.columns(memory)]


def test_seeds_become_a_mean_and_half_the_range() -> None:
    results = [result("lru", hit, seed=seed) for seed, hit in enumerate((0.60, 0.62, 0.67))]
    assert "63.00 ± 3.50" in shown(results)
    assert "1.000 " in shown(results), "equal figures have no spread"
    (group,) = report.groups(results)
    assert len(group.lines) == 1


def test_hints_and_traces_get_columns_when_they_differ() -> None:
    assert "hints" not in shown(sweep())
    results = [*sweep(), result("lru", 0.5, hints=0.5, trace="generate:agentic")]
    head = shown(results).splitlines()[0].split()
    assert head[:4] == ["trace", "capacity", "hints", "policy"]
    assert "generate:agentic" in shown(results)


def test_names_of_traces_are_short_while_they_differ() -> None:
    assert report.short_names(["a/x.jsonl.gz", "b/y.jsonl"]) == {
        "a/x.jsonl.gz": "x",
        "b/y.jsonl": "y",
    }
    assert report.short_names(["a/x.jsonl", "b/x.jsonl.zst"]) == {
        "a/x.jsonl": "a/x.jsonl",
        "b/x.jsonl.zst": "b/x.jsonl.zst",
    }


def test_breakdown_by_category_and_gap() -> None:
    text = shown(sweep(), parts=True)
    assert "chat %  none %" in text
    assert "25.00    0.00" in text
    assert "first turn %  < 15 s %" in text
    assert "0.00     50.00" in text


def test_without_a_model_times_are_unknown() -> None:
    made = result("lru", 0.6, ttft={})
    head, row = shown([made]).splitlines()
    assert head.split("  ")[-1] == "NVMe GB/day"
    assert row.split()[5:9] == ["-", "-", "-", "-"], "gap closed and times"
    (line,) = report.to_json([made])
    assert json.loads(line)["ttft"] == {}
    assert "first token" not in report.summary([made])[0]
    assert [plot.title for plot in plots.plots([made], {})[made.trace]] == ["Token hit rate, %"]
    both = list(csv.DictReader(io.StringIO(report.to_csv([made, *sweep()]))))
    assert (both[0]["ttft.mean"], both[1]["ttft.mean"]) == ("", "1.05")


def test_json_is_one_object_per_replay_with_the_derived_figures() -> None:
    rows = [json.loads(line) for line in report.to_json(sweep())]
    assert len(rows) == 10
    assert rows[1]["policy"] == "delay"
    assert rows[1]["hit_rate"] == 0.7
    assert rows[1]["recomputed_tokens"] == 250_000
    assert rows[1]["total"]["hit_tokens"] == 700_000
    assert rows[1]["tiers"] == [["dram", 100], ["nvme", 400]]


def test_csv_has_one_row_per_replay_and_the_union_of_the_columns() -> None:
    results = [*sweep(), result("lru", 0.5, hit_by_tier={"hbm": 7}, tiers=[("hbm", 3)])]
    rows = list(csv.DictReader(io.StringIO(report.to_csv(results))))
    assert len(rows) == 11
    assert (rows[1]["policy"], rows[1]["hit_by_tier.dram"], rows[1]["gap_closed"]) == (
        "delay",
        "525000",
        "0.5",
    )
    assert (rows[10]["hit_by_tier.dram"], rows[10]["hit_by_tier.hbm"], rows[10]["tiers.hbm"]) == (
        "",
        "7",
        "3",
    )
    assert rows[0]["by_category.none.requests"] == "600"


def test_the_summary_is_about_the_capacity_where_policies_differ_most() -> None:
    assert report.summary(sweep()) == [
        "one at dram=100: delay finds 70.0 % of the input tokens, LRU 60.0 %, the optimum 80.0 %; "
        "50 % of the gap is closed. The first token takes 1.3 s on average (LRU 1.4 s)."
    ]
    only = [r for r in sweep() if r.policy != "delay"]
    assert report.summary(only) == [
        "one at dram=100: lru finds 60.0 % of the input tokens, the optimum 80.0 %. The first "
        "token takes 1.4 s on average."
    ], "LRU is not compared with itself"
    for made in only:
        made.hints, made.gap_closed = 0.5, 0.2
    assert (
        "one at dram=100 with finish hints from 50% of the sessions: lru finds 60.0 % of the input "
        "tokens, the optimum 80.0 %; 20 % of the gap from LRU without hints is closed."
    ) in report.summary(only)[0]
    assert report.summary([]) == []


class Page(HTMLParser):
    """Collects what a browser would load, ids, and whether tags are balanced."""

    VOID = frozenset({"meta", "br", "hr", "img", "path", "use", "rect"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.loads.append(f"{tag} {name}={value}")
            if name == "id":
                self.ids.append(value or "")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_is_one_file_with_tables_plots_settings_and_constants() -> None:
    trace = "dir/one.jsonl.gz"
    results = [*sweep(), result("a<b>", 0.61)]
    charts = plots.plots(results, {trace: measure(generate("agentic", 20))})
    text = render(SPEC, results, charts, constants_in_force(SPEC))
    page = Page(text)
    assert page.open == []
    assert page.loads == []
    assert "@import" not in text
    assert "http" not in text
    assert "script" not in page.seen
    assert len(page.ids) == len(set(page.ids))
    used = re.findall(r'url\(#(\w+)\)|href="#(\w+)"', text)
    assert {a or b for a, b in used} <= set(page.ids)
    assert (page.seen["svg"], page.seen["table"]) == (4, 3)
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text
    assert "a&lt;b&gt;" in text
    assert "<b>" not in text
    for said in ("one at dram=100: delay", "pcie_gbps", "55.6", "dram=5% nvme=40%", "tool_use"):
        assert said in text
    assert render(SPEC, results, charts, constants_in_force(SPEC)) == text


def test_settings_and_constants_follow_the_options(tmp_path: Path) -> None:
    assert settings(SPEC)["capacities"] == "dram=5% nvme=40%; dram=10% nvme=40%"
    own = tmp_path / "cost.yaml"
    own.write_text("gpus: {h100: {pcie_gbps: 12.5}}\nprefill: {overhead: 0.5}\n")
    spec = Spec(
        traces=("t",),
        policies=("lru",),
        capacities=parse_capacities(["dram=5%"], []),
        bytes_per_token=1000,
        cost_file=str(own),
    )
    constants = constants_in_force(spec)
    assert list(constants) == ["GPU h100", "tier dram", "prefill"]
    assert constants["GPU h100"]["pcie_gbps"] == "12.5"
    assert constants["GPU h100"]["bf16_tflops"] == "989.4"
    assert constants["prefill"]["overhead"] == 0.5
    assert settings(spec)["bytes per token"] == "1,000"
    own.write_text("[")
    with pytest.raises(ConfigError, match=r"cost\.yaml"):
        constants_in_force(spec)


def test_the_picture_has_two_charts_in_a_row(tmp_path: Path) -> None:
    results = [*sweep(), *(result(r.policy, r.hit_rate, trace="other") for r in sweep()[:5])]
    charts = plots.plots(results, {"other": measure(generate("agentic", 5))})
    assert {trace: len(found) for trace, found in charts.items()} == {
        "dir/one.jsonl.gz": 2,
        "other": 4,
    }
    path = tmp_path / "out.png"
    plots.write_png(path, charts)
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(header[i : i + 4]) for i in (16, 20))
    assert (width, height) == (1430, 3 * 520)
    with pytest.raises(UsageError, match="choose a writable place"):
        plots.write_png(tmp_path / "none" / "out.png", charts)


def test_curves_have_the_values_of_the_table() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plots.plots(sweep(), {})["dir/one.jsonl.gz"][0].draw(axes)
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}  # type: ignore[arg-type]
    assert drawn == {
        "lru": [pytest.approx(60), pytest.approx(80)],
        "delay": [pytest.approx(70), pytest.approx(84)],
        "optimum": [pytest.approx(80), pytest.approx(88)],
        "bound": [pytest.approx(90), pytest.approx(90)],
        "infinite": [pytest.approx(95), pytest.approx(95)],
    }
    assert [label.get_text() for label in axes.get_xticklabels()] == ["dram=100", "dram=200"]


def test_curves_of_one_policy_share_a_colour_and_bounds_know_no_hints() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    hinted = [result(r.policy, r.hit_rate, r.tiers[0][1], hints=0.5) for r in sweep()]
    plots.plots([*sweep(), *hinted], {})["dir/one.jsonl.gz"][0].draw(axes)
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines) == [
        *("lru, 0% hints", "delay, 0% hints", "lru, 50% hints", "delay, 50% hints"),
        *("optimum", "bound", "infinite"),
    ]
    looks = {
        name: (line.get_color(), line.get_linestyle(), line.get_marker())
        for name, line in lines.items()
    }
    assert len(set(looks.values())) == len(looks)
    assert looks["delay, 0% hints"][0] == looks["delay, 50% hints"][0] != looks["optimum"][0]


def test_one_capacity_is_a_row_per_policy_with_its_figure() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plots.plots(sweep()[:5], {})["dir/one.jsonl.gz"][0].draw(axes)
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        *("lru", "delay", "optimum", "bound", "infinite"),
    ]
    assert [text.get_text() for text in axes.texts] == ["60.00", "70.00", "80.00", "90.00", "95.00"]
    assert axes.get_xlabel() == "at dram=100"


def test_missing_matplotlib_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install 'tieredkv\[plot\]'"):
        plots.require()


def test_tables_do_not_import_matplotlib() -> None:
    import subprocess

    code = (
        "import sys, tieredkv.sim.report, tieredkv.sim.plots, tieredkv.sim.html\n"
        "sys.exit('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
