"""`tieredkv simulate` as a user calls it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tieredkv.cli.app import app
from tieredkv.errors import UsageError
from tieredkv.sim.generate import generate
from tieredkv.sim.result import BOUNDS
from tieredkv.sim.trace import stats, write_trace

SMALL = ["--jobs", "1", "--policy", "lru,fifo"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("trace") / "small.jsonl.gz"
    write_trace(path, generate("agentic", sessions=8, seed=1))
    return str(path)


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments])


def replays(*arguments: str) -> list[dict[str, Any]]:
    done = simulate(*arguments, "--format", "json")
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_lru_and_the_bounds_are_always_there_and_in_order(trace: str) -> None:
    rows = replays(trace, "--jobs", "1", "--policy", "fifo", "--tier", "dram=5%")
    hits = {row["policy"]: row["hit_rate"] for row in rows}
    assert set(hits) == {"fifo", "lru", *BOUNDS}
    assert max(hits["fifo"], hits["lru"], hits["optimum"]) <= hits["bound"] <= hits["infinite"]
    assert [row["policy"] for row in rows] == ["lru", "fifo", *BOUNDS]
    known = stats(generate("agentic", sessions=8, seed=1))
    assert hits["infinite"] == pytest.approx(known.hit_share)
    (lru,) = (row for row in rows if row["policy"] == "lru")
    assert lru["requests"] == known.requests
    assert lru["total"]["input_tokens"] == known.input_tokens
    assert lru["tiers"] == [["dram", round(0.05 * known.unique_blocks)]]
    assert lru["capacity"] == "5 %"
    assert lru["trace"] == trace


def test_one_row_per_capacity_seed_and_share_of_hints(trace: str) -> None:
    rows = replays(
        trace, *SMALL, "--capacity", "dram=5%", "--capacity", "dram=0.5live", "--seed", "0,1",
        "--hints", "0,1",
    )  # fmt: skip
    keys = [(r["policy"], r["capacity"], r["seed"], r["hints"]) for r in rows]
    assert len(keys) == len(set(keys))
    assert set(keys) == {
        (policy, capacity, seed, hints)
        for policy in ("lru", "fifo", *BOUNDS)
        for capacity in ("5 %", "0.5x live")
        for seed in (0, 1)
        for hints in (0.0, 1.0)
    }


def test_several_tiers_with_policies_of_their_own(trace: str) -> None:
    rows = replays(
        trace, *SMALL, "--tier", "dram=2%", "--tier", "nvme=10%", "--tier-policy", "nvme=fifo"
    )
    assert [row["policy"] for row in rows] == ["lru", "lru/fifo", "fifo", *BOUNDS]
    (lru,) = (row for row in rows if row["policy"].startswith("lru/"))
    assert lru["policy"] == "lru/fifo"
    assert lru["nvme_written_bytes"] > 0
    assert sum(lru["hit_by_tier"].values()) == lru["total"]["hit_tokens"]
    assert set(lru["hit_by_tier"]) == {"dram", "nvme"}


def test_admission_says_what_goes_to_nvme(trace: str) -> None:
    tiers = ("--tier", "hbm=5%", "--tier", "nvme=10%")
    written = {
        admission: replays(trace, *SMALL, *tiers, "--admission", admission)[0]["nvme_written_bytes"]
        for admission in ("all", "delay")
    }
    assert 0 < written["delay"] < written["all"]


def test_warm_up_and_the_size_of_a_token(trace: str) -> None:
    args = (trace, *SMALL, "--tier", "dram=1GiB", "--bytes-per-token", "1024")
    whole, cut = replays(*args), replays(*args, "--warmup", "0.5")
    assert whole[0]["block_bytes"] == 512 * 1024
    assert whole[0]["tiers"] == [["dram", 2048]]
    assert abs(cut[0]["requests"] - whole[0]["requests"] / 2) <= 1
    assert cut[0]["ttft"] == {}, "no model, no times"
    assert json.dumps(cut) == json.dumps(json.loads(json.dumps(cut, allow_nan=False)))


def test_a_closed_loop_serves_the_same_requests_with_the_pauses_of_the_trace(trace: str) -> None:
    """With room for all, hits depend on the order of the requests and not on time."""
    args = (trace, *SMALL, "--tier", "dram=2live", "--seed", "3")
    opened, closed = (replays(*args, "--loop", loop)[0] for loop in ("open", "closed"))
    for field in ("input_tokens", "potential_tokens", "requests"):
        assert {name: share[field] for name, share in closed["by_category"].items()} == {
            name: share[field] for name, share in opened["by_category"].items()
        }
    pauses = [request.think for request in generate("agentic", sessions=8, seed=1)]
    assert {name: share["requests"] for name, share in closed["by_gap"].items()} == {
        "first turn": sum(pause is None for pause in pauses),
        "< 15 s": sum(pause is not None and pause < 15 for pause in pauses),
        "15 s - 2 min": sum(pause is not None and 15 <= pause < 120 for pause in pauses),
        "> 2 min": sum(pause is not None and pause >= 120 for pause in pauses),
    }
    assert closed["duration"] != opened["duration"]
    assert closed["hit_rate"] == pytest.approx(opened["hit_rate"], abs=0.01)


def test_tiers_that_all_have_a_policy_of_their_own_leave_nothing_to_compare(trace: str) -> None:
    rows = replays(trace, *SMALL, "--tier", "dram=5%", "--tier-policy", "dram=lfu")
    assert [row["policy"] for row in rows] == ["lru", "lfu", *BOUNDS]


def test_gaps_are_measured_from_lru_without_hints(trace: str) -> None:
    rows = replays(trace, *SMALL, "--tier", "dram=0.5live", "--hints", "1")
    plain = replays(trace, *SMALL, "--tier", "dram=0.5live")
    hit = {row["policy"]: row["hit_rate"] for row in rows}
    before = {row["policy"]: row for row in plain}
    gap = before["optimum"]["hit_rate"] - before["lru"]["hit_rate"]
    assert rows[0]["gap_closed"] == pytest.approx((hit["lru"] - before["lru"]["hit_rate"]) / gap)
    assert before["lru"]["gap_closed"] == 0 < rows[0]["gap_closed"]
    assert {row["gap_closed"] for row in rows if row["policy"] in BOUNDS} == {None}


def test_processes_do_not_change_the_results(trace: str) -> None:
    args = (trace, "--policy", "fifo", "--capacity", "dram=5%", "--capacity", "dram=10%")
    one, two = (
        [row | {"seconds": 0} for row in replays(*args, "--jobs", jobs)] for jobs in ("1", "2")
    )
    assert one == two


def test_the_table_starts_with_a_sentence(trace: str) -> None:
    done = simulate(trace, *SMALL, "--tier", "dram=5%", "--breakdown")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("small at 5 %: ")
    for said in ("optimum", "infinite", "TTFT mean s", "Hit rate by category", "first turn %"):
        assert said in done.stdout


def test_generated_traces_csv_and_files(tmp_path: Path) -> None:
    page, picture = tmp_path / "report.html", tmp_path / "out.png"
    done = simulate(
        "generate:scaling", *SMALL, "--tier", "dram=10%", "--format", "csv", "--html", str(page),
        "--plot", str(picture),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert {row["policy"] for row in rows} == {"lru", "fifo", *BOUNDS}
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 4
    assert "generate:scaling at 10 %: " in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.jsonl"], "none.jsonl: no such file"),
        (["generate:chess"], "unknown preset; one of card942"),
        (["generate:scaling", "--tier", "ram=1GiB"], "--tier ram=1GiB"),
        (["generate:scaling", "--policy", "lru,"], "--policy 'lru,'"),
        (["generate:scaling", "--policy", "optimum"], "'optimum': a bound"),
        (["generate:scaling", "--model", "gpt-7"], "no model 'gpt-7'"),
        (["generate:scaling", "--loop", "closed", "--bytes-per-token", "9"], "pass --model"),
        (["generate:scaling", "--admission", "delya"], "--admission: 'delya' is no built-in"),
        (["generate:scaling", "--seed", "x"], "--seed 'x'"),
        (["generate:scaling", "--hints", "2"], "--hints 2"),
        (["generate:scaling", "--jobs", "0"], "--jobs 0"),
        (["generate:scaling", "--tier-policy", "nvme=lru"], "no tier has this name"),
        (["generate:scaling", "--html", "none/report.html"], "create none"),
    ],
)
def test_what_cannot_run_is_refused_at_once(arguments: list[str], said: str) -> None:
    done = simulate(*arguments)
    assert isinstance(done.exception, UsageError)
    assert said in str(done.exception)


def test_help_names_every_option() -> None:
    done = simulate("--help")
    assert done.exit_code == 0
    for option in ("--tier-policy", "--bytes-per-token", "--breakdown", "--html", "--hints"):
        assert option in done.stdout
