"""Line formats of traces, told apart line by line; and the writers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Literal

from tieredkv.sim.formats_foreign import MOONCAKE_BLOCK, Bailian, LMCache, Mooncake
from tieredkv.sim.formats_row import Row
from tieredkv.sim.request import Request, TraceError

TraceFormat = Literal["tieredkv", "mooncake", "bailian", "lmcache"]
WrittenFormat = Literal["tieredkv", "mooncake"]
FIELDS = tuple(Request.__dataclass_fields__)

_MARKS: dict[str, TraceFormat] = {
    "ts": "tieredkv",
    "chat_id": "bailian",
    "chunk_hashes": "lmcache",
    "timestamp": "mooncake",
}
"""The first of these fields that a line has says its format."""


class Parser:
    """Turns lines into requests; remembers what a line must agree with."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._ts = -math.inf
        self._block_size = 0
        self._parse: dict[TraceFormat, Callable[[Row], Request]] = {
            "tieredkv": _ours,
            "mooncake": Mooncake(),
            "bailian": Bailian(),
            "lmcache": LMCache(),
        }

    def __call__(self, line: str, number: int) -> Request:
        row = Row(line, f"{self._path}:{number}")
        request = self._parse[_format(row)](row)
        if request.ts < self._ts:
            raise row.error(f"time {request.ts} s after {self._ts} s", "sort the file by time")
        if request.block_size != (self._block_size or request.block_size):
            raise row.error(
                f"block_size {request.block_size} after {self._block_size}",
                "keep one block size per file",
            )
        self._ts, self._block_size = request.ts, request.block_size
        return request

    def format(self, line: str, number: int) -> TraceFormat:
        """The format of one line."""
        return _format(Row(line, f"{self._path}:{number}"))


def _format(row: Row) -> TraceFormat:
    for mark, name in _MARKS.items():
        if mark in row:
            return name
    raise row.error(
        f"neither `ts` nor `timestamp` among the fields {row.names()[:8]}",
        "use our schema (ts in seconds), Mooncake's, Qwen-Bailian's or LMCache's lookup log",
    )


def _ours(row: Row) -> Request:
    block_size = row.integer("block_size", 1)
    length = row.integer("input_length", 0)
    ids = row.chained("hash_ids", row.ids("hash_ids"))
    row.full_blocks("hash_ids", len(ids), block_size, length)
    return Request(
        ts=row.seconds("ts"),
        session=row.text("session"),
        turn=row.integer("turn", 1),
        input_length=length,
        output_length=row.integer("output_length", 0),
        block_size=block_size,
        hash_ids=ids,
        category=row.optional_text("category") or "",
        think=row.optional_seconds("think"),
        service=row.optional_seconds("service"),
        stop=row.optional_text("stop") or None,
        model=row.optional_text("model"),
        parent=row.optional_text("parent"),
    )


def to_json(request: Request) -> str:
    """The request as one line in our schema, without the newline."""
    row = {name: getattr(request, name) for name in FIELDS}
    row = {name: value for name, value in row.items() if value is not None}
    return json.dumps(row, separators=(",", ":"))


class MooncakeEncoder:
    """Mooncake numbers blocks from 0 in order of appearance, partial last blocks included."""

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}
        self._next = 0

    def __call__(self, request: Request) -> str:
        if request.block_size != MOONCAKE_BLOCK:
            raise TraceError(
                f"block_size is {request.block_size}; Mooncake traces have {MOONCAKE_BLOCK}-token "
                "blocks, write our format instead"
            )
        ids = [self._number(block) for block in request.hash_ids]
        if len(ids) * MOONCAKE_BLOCK < request.input_length:
            ids.append(self._fresh())
        return json.dumps(
            {
                "timestamp": round(request.ts * 1000),
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": ids,
            }
        )

    def _fresh(self) -> int:
        self._next += 1
        return self._next - 1

    def _number(self, block: int) -> int:
        known = self._ids.get(block)
        if known is None:
            known = self._ids[block] = self._fresh()
        return known
