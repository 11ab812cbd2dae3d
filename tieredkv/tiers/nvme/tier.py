"""The NVMe tier: slots in preallocated segment files, verified on every read."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, cast

import numpy as np

from tieredkv.device import on_device
from tieredkv.errors import BlockSizeError, ClosedError, UsageError
from tieredkv.tiers.base import BlockBuffers
from tieredkv.tiers.nvme.checksum import NH_64, XXH3_64, Checksums
from tieredkv.tiers.nvme.directory import Directory
from tieredkv.tiers.nvme.engines import Engine
from tieredkv.tiers.nvme.payloads import Item, Payloads
from tieredkv.tiers.nvme.segment import Segment
from tieredkv.tiers.nvme.segments import SegmentSet
from tieredkv.tiers.nvme.selection import select
from tieredkv.tiers.nvme.slot_io import CALL, SlotIo
from tieredkv.types import Batch, Outcome

log = logging.getLogger(__name__)


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
        self._directory = directory
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
        self._io = SlotIo(
            block_bytes,
            geometry.slot_bytes,
            self._engine.alignment,
            getattr(self._engine, "call_bytes", CALL),
        )
        checksums = Checksums(directory.digest[:8], block_bytes)
        self._payloads = Payloads(self._io, checksums, block_bytes)
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

    @property
    def last_error(self) -> str | None:
        """Text of the latest error of the medium, or of a device."""
        return self._payloads.last_error

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
        kind = NH_64 if self.device else XXH3_64
        written: list[tuple[Segment, int, list[int]]] = []
        for index, segment_slots in self._by_segment(batch):
            segment = self._segments.get_or_create(index)
            if segment is not None:
                mark = segment.mark()
                done = self._payloads.write(
                    segment, segment_slots, batch, sources, outcomes, kind=kind
                )
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
            if segment is not None:
                self._payloads.read(segment, segment_slots, batch, targets, outcomes, device=device)
        self._count("read", outcomes)
        return outcomes

    def verify(self, batch: Batch) -> list[Outcome]:
        """Like `read`, without keeping the bytes."""
        outcomes: list[Outcome] = []
        with self._io.bounce() as memory:
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

    def _attempt(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except OSError as error:
            self._payloads.last_error = str(error)
            return False
        return True

    def _count(self, operation: str, outcomes: Sequence[Outcome]) -> None:
        with self._counting:
            for outcome, n in Counter(outcomes).items():
                self.counters[f"{operation}_{outcome}"] += n
