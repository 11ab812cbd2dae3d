"""A circuit breaker: after a failure nobody tries again until a probe has succeeded."""

from __future__ import annotations

import threading
from collections.abc import Callable

PAUSE, LONGEST = 0.25, 2.0
"""Seconds from a failure to the first probe, and at most between two."""
CALM = 30.0
"""Seconds without a failure after which pauses are short again."""


class CircuitBreaker:
    """Thread-safe. Open at first: what was never reached is not known to work."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = False
        self._pause = PAUSE
        self._due = clock()
        self._failed: float | None = None
        self.failures = 0

    @property
    def closed(self) -> bool:
        """True: calls may go. A plain read, so that asking costs nothing."""
        return self._closed

    def due(self) -> float | None:
        """Seconds until the next probe; None while closed."""
        with self._lock:
            return None if self._closed else max(0.0, self._due - self._clock())

    def succeeded(self) -> None:
        """A probe has succeeded."""
        with self._lock:
            self._closed = True

    def failed(self) -> None:
        """A call or a probe has failed or hung. Pauses double while failures follow each other,
        so that a pool that answers probes and nothing else is not tried all the time."""
        with self._lock:
            now = self._clock()
            if self._failed is None or now - self._failed > CALM:
                self._pause = PAUSE
            elif self._closed or now >= self._due:  # not those that were under way together
                self._pause = min(LONGEST, 2 * self._pause)
            self._closed = False
            self._failed, self._due = now, now + self._pause
            self.failures += 1
