"""One request of a trace."""

from __future__ import annotations

from dataclasses import dataclass

from tieredkv.errors import TieredKVError


class TraceError(TieredKVError):
    """A trace cannot be read or written; names the file, the line, the value and a remedy."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace, in arrival order."""

    ts: float
    """Arrival, seconds from the start of the trace."""
    session: str
    turn: int
    """1 for the first request of a session."""
    input_length: int
    """Tokens of the whole prompt, context included."""
    output_length: int
    block_size: int
    """Tokens per block."""
    hash_ids: list[int]
    """Ids of the full blocks of the input, root first. Not to be changed: ids are shared."""
    category: str = ""
    think: float | None = None
    """Seconds between the previous response and this request."""
    service: float | None = None
    """Seconds from arrival to the end of the response."""
    stop: str | None = None
    """What ended the response: `tool_use`, `end_turn`, ..."""
    model: str | None = None
    parent: str | None = None
    """Session that spawned this one."""
