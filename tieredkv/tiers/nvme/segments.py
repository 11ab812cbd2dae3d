"""All segments of a rank: found, opened, set aside, and created within the limits."""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tieredkv.errors import CapacityError
from tieredkv.index.damage import sync_directory
from tieredkv.tiers.nvme.directory import Directory
from tieredkv.tiers.nvme.engines import Engine
from tieredkv.tiers.nvme.lock import refused
from tieredkv.tiers.nvme.segment import (
    BadSegment,
    Geometry,
    Segment,
    SegmentHeader,
    create,
    read_header,
    resize,
    round_up,
)
from tieredkv.tiers.nvme.slot_io import Truncated

log = logging.getLogger(__name__)

MAX_SEGMENTS = 512  # each is an open file, and 1024 is the usual limit
INDEX_FIXED = 192 << 10
INDEX_PER_SLOT = 640  # a record takes 220 bytes; a transaction may rewrite all pages
FIXED = INDEX_FIXED + (64 << 10)  # directories, locks, marker
EXTENTS_PER_SLOT = 16  # of the filesystem, where every second slot is written
RETRY = 30.0
SEGMENT_NAME = re.compile(r"seg-(\d{6})\.kv")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a capacity allows."""

    slots: int
    geometry: Geometry
    index_bytes: int
    """Of the capacity, for the index."""


def plan(capacity: int, block_bytes: int, segment: int, found: Geometry | None) -> Plan:
    """Slots that fit into `capacity` bytes with everything around them.

    `segment` is the size of a segment file; larger ones are used where there would be more
    than MAX_SEGMENTS. An existing geometry is kept unless it means far too many files.
    """
    slot = round_up(block_bytes)
    table_slots = max(1, min(max(segment, capacity // MAX_SEGMENTS), capacity) // slot)
    if found is not None and capacity <= found.table_slots * slot * 2 * MAX_SEGMENTS:
        table_slots = found.table_slots
    geometry = Geometry(block_bytes, table_slots)
    per_slot = INDEX_PER_SLOT + EXTENTS_PER_SLOT
    room = max(0, capacity - FIXED)
    full, rest = divmod(room, geometry.offset(table_slots) + table_slots * per_slot)
    slots = full * table_slots + max(0, (rest - geometry.offset(0)) // (slot + per_slot))
    return Plan(slots, geometry, INDEX_FIXED + slots * INDEX_PER_SLOT)


class SegmentSet:
    """The segments of one rank's directory. Thread-safe."""

    def __init__(
        self,
        directory: Directory,
        engine: Engine,
        block_bytes: int,
        capacity: int | None,
        min_free: int,
        segment: int,
        clock: Callable[[], float],
        ranks: int = 1,
    ) -> None:
        """See `NvmeTier`. `clock` in seconds, for the pause after a failed growth."""
        self.bad: dict[str, str] = {}
        """Segments that cannot be used, and why."""
        self.growth_error: str | None = None
        """Why the tier has stopped growing."""
        self._directory, self._engine, self._clock = directory, engine, clock
        self._capacity, self._min_free, self._ranks = capacity, min_free, ranks
        self._retry_at = float("-inf")
        self._growing = threading.Lock()
        self._open: dict[int, Segment] = {}
        try:
            headers = self._find(block_bytes)
            self._highest = max(headers, default=-1)
            self._limit(headers, block_bytes, segment)
            for index, header in sorted(headers.items()):
                self._open_existing(index, header)
        except OSError as error:
            self.close()
            raise refused(directory.rank_path, error) from error
        except BaseException:
            self.close()
            raise

    def get(self, index: int) -> Segment | None:
        """The segment if it exists and is good."""
        return self._open.get(index)

    def get_or_create(self, index: int) -> Segment | None:
        """None if it cannot be created now; then `slots` shrinks."""
        segment = self._open.get(index)
        if segment is None and index * self.geometry.table_slots < self._planned:
            with self._growing:
                segment = self._open.get(index)
                if segment is None and self._clock() >= self._retry_at:
                    segment = self._create(index)
        return segment

    def all(self) -> dict[int, Segment]:
        return dict(self._open)

    def close(self) -> None:
        segments, self._open = self._open, {}
        for segment in segments.values():
            segment.close()

    def _path(self, index: int) -> Path:
        return self._directory.rank_path / f"seg-{index:06d}.kv"

    def _find(self, block_bytes: int) -> dict[int, SegmentHeader]:
        """Headers of all good segments, which agree in their geometry."""
        headers: dict[int, SegmentHeader] = {}
        table_slots: int | None = None
        for path in sorted(self._directory.rank_path.iterdir()):
            if not (match := SEGMENT_NAME.fullmatch(path.name)):
                continue
            index = int(match[1])
            try:
                header = read_header(path)
                mine = (self._directory.digest, self._directory.rank, index, block_bytes)
                table_slots = table_slots or header.geometry.table_slots
                geometry = header.geometry
                if (header.digest, header.rank, header.index, geometry.block_bytes) != mine:
                    raise BadSegment("belongs to another place, fingerprint or block size")
                if geometry.table_slots != table_slots or header.slots > table_slots:
                    raise BadSegment("has another geometry than its neighbours")
            except BadSegment as error:
                self._set_aside(index, str(error))
            else:
                headers[index] = header
        return headers

    def _limit(self, headers: dict[int, SegmentHeader], block_bytes: int, segment: int) -> None:
        """Fix geometry and number of slots; drop and resize what does not fit them."""
        found = next(iter(headers.values())).geometry if headers else None
        self.index_bytes = 0
        if self._capacity is None:
            self.geometry = found or Geometry(block_bytes, 1)
            ends = (i * self.geometry.table_slots + h.slots for i, h in headers.items())
            self.slots = self._planned = max(ends, default=0)
            return
        room = self._capacity - self._directory.others()
        self.index_bytes, self.geometry = 0, Geometry(block_bytes, 1)
        target = plan(room // self._ranks, block_bytes, segment, found)
        if not target.slots:
            raise CapacityError(
                f"{self._directory.root}: no block of {block_bytes} bytes fits into {room} bytes "
                f"(capacity {self._capacity} without what other processes use, shared by "
                f"{self._ranks} ranks); raise it"
            )
        self.geometry, self.index_bytes = target.geometry, target.index_bytes
        self.slots = self._planned = target.slots
        for index in sorted(headers):
            self._fit(index, headers)
        with self._directory.growth(0, self._capacity, self.index_bytes) as fits:
            if not fits:
                log.warning("%s: over its capacity", self._directory.root)

    def _wanted(self, index: int) -> int:
        table_slots = self.geometry.table_slots
        return max(0, min(table_slots, self._planned - index * table_slots))

    def _fit(self, index: int, headers: dict[int, SegmentHeader]) -> None:
        """Remove, shorten or lengthen one existing segment file."""
        header, wanted = headers[index], self._wanted(index)
        if not wanted or header.geometry != self.geometry:
            self._path(index).unlink()
            del headers[index]
        elif wanted < header.slots:
            headers[index] = self._resize(index, wanted)
        elif wanted > header.slots:
            need = (wanted - header.slots) * self.geometry.slot_bytes
            try:
                with self._room(need):
                    headers[index] = self._resize(index, wanted)
            except OSError as error:
                self._stop_growing(index, header.slots, error)

    def _header(self, index: int, slots: int) -> SegmentHeader:
        rank = self._directory.rank or 0
        return SegmentHeader(self._directory.digest, rank, index, slots, self.geometry)

    def _resize(self, index: int, slots: int) -> SegmentHeader:
        header = self._header(index, slots)
        resize(self._path(index), header)
        return header

    def _open_existing(self, index: int, header: SegmentHeader) -> None:
        try:
            self._open[index] = Segment(self._path(index), header, self._engine)
        except (Truncated, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.EIO:
                raise
            self._set_aside(index, str(error))

    def _set_aside(self, index: int, reason: str) -> None:
        path = self._path(index)
        self.bad[path.name] = reason
        if self._capacity is not None:  # an inspection changes nothing
            log.warning("segment %s is set aside: %s", path, reason)
            os.replace(path, path.with_name(path.name + ".quarantine"))
            sync_directory(path.parent)

    @contextmanager
    def _room(self, need: int) -> Iterator[None]:
        """Let the block take `need` bytes more. Raises OSError if a limit forbids it."""
        stat = os.statvfs(self._directory.path)
        free = stat.f_bavail * stat.f_frsize
        if free - need < self._min_free:
            raise OSError(errno.ENOSPC, f"{free} bytes free, min_free is {self._min_free}")
        capacity = self._capacity or 0
        with self._directory.growth(need, capacity, self.index_bytes) as fits:
            if not fits:
                raise OSError(errno.ENOSPC, f"the capacity of {capacity} bytes is used up")
            yield

    def _stop_growing(self, index: int, slots: int, error: Exception) -> None:
        """Live with the first `slots` of this segment for a while."""
        self._retry_at = self._clock() + RETRY
        self.growth_error = str(error)
        if index >= self._highest:
            self.slots = min(self.slots, index * self.geometry.table_slots + slots)
        path = self._path(index)
        log.warning("%s: cannot grow (%s); %d slots are left", path, error, self.slots)

    def _create(self, index: int) -> Segment | None:
        header = self._header(index, self._wanted(index))
        path = self._path(index)
        try:
            with self._room(self.geometry.offset(header.slots)):
                create(path, header)
            segment = Segment(path, header, self._engine)
        except (OSError, Truncated) as error:
            self._stop_growing(index, 0, error)
            return None
        self._open[index] = segment
        self._highest = max(self._highest, index)
        self.growth_error = None
        return segment
