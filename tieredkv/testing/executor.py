"""Background work, step by step."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class StepExecutor:
    """A `tieredkv.executor.Executor` that runs a job only when the test says so.

    Jobs run in order, in the thread that calls `step`; exceptions reach that caller.
    Thread-safe. `close` runs what is left.
    """

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def pending(self) -> int:
        """Jobs submitted and not started."""
        return len(self._jobs)

    def submit(self, fn: Callable[[], None]) -> None:
        """Queue `fn`. Raises RuntimeError after `close`."""
        with self._lock:
            if self._closed:
                raise RuntimeError("submit after close")
            self._jobs.append(fn)

    def step(self, n: int = 1) -> int:
        """Run up to `n` jobs; returns how many ran."""
        for ran in range(n):
            with self._lock:
                if not self._jobs:
                    return ran
                fn = self._jobs.popleft()
            fn()
        return n

    def run_all(self, limit: int = 100_000) -> int:
        """Run until nothing is pending, jobs submitted meanwhile included.

        Raises RuntimeError after `limit` jobs: they keep submitting each other.
        """
        ran = self.step(limit)
        if self.pending:
            raise RuntimeError(f"{self.pending} jobs pending after running {limit}")
        return ran

    def close(self, timeout: float) -> bool:
        """Run what is left and accept no more; True. `timeout` is not needed."""
        with self._lock:
            self._closed = True
        self.run_all()
        return True
