"""Line formats of traces: ours and Mooncake FAST25, told apart line by line."""

from __future__ import annotations

import json
import math
from typing import Any, Literal

from tieredkv.sim.request import Request, TraceError

TraceFormat = Literal["tieredkv", "mooncake"]
MOONCAKE_BLOCK = 512
"""Tokens per block of every Mooncake trace."""
FIELDS = tuple(Request.__dataclass_fields__)


class Parser:
    """Turns lines into requests; remembers what a line must agree with."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._where = ""
        self._ts = -math.inf
        self._block_size = 0
        self._sessions = Sessions()

    def __call__(self, line: str, number: int) -> Request:
        row = self._row(line, number)
        request = self._ours(row) if self._format(row) == "tieredkv" else self._mooncake(row)
        if request.ts < self._ts:
            raise self._error(f"time {request.ts} s after {self._ts} s", "sort the file by time")
        if request.block_size != (self._block_size or request.block_size):
            raise self._error(
                f"block_size {request.block_size} after {self._block_size}",
                "keep one block size per file",
            )
        self._ts, self._block_size = request.ts, request.block_size
        return request

    def format(self, line: str, number: int) -> TraceFormat:
        """The format of one line."""
        return self._format(self._row(line, number))

    def _row(self, line: str, number: int) -> dict[str, Any]:
        self._where = f"{self._path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            problem = f"{line.strip()[:60]!r} is no JSON ({error})"
            raise self._error(problem, "write one JSON object per line") from None
        if not isinstance(row, dict):
            raise self._error(f"{line.strip()[:60]!r} is no object", "write one object per line")
        return row

    def _format(self, row: dict[str, Any]) -> TraceFormat:
        if "ts" in row:
            return "tieredkv"
        if "timestamp" in row:
            return "mooncake"
        raise self._error(
            f"neither `ts` nor `timestamp` among the fields {sorted(row)[:8]}",
            "use our schema (ts in seconds) or Mooncake's (timestamp in milliseconds)",
        )

    def _ours(self, row: dict[str, Any]) -> Request:
        block_size = self._integer(row, "block_size", 1)
        length = self._integer(row, "input_length", 0)
        ids = self._ids(row)
        if len(ids) * block_size > length:
            raise self._error(
                f"{len(ids)} hash_ids of {block_size} tokens exceed input_length {length}",
                "list full blocks of the input only",
            )
        return Request(
            ts=self._seconds(row, "ts"),
            session=self._text(row, "session"),
            turn=self._integer(row, "turn", 1),
            input_length=length,
            output_length=self._integer(row, "output_length", 0),
            block_size=block_size,
            hash_ids=ids,
            category=self._optional_text(row, "category") or "",
            think=None if row.get("think") is None else self._seconds(row, "think"),
            service=None if row.get("service") is None else self._seconds(row, "service"),
            stop=self._optional_text(row, "stop") or None,
            model=self._optional_text(row, "model"),
            parent=self._optional_text(row, "parent"),
        )

    def _mooncake(self, row: dict[str, Any]) -> Request:
        length = self._integer(row, "input_length", 0)
        # The last id of a Mooncake line may cover a partial block.
        ids = self._ids(row)[: length // MOONCAKE_BLOCK]
        session, turn = self._sessions.assign(ids)
        return Request(
            ts=self._seconds(row, "timestamp") / 1000,
            session=session,
            turn=turn,
            input_length=length,
            output_length=self._integer(row, "output_length", 0),
            block_size=MOONCAKE_BLOCK,
            hash_ids=ids,
        )

    def _error(self, problem: str, remedy: str) -> TraceError:
        return TraceError(f"{self._where}: {problem}; {remedy}")

    def _integer(self, row: dict[str, Any], name: str, least: int) -> int:
        value = row.get(name)
        if type(value) is not int or value < least:
            raise self._error(f"{name} is {value!r}", f"an integer >= {least} is needed")
        return value

    def _seconds(self, row: dict[str, Any], name: str) -> float:
        value = row[name]
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise self._error(f"{name} is {value!r}", "a finite number >= 0 is needed")
        return float(value)

    def _text(self, row: dict[str, Any], name: str) -> str:
        value = row.get(name)
        if not isinstance(value, str) or not value:
            raise self._error(f"{name} is {value!r}", "a non-empty string is needed")
        return value

    def _optional_text(self, row: dict[str, Any], name: str) -> str | None:
        value = row.get(name)
        if value is not None and not isinstance(value, str):
            raise self._error(f"{name} is {value!r}", "a string is needed")
        return value

    def _ids(self, row: dict[str, Any]) -> list[int]:
        ids = row.get("hash_ids")
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
            raise self._error(f"hash_ids is {str(ids)[:60]}", "a list of integers is needed")
        if len(set(ids)) != len(ids):
            raise self._error("hash_ids names a block twice", "ids must be prefix-chained")
        if ids and not 0 <= min(ids) <= max(ids) < 1 << 64:
            raise self._error(f"hash_ids up to {max(ids)}", "ids must be in [0, 2**64)")
        return ids


class Sessions:
    """Sessions of a trace that has none: a request continues the session whose last request
    its prefix contains. One shared block is no evidence (all prompts of a deployment may
    start alike), so a session is continued from its second block on."""

    def __init__(self) -> None:
        self._tips: dict[int, tuple[str, int]] = {}
        self._count = 0

    def assign(self, ids: list[int]) -> tuple[str, int]:
        for block in reversed(ids[1:]):
            found = self._tips.pop(block, None)
            if found is not None:
                session, turn = found[0], found[1] + 1
                break
        else:
            session, turn = f"s{self._count}", 1
            self._count += 1
        if len(ids) > 1:
            self._tips[ids[-1]] = (session, turn)
        return session, turn


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
