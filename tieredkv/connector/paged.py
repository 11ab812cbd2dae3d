"""An engine's blocks as a tier: copies between them and chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tieredkv.buffers import check_batch
from tieredkv.connector.copies import HostCopies, StreamCopies
from tieredkv.connector.layout import segments_of
from tieredkv.device import Device, Event, streams_of
from tieredkv.staging import Staging
from tieredkv.tiers.base import BlockBuffers
from tieredkv.types import Batch, Outcome

Chunks = Sequence[Sequence[int]]
"""Engine blocks of each chunk."""


class PagedCache:
    """The registered KV tensors of one rank. Copies are thread-safe for distinct blocks."""

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        num_blocks: int,
        per_chunk: int,
        *,
        batch: int,
        users: int,
        streams: Device | None = None,
    ) -> None:
        """`tensors` as of `segments_of`; they stay the engine's. `per_chunk`: engine blocks in a
        chunk. Of staging memory there is enough for `users` threads that each copy `batch` bytes,
        or one chunk, at once. `streams` in place of those of the tensors' device.

        Raises UsageError where the bytes of a block do not lie together, ConfigError where the
        device has no room for staging.
        """
        segments = segments_of(tensors, num_blocks)
        self.segments = len(segments)
        self.chunk_bytes = per_chunk * sum(segment.shape[1] for segment in segments)
        self.part = max(1, batch // self.chunk_bytes)
        """Chunks that are copied at once."""
        self.device = segments[0].device
        self._streams = streams or streams_of(self.device)
        self.on_device = self._streams is not None
        self.staging = Staging(self.chunk_bytes, self.part, users)
        self._copies: HostCopies | StreamCopies = (
            HostCopies(segments, per_chunk)
            if self._streams is None
            else StreamCopies(segments, per_chunk, self._streams, self.staging, self.part, users)
        )

    def fence(self) -> Event | None:
        """Mark what the engine has asked of the device so far; None on the CPU."""
        return None if self._streams is None else self._streams.mark()

    def gather(self, chunks: Chunks, targets: BlockBuffers, fence: Event | None = None) -> None:
        """Copy chunks out of their engine blocks, once `fence` has passed; `targets` are of the
        host, or of the device where the cache is there. Raises RuntimeError if the device fails.
        """
        for lo in range(0, len(chunks), self.part):
            part = slice(lo, lo + self.part)
            self._copies.copy("out", [(0, blocks) for blocks in chunks[part]], targets[part], fence)

    def scatter(self, chunks: Chunks, sources: BlockBuffers, fence: Event | None = None) -> None:
        """Copy chunks into their engine blocks; ids below 0 at either end are left alone."""
        for lo in range(0, len(chunks), self.part):
            part = slice(lo, lo + self.part)
            rows = [_wanted(blocks) for blocks in chunks[part]]
            self._copies.copy("in", rows, sources[part], fence)


class PagedBlocks:
    """The engine blocks of one job as a tier: slot i is its i-th chunk.

    Lets a Transfer copy between any tier and the engine without a staging copy where the tier
    has host memory of its own. It lends no memory of the engine's, even where a chunk lies
    together: what a disk that hangs writes to could be taken away from nobody. So a copy into
    or out of engine blocks is one between memories, which cannot hang.

    After `revoke` every call is BUSY: the engine may have given the blocks to somebody else.
    """

    name = "engine"
    inline = False
    durable = False

    def __init__(self, cache: PagedCache, blocks: list[list[int]], fence: Event | None) -> None:
        self.block_bytes = cache.chunk_bytes
        self.device = cache.on_device
        self._cache, self._blocks, self._fence = cache, blocks, fence
        self._lock = threading.Lock()
        self._active = 0
        self._revoked = False

    @property
    def slots(self) -> int:
        return len(self._blocks)

    def read(self, batch: Batch, targets: BlockBuffers) -> list[Outcome]:
        return self._copy(self._cache.gather, batch, targets)

    def write(self, batch: Batch, sources: BlockBuffers) -> list[Outcome]:
        return self._copy(self._cache.scatter, batch, sources)

    def _copy(
        self, copy: Callable[[Any, Any, Any], None], batch: Batch, buffers: BlockBuffers
    ) -> list[Outcome]:
        with self._lock:
            if self._revoked:
                return [Outcome.BUSY] * len(batch)
            self._active += 1
        try:
            check_batch(batch, buffers, self.block_bytes, self.slots)
            copy([self._blocks[slot] for slot in batch.slots], buffers, self._fence)
        finally:
            with self._lock:
                self._active -= 1
        return [Outcome.OK] * len(batch)

    def revoke(self) -> bool:
        """Let no further copy begin; False while one is under way, which will end by itself."""
        with self._lock:
            self._revoked = True
            return not self._active

    def views(self, slots: Sequence[int]) -> list[memoryview] | None:
        return None

    def device_views(self, slots: Sequence[int]) -> Sequence[Any] | None:
        return None

    def close(self) -> None:
        return


def _wanted(blocks: Sequence[int]) -> tuple[int, Sequence[int]]:
    """(rows that come before, engine blocks) of what is wanted of a chunk."""
    wanted = [i for i, block in enumerate(blocks) if block >= 0] or [0, -1]
    first, last = wanted[0], wanted[-1] + 1
    return first, blocks[first:last]
