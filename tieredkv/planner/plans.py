"""What the planner hands out: put plans, index changes, and its rate limit."""

from __future__ import annotations

from dataclasses import dataclass, field

from tieredkv.index.record import Deletion, Piece
from tieredkv.types import Move

DAY = 86400.0  # seconds


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
    """A rate limit of whole tokens per second; rate 0: no limit. Not thread-safe."""

    def __init__(self, rate: float, burst: float | None = None) -> None:
        """`burst`: how many may be saved up. It starts with all of them; left out: with those
        of one second, and it can save up one token even where that is longer."""
        self._rate = rate
        self._burst = max(rate, 1.0) if burst is None else burst
        self._tokens = rate if burst is None else burst
        self._last: float | None = None

    @classmethod
    def daily(cls, tokens: float, batch: int) -> TokenBucket:
        """At most `tokens` in any 24 hours; 0 for no limit.

        An hour's worth can be saved up, or `batch` if that is more, but not over half of the
        day's. What is saved up counts as part of the day's tokens, so that a full bucket and a
        day of refill together do not exceed them.
        """
        burst = max(tokens / 25, min(batch, tokens / 2))
        return cls((tokens - burst) / DAY, burst)

    def available(self, wanted: int, now: float) -> int:
        """How many of `wanted` could go now."""
        if not self._rate:
            return wanted
        elapsed = 0.0 if self._last is None else max(0.0, now - self._last)
        self._last = now
        self._tokens = min(self._burst, self._tokens + elapsed * self._rate)
        return max(0, min(wanted, int(self._tokens)))

    def take(self, wanted: int, now: float) -> int:
        """Spend up to `wanted` tokens; how many."""
        granted = self.available(wanted, now)
        self.spend(granted)
        return granted

    def spend(self, tokens: int) -> None:
        """These were used, of those that were available."""
        if self._rate:
            self._tokens -= tokens
