"""The NVMe tier: slots in preallocated segment files, verified on every read."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, cast

import numpy as np

from tieredkv.device import copy_blocks, on_device
from tieredkv.errors import BlockSizeError, ClosedError, UsageError
from tieredkv.tiers.base import BlockBuffer, BlockBuffers
from tieredkv.tiers.nvme.checksum import NH_64, XXH3_64, Checksums
from tieredkv.tiers.nvme.directory import Directory
from tieredkv.tiers.nvme.engines import Engine, File
from tieredkv.tiers.nvme.segment import Segment, identity
from tieredkv.tiers.nvme.segments import SegmentSet
from tieredkv.tiers.nvme.selection import select
from tieredkv.tiers.nvme.transfer import CALL, Transfer, Truncated
from tieredkv.types import Batch, Outcome

log = logging.getLogger(__name__)

Copy = Callable[[File, int, Sequence[BlockBuffer]], None]
Item = tuple[int, int]
"""(position in the batch, slot in its segment)"""
ByPosition: TypeAlias = "BlockBuffers | Mapping[int, BlockBuffer]"
Sum = tuple[int, int]
"""(kind, checksum)"""


class NvmeTier:
    """Slots in segment files; implements `tieredkv.tiers.base.DeviceTier`.

    A write returns OK once payload and slot header survive a power loss. A read returns OK
    only for the bytes written under that key, generation and epoch, checksum verified. In a
    forked child all calls return FAILED. Thread-safe as the protocol says.

    Where `device` is True, all buffers of a call may be memory of a device instead. Its
    checksums are then of the kind that a device computes as well, also of blocks from the host;
    a block with another kind is read through the host.
    """

    inline = False
    durable = True

    def __init__(
        self,
        directory: Directory,
        name: str,
        block_bytes: int,
        capacity: int | None,
        *,
        min_free: int = 1 << 30,
        engine: Literal["auto", "gds", "direct", "portable"] | Engine = "auto",
        segment: int = 256 << 20,
        clock: Callable[[], float] = time.monotonic,
        ranks: int = 1,
    ) -> None:
        """Open the segments in `directory`, which must own a rank and outlive the tier.

        `capacity` in bytes bounds the whole root, what other fingerprints and the index
        take included; files are allocated as slots are first used. None takes the files as
        they are and changes nothing. `min_free` bytes of the filesystem stay free, `segment`
        bytes make one file. `ranks` tiers share the root, each with an equal part.

        Raises CapacityError if no block fits, DirectoryError if the files cannot be used.
        """
        if directory.rank is None or not directory.owned:
            raise UsageError("the directory must be open, with a rank")
        if block_bytes <= 0:
            raise UsageError(f"block_bytes {block_bytes}: must be larger than 0")
        self.name = name
        self.block_bytes = block_bytes
        self.counters: Counter[str] = Counter()
        """Blocks by what happened, like `write_ok` or `read_corrupt`."""
        self.last_error: str | None = None
        """Text of the latest error of the medium."""
        self._directory = directory
        self._checksums = Checksums(directory.digest[:8], block_bytes)
        self._counting = threading.Lock()
        self._stores_fail = False
        self._closed = False
        if isinstance(engine, str):
            self._engine, self.mode_reason = select(engine, directory.rank_path)
        else:
            self._engine, self.mode_reason = engine, "given"
        try:
            self._segments = SegmentSet(
                directory, self._engine, block_bytes, capacity, min_free, segment, clock, ranks
            )
        except BaseException:
            self._engine.close()
            raise
        geometry = self._segments.geometry
        self._transfer = Transfer(
            block_bytes,
            geometry.slot_bytes,
            self._engine.alignment,
            getattr(self._engine, "call_bytes", CALL),
        )
        log.info("tier %s: %s I/O (%s)", name, self.mode, self.mode_reason)

    @property
    def mode(self) -> str:
        """Name of the active engine; `mode_reason` says why."""
        return self._engine.name

    @property
    def device(self) -> bool:
        """Do `write` and `read` take memory of a device?"""
        whole = self.block_bytes == self._segments.geometry.slot_bytes
        return whole and getattr(self._engine, "device", False)

    def register(self, memory: Any) -> None:
        """Let the engine move this device memory without copies of its own, until `close`.

        One contiguous torch tensor, which is kept alive. Where that fails, which is logged, its
        blocks are moved all the same. Only where `device` is True.
        """
        try:
            cast(Any, self._engine).register(memory)
        except OSError as error:
            log.warning(
                "tier %s: device memory is not registered (%s): more copies", self.name, error
            )

    @property
    def slots(self) -> int:
        return self._segments.slots

    @property
    def index_bytes(self) -> int:
        """The part of the capacity that is the index's: its `set_map_limit`."""
        return self._segments.index_bytes

    @property
    def segments(self) -> SegmentSet:
        """For inspection."""
        return self._segments

    def health(self) -> str | None:
        """What is wrong, None if nothing is."""
        if self._stores_fail:
            return f"stores fail: {self.last_error or self._segments.growth_error}"
        if self._segments.growth_error:
            return f"cannot grow: {self._segments.growth_error}"
        return None

    def write(self, batch: Batch, sources: BlockBuffers) -> list[Outcome]:
        self._check(batch, sources)
        outcomes = [Outcome.FAILED] * len(batch)
        if not self._directory.owned:
            return outcomes
        written: list[tuple[Segment, int, list[int]]] = []
        for index, segment_slots in self._by_segment(batch):
            segment = self._segments.get_or_create(index)
            if segment is not None:
                mark = segment.mark()
                done = self._write_segment(segment, segment_slots, batch, sources, outcomes)
                written.append((segment, mark, done))
        for segment, mark, done in written:
            if self._attempt(partial(segment.sync, mark)):
                for position in done:
                    outcomes[position] = Outcome.OK
        self._stores_fail = bool(outcomes) and all(o is Outcome.FAILED for o in outcomes)
        self._count("write", outcomes)
        return outcomes

    def read(self, batch: Batch, targets: BlockBuffers) -> list[Outcome]:
        device = self._check(batch, targets)
        outcomes = [Outcome.CORRUPT] * len(batch)
        if not self._directory.owned:
            return [Outcome.FAILED] * len(batch)
        for index, segment_slots in self._by_segment(batch):
            segment = self._segments.get(index)
            if segment is None:
                continue
            sums = self._expected(segment, segment_slots, batch)
            good = [item for item in segment_slots if item[0] in sums]
            if device:
                self._read_by_host(segment, good, targets, sums, outcomes)
                good = [item for item in good if sums[item[0]][0] == NH_64]
            done = self._copy(self._transfer.read, segment, good, targets, outcomes)
            self._judge(done, targets, sums, outcomes)
        self._count("read", outcomes)
        return outcomes

    def verify(self, batch: Batch) -> list[Outcome]:
        """Like `read`, without keeping the bytes."""
        outcomes: list[Outcome] = []
        with self._transfer.bounce() as memory:
            target = memory[: self.block_bytes]
            for slot, key, number in zip(batch.slots, batch.keys, batch.generations, strict=True):
                outcomes += self.read(Batch([slot], [key], [number], batch.epoch), [target])
        return outcomes

    def views(self, slots: Sequence[int]) -> None:
        return None

    device_views = views

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._segments.close()
            self._engine.close()

    def _check(self, batch: Batch, buffers: BlockBuffers) -> bool:
        """Are the buffers memory of a device?"""
        if self._closed:
            raise ClosedError(f"tier {self.name} is closed")
        if len(buffers) != len(batch):
            raise UsageError(f"{len(buffers)} buffers for {len(batch)} slots")
        if isinstance(buffers, np.ndarray):
            return False
        found = {on_device(buffer) for buffer in buffers}
        if True not in found:
            return False
        if not self.device or False in found:
            raise UsageError(
                f"tier {self.name} takes device memory with engine gds, blocks of whole pages, "
                "and no host memory in the same call"
            )
        for buffer in cast(Any, buffers):
            if not (buffer.itemsize == buffer.ndim == 1 and buffer.is_contiguous()):
                raise UsageError("device memory must be a contiguous vector of uint8")
            if len(buffer) != self.block_bytes:
                raise BlockSizeError(f"block of {len(buffer)}, not {self.block_bytes} bytes")
        return True

    def _by_segment(self, batch: Batch) -> Iterator[tuple[int, list[Item]]]:
        """Number of the segment and its items, slots ascending."""
        table_slots = self._segments.geometry.table_slots
        groups: dict[int, list[Item]] = {}
        for position, slot in sorted(enumerate(batch.slots), key=lambda item: item[1]):
            if slot < 0:
                raise UsageError(f"slot {slot} is negative")
            groups.setdefault(slot // table_slots, []).append((position, slot % table_slots))
        yield from groups.items()

    def _write_segment(
        self,
        segment: Segment,
        slots: list[Item],
        batch: Batch,
        sources: BlockBuffers,
        outcomes: list[Outcome],
    ) -> list[int]:
        """Write payloads, set headers; returns the positions that only need a sync now."""
        kind = NH_64 if self.device else XXH3_64
        slots = [item for item in slots if item[1] < segment.slots]
        sums = self._sums(kind, [position for position, _ in slots], sources, outcomes)
        todo = [item for item in slots if item[0] in sums]
        done = set(self._copy(self._transfer.write, segment, todo, sources, outcomes))
        headers = [
            (slot, self._identity(batch, position, kind), sums[position])
            for position, slot in todo
            if position in done
        ]
        segment.put_headers(headers)
        return list(done)

    def _read_by_host(
        self,
        segment: Segment,
        slots: list[Item],
        targets: BlockBuffers,
        sums: dict[int, Sum],
        outcomes: list[Outcome],
    ) -> None:
        """Those for a device that only the host can verify, one after the other."""
        foreign = [item for item in slots if sums[item[0]][0] != NH_64]
        with self._transfer.bounce() as memory:
            block = memory[: self.block_bytes]
            for position, slot in foreign:
                here = {position: block}
                done = self._copy(self._transfer.read, segment, [(position, slot)], here, outcomes)
                self._judge(done, here, sums, outcomes)
                if outcomes[position] is Outcome.OK:
                    try:
                        copy_blocks("in", [targets[position]], [block])
                    except RuntimeError as error:
                        self.last_error = str(error)
                        outcomes[position] = Outcome.BUSY

    def _judge(
        self,
        positions: list[int],
        blocks: ByPosition,
        sums: dict[int, Sum],
        outcomes: list[Outcome],
    ) -> None:
        """Compare what was read with its checksum."""
        for kind in {sums[position][0] for position in positions}:
            mine = [position for position in positions if sums[position][0] == kind]
            for position, found in self._sums(kind, mine, blocks, outcomes).items():
                good = found == sums[position][1]
                outcomes[position] = Outcome.OK if good else Outcome.CORRUPT

    def _copy(
        self,
        copy: Copy,
        segment: Segment,
        slots: list[Item],
        buffers: ByPosition,
        outcomes: list[Outcome],
    ) -> list[int]:
        """Copy runs of consecutive slots; returns the positions that went well.

        A run that fails is repeated block by block, so that neighbours do not suffer.
        """
        done: list[int] = []
        for run in _runs(slots):
            try:
                offset = segment.geometry.offset(run[0][1])
                copy(segment.file, offset, [buffers[position] for position, _ in run])
            except (OSError, Truncated, ValueError, BufferError) as error:
                if len(run) > 1:
                    for item in run:
                        done += self._copy(copy, segment, [item], buffers, outcomes)
                    continue
                outcomes[run[0][0]] = self._failure(error)
            else:
                done += [position for position, _ in run]
        return done

    def _expected(self, segment: Segment, slots: list[Item], batch: Batch) -> dict[int, Sum]:
        """(kind, checksum) of those positions whose slot header is the right one."""
        sums: dict[int, Sum] = {}
        for position, slot in slots:
            for kind in self._checksums.kinds if slot < segment.slots else ():
                found = segment.checksum(slot, self._identity(batch, position, kind))
                if found is not None:
                    sums[position] = kind, found
        return sums

    def _identity(self, batch: Batch, position: int, kind: int) -> bytes:
        key, generation = batch.keys[position], batch.generations[position]
        return identity(key, generation, batch.epoch, self.block_bytes, kind)

    def _sums(
        self, kind: int, positions: list[int], blocks: Any, outcomes: list[Outcome]
    ) -> dict[int, int]:
        """Checksums of the blocks at these positions, without those that were taken away."""
        sums: dict[int, int] = {}
        if positions and on_device(blocks[positions[0]]):
            try:
                found = self._checksums.on_device([blocks[position] for position in positions])
                sums = dict(zip(positions, found, strict=True))
            except RuntimeError as error:  # which says nothing about the blocks
                self.last_error = str(error)
                for position in positions:
                    outcomes[position] = Outcome.BUSY
            return sums
        for position in positions:
            try:
                sums[position] = self._checksums.of(kind, blocks[position])
            except ValueError as error:
                outcomes[position] = self._released(error)
        return sums

    def _failure(self, error: Exception) -> Outcome:
        if isinstance(error, (ValueError, BufferError)):
            return self._released(error)
        self.last_error = str(error)
        return Outcome.CORRUPT if isinstance(error, Truncated) else Outcome.FAILED

    def _released(self, error: Exception) -> Outcome:
        """The mover takes its views back at the deadline; anything else is a bug."""
        if isinstance(error, BlockSizeError):
            raise error
        return Outcome.BUSY

    def _attempt(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except OSError as error:
            self.last_error = str(error)
            return False
        return True

    def _count(self, operation: str, outcomes: Sequence[Outcome]) -> None:
        with self._counting:
            for outcome, n in Counter(outcomes).items():
                self.counters[f"{operation}_{outcome}"] += n


def _runs(slots: list[Item]) -> Iterator[list[Item]]:
    """Split at gaps between slot numbers."""
    start = 0
    for i in range(1, len(slots) + 1):
        if i == len(slots) or slots[i][1] != slots[i - 1][1] + 1:
            yield slots[start:i]
            start = i
