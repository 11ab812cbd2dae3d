"""Reading, writing and measuring traces."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredkv.sim.generate import generate
from tieredkv.sim.trace import (
    Request,
    TraceError,
    read_trace,
    stats,
    to_json,
    trace_format,
    write_trace,
)

SHARED = Path(__file__).parents[3] / "shared" / "traces"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared traces")

OURS = {
    "ts": 1.5,
    "session": "a",
    "turn": 1,
    "input_length": 20,
    "output_length": 3,
    "block_size": 8,
    "hash_ids": [7, 9],
    "category": "chat",
}
MOONCAKE = {"timestamp": 1500, "input_length": 1100, "output_length": 3, "hash_ids": [0, 1, 2]}


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def test_reads_our_schema_with_and_without_optional_fields(tmp_path: Path) -> None:
    full = OURS | {
        "ts": 2,
        "think": 0.5,
        "service": 1,
        "stop": "end_turn",
        "model": "m",
        "parent": "p",
    }
    first, second = read_trace(write_lines(tmp_path / "t", OURS, "", full))
    assert first == Request(1.5, "a", 1, 20, 3, 8, [7, 9], "chat")
    assert second == Request(2.0, "a", 1, 20, 3, 8, [7, 9], "chat", 0.5, 1.0, "end_turn", "m", "p")


def test_mooncake_drops_the_partial_block_and_rebuilds_sessions(tmp_path: Path) -> None:
    rows = [
        MOONCAKE,
        MOONCAKE | {"hash_ids": [0, 8, 9]},  # shares one block only: another session
        MOONCAKE | {"timestamp": 9000, "input_length": 2048, "hash_ids": [0, 1, 3, 4]},
        MOONCAKE | {"timestamp": 9001, "input_length": 500, "hash_ids": [5]},
        MOONCAKE | {"timestamp": 9002, "input_length": 500, "hash_ids": [5]},
    ]
    got = list(read_trace(write_lines(tmp_path / "t", *rows)))
    assert [r.hash_ids for r in got] == [[0, 1], [0, 8], [0, 1, 3, 4], [], []]
    assert [(r.session, r.turn) for r in got] == [
        ("s0", 1),
        ("s1", 1),
        ("s0", 2),
        ("s2", 1),
        ("s3", 1),
    ]
    assert got[0].ts == 1.5
    assert got[0].block_size == 512


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "no JSON"),
        ("[1]", "no object"),
        ("[" * 100_000, "no JSON"),
        ({"input_length": 1}, "neither `ts` nor `timestamp`"),
        (OURS | {"ts": "now"}, "ts is 'now'"),
        (OURS | {"ts": float("nan")}, "ts is nan"),
        (OURS | {"ts": True}, "ts is True"),
        (OURS | {"ts": -1}, "ts is -1"),
        (OURS | {"session": 3}, "session is 3"),
        (OURS | {"turn": 0}, "turn is 0"),
        (OURS | {"block_size": 0}, "block_size is 0"),
        (OURS | {"input_length": 2.5}, "input_length is 2.5"),
        (OURS | {"output_length": None}, "output_length is None"),
        (OURS | {"input_length": 15}, "exceed input_length 15"),
        (OURS | {"hash_ids": "77"}, "hash_ids is 77"),
        (OURS | {"hash_ids": [1, True]}, "hash_ids is [1, True]"),
        (OURS | {"hash_ids": [1, 1]}, "names a block twice"),
        (OURS | {"hash_ids": [-1]}, "[0, 2**64)"),
        (OURS | {"hash_ids": [1 << 64]}, "[0, 2**64)"),
        (OURS | {"category": 1}, "category is 1"),
        (OURS | {"think": "x"}, "think is 'x'"),
        (OURS | {"ts": 0.5}, "sort the file by time"),
        (OURS | {"block_size": 4}, "block_size 4 after 8"),
        (MOONCAKE | {"timestamp": None}, "timestamp is None"),
        (MOONCAKE | {"hash_ids": None}, "hash_ids is None"),
    ],
)
def test_bad_lines_name_file_line_and_value(tmp_path: Path, row: object, said: str) -> None:
    path = write_lines(tmp_path / "t.jsonl", OURS, row)
    reader = read_trace(path)
    next(reader)
    with pytest.raises(TraceError) as caught:
        next(reader)
    assert f"{path}:2: " in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_round_trip_is_exact_and_reproducible(tmp_path: Path, suffix: str) -> None:
    requests = generate("agentic", sessions=6, seed=3)
    one, two = tmp_path / f"one{suffix}", tmp_path / f"two{suffix}"
    assert write_trace(one, requests) == write_trace(two, iter(requests)) == len(requests)
    assert list(read_trace(one)) == requests
    assert one.read_bytes() == two.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([one.name, two.name])


def test_mooncake_round_trip_keeps_what_the_format_holds(tmp_path: Path) -> None:
    requests = generate("card942", sessions=5, seed=1)
    path = tmp_path / "m.gz"
    write_trace(path, requests, "mooncake")
    back = list(read_trace(path))
    assert trace_format(path) == "mooncake"
    assert [r.input_length for r in back] == [r.input_length for r in requests]
    assert max(abs(a.ts - b.ts) for a, b in zip(back, requests, strict=True)) <= 0.0006
    a, b = stats(back), stats(requests)
    assert (a.hit_tokens, a.unique_blocks, a.once_share) == (
        b.hit_tokens,
        b.unique_blocks,
        b.once_share,
    )
    last = json.loads(gzip.decompress(path.read_bytes()).splitlines()[-1])
    assert len(last["hash_ids"]) == -(-last["input_length"] // 512)
    with pytest.raises(TraceError, match="block_size is 64"):
        write_trace(path, generate("card942", sessions=1, block_size=64), "mooncake")
    assert trace_format(path) == "mooncake", "a failed write must leave the old file"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("keep", [0.5, 0.97])
def test_a_cut_file_is_an_error_not_a_shorter_trace(
    tmp_path: Path, suffix: str, keep: float
) -> None:
    path = tmp_path / f"t{suffix}"
    write_trace(path, generate("card942", sessions=3))
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(TraceError, match=r"damaged|no JSON"):
        list(read_trace(path))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_concatenated_files_are_one_trace(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t{suffix}"
    requests = generate("card942", sessions=8)
    middle = len(requests) // 2
    parts = []
    for part in (requests[:middle], requests[middle:]):
        write_trace(path, part)
        parts.append(path.read_bytes())
    path.write_bytes(b"".join(parts))
    assert list(read_trace(path)) == requests


def test_unreadable_and_unwritable_files(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        next(read_trace(tmp_path / "none"))
    with pytest.raises(TraceError, match="Is a directory"):
        next(read_trace(tmp_path))
    with pytest.raises(TraceError, match="No such file"):
        write_trace(tmp_path / "none" / "t", [])
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="binary:1"):
        next(read_trace(tmp_path / "binary"))
    (tmp_path / "empty").write_text("")
    assert list(read_trace(tmp_path / "empty")) == []
    with pytest.raises(TraceError, match="no JSON"):
        trace_format(tmp_path / "empty")


def test_reports_bytes_consumed(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_trace(path, generate("card942", sessions=10))
    seen: list[int] = []
    requests = list(read_trace(path, seen.append))
    assert len(seen) == len(requests) // 64
    assert seen == sorted(seen)
    assert 0 < seen[0] < seen[-1] <= path.stat().st_size


@st.composite
def chains(draw: st.DrawFn) -> list[Request]:
    """Requests over a small tree of prefix-chained ids."""
    ids: dict[tuple[int, ...], int] = {}
    out: list[Request] = []
    ts = 0.0
    for turn in range(draw(st.integers(0, 12))):
        ts += draw(st.sampled_from([0.0, 1.0, 3.0]))
        path = draw(st.lists(st.integers(0, 1), max_size=4))
        chain = [ids.setdefault(tuple(path[: i + 1]), len(ids)) for i in range(len(path))]
        session = draw(st.sampled_from("ab"))
        out.append(Request(ts, session, turn + 1, 4 * len(chain) + 1, 2, 4, chain))
    return out


@given(chains())
def test_stats_equal_a_naive_count(requests: list[Request]) -> None:
    got = stats(iter(requests))
    uses: dict[int, list[float]] = {}
    hit = 0
    for r in requests:
        hit += sum(r.block_size for block in r.hash_ids if block in uses)
        for block in r.hash_ids:
            uses.setdefault(block, []).append(r.ts)
    assert got.hit_tokens == hit
    assert got.unique_blocks == len(uses)
    once = sum(len(times) == 1 for times in uses.values())
    assert got.once_share * max(1, len(uses)) == pytest.approx(once)
    lives = [(t[0], t[-1]) for t in uses.values() if t[-1] > t[0]]
    assert got.peak_live_blocks == max(
        (sum(a <= r.ts <= b for a, b in lives) for r in requests), default=0
    )
    assert got.requests == len(requests)
    assert got.sessions == len({r.session for r in requests})
    assert got.input_tokens == sum(r.input_length for r in requests)


def test_optional_fields_are_left_out_of_json() -> None:
    row = json.loads(to_json(Request(0.0, "a", 1, 1, 1, 8, [])))
    assert set(row) == set(OURS)


@needs_shared
@pytest.mark.parametrize(
    ("name", "requests", "sessions", "turns", "gap", "hit", "once", "live"),
    [
        ("mooncake_conversation", 12_031, 8_130, (1, 2, 7), (123, 477, 1470), 0.373, 0.74, 0.048),
        ("claude_code_tune", 22_663, 423, (35, 121, 217), (17, 114, 1400), 0.962, 0.05, 0.156),
        ("lmcache_agents", 1_566, 69, (27, 38, 42), None, 0.888, 0.26, None),
    ],
)
def test_figures_of_the_shared_traces(
    name: str,
    requests: int,
    sessions: int,
    turns: tuple[int, ...],
    gap: tuple[int, ...] | None,
    hit: float,
    once: float,
    live: float | None,
) -> None:
    got = stats(read_trace(SHARED / f"{name}.jsonl.gz"))
    assert (got.requests, got.sessions) == (requests, sessions)
    assert tuple(map(int, got.turns_p50_p90_p99)) == turns
    assert gap is None or got.gap_p50_p90_p99 == pytest.approx(gap, rel=0.001)
    assert got.hit_share == pytest.approx(hit, abs=0.0005)
    assert got.once_share == pytest.approx(once, abs=0.005)
    assert live is None or got.peak_live_blocks / got.unique_blocks == pytest.approx(
        live, abs=0.0005
    )


@needs_shared
def test_reconstructed_sessions_agree_with_the_shared_ones(tmp_path: Path) -> None:
    """As Mooncake publishes it, without sessions."""
    known = list(read_trace(SHARED / "mooncake_conversation.jsonl.gz"))
    write_trace(tmp_path / "raw.gz", known, "mooncake")
    rebuilt = list(read_trace(tmp_path / "raw.gz"))

    def predecessors(requests: list[Request]) -> list[int]:
        last: dict[str, int] = {}
        before = []
        for index, request in enumerate(requests):
            before.append(last.get(request.session, -1))
            last[request.session] = index
        return before

    pairs = zip(predecessors(known), predecessors(rebuilt), strict=True)
    assert sum(a == b for a, b in pairs) / len(known) > 0.985
    for one, two in itertools.islice(zip(known, rebuilt, strict=True), 100):
        assert len(one.hash_ids) == len(two.hash_ids)
