"""Where background work runs: daemon threads in production, by hand in tests."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger(__name__)


class Executor(Protocol):
    """Runs callables some time later. `submit` never blocks and never runs `fn` itself."""

    def submit(self, fn: Callable[[], None]) -> None: ...

    def close(self, timeout: float) -> bool:
        """Stop after the work already submitted; False if some still runs at the deadline."""
        ...


class DaemonExecutor:
    """A fixed number of daemon threads, so that a hung device cannot keep a process alive.

    (concurrent.futures joins its threads at interpreter exit, for ever.) The backlog is
    bounded by the callers: the mover counts bytes, the index coalesces its commits.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._ready = threading.Condition()
        self._work: deque[Callable[[], None]] = deque()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[[], None]) -> None:
        with self._ready:
            if self._closed:
                raise RuntimeError("submit after close")
            self._work.append(fn)
            self._ready.notify()

    def close(self, timeout: float) -> bool:
        with self._ready:
            self._closed = True
            self._ready.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            with self._ready:
                while not self._work:
                    if self._closed:
                        return
                    self._ready.wait()
                fn = self._work.popleft()
            try:
                fn()
            except Exception:  # a worker must survive any job; jobs report their own failures
                log.exception("background job failed")
