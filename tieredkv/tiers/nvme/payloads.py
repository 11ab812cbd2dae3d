"""Payloads between buffers and the slots of a segment, with the checksums of both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from tieredkv.device import copy_blocks, on_device
from tieredkv.errors import BlockSizeError
from tieredkv.tiers.base import BlockBuffer, BlockBuffers
from tieredkv.tiers.nvme.checksum import NH_64, Checksums
from tieredkv.tiers.nvme.engines import File
from tieredkv.tiers.nvme.segment import Segment, identity
from tieredkv.tiers.nvme.slot_io import SlotIo, Truncated
from tieredkv.types import Batch, Outcome

Copy = Callable[[File, int, Sequence[BlockBuffer]], None]
Item = tuple[int, int]
"""(position in the batch, slot in its segment)"""
ByPosition: TypeAlias = "BlockBuffers | Mapping[int, BlockBuffer]"
Sum = tuple[int, int]
"""(kind, checksum)"""


class Payloads:
    """Writes and reads slots of segments; says what became of each block in the `outcomes` of
    the whole batch. Thread-safe."""

    def __init__(self, io: SlotIo, checksums: Checksums, block_bytes: int) -> None:
        self._io, self._checksums, self._block_bytes = io, checksums, block_bytes
        self.last_error: str | None = None
        """Text of the latest error of the medium, or of a device."""

    def read(
        self,
        segment: Segment,
        slots: list[Item],
        batch: Batch,
        targets: BlockBuffers,
        outcomes: list[Outcome],
        *,
        device: bool,
    ) -> None:
        """Fill targets, of a `device` or of the host, and verify them."""
        sums = self._expected(segment, slots, batch)
        good = [item for item in slots if item[0] in sums]
        if device:
            self._read_by_host(segment, good, targets, sums, outcomes)
            good = [item for item in good if sums[item[0]][0] == NH_64]
        done = self._copy(self._io.read, segment, good, targets, outcomes)
        self._judge(done, targets, sums, outcomes)

    def write(
        self,
        segment: Segment,
        slots: list[Item],
        batch: Batch,
        sources: BlockBuffers,
        outcomes: list[Outcome],
        *,
        kind: int,
    ) -> list[int]:
        """Write payloads, set headers with checksums of this kind; returns the positions that only
        need a sync now."""
        slots = [item for item in slots if item[1] < segment.slots]
        sums = self._sums(kind, [position for position, _ in slots], sources, outcomes)
        todo = [item for item in slots if item[0] in sums]
        done = set(self._copy(self._io.write, segment, todo, sources, outcomes))
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
        with self._io.bounce() as memory:
            block = memory[: self._block_bytes]
            for position, slot in foreign:
                here = {position: block}
                done = self._copy(self._io.read, segment, [(position, slot)], here, outcomes)
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
        return identity(key, generation, batch.epoch, self._block_bytes, kind)

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


def _runs(slots: list[Item]) -> Iterator[list[Item]]:
    """Split at gaps between slot numbers."""
    start = 0
    for i in range(1, len(slots) + 1):
        if i == len(slots) or slots[i][1] != slots[i - 1][1] + 1:
            yield slots[start:i]
            start = i
