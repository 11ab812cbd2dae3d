"""A device of host memory on which everything happens late."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from tieredkv.device import WAYS, Way

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


class LateStream:
    """Runs what is queued in order, each piece `delay` seconds after the one before it."""

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self._queue: deque[tuple[Callable[[], object], LateEvent] | None] = deque()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="late-stream", daemon=True)
        self._thread.start()

    def queue(self, work: Callable[[], object]) -> LateEvent:
        event = LateEvent()
        self._add((work, event))
        return event

    def close(self) -> None:
        """Run what is queued, then end."""
        self._add(None)
        self._thread.join(DEADLINE)

    def _add(self, item: tuple[Callable[[], object], LateEvent] | None) -> None:
        with self._changed:
            self._queue.append(item)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                item = self._queue.popleft()
            if item is None:
                return
            work, event = item
            time.sleep(self.delay)
            try:
                work()
            except BaseException as error:
                event.error = error
            event.set()


class LateDevice:
    """Streams that run `delay` seconds late, in host memory; implements `tieredkv.device.Device`.

    Give it to what copies on streams, with tensors of the CPU: bytes that are read before the
    event behind their copy, or a buffer that is used again before it, come out wrong, every
    time. `compute` is the stream of whoever else uses the device. Close it when done.
    """

    def __init__(self, delay: float = 0.005) -> None:
        self.compute = LateStream(delay)
        self._streams = {way: LateStream(delay) for way in WAYS}

    def mark(self) -> LateEvent:
        return self.compute.queue(lambda: None)

    def run(self, way: Way, work: Callable[[], object]) -> LateEvent:
        return self._streams[way].queue(work)

    def drain(self, way: Way) -> None:
        self._streams[way].queue(lambda: None).synchronize()

    def slow_down(self, delay: float) -> None:
        """Seconds from now on."""
        for stream in (self.compute, *self._streams.values()):
            stream.delay = delay

    def close(self) -> None:
        for stream in (self.compute, *self._streams.values()):
            stream.close()

    def __enter__(self) -> LateDevice:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
