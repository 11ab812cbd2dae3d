"""The eviction bench runs, on sizes that say nothing; bars and tables are worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benches import __main__ as cli
from benches import eviction, eviction_cost, eviction_rows, eviction_size, eviction_tables
from benches.eviction_size import QUICK, Size, parse
from benches.eviction_tables import BEGIN, END, Table, merge
from benches.eviction_wrong import KINDS, wrong
from tieredkv.errors import UsageError
from tieredkv.eviction.base import SessionState
from tieredkv.eviction.delay_model import DelayModel
from tieredkv.sim.result import Result, Share

ROOT = Path(__file__).parents[2]
TINY = replace(QUICK, sessions=4, policies=("lru", "delay"), capacities=("0.5live",))


def replayed(policy: str, hit: int, capacity: str, blocks: int, hints: float = 0.0) -> Result:
    """`hit` of 1,000 tokens; optimum 500, LRU 300."""
    gap = (hit - 300) / 200
    total = Share(1, 1000, hit, 500)
    return Result(
        "t", policy, capacity, [("dram", blocks)], 1, 10, 0, hints, 1, 3600.0, total,
        ttft={"mean": 1.0 - hit / 1000, "p90": 2.0}, nvme_written_bytes=hit * 10, gap_closed=gap,
    )  # fmt: skip


def verdicts(name: str, *replays: Result, whole: bool = True) -> dict[str, bool | None]:
    prefix = f"eviction.{name}."
    found = eviction_rows.one_tier(name, replays, whole)
    return {line.metric.removeprefix(prefix): line.ok for line in found}


def test_every_part_gives_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for line in eviction.run(TINY):
        assert math.isfinite(line.value), line.metric
        assert (line.ok is None) == (line.bar is None), line.metric
        assert line.metric not in found
        found[line.metric.removeprefix("eviction.")] = line
    for policy in ("lru", "delay", "optimum", "bound", "infinite"):
        assert f"agentic.0.5xlive.hints0.{policy}.hit" in found
    assert {f"agentic.0.5xlive.hints0.delay.{kind}.hit" for kind in KINDS} <= found.keys()
    assert {"agentic.0.5xlive.hints1.delay.hit", "agentic.0.5xlive.delay.least_gain_of_hints"} <= (
        found.keys()
    )
    for figure in ("hit", "ttft", "nvme_writes"):
        assert f"agentic.three_tiers.hints1.delay.{figure}" in found
    for figure in ("completion", "eviction", "guard"):
        assert found[f"cost.agentic.{figure}"].value > 0
    for policy in ("lru", "delay"):
        assert found[f"speed.agentic.{policy}"].value > 0
    assert capsys.readouterr().out == ""


def test_never_worse_than_lru_means_one_per_cent() -> None:
    lru, best = replayed("lru", 300, "1x live", 100), replayed("optimum", 500, "1x live", 100)
    for hit, ok in ((297, True), (296, False)):
        assert verdicts("t", lru, replayed("delay", hit, "1x live", 100), best) == {
            "1xlive.hints0.lru.hit": None,
            "1xlive.hints0.delay.hit": ok,
            "1xlive.hints0.delay.gap": None,
            "1xlive.hints0.optimum.hit": None,
        }


@pytest.mark.parametrize(
    ("name", "hints", "blocks", "hit", "ok"),
    [
        ("claude_code_tune", 0.0, 50, 344, True),
        ("claude_code_tune", 0.0, 50, 343, False),
        ("claude_other", 0.0, 20, 343, False),
        ("claude_code_tune", 0.0, 60, 343, None),
        ("claude_code_tune", 1.0, 50, 380, True),
        ("claude_code_tune", 1.0, 100, 380, False),
        ("mooncake_conversation", 0.0, 25, 340, True),
        ("mooncake_conversation", 1.0, 50, 439, False),
        ("card942", 0.0, 50, 318, True),
        ("card942", 0.0, 25, 300, None),
        ("agentic", 1.0, 50, 439, False),
        ("lmcache_agents", 0.0, 50, 300, None),
    ],
)
def test_the_gap_to_close_depends_on_trace_and_regime(
    name: str, hints: float, blocks: int, hit: int, ok: bool | None
) -> None:
    """The peak live set is 100 blocks."""
    live = replayed("lru", 300, "1x live", 100, hints)
    lru = replayed("lru", 300, "5 %", blocks, hints)
    ours = replayed("delay", hit, "5 %", blocks, hints)
    found = verdicts(name, live, lru, ours)
    assert found[f"5%.hints{hints:g}.delay.gap"] is ok
    assert verdicts(name, live, lru, ours, whole=False)[f"5%.hints{hints:g}.delay.gap"] is None


def test_more_hints_must_not_hit_less() -> None:
    def gain(*hits: int) -> bool | None:
        pairs = list(zip((0.0, 0.5, 1.0), hits, strict=True))
        lru = [replayed("lru", 300, "10 %", 9, hints) for hints, _ in pairs]
        ours = [replayed("delay", hit, "10 %", 9, hints) for hints, hit in pairs]
        return verdicts("t", *lru, *ours)["10%.delay.least_gain_of_hints"]

    assert gain(300, 300, 310) is True
    assert gain(300, 310, 309) is False


def test_three_tiers_are_judged_against_lru_without_hints() -> None:
    capacity = "hbm=0.3xlive nvme=1xlive"
    replays = [
        replayed(policy, hit, capacity, 9, hints)
        for hints, ours in ((0.0, 300), (1.0, 421))
        for policy, hit in (("lru", 300), ("delay", ours), ("optimum", 500))
    ]
    found = {
        line.metric.removeprefix("eviction.agentic.three_tiers."): line
        for line in eviction_rows.three_tiers("agentic", replays, whole=True)
    }
    assert found["hints0.delay.ttft"].ok is True
    assert found["hints0.delay.nvme_writes"].value == 300
    assert found["hints0.delay.nvme_writes"].ok is False  # as many as LRU
    assert found["hints1.delay.nvme_writes"].ratio == pytest.approx(421 / 300)
    assert found["hints1.delay.ttft_gap"].value == pytest.approx(60.5)
    assert found["hints1.delay.ttft_gap"].ok is True
    assert "hints0.optimum.nvme_writes" not in found


def test_statistics_are_wrong_inside_and_right_after() -> None:
    model, waiting = DelayModel(), []
    for name, reason in (("a", "tool_use"), ("b", "end_turn")):
        for turn in range(30):
            session = SessionState(name, 2, since=100.0 * turn, finish_reason=reason)
            model.completed(session, session.since)
            if turn == 29:
                waiting.append(session)
                break
            now = session.since + (1.0 if name == "a" else 50.0)
            session.running = True
            model.returned(session, now)
    right = [model.table(session).index for session in waiting]
    assert right[0] != right[1]
    with wrong("reversed"):
        assert [model.table(session).index for session in waiting] == [r[::-1] for r in right]
    with wrong("permuted"):
        shuffled = [model.table(session).index for session in waiting]
        assert shuffled != right
        assert [sorted(t) for t in shuffled] == [sorted(t) for t in right]
        assert shuffled == [model.table(session).index for session in waiting]
    with wrong("swapped"):
        for session in waiting:
            model.completed(session, session.since)
        other = [model.table(session).index for session in waiting]
        assert other == [model.table(session).index for session in reversed(waiting)][::-1]
    after = [model.table(session).index for session in waiting]
    assert other[0] == pytest.approx(after[1])
    assert other[0] != pytest.approx(after[0])


def test_watching_is_not_part_of_the_cost() -> None:
    class Busy:
        def method(self, turns: int) -> int:
            return sum(range(turns))

    clock, busy = eviction_cost.Clock(), Busy()
    clock.watch(busy, "method", lambda turns: "many" if turns > 10 else "few")
    for _ in range(5_000):
        busy.method(0)
    assert busy.method(100_000) == 4_999_950_000
    assert clock.calls == {"few": 5_000, "many": 1}
    assert clock.net("few") < clock.spent["few"]
    assert clock.net("many") > 0.5 * clock.spent["many"]


def test_tables_are_replaced_by_title(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    first = Table("`a`, one tier", ["Old."], ["capacity", "lru"], [["10 %", "1"]])
    merge(page, [first, Table("`b`, one tier", ["Kept."], ["x"], [["y"]])])
    merge(page, [replace(first, notes=["New."], rows=[["20 %", "**2**"]])])
    assert page.read_text() == (
        f"before\n{BEGIN}\n\n"
        "### `a`, one tier\n\nNew.\n\n| capacity | lru |\n| --- | ---: |\n| 20 % | **2** |\n\n"
        "### `b`, one tier\n\nKept.\n\n| x |\n| --- |\n| y |\n\n"
        f"{END}\nafter\n"
    )
    page.write_text("no marks")
    with pytest.raises(UsageError, match=r"page\.md.*needed"):
        merge(page, [first])
    assert page.read_text() == "no marks"


def test_a_table_has_a_column_per_policy_and_marks_the_best() -> None:
    found = [
        replayed(policy, hit, "10 %", 9)
        for policy, hit in (("lru", 300), ("delay", 350), ("optimum", 500), ("bound", 510))
    ]
    found.append(replayed("delay", 400, "10 %", 9, 1.0))
    table = eviction_tables.one_tier("t", "a note", found)
    assert table.head == [
        "capacity", "lru", "delay", "delay, hints 100%", "optimum",
        "gap closed by delay, hints 0% / 100%",
    ]  # fmt: skip
    assert table.rows == [["10 %", "30.00", "**35.00**", "40.00", "50.00", "25 % / 50 %"]]


def test_the_page_has_the_marks() -> None:
    page = (ROOT / "docs" / "policies.md").read_text()
    assert page.count(BEGIN) == page.count(END) == 1


def test_options() -> None:
    size = parse(["--quick", "--policy", "delay,arc", "--hints", "0,0.5", "--jobs", "2"], True)
    assert size == replace(
        QUICK, policies=("delay", "arc"), hinted=("lru", "delay"), hints=(0.0, 0.5), jobs=2,
        tables=True,
    )  # fmt: skip
    assert parse([], False) == Size()
    assert parse(["--policy", "arc"], False).hinted == ("lru",)
    assert parse(["--hinted", "arc"], False).hinted == ("arc",)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--part", "tabel"], "tabel"),
        (["--capacity", "10x"], "dram=10x"),
        (["--hints", "2"], "--hints 2"),
        (["--jobs", "0"], "--jobs 0"),
        (["--sessions", "0"], "--sessions 0"),
        (["--policy", "delai"], "delay"),
        (["--markdown", "/nowhere/page.md"], "/nowhere/page.md"),
    ],
)
def test_bad_options_are_named(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(options, False)
    assert text in capsys.readouterr().err


def test_other_benches_have_no_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["index", "--quick"])
    assert "--quick" in capsys.readouterr().err


def test_missing_traces_are_skipped_loudly(capsys: pytest.CaptureFixture[str]) -> None:
    size = replace(TINY, traces=("nowhere.jsonl", "agentic"), parts=("table",))
    with eviction_size.sources(size) as found:
        assert [source.name for source in found] == ["agentic"]
    assert "SKIPPED nowhere.jsonl" in capsys.readouterr().err


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    common = ["eviction", "--quick", "--sessions", "3", "--policy", "lru", "--part", "table"]
    assert cli.main([*common, "--json", "--markdown", str(page)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"eviction.agentic.10%.hints0.lru.hit"} <= {line["metric"] for line in lines}
    assert "### `agentic`, one tier" in page.read_text()
    assert cli.main(common) == 0
    assert "infinite" in capsys.readouterr().out
