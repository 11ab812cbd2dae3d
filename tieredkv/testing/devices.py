"""A device of host memory on which everything happens late."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from tieredkv.device import Event, Way

DEADLINE = 60.0


class LateEvent:
    """Implements `tieredkv.device.Event`."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: BaseException | None = None

    def query(self) -> bool:
        return self._done.is_set()

    def synchronize(self) -> None:
        """Raises RuntimeError as well if nothing has happened for a minute."""
        if not self._done.wait(DEADLINE):
            raise RuntimeError("the device hangs")
        if self.error is not None:
            raise RuntimeError(f"on the device: {self.error!r}") from self.error

    def set(self) -> None:
        self._done.set()


class _Work(NamedTuple):
    work: Callable[[], object]
    after: Any
    event: LateEvent


class LateStream:
    """Runs what is queued in order, each piece `delay` seconds after the one before it."""

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self._queue: deque[_Work | None] = deque()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="late-stream", daemon=True)
        self._thread.start()

    def queue(self, work: Callable[[], object], after: Event | None = None) -> LateEvent:
        item = _Work(work, after, LateEvent())
        with self._changed:
            self._queue.append(item)
            self._changed.notify()
        return item.event

    def close(self) -> None:
        """Run what is queued, then end."""
        with self._changed:
            self._queue.append(None)
            self._changed.notify()
        self._thread.join(DEADLINE)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                item = self._queue.popleft()
            if item is None:
                return
            try:
                if item.after is not None:
                    item.after.synchronize()
                time.sleep(self.delay)
                item.work()
            except BaseException as error:
                item.event.error = error
            item.event.set()


class LateDevice:
    """Streams that run `delay` seconds late, in host memory; implements `tieredkv.device.Device`.

    Give it to what copies on streams, with tensors of the CPU: bytes that are read before the
    event behind their copy, or a buffer that is used again before it, come out wrong, every
    time. `compute` is the stream of whoever else uses the device. Close it when done.
    """

    def __init__(self, delay: float = 0.005) -> None:
        self.compute = LateStream(delay)
        self._streams = {"in": LateStream(delay), "out": LateStream(delay)}

    def mark(self) -> LateEvent:
        return self.compute.queue(lambda: None)

    def run(self, way: Way, work: Callable[[], object], after: Event | None = None) -> LateEvent:
        return self._streams[way].queue(work, after)

    def close(self) -> None:
        for stream in (self.compute, *self._streams.values()):
            stream.close()

    def __enter__(self) -> LateDevice:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
