"""An engine's paged KV cache, seen as rows of bytes, and copies between it and chunks.

A *segment* is one tensor of shape (engine blocks, bytes): a layer, half a layer where keys and
values lie apart, or all layers where they lie side by side in every block. A chunk holds, one
segment after the other, the rows of its engine blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tieredkv.errors import UsageError
from tieredkv.tiers.base import BlockBuffer, BlockBuffers, Bytes
from tieredkv.types import Batch, Outcome


class PagedCache:
    """The registered KV tensors of one rank. Copies are thread-safe for distinct blocks."""

    def __init__(self, tensors: Iterable[torch.Tensor], num_blocks: int, per_chunk: int) -> None:
        """`tensors` in layer order, each with one dimension of `num_blocks`; they stay the
        engine's. `per_chunk`: engine blocks in a chunk.

        Raises UsageError where the bytes of a block do not lie together.
        """
        self.segments = _merged([s for t in tensors for s in _segments(t, num_blocks)])
        self.per_chunk = per_chunk
        self.chunk_bytes = per_chunk * sum(segment.shape[1] for segment in self.segments)
        self.device = self.segments[0].device
        self._rows = [(_items(segment), segment.shape[1]) for segment in self.segments]
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(self.device) if self.device.type == "cuda" else None

    def fence(self) -> Any:
        """Mark what the engine has queued on the device so far; None on the CPU."""
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self.device).record_event()

    def gather(self, blocks: Sequence[int], chunk: BlockBuffer, fence: Any = None) -> None:
        """Copy engine blocks into a chunk of host memory, once `fence` has passed."""
        self._copy(blocks, 0, chunk, fence, out=True)

    def scatter(self, blocks: Sequence[int], chunk: BlockBuffer, fence: Any = None) -> None:
        """Copy a chunk into engine blocks; ids below 0 at either end are left alone."""
        wanted = [i for i, block in enumerate(blocks) if block >= 0]
        if wanted:
            first, last = wanted[0], wanted[-1] + 1
            self._copy(blocks[first:last], first, chunk, fence, out=False)

    def _copy(
        self, blocks: Sequence[int], skip: int, chunk: BlockBuffer, fence: Any, *, out: bool
    ) -> None:
        host = np.frombuffer(chunk, np.uint8)
        if self._stream is None:
            for rows, part in self._parts(host, skip, len(blocks)):
                # single-threaded on purpose: the engine's threads are computing
                if out:
                    np.take(rows, blocks, out=part, mode="clip")
                else:
                    rows[blocks] = part
            return
        ids = torch.tensor(blocks, dtype=torch.int64)
        with torch.cuda.stream(self._stream):
            if fence is not None:
                self._stream.wait_event(fence)
            there = ids.to(self.device)
            for segment, part in self._parts(host, skip, len(blocks)):
                rows = torch.from_numpy(part.view(np.uint8)).view(len(blocks), -1)
                if out:
                    rows.copy_(segment.index_select(0, there))
                else:
                    segment.index_copy_(0, there, rows.to(self.device))
            self._stream.synchronize()

    def _parts(self, host: Bytes, skip: int, count: int) -> Iterator[tuple[Any, Any]]:
        """(rows of a segment, `count` rows of the chunk from the `skip`-th on, an item each)."""
        at = 0
        for rows, width in self._rows:
            first = at + skip * width
            yield rows, host[first : first + count * width].view(f"V{width}")
            at += self.per_chunk * width


class PagedBlocks:
    """The engine blocks of one job as a tier: slot i is its i-th chunk.

    Lets a Transfer copy between any tier and the engine without a staging copy where the tier
    has host memory of its own. After `revoke` every call is BUSY: the engine may have given the
    blocks to somebody else.
    """

    name = "engine"
    inline = False
    durable = False

    def __init__(self, cache: PagedCache, blocks: list[list[int]], fence: Any) -> None:
        self.block_bytes = cache.chunk_bytes
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
            for slot, buffer in zip(batch.slots, buffers, strict=True):
                copy(self._blocks[slot], buffer, self._fence)
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

    def close(self) -> None:
        return


def _segments(tensor: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
    """Byte views of shape (num_blocks, bytes) on one layer's tensor."""
    if tensor.shape[0] != num_blocks:
        if tensor.shape[0] % num_blocks == 0:  # the kernel's blocks are smaller
            return _segments(tensor.view(num_blocks, -1, *tensor.shape[1:]), num_blocks)
        if tensor.ndim > 1 and tensor.shape[1] == num_blocks:  # keys and values apart
            return [s for part in tensor.unbind(0) for s in _segments(part, num_blocks)]
        raise UsageError(
            f"a KV cache tensor of shape {tuple(tensor.shape)} has no dimension of {num_blocks} "
            "blocks: this attention backend is not supported"
        )
    inner = tensor[0].numel()
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    if span != inner:
        raise UsageError(
            f"a KV cache tensor with strides {tensor.stride()} scatters the bytes of a block: "
            "this KV cache layout is not supported"
        )
    flat = tensor.as_strided((num_blocks, inner), (tensor.stride(0), 1))
    return [flat.view(torch.uint8)]


def _items(segment: torch.Tensor) -> Any:
    """On the CPU an array with one item per row, which numpy copies whole; else the tensor."""
    if not segment.is_cpu:
        return segment
    array = segment.numpy()
    return array.view(f"V{array.shape[1]}")[:, 0]


def _merged(segments: list[torch.Tensor]) -> list[torch.Tensor]:
    """Drop segments that share memory; join those that are neighbours in every block."""
    found: dict[tuple[int, int], torch.Tensor] = {}
    for segment in segments:
        found.setdefault((segment.data_ptr(), segment.shape[1]), segment)
    unique = list(found.values())
    ordered = sorted(unique, key=lambda s: (s.untyped_storage().data_ptr(), s.storage_offset()))
    joined: list[torch.Tensor] = []
    for segment in ordered:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.untyped_storage().data_ptr() == segment.untyped_storage().data_ptr()
            and last.stride(0) == segment.stride(0)
            and last.storage_offset() + last.shape[1] == segment.storage_offset()
            and last.shape[1] + segment.shape[1] <= segment.stride(0)
        ):
            shape = (last.shape[0], last.shape[1] + segment.shape[1])
            joined[-1] = last.as_strided(shape, last.stride(), last.storage_offset())
        else:
            joined.append(segment)
    # registration order where nothing joins, so that all ranks and restarts agree
    return joined if len(joined) < len(unique) else unique
