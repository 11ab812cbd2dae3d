"""`tieredkv plan` as a user calls it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from tieredkv.cli.plan import plan
from tieredkv.errors import TieredKVError
from tieredkv.sim.curve import miss_ratio_curve
from tieredkv.sim.generate import generate
from tieredkv.sim.trace import write_trace

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(plan)

TIERS = ("--price", "dram=3.0", "--price", "nvme=0.1")
MODEL = ("--model", "llama-3.1-70b", "--tp", "4")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plan") / "card.jsonl.gz"
    write_trace(path, generate("card942", 30))
    return str(path)


def invoke(*options: str) -> Result:
    return CliRunner().invoke(app, options)


def as_json(*options: str, code: int = 0) -> dict[str, Any]:
    result = invoke(*options, "--format", "json")
    assert result.exit_code == code, (result.output, result.exception)
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_hit_rate(trace: str) -> None:
    report = as_json(trace, "--target-hit", "0.9", *TIERS, *MODEL)
    curve = miss_ratio_curve(generate("card942", 30))
    assert report["reached"] is True
    assert report["plan"]["hit_rate"] >= 0.9
    assert report["plan"]["tiers"][0]["blocks"] == 0
    blocks = report["plan"]["tiers"][1]["blocks"]
    assert curve.at(blocks) == pytest.approx(report["plan"]["hit_rate"])
    assert curve.at(blocks - 1) < 0.9
    assert report["requests"] == curve.requests
    assert report["block_bytes"] == 512 * 327_680
    assert report["infinite"]["hit_rate"] == pytest.approx(curve.infinite)
    points = report["curve"]
    assert len(points["capacity_bytes"]) == len(points["hit_rate"]) == len(points["error"]) > 30
    assert points["hit_rate"] == sorted(points["hit_rate"])
    assert report["best"] is None


def test_ttft_costs_more_the_faster_it_has_to_be(trace: str) -> None:
    costs = []
    for target in ("1.2", "0.9", "0.8"):
        report = as_json(trace, "--target-ttft", target, *TIERS, *MODEL)
        assert report["plan"]["ttft"] <= float(target)
        costs.append(report["plan"]["cost"])
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]


def test_unreachable_targets_end_with_1_and_say_what_can_be_reached(trace: str) -> None:
    result = invoke(trace, "--target-hit", "0.999", *TIERS, *MODEL)
    assert result.exit_code == 1
    assert "target not reached: hit rate 0.999 (best with everything kept: 0.9" in result.stderr
    assert "infinite" in result.stdout
    report = as_json(trace, "--target-ttft", "0.001", *TIERS, *MODEL, code=1)
    assert report["reached"] is False
    assert report["plan"] is None
    assert report["best"]["ttft"] == pytest.approx(report["infinite"]["ttft"])
    few = invoke(trace, "--target-hit", "0.9", *TIERS[:2], "--limit", "dram=2GiB", *MODEL)
    assert few.exit_code == 1
    assert "best within the limits: 0." in few.stderr


def test_table_and_sampling(trace: str) -> None:
    result = invoke(trace, "--target-hit", "0.6", *TIERS, *MODEL, "--sample", "0.2")
    assert result.exit_code == 0, result.output
    for text in ("card.jsonl.gz: ", "sampled 0.2", " ± ", "cheapest", "infinite dram", "4 x h100"):
        assert text in result.stdout
    exact = invoke(trace, "--target-hit", "0.6", *TIERS, *MODEL)
    assert "; exact" in exact.stdout
    assert "±" not in exact.stdout


def test_without_a_model(trace: str) -> None:
    options = (trace, "--target-hit", "0.5", *TIERS, "--bytes-per-token", "1000")
    report = as_json(*options)
    assert report["block_bytes"] == 512_000
    assert report["plan"]["ttft"] is None
    assert report["model"] is None
    assert " s" not in invoke(*options).stdout.split("cheapest")[1]


def test_generated_traces_and_constants_of_ones_own(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("gpus:\n  h100: {mfu: 0.25}\n")
    options = ("generate:scaling", "--target-hit", "0.5", *TIERS, *MODEL)
    slow = as_json(*options, "--cost-file", str(own))
    fast = as_json(*options)
    assert slow["trace"] == "generate:scaling"
    assert slow["plan"]["ttft"] > 1.5 * fast["plan"]["ttft"]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plot(trace: str, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"curve{suffix}"
    options = ("--target-hit", "0.8", *TIERS, *MODEL, "--sample", "0.5", "--plot", str(out))
    assert invoke(trace, *options).exit_code == 0
    start = out.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if suffix == ".png" else b"<?xml" in start


def test_matplotlib_is_only_needed_for_plots(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert invoke(trace, "--target-hit", "0.8", *TIERS, *MODEL).exit_code == 0
    result = invoke(trace, "--target-hit", "0.8", *TIERS, *MODEL, "--plot", str(tmp_path / "a.png"))
    assert "pip install 'tieredkv[plot]'" in str(result.exception)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (TIERS + MODEL, "no target: pass --target-hit"),
        (("--target-hit", "0.9", *MODEL), "no --price"),
        (("--target-hit", "0.9", "--price", "dram", *MODEL), "--price dram: write NAME=VALUE"),
        (("--target-hit", "0.9", "--price", "dram=x", *MODEL), "'x' is no number"),
        (("--target-hit", "0.9", "--price", "dran=1", *MODEL), "no tier 'dran'.*'dram'"),
        (("--target-hit", "0.9", "--price", "dram=-1", *MODEL), "price of dram is -1"),
        (("--target-hit", "1.9", *TIERS, *MODEL), "1.9: pass a share"),
        (("--target-hit", "0.9", *TIERS, "--model", "llama"), "no model 'llama'"),
        (("--target-hit", "0.9", *TIERS, *MODEL, "--gpu", "h10"), "no gpu 'h10'"),
        (("--target-hit", "0.9", *TIERS, *MODEL, "--limit", "dram=10%"), "write bytes"),
        (("--target-hit", "0.9", *TIERS, *MODEL, "--limit", "hbm=1GiB"), "limit but no price"),
        (("--target-hit", "0.9", *TIERS, *MODEL, "--sample", "0"), "sample=0"),
        (("--target-hit", "0.9", *TIERS, *MODEL, "--plot", "x.doc"), "--plot x.doc"),
    ],
)
def test_wrong_options(trace: str, options: tuple[str, ...], said: str) -> None:
    result = invoke(trace, *options)
    assert isinstance(result.exception, TieredKVError)
    assert re.search(said, str(result.exception)), str(result.exception)


def test_unreadable_trace(tmp_path: Path) -> None:
    result = invoke(str(tmp_path / "none"), "--target-hit", "0.9", *TIERS, *MODEL)
    assert "name an existing trace file" in str(result.exception)
    result = invoke("generate:nope", "--target-hit", "0.9", *TIERS, *MODEL)
    assert "unknown preset 'nope'" in str(result.exception)


def test_the_verb_is_registered() -> None:
    from tieredkv.cli.app import app as root

    result = CliRunner().invoke(root, ["plan", "--help"])
    assert result.exit_code == 0
    assert "target" in result.output
