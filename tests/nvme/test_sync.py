"""A failed sync fails everybody whose writes it may have been meant for."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.nvme.world import batch, get, key_of, opened, put, segment_file
from tieredkv.tiers.nvme.engines import PAGE
from tieredkv.tiers.nvme.segment import SLOT_BYTES, _GroupSync, identity
from tieredkv.types import Outcome

PATIENCE = 20.0


class FakeFile:
    """Like the kernel: a failed write-back is reported once, to whoever syncs first."""

    def __init__(self, engine: FakeEngine, path: Path) -> None:
        self._engine = engine
        self._fd = os.open(path, os.O_RDWR)

    def pwrite(self, buffers: Sequence[Any], offset: int) -> int:
        done = os.pwritev(self._fd, buffers, offset)
        self._engine.wrote(bytes(buffers[0][:1]))
        return done

    def pread(self, buffers: Sequence[Any], offset: int) -> int:
        return os.preadv(self._fd, buffers, offset)

    def sync(self) -> None:
        error, self._engine.error = self._engine.error, None
        if error is not None:
            raise error

    def close(self) -> None:
        os.close(self._fd)


class FakeEngine:
    name, alignment = "fake", 1

    def __init__(self) -> None:
        self.error: BaseException | None = None
        """Of the next sync."""
        self.wrote: Callable[[bytes], None] = lambda first: None

    def open(self, path: Path) -> FakeFile:
        return FakeFile(self, path)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EIO, "injected")])
def test_a_failed_sync_fails_all_that_share_it(error: BaseException) -> None:
    group, entered, go = _GroupSync(), threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        assert go.wait(PATIENCE)

    def bad() -> None:
        raise error

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(group.run, slow, group.failures)
        assert entered.wait(PATIENCE)
        others = [pool.submit(group.run, bad, group.failures) for _ in range(2)]
        deadline = time.monotonic() + PATIENCE
        while len(group._changed._waiters) < 2 and time.monotonic() < deadline:  # type: ignore
            time.sleep(0.001)
        go.set()
        errors = [future.exception(PATIENCE) for future in others]
        assert all(isinstance(e, MemoryError | OSError) for e in errors), errors
        first.exception(PATIENCE)  # either: it ends before the failure, or learns of it
    mark = group.failures
    group.run(lambda: None, mark)
    with pytest.raises(OSError, match=r"a sync failed|injected"):
        group.run(lambda: None, mark - 1)


def test_a_sync_that_takes_the_report_of_others_fails_them_too(tmp_path: Path) -> None:
    engine = FakeEngine()
    written, go = threading.Event(), threading.Event()

    def wrote(first: bytes) -> None:
        if first == b"W":
            engine.error = OSError(errno.EIO, "write-back failed")
            written.set()  # and its writer loses the processor before it syncs
            assert go.wait(PATIENCE)

    with opened(tmp_path, engine=engine) as tier, ThreadPoolExecutor(1) as pool:
        put(tier, [7])  # the segment is there
        engine.wrote = wrote
        first = pool.submit(tier.write, batch([0]), [memoryview(b"W" * 4096)])
        assert written.wait(PATIENCE)
        second = tier.write(batch([1]), [memoryview(b"A" * 4096)])
        go.set()
        assert second == [Outcome.FAILED]
        assert first.result(PATIENCE) == [Outcome.FAILED]
        engine.wrote = lambda first: None
        put(tier, [0, 1], generation=2)
        assert get(tier, [0, 1], generation=2) == [Outcome.OK] * 2


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt, OSError])
def test_headers_survive_a_failed_sync(kind: type[BaseException], tmp_path: Path) -> None:
    engine = FakeEngine()
    with opened(tmp_path, engine=engine) as tier:
        put(tier, [0])
        segment = tier._segments.get(0)
        assert segment is not None
        name = identity(key_of(5), 1, 1, 4096)
        mark = segment.mark()
        # the page itself may not have reached the file, so the next sync writes it again
        segment.put_headers([(5, name, 42)])
        engine.error = kind("injected")
        with pytest.raises(kind):
            segment.sync(mark)
        at = PAGE + 5 * SLOT_BYTES
        with segment_file(tmp_path).open("r+b") as file:
            file.seek(at)
            file.write(bytes(SLOT_BYTES))
        segment.sync(segment.mark())
        assert segment_file(tmp_path).read_bytes()[at : at + len(name)] == name
