"""Whole slots between buffers and a file, whatever the alignment of the buffers."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from tieredkv.device import on_device
from tieredkv.tiers.base import BlockBuffer
from tieredkv.tiers.nvme.engines import PAGE, File

CALL = 1 << 20  # bytes per system call: disks serve many of this size faster than few large ones
BOUNCE = 1 << 20
POOLED = 8


class Truncated(Exception):
    """The file ends before the bytes that were asked for."""


class SlotIo:
    """Moves consecutive slots. Thread-safe.

    Where the buffers fit the engine's alignment they are handed to the system calls
    themselves. Otherwise the bytes pass through page-aligned memory, one
    such buffer per calling thread.
    """

    def __init__(
        self, block_bytes: int, slot_bytes: int, alignment: int, call_bytes: int = CALL
    ) -> None:
        """At most `call_bytes` go into one call of the file."""
        self._block, self._slot, self._alignment = block_bytes, slot_bytes, alignment
        self._call = call_bytes
        self._bounce_slots = max(1, BOUNCE // slot_bytes)
        self._free: list[mmap.mmap] = []

    def write(self, file: File, offset: int, sources: Sequence[BlockBuffer]) -> None:
        """Write one slot per source from `offset` on; tails of slots become zeros.

        Raises OSError, or ValueError if a source has been released.
        """
        if self._fits(sources):
            for part, size, at in self._calls(sources):
                write_all(file, part, size, offset + at)
            return
        with self.bounce() as memory:
            for start in range(0, len(sources), self._bounce_slots):
                part = sources[start : start + self._bounce_slots]
                size = len(part) * self._slot
                for i, source in enumerate(part):
                    at = i * self._slot
                    _copy(memory[at : at + self._block], source)
                    _zero(memory[at + self._block : at + self._slot])
                write_all(file, [memory[:size]], size, offset + start * self._slot)

    def read(self, file: File, offset: int, targets: Sequence[BlockBuffer]) -> None:
        """Fill one target per slot from `offset` on.

        Raises Truncated, OSError, or ValueError if a target has been released.
        """
        if self._fits(targets):
            for part, size, at in self._calls(targets):
                read_all(file, part, size, offset + at)
            return
        with self.bounce() as memory:
            for start in range(0, len(targets), self._bounce_slots):
                part = targets[start : start + self._bounce_slots]
                size = len(part) * self._slot
                read_all(file, [memory[:size]], size, offset + start * self._slot)
                for i, target in enumerate(part):
                    at = i * self._slot
                    _copy(target, memory[at : at + self._block])

    @contextmanager
    def bounce(self) -> Iterator[memoryview]:
        """Page-aligned memory of at least one slot, for the duration of the block."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = mmap.mmap(-1, self._bounce_slots * self._slot)
        try:
            yield memoryview(memory)
        finally:
            if len(self._free) < POOLED:
                self._free.append(memory)

    def _calls(
        self, buffers: Sequence[BlockBuffer]
    ) -> Iterator[tuple[Sequence[BlockBuffer], int, int]]:
        """(buffers, bytes, offset of the first) of each call for whole slots."""
        slot = self._slot
        if slot <= self._call:
            n = self._call // slot
            for first in range(0, len(buffers), n):
                part = buffers[first : first + n]
                yield part, len(part) * slot, first * slot
            return
        for i, buffer in enumerate(buffers):
            for at in range(0, slot, self._call):
                size = min(self._call, slot - at)
                yield [buffer[at : at + size]], size, i * slot + at

    def _fits(self, buffers: Sequence[BlockBuffer]) -> bool:
        if self._block != self._slot:
            return False
        return self._alignment == 1 or all(
            on_device(buffer) or not _address(buffer) % self._alignment for buffer in buffers
        )


def write_all(file: File, buffers: Sequence[BlockBuffer], size: int, offset: int) -> None:
    """Write all of `buffers`, `size` bytes together, looping on short writes."""
    done = file.pwrite(buffers, offset)
    while done < size:
        start = done - done % PAGE  # a page boundary, where O_DIRECT can continue
        end = start + file.pwrite(_rest(buffers, start), offset + start)
        if end <= done:
            raise OSError(errno.EIO, "no progress while writing")
        done = end


def read_all(file: File, buffers: Sequence[BlockBuffer], size: int, offset: int) -> None:
    """Fill all of `buffers`. Raises Truncated at the end of the file."""
    done = file.pread(buffers, offset)
    while done < size:
        start = done - done % PAGE
        end = start + file.pread(_rest(buffers, start), offset + start)
        if end <= done:
            raise Truncated(f"file ends at {offset + done}")
        done = end


def _rest(buffers: Sequence[BlockBuffer], skip: int) -> list[BlockBuffer]:
    rest: list[BlockBuffer] = []
    for buffer in buffers:
        size = len(buffer)
        if skip < size:
            rest.append(buffer[skip:] if skip else buffer)
        skip = max(0, skip - size)
    return rest


def _address(buffer: BlockBuffer) -> int:
    # the array lives for this expression only: an export would block memoryview.release()
    array = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    address: int = array.__array_interface__["data"][0]
    return address


def _copy(target: BlockBuffer, source: BlockBuffer) -> None:
    # numpy copies without the GIL, a memoryview assignment holds it
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _zero(view: memoryview) -> None:
    if view:
        np.frombuffer(view, np.uint8).fill(0)
