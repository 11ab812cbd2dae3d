"""How bytes reach a segment file: `direct` (O_DIRECT) or `portable` (buffered, aiofiles).

`gds` has a module of its own; `selection` chooses between them.

An engine opens files; a file does positional, vectored I/O. Both are thread-safe. A partial
transfer is a short count, an error is an OSError; nothing is retried here. Buffers are used
only during the call.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from aiofiles.base import wrap

from tieredkv.executor import DaemonExecutor
from tieredkv.tiers.base import BlockBuffer

PAGE = 4096
POLL = 60.0
T = TypeVar("T")


class File(Protocol):
    """An open segment file."""

    def pwrite(self, buffers: Sequence[BlockBuffer], offset: int) -> int:
        """Bytes written, possibly fewer than given."""
        ...

    def pread(self, buffers: Sequence[BlockBuffer], offset: int) -> int:
        """Bytes read, fewer than asked at the end of the file or at any time."""
        ...

    def sync(self) -> None:
        """Make every write that has returned survive a power loss."""
        ...

    def close(self) -> None: ...


class Engine(Protocol):
    """A way of doing I/O.

    May also have `device`: True if buffers may be memory of a device; and `call_bytes`: how much
    one call should move, where that is not `transfer.CALL`.
    """

    name: str
    alignment: int
    """Addresses, offsets and sizes of all transfers must be multiples of this."""

    def open(self, path: Path) -> File:
        """Open an existing file for reading and writing. Raises OSError."""
        ...

    def close(self) -> None:
        """Release what the files share; they have been closed."""
        ...


class DirectEngine:
    """O_DIRECT: no page cache, no copy in the kernel."""

    name = "direct"
    alignment = PAGE

    def open(self, path: Path) -> File:
        return DirectFile(os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC))

    def close(self) -> None:
        """Nothing is shared."""


class DirectFile:
    """System calls on one descriptor; they release the GIL."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def pwrite(self, buffers: Sequence[BlockBuffer], offset: int) -> int:
        return os.pwritev(self._fd, cast(Any, buffers), offset)

    def pread(self, buffers: Sequence[BlockBuffer], offset: int) -> int:
        return os.preadv(self._fd, cast(Any, buffers), offset)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class PortableEngine:
    """Buffered I/O through aiofiles on one event loop in a daemon thread.

    For filesystems that refuse O_DIRECT. Slower: a hop between threads and a copy in the
    kernel per call.
    """

    name = "portable"
    alignment = 1

    def __init__(self, threads: int = 4) -> None:
        self._pool = _Pool(threads)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="tieredkv-portable", daemon=True
        )
        self._thread.start()

    def open(self, path: Path) -> File:
        return PortableFile(self, os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def run(self, call: Callable[..., Awaitable[T]], *args: object) -> T:
        """Run a wrapped system call on the loop and wait for its real end.

        Giving up earlier would hand back buffers in use, so the wait ends with the call or
        with the loop.
        """

        async def await_call() -> T:
            return await call(*args, executor=self._pool)

        future = asyncio.run_coroutine_threadsafe(await_call(), self._loop)
        while not future.done():
            try:
                return future.result(POLL)
            except TimeoutError:
                if not future.done() and not self._thread.is_alive():
                    raise OSError(errno.EIO, "the I/O loop has ended") from None
        return future.result()

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._pool.close()
        if not self._thread.is_alive():
            self._loop.close()


class PortableFile:
    """One descriptor, reached through its engine's loop."""

    _pwritev = staticmethod(wrap(os.pwritev))
    _preadv = staticmethod(wrap(os.preadv))
    _fdatasync = staticmethod(wrap(os.fdatasync))

    def __init__(self, engine: PortableEngine, fd: int) -> None:
        self._engine, self._fd = engine, fd

    def pwrite(self, buffers: Sequence[BlockBuffer], offset: int) -> int:
        return self._engine.run(self._pwritev, self._fd, buffers, offset)

    def pread(self, buffers: Sequence[BlockBuffer], offset: int) -> int:
        return self._engine.run(self._preadv, self._fd, buffers, offset)

    def sync(self) -> None:
        self._engine.run(self._fdatasync, self._fd)

    def close(self) -> None:
        os.close(self._fd)


class _Pool:
    """Daemon threads behind the one method of an executor that asyncio uses.

    The loop's own executor is joined at interpreter exit, for ever if the device hangs.
    """

    def __init__(self, threads: int) -> None:
        self._threads = DaemonExecutor(threads, "tieredkv-portable-io")

    def submit(self, fn: Callable[..., Any], *args: object) -> Future[Any]:
        future: Future[Any] = Future()

        def job() -> None:
            try:
                result = fn(*args)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._threads.submit(job)
        return future

    def close(self) -> None:
        self._threads.close(5.0)
