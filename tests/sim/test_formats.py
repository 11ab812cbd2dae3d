"""Trace formats of other projects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.sim.test_trace import write_lines
from tieredkv.sim.trace import Request, TraceError, read_trace, stats, trace_format, write_trace

BAILIAN = {
    "chat_id": 7,
    "parent_chat_id": -1,
    "timestamp": 1.25,
    "input_length": 40,
    "output_length": 9,
    "type": "text",
    "turn": 1,
    "hash_ids": [3, 4, 5],
}
LMCACHE = {
    "timestamp": 1_711_929_600.5,
    "request_id": "req-1",
    "model_name": "m",
    "chunk_size": 256,
    "seq_len": 600,
    "dtypes": ["bfloat16"],
    "shapes": [[2, 256, 128]],
    "chunk_hashes": ["0xaa", "0xbb"],
}


def read(tmp_path: Path, *rows: object) -> list[Request]:
    return list(read_trace(write_lines(tmp_path / "t.jsonl", *rows)))


def test_bailian_fields_and_the_partial_last_block(tmp_path: Path) -> None:
    (got,) = read(tmp_path, BAILIAN)
    assert (got.ts, got.session, got.turn, got.category) == (1.25, "7", 1, "text")
    assert (got.input_length, got.output_length, got.block_size) == (40, 9, 16)
    assert len(got.hash_ids) == 2, "40 tokens are two full blocks of 16"


def test_bailian_sessions_are_chains_of_parents(tmp_path: Path) -> None:
    chats = [(7, -1), (8, -1), (9, 7), (10, 9), (11, 9), (21, 20), (22, 20), (23, 21)]
    rows = [
        BAILIAN | {"chat_id": chat, "parent_chat_id": parent, "timestamp": t, "turn": t + 1}
        for t, (chat, parent) in enumerate(chats)
    ]
    got = read(tmp_path, *rows)
    assert [r.session for r in got] == ["7", "8", "7", "7", "7", "20", "20", "20"]
    assert [r.turn for r in got] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_bailian_ids_become_prefix_chained(tmp_path: Path) -> None:
    """An id names the content of its block: equal content elsewhere is another block."""
    contents = [[3, 4, 5], [3, 4, 9], [4, 5], [3, 3, 3]]
    rows = [
        BAILIAN | {"chat_id": i, "input_length": 48, "hash_ids": ids}
        for i, ids in enumerate(contents)
    ]
    a, b, c, d = (r.hash_ids for r in read(tmp_path, *rows))
    assert a[:2] == b[:2]
    assert a[2] != b[2]
    assert not {*a, *b} & {*c}
    assert d[0] == a[0]
    assert len({*a, *b, *c, *d}) == 8
    assert [ids[0] for ids in (a, c)] == [r.hash_ids[0] for r in read(tmp_path, rows[0], rows[2])]


def test_lmcache_fields_time_and_sessions(tmp_path: Path) -> None:
    rows = [
        LMCACHE,
        LMCACHE | {"timestamp": LMCACHE["timestamp"] + 9.5, "chunk_hashes": ["0xaa", "-0xcc"]},
        LMCACHE
        | {
            "timestamp": LMCACHE["timestamp"] + 20,
            "seq_len": 1024,
            "chunk_hashes": ["0xaa", "0xbb", "0xdd", "0xee"],
        },
    ]
    got = read(tmp_path, *rows)
    assert [r.ts for r in got] == [0.0, 9.5, 20.0]
    assert [(r.session, r.turn) for r in got] == [("s0", 1), ("s1", 1), ("s0", 2)]
    assert [r.input_length for r in got] == [600, 600, 1024]
    assert {r.output_length for r in got} == {0}
    assert {r.block_size for r in got} == {256}
    assert {r.model for r in got} == {"m"}
    assert got[2].hash_ids[:2] == got[0].hash_ids
    assert got[1].hash_ids[0] == got[0].hash_ids[0]
    assert len({block for r in got for block in r.hash_ids}) == 5


def test_lmcache_models_share_nothing(tmp_path: Path) -> None:
    one, other = read(tmp_path, LMCACHE, LMCACHE | {"model_name": "n"})
    assert not {*one.hash_ids} & {*other.hash_ids}


def test_lmcache_lines_may_be_a_second_out_of_order(tmp_path: Path) -> None:
    start = LMCACHE["timestamp"]
    rows = [LMCACHE | {"timestamp": start + t} for t in (0, 5, 4.5, 4.2, 6)]
    assert [r.ts for r in read(tmp_path, *rows)] == [0, 5, 5, 5, 6]
    with pytest.raises(TraceError, match=r"t.jsonl:6: time 4.5 s after 6.0 s; sort the file"):
        read(tmp_path, *rows, LMCACHE | {"timestamp": start + 4.5})


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize(("row", "name"), [(BAILIAN, "bailian"), (LMCACHE, "lmcache")])
def test_formats_are_recognised_and_convert_to_ours(
    tmp_path: Path, row: dict[str, object], name: str, suffix: str
) -> None:
    path = write_lines(tmp_path / "raw", row)
    assert trace_format(path) == name
    out = tmp_path / f"ours{suffix}"
    write_trace(out, read_trace(path))
    assert trace_format(out) == "tieredkv"
    assert list(read_trace(out)) == list(read_trace(path))


def test_reuse_of_a_bailian_trace_is_what_the_ids_say(tmp_path: Path) -> None:
    rows = [
        BAILIAN,
        BAILIAN
        | {
            "chat_id": 8,
            "parent_chat_id": 7,
            "turn": 2,
            "timestamp": 3,
            "input_length": 64,
            "hash_ids": [3, 4, 6, 7],
        },
    ]
    got = stats(iter(read(tmp_path, *rows)))
    assert (got.hit_tokens, got.unique_blocks, got.sessions) == (32, 4, 1)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (BAILIAN | {"chat_id": -1}, "chat_id is -1"),
        (BAILIAN | {"parent_chat_id": None}, "parent_chat_id is None"),
        (BAILIAN | {"timestamp": "x"}, "timestamp is 'x'"),
        (BAILIAN | {"turn": 0}, "turn is 0"),
        (BAILIAN | {"type": 3}, "type is 3"),
        (BAILIAN | {"hash_ids": [-4]}, "[0, 2**64)"),
        (BAILIAN | {"hash_ids": ["4"]}, "a list of integers is needed"),
        (LMCACHE | {"chunk_size": 0}, "chunk_size is 0"),
        (LMCACHE | {"seq_len": 500}, "2 chunk_hashes of 256 tokens exceed input_length 500"),
        (LMCACHE | {"chunk_hashes": [1, 2]}, "a list of strings is needed"),
        (LMCACHE | {"chunk_hashes": ["0xa", "0xa"]}, "names a block twice"),
        (LMCACHE | {"model_name": 1}, "model_name is 1"),
        ({"timestamp_s": 1}, "Qwen-Bailian"),
    ],
)
def test_bad_lines_name_the_value(tmp_path: Path, row: object, said: str) -> None:
    with pytest.raises(TraceError) as caught:
        read(tmp_path, row)
    assert said in str(caught.value)
    assert "t.jsonl:1: " in str(caught.value)


def test_a_change_of_block_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="block_size 128 after 256"):
        read(tmp_path, LMCACHE, LMCACHE | {"chunk_size": 128})


def test_long_values_do_not_flood_the_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError) as caught:
        read(tmp_path, json.dumps(LMCACHE | {"seq_len": "9" * 100_000}))
    assert len(str(caught.value)) < 400
