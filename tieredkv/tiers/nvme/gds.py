"""The engine `gds`: kvikio moves segments to and from host memory or memory of a GPU.

In mode `gds` cuFile moves device memory by DMA; in mode `compat` kvikio copies it through
pinned host memory. Host memory is read and written with O_DIRECT in both. Whether GPUDirect
Storage works is asked in a process of its own (`gds_probe`).

kvikio's defaults belong to the process: this engine has it use at least `THREADS` threads and
O_DIRECT wherever the filesystem takes it.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import importlib.util
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from tieredkv.errors import ConfigError
from tieredkv.tiers.base import BlockBuffer
from tieredkv.tiers.nvme.engines import PAGE, File

log = logging.getLogger(__name__)

THREADS = 8
TASK = 1 << 20  # bytes that a thread moves at once
CALL = 16 << 20
DRIVER = "libcuda.so.1"
ERRNOS = {os.strerror(code): code for code in errno.errorcode}
PLACE = re.compile(r"^.* at: \S+:\d+: ")
END_OF_FILE = "EOF"

_opening = threading.Lock()


def missing() -> str | None:
    """What kvikio would need and this machine has not; imports nothing."""
    if importlib.util.find_spec("kvikio") is None:
        return "kvikio is not installed: pip install 'tieredkv[gds-cu13]' (CUDA 12: [gds-cu12])"
    try:
        ctypes.CDLL(DRIVER)
    except OSError as error:  # kvikio asks the driver about every buffer, of the host as well
        return f"the CUDA driver is missing ({error}): install it"
    return None


def load() -> Any:
    """The module kvikio. Raises ConfigError if it or what it needs is missing."""
    lack = missing()
    if lack is None:
        try:
            importlib.import_module("kvikio.defaults")
            return importlib.import_module("kvikio")
        except (ImportError, OSError, RuntimeError) as error:  # the latter without nvidia-cufile
            lack = f"kvikio does not load ({error}): pip install 'tieredkv[gds-cu13]'"
    raise ConfigError(f"engine: gds: {lack}, or use engine: auto")


class GdsEngine:
    """Files through kvikio; implements `Engine`. Thread-safe.

    Buffers may also be contiguous uint8 vectors of a device: anything with len(), slices and
    `__cuda_array_interface__`, as torch tensors have. The engine waits for the device's legacy
    default stream and for no other: what a buffer holds must be there, or be ordered before
    that stream.
    """

    alignment = PAGE
    call_bytes = CALL
    """What a call should move at least: its parts run in parallel."""

    def __init__(self, mode: Literal["gds", "compat"]) -> None:
        """Set kvikio's defaults. Raises ConfigError where it cannot be used."""
        self.name: str = mode
        self.device = mode == "gds"
        """May buffers be memory of a device? In mode `compat` they could, but that saves no copy,
        and what passes through host memory has a checksum."""
        self._kvikio = load()
        self._pid = os.getpid()
        self._registered: dict[int, Any] = {}
        self._registering = threading.Lock()
        defaults = self._kvikio.defaults
        with _opening:
            defaults.set({"auto_direct_io_read": True, "auto_direct_io_write": True})
            if defaults.get("num_threads") < THREADS:
                defaults.set("num_threads", THREADS)

    def open(self, path: Path) -> File:
        """Raises OSError, EINVAL where the filesystem refuses O_DIRECT."""
        self.check_process()
        fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        try:
            with self._mode(), _errors():
                file = self._kvikio.CuFile(path, "r+")
            if not file.is_direct_io_supported():  # it did open: only a descriptor was lacking
                file.close()
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        except BaseException:
            os.close(fd)
            raise
        return GdsFile(self, fd, file)

    def register(self, buffer: Any) -> None:
        """Make the device allocation that holds `buffer` known to cuFile, once.

        Without it cuFile copies through memory of its own. The allocation is kept alive until
        `close`. Does nothing in mode `compat`. Raises OSError.
        """
        with self._registering:
            address = buffer.__cuda_array_interface__["data"][0]
            if address not in self._registered:
                self._registration(self._kvikio.memory_register, buffer)
                self._registered[address] = buffer

    def close(self) -> None:
        """Deregister what is left. Idempotent; does nothing in a forked child."""
        with self._registering:
            left, self._registered = list(self._registered.values()), {}
            for buffer in left if self.usable else ():
                try:
                    self._registration(self._kvikio.memory_deregister, buffer)
                except OSError as error:  # the driver may have ended before us
                    log.warning("device memory stays registered: %s", error)

    @property
    def usable(self) -> bool:
        """False in a forked child, where kvikio's threads and CUDA are gone."""
        return self._pid == os.getpid()

    def check_process(self) -> None:
        """Raises OSError in a forked child."""
        if not self.usable:
            raise OSError(errno.EIO, "kvikio does not survive a fork")

    def _registration(self, call: Callable[[Any], None], buffer: Any) -> None:
        self.check_process()
        if self.name == "gds":
            with self._mode(), _errors():
                call(buffer)

    @contextmanager
    def _mode(self) -> Iterator[None]:
        """kvikio takes the mode of a file from a default of the process."""
        modes = self._kvikio.CompatMode
        mode = modes.OFF if self.name == "gds" else modes.ON
        with _opening, self._kvikio.defaults.set({"compat_mode": mode}):
            yield


class _Part(NamedTuple):
    """I/O under way. kvikio keeps neither the memory nor the file alive: this does."""

    future: Any
    size: int
    memory: Any
    file: Any


class GdsFile:
    """A CuFile, and a descriptor of our own for what kvikio does not offer. Implements `File`."""

    def __init__(self, engine: GdsEngine, fd: int, file: Any) -> None:
        self._engine, self._fd, self._file = engine, fd, file
        self._closed = False

    def pwrite(self, buffers: Sequence[BlockBuffer], offset: int) -> int:
        return self._transfer("pwrite", buffers, offset, sum(len(buffer) for buffer in buffers))

    def pread(self, buffers: Sequence[BlockBuffer], offset: int) -> int:
        # kvikio fails a read that passes the end. A page that the end cuts would be read
        # through the page cache, which must not mix with the rest: it is left out.
        room = max(0, os.fstat(self._fd).st_size - offset)
        return self._transfer("pread", buffers, offset, room - room % PAGE)

    def sync(self) -> None:
        self._engine.check_process()
        os.fdatasync(self._fd)

    def close(self) -> None:
        """No transfer is running. Idempotent; in a forked child the CuFile stays as it is."""
        if not self._closed:
            self._closed = True
            os.close(self._fd)
            if self._engine.usable:
                self._file.close()

    def _transfer(self, call: str, buffers: Sequence[BlockBuffer], offset: int, room: int) -> int:
        """Move at most `room` bytes, all buffers at once; how many leading ones were moved."""
        self._engine.check_process()
        file, parts = self._file, list[_Part]()
        try:
            for buffer in buffers:
                size = min(len(buffer), room)
                if size:
                    memory = _memory(buffer)
                    with _errors():
                        future = getattr(file, call)(memory, size, offset, TASK)
                    parts.append(_Part(future, size, memory, file))
                offset, room = offset + size, room - size
        finally:
            results = _settle(parts)
        done = 0
        for part, result in zip(parts, results, strict=True):
            if isinstance(result, str):
                if result.endswith(END_OF_FILE):  # it was cut meanwhile: the next call sees it
                    break
                raise error_of(result)
            if result < part.size and part.size > TASK:
                break  # some task was short, and nobody says which
            done += result
            if result < part.size:
                break
        return done


def _memory(buffer: Any) -> Any:
    """What kvikio is given. An array of its own keeps the memory of a view that is released."""
    return np.frombuffer(buffer, np.uint8) if isinstance(buffer, memoryview) else buffer


def _settle(parts: Sequence[_Part]) -> list[int | str]:
    """Bytes moved, or the text of the error, of each part.

    Waits for all of them whatever happens: until then kvikio uses their memory.
    """
    results: list[int | str] = []
    interrupt: BaseException | None = None
    for part in parts:
        while True:
            try:
                results.append(part.future.get())
            except Exception as error:  # RuntimeError, mostly
                # only its text: its traceback would keep the memory in a cycle
                results.append(str(error))
            except BaseException as error:  # Ctrl-C, before or after the wait: ask again
                interrupt = error
                continue
            break
    if interrupt is not None:
        raise interrupt
    return results


@contextmanager
def _errors() -> Iterator[None]:
    """kvikio's RuntimeErrors as OSErrors."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
    else:
        return
    raise error_of(text)


def error_of(text: str) -> OSError:
    """An OSError for what kvikio says, which names the errno in words at best; else EIO."""
    text = PLACE.sub("", text)
    words = text.rsplit(": ", 1)[-1]
    if text == "POSIX error: Operation not permitted":
        code = errno.EBADF  # kvikio's words for it
    elif words.endswith("CUDA_ERROR_OUT_OF_MEMORY") or "CUDA_ERROR_OUT_OF_MEMORY" in text:
        code = errno.ENOMEM
    else:
        code = ERRNOS.get(words, errno.EIO)
    return OSError(code, text)
