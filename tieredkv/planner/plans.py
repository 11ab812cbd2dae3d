"""What the planner hands out: put plans, index changes, and its rate limit."""

from __future__ import annotations

from dataclasses import dataclass, field

from tieredkv.index.record import Deletion, Piece
from tieredkv.types import Move


@dataclass(frozen=True, slots=True)
class PutPlan:
    """What a put has to do. `keys[:known]` are stored already or on their way."""

    known: int
    pending: bool
    """The deepest known block is still being written by another put."""
    moves: list[Move]
    short: int
    """Blocks that got no slot; if `wait`, asking again later may find room."""
    wait: bool = False


@dataclass(slots=True)
class IndexOp:
    """One ordered change of the durable index."""

    ticket: int
    puts: list[Piece]
    deletes: list[Deletion]


@dataclass(slots=True)
class Effects:
    """What the caller has to start after a planner call."""

    moves: list[Move] = field(default_factory=list)
    index: IndexOp | None = None


@dataclass(frozen=True, slots=True)
class Ticket:
    """An index change on its way."""

    epoch: int
    puts: list[Piece]
    deletes: list[Deletion]


class TokenBucket:
    """A rate limit of whole tokens per second with one second of burst; rate 0: no limit."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._tokens = rate
        self._last: float | None = None

    def available(self, wanted: int, now: float) -> int:
        """How many of `wanted` could go now."""
        if not self._rate:
            return wanted
        elapsed = 0.0 if self._last is None else max(0.0, now - self._last)
        self._last = now
        self._tokens = min(max(self._rate, 1.0), self._tokens + elapsed * self._rate)
        return min(wanted, int(self._tokens))

    def take(self, wanted: int, now: float) -> int:
        """Spend up to `wanted` tokens; how many."""
        granted = self.available(wanted, now)
        self._tokens -= granted if self._rate else 0
        return granted
