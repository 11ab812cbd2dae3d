"""Handles that a store gives out: pins and sessions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Self, TypeAlias

from tieredkv import arguments
from tieredkv.core import Core
from tieredkv.planner import Planner

Hint: TypeAlias = Callable[[Callable[[Planner, float], None]], None]
"""Runs a planner call with the time, under the lock of an open store."""


class PinGuard:
    """A pin in force. Leaving the context, or `release`, ends it; so does its ttl."""

    def __init__(self, core: Core | None, pin: int | None, blocks: int) -> None:
        self.blocks = blocks
        """Length of the prefix that is kept."""
        self._core = core
        self._pin = pin

    def release(self) -> None:
        """End the pin. Idempotent, thread-safe."""
        if self._core is not None and self._pin is not None:
            with self._core.lock:
                self._core.planner.pins.release(self._pin)
                self._pin = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Session:
    """Hints about one session. All are optional; wrong ones cost hits, never correctness."""

    def __init__(
        self, session: str, hint: Hint, prefetch: Callable[[Sequence[bytes]], Future[int]]
    ) -> None:
        self.id = session
        self._hint = hint
        self._prefetch = prefetch

    def turn_ended(
        self,
        reason: str | None = None,
        next_tool: str | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """The turn is over: why (`tool_use`, `end_turn`, ...), which tool runs next, and how
        long the answer was."""
        arguments.text("reason", reason)
        arguments.text("next_tool", next_tool)
        arguments.count("output_tokens", output_tokens)
        self._hint(
            lambda planner, now: planner.turn_ended(
                self.id, now, finish_reason=reason, next_tool=next_tool, output_tokens=output_tokens
            )
        )

    def resume(self, keys: Sequence[bytes]) -> Future[int]:
        """The session's next request, with this chain, has arrived: its blocks stay until it is
        served, and are brought into memory as by `TieredKVStore.prefetch`."""
        self._hint(lambda planner, now: planner.queued(self.id, now))
        return self._prefetch(keys)

    def finish(self) -> None:
        """The session will not come back: its blocks are the next to go."""
        self._hint(lambda planner, now: planner.end_session(self.id, now))

    def abandon(self, keys: Sequence[bytes]) -> None:
        """Nobody will extend this chain: what hangs on nothing else is the next to go."""
        chain = arguments.chain(keys)
        self._hint(lambda planner, now: planner.abandon(chain, now))

    def fork(self, new_id: str) -> Session:
        """A new session that begins with this one's context."""
        new = arguments.session(new_id, "new_id")
        self._hint(lambda planner, now: planner.fork(self.id, new, now))
        return Session(new, self._hint, self._prefetch)
