"""One slab of anonymous host memory, divided into slots, and the copies in and out of it."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from tieredkv.errors import CapacityError, ConfigError
from tieredkv.executor import DaemonExecutor
from tieredkv.tiers.base import BlockBuffers, Bytes

log = logging.getLogger(__name__)

PAGE = 4096
ALIGN_FROM = 16 * PAGE  # from this block size on, alignment costs at most 6 % of memory
MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module
PREFAULT_STEP = 16 << 20  # bounds the time for which the kernel holds the address space
SHARE_FROM = 8 << 20  # below this, waking a second thread costs more than it copies
SHARE_STEP = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def slot_count(name: str, capacity: int, block_bytes: int) -> int:
    """Slots of a memory tier of `capacity` payload bytes; raises if there is not one."""
    if block_bytes <= 0:
        raise ConfigError(f"tier {name}: block_bytes {block_bytes} must be larger than 0")
    if capacity < block_bytes:
        raise CapacityError(
            f"tier {name}: capacity {capacity} is less than one block of {block_bytes} bytes; "
            "raise the capacity"
        )
    return capacity // block_bytes


class Slab:
    """`slots` rows of `block_bytes` bytes in one private anonymous mapping.

    No file backs it: the kernel frees it with the process, however that ends. From 64 KiB
    per block on, every slot starts at a multiple of 4096, as O_DIRECT wants it.
    """

    def __init__(self, slots: int, block_bytes: int) -> None:
        """Raises ConfigError if the memory cannot be had."""
        stride = -(-block_bytes // PAGE) * PAGE if block_bytes >= ALIGN_FROM else block_bytes
        self.nbytes = slots * stride
        try:
            self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (MemoryError, OSError, OverflowError) as error:
            raise ConfigError(
                f"capacity: cannot map {self.nbytes} bytes of host memory ({error}); "
                "lower the capacity, or raise the memory limit of the process"
            ) from error
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            log.debug("no transparent huge pages for the slab: %s", error)
        memory: Bytes = np.frombuffer(self._map, np.uint8)
        self.address: int = memory.ctypes.data
        self.rows: Bytes = memory.reshape(slots, stride)[:, :block_bytes]
        """Shape (slots, block_bytes); each row is contiguous."""

    def prefault(self, stop: threading.Event) -> None:
        """Make every page present, until `stop` is set.

        The first touch of a page costs about ten copies of it. Safe beside readers and
        writers: contents are not changed.
        """
        for start in range(0, self.nbytes, PREFAULT_STEP):
            if stop.is_set():
                return
            size = min(PREFAULT_STEP, self.nbytes - start)
            if _libc.madvise(self.address + start, size, MADV_POPULATE_WRITE):
                reason = os.strerror(ctypes.get_errno())
                log.info("slab is not pre-faulted (%s): first writes will be slower", reason)
                return

    def views(self, slots: Sequence[int]) -> list[memoryview]:
        """Writable memory of these slots."""
        return [memoryview(self.rows[slot]) for slot in slots]

    def close(self) -> None:
        """Give the memory back; views that somebody still holds keep it alive."""
        self.rows = self.rows[:0, :].copy()
        try:
            self._map.close()
        except BufferError:
            log.debug("slab still viewed at close; it is freed with its last view")


def runs(slots: Sequence[int], first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """(index, slot, length) of each run of consecutive numbers in `slots[first:last]`."""
    start = first
    for i in range(first + 1, last + 1):
        if i == last or slots[i] != slots[i - 1] + 1:
            yield start, slots[start], i - start
            start = i


def copy_in(
    rows: Bytes, slots: Sequence[int], sources: BlockBuffers, first: int, last: int
) -> None:
    """Copy `sources[first:last]` into their slots, without the GIL."""
    if isinstance(sources, np.ndarray):
        for i, slot, n in runs(slots, first, last):
            rows[slot : slot + n] = sources[i : i + n]
    else:
        for i in range(first, last):
            rows[slots[i]] = sources[i]


def copy_out(
    rows: Bytes, slots: Sequence[int], targets: BlockBuffers, first: int, last: int
) -> None:
    """Copy slots into `targets[first:last]`, without the GIL."""
    if isinstance(targets, np.ndarray):
        for i, slot, n in runs(slots, first, last):
            targets[i : i + n] = rows[slot : slot + n]
    else:
        for i in range(first, last):
            target = targets[i]
            if isinstance(target, memoryview):
                # assigning to the memoryview itself would copy under the GIL
                target = np.frombuffer(target, np.uint8)
            target[:] = rows[slots[i]]


Copy: TypeAlias = Callable[[Bytes, Sequence[int], BlockBuffers, int, int], None]
"""`copy_in` or `copy_out`."""


class CopyPool:
    """Threads that help the caller with one large batch of copies.

    The caller works too and waits only for pieces that a helper has begun, so a busy or
    stopped pool costs nothing but its help.
    """

    def __init__(self, threads: int, name: str) -> None:
        """`threads` including the caller's."""
        self._helpers = max(0, min(threads, len(os.sched_getaffinity(0))) - 1)
        self._executor = DaemonExecutor(self._helpers, name) if self._helpers else None

    def run(self, copy: Copy, rows: Bytes, slots: Sequence[int], buffers: BlockBuffers) -> None:
        """`copy` the whole batch; returns when all of it is done, raises what a copy raised."""
        count, block_bytes = len(slots), rows.shape[1]
        if count * block_bytes < SHARE_FROM or count < 2 or self._executor is None:
            copy(rows, slots, buffers, 0, count)
            return
        step = max(1, SHARE_STEP // block_bytes)
        shared = _Shared(count, step, partial(copy, rows, slots, buffers))
        for _ in range(min(self._helpers, -(-count // step) - 1)):
            self._executor.submit(shared.work)
        shared.work()
        shared.wait()

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close(timeout=5.0)


class _Shared:
    """The pieces of one batch."""

    def __init__(self, count: int, step: int, copy: Callable[[int, int], None]) -> None:
        self._pieces = deque((i, min(i + step, count)) for i in range(0, count, step))
        self._copy: Callable[[int, int], None] | None = copy
        self._running = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def work(self) -> None:
        while True:
            with self._changed:
                copy = self._copy
                if not self._pieces or copy is None:
                    return
                first, last = self._pieces.popleft()
                self._running += 1
            error: BaseException | None = None
            try:
                copy(first, last)
            except BaseException as caught:
                error = caught
            with self._changed:
                self._running -= 1
                if error is not None:
                    self._error = error
                    self._pieces.clear()
                if not self._running:
                    self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            # A copy of at most 1 MiB (or one block) in another thread is as certain to end
            # as one in this thread, and leaving before would give the buffers away in use.
            while self._running:
                self._changed.wait(1.0)
            self._copy = None  # a helper that wakes late must not keep the buffers alive
            if self._error is not None:
                raise self._error
