"""One segment file: a header page, a table of slot headers, then the payloads.

docs/on-disk-format.md specifies the bytes.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from tieredkv.index.damage import sync_directory
from tieredkv.tiers.nvme.checksum import XXH3_64
from tieredkv.tiers.nvme.engines import PAGE, Engine
from tieredkv.tiers.nvme.slot_io import read_all, write_all

FORMAT = 1
SEGMENT_MAGIC = b"TKVSEGMT"
SEGMENT = struct.Struct("<8s IIII QQQQ 32s")
CHECKSUM = struct.Struct("<Q")
SLOT_MAGIC = b"TKVS"
SLOT = struct.Struct("<4sHH32sQIIQ")
SLOT_BYTES = SLOT.size  # 64
IDENTITY_BYTES = 56  # of a slot header: everything but the checksum
SLOT_DTYPE = np.dtype(
    [
        ("magic", "S4"),
        ("format", "<u2"),
        ("kind", "<u2"),
        ("key", "V32"),
        ("generation", "<u8"),
        ("epoch", "<u4"),
        ("length", "<u4"),
        ("checksum", "<u8"),
    ]
)


def round_up(n: int, multiple: int = PAGE) -> int:
    return -(-n // multiple) * multiple


class BadSegment(Exception):
    """The file is not the segment it should be, or it is incomplete."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the slots of a segment are; equal for all segments of a directory."""

    block_bytes: int
    table_slots: int
    """Slots of a full segment: the last one may have fewer, with the same layout."""

    @property
    def slot_bytes(self) -> int:
        return round_up(self.block_bytes)

    @property
    def table_bytes(self) -> int:
        return round_up(self.table_slots * SLOT_BYTES)

    def offset(self, slot: int) -> int:
        """File offset of a slot's payload; `offset(n)` is the size of n slots."""
        return PAGE + self.table_bytes + slot * self.slot_bytes


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The first page of a segment file."""

    digest: bytes
    """Of the fingerprint, 32 bytes."""
    rank: int
    index: int
    """Its number, so that swapped files are noticed."""
    slots: int
    geometry: Geometry

    def pack(self) -> bytes:
        """One page."""
        g = self.geometry
        head = SEGMENT.pack(
            *(SEGMENT_MAGIC, FORMAT, self.index, self.rank, XXH3_64),
            *(g.block_bytes, g.slot_bytes, g.table_slots, self.slots, self.digest),
        )
        return (head + CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))).ljust(PAGE, b"\0")

    @classmethod
    def unpack(cls, page: bytes) -> SegmentHeader:
        """Raises BadSegment."""
        size = SEGMENT.size
        if len(page) < PAGE or page[:8] != SEGMENT_MAGIC:
            raise BadSegment("no segment header")
        if CHECKSUM.unpack_from(page, size)[0] != xxhash.xxh3_64_intdigest(page[:size]):
            raise BadSegment("the checksum of the segment header is wrong")
        _, version, index, rank, kind, block, _, table, slots, digest = SEGMENT.unpack_from(page)
        if version != FORMAT or kind != XXH3_64:
            raise BadSegment(f"format {version} with checksums {kind} is unknown")
        return cls(digest, rank, index, slots, Geometry(block, table))


def read_header(path: Path) -> SegmentHeader:
    """Header of a complete segment file. Raises BadSegment, OSError."""
    with path.open("rb") as file:
        header = SegmentHeader.unpack(file.read(PAGE))
        size = os.fstat(file.fileno()).st_size
    if size < header.geometry.offset(header.slots):
        raise BadSegment(f"truncated: {size} bytes for {header.slots} slots")
    return header


def create(path: Path, header: SegmentHeader) -> None:
    """Create a preallocated segment that is complete and durable, or leave nothing.

    Raises OSError.
    """
    tmp = path.with_name(path.name + ".tmp")
    try:
        fd = os.open(tmp, os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, header.geometry.offset(header.slots))
            os.pwrite(fd, header.pack(), 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(tmp, path)
    except OSError:
        with suppress(FileNotFoundError):
            os.unlink(tmp)  # a failed allocation leaves a partial file
        raise
    sync_directory(path.parent)


def resize(path: Path, header: SegmentHeader) -> None:
    """Give an existing segment the number of slots in `header`. Raises OSError.

    In the order that leaves a complete segment after a crash: the file is never shorter
    than its header says.
    """
    size = header.geometry.offset(header.slots)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size < size:
            os.posix_fallocate(fd, 0, size)
            os.fsync(fd)
        os.pwrite(fd, header.pack(), 0)
        os.fsync(fd)
        os.ftruncate(fd, size)
        os.fsync(fd)
    finally:
        os.close(fd)


class Segment:
    """An open segment: slot numbers in here count from its start. Thread-safe."""

    def __init__(self, path: Path, header: SegmentHeader, engine: Engine) -> None:
        """Open it and load its table. Raises OSError, Truncated."""
        self.path = path
        self.slots = header.slots
        self.geometry = header.geometry
        self.file = engine.open(path)
        self._table = mmap.mmap(-1, header.geometry.table_bytes)
        self._headers = threading.Lock()
        self._unwritten: set[int] = set()
        """Pages of the table that differ from the file."""
        self._syncs = _GroupSync()
        try:
            with memoryview(self._table) as view:
                read_all(self.file, [view], len(view), PAGE)
        except BaseException:
            self.file.close()
            raise

    def checksum(self, slot: int, identity: bytes) -> int | None:
        """Checksum of the slot's payload if its header has this identity, else None."""
        at = slot * SLOT_BYTES
        if self._table[at : at + IDENTITY_BYTES] != identity:
            return None
        checksum: int = CHECKSUM.unpack_from(self._table, at + IDENTITY_BYTES)[0]
        return checksum

    def put_headers(self, headers: Iterable[tuple[int, bytes, int]]) -> None:
        """Set (slot, identity, checksum); the next `sync` writes them."""
        with self._headers:
            for slot, identity, checksum in headers:
                at = slot * SLOT_BYTES
                self._table[at : at + SLOT_BYTES] = identity + CHECKSUM.pack(checksum)
                self._unwritten.add(at // PAGE)

    def mark(self) -> int:
        """To be taken before the first write that `sync` shall make durable."""
        return self._syncs.failures

    def sync(self, mark: int) -> None:
        """Make everything written since `mark` durable, headers too. Raises OSError, also if a
        sync of somebody else has failed since: the kernel reports a lost write only once.

        A page write queues behind the payloads of others, so callers share it as they share
        the sync.
        """
        self._syncs.run(self._sync, mark)

    def _sync(self) -> None:
        """Write whole pages of the table, and sync. Raises OSError.

        Neighbours that have a record keep the bytes that the file has already, so a torn page
        write changes nothing of theirs. What `put_headers` changes meanwhile is written by the
        sync that its caller waits for; this one writes a copy, which nobody changes.
        """
        with self._headers:
            pages, self._unwritten = self._unwritten, set()
            copies = [(first, self._copy(first, last)) for first, last in _ranges(sorted(pages))]
        try:
            for first, copy in copies:
                write_all(self.file, [copy], len(copy), PAGE + first * PAGE)
            self.file.sync()
        except BaseException:
            with self._headers:
                self._unwritten |= pages
            raise

    def _copy(self, first: int, last: int) -> memoryview:
        """Pages of the table, in aligned memory of their own."""
        copy = mmap.mmap(-1, (last - first) * PAGE)
        copy[:] = self._table[first * PAGE : last * PAGE]
        return memoryview(copy)

    def headers(self) -> npt.NDArray[np.void]:
        """A copy of the table, `SLOT_DTYPE`, one per slot."""
        with self._headers:
            return np.frombuffer(bytes(self._table), SLOT_DTYPE, self.slots)

    def close(self) -> None:
        self.file.close()


def identity(key: bytes, generation: int, epoch: int, length: int, kind: int = XXH3_64) -> bytes:
    """Everything of a slot header but the checksum, which is of `kind`."""
    packed = SLOT.pack(SLOT_MAGIC, FORMAT, kind, key, generation, epoch, length, 0)
    return packed[:IDENTITY_BYTES]


def _ranges(numbers: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Half-open ranges of consecutive numbers."""
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[start], numbers[i - 1] + 1
            start = i


class _GroupSync:
    """Callers that come while a sync runs share the next one.

    It also keeps errors honest: the kernel reports a failed write-back of a descriptor
    once, to whoever syncs first, so everybody whose writes may have been meant fails.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._started = self._finished = self._failed = 0
        self._error = OSError(errno.EIO, "a sync failed")
        self.failures = 0

    def run(self, sync: Callable[[], None], mark: int) -> None:
        """Return after a `sync` that began after this call.

        Raises the error of that sync, of a later one, or of any since `failures` was `mark`.
        """
        with self._changed:
            wanted = self._started + 1
            while self._finished < wanted:
                if self._started > self._finished:
                    self._changed.wait(60.0)
                    continue
                self._started += 1
                self._changed.release()
                error: BaseException | None = None
                try:
                    sync()
                except BaseException as caught:  # whatever it is, nothing was made durable
                    error = caught
                finally:
                    self._changed.acquire()
                    self._finished = self._started
                    if error is not None:
                        self._failed = self._finished
                        self.failures += 1
                        if isinstance(error, OSError):
                            self._error = error
                    self._changed.notify_all()
                if error is not None and not isinstance(error, OSError):
                    raise error
            if self._failed >= wanted or self.failures != mark:
                raise OSError(self._error.errno, self._error.strerror)
