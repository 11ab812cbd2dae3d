"""Copies between an engine's blocks and chunks: by the CPU, or on the streams of a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from tieredkv.device import (
    Device,
    Event,
    Way,
    as_tensor,
    carry_out,
    copy_pairs,
    device_tensor,
    host_tensor,
)
from tieredkv.staging import Ring, Staging
from tieredkv.tiers.base import BlockBuffers
from tieredkv.tiers.slab import runs

Rows: TypeAlias = "Sequence[tuple[int, Sequence[int]]]"
"""Of each chunk (rows that come before, engine blocks of the rows to copy)."""


class HostCopies:
    """By the calling thread, between tensors and buffers of the host. Single-threaded on
    purpose: the engine's threads are computing."""

    def __init__(self, segments: Sequence[torch.Tensor], per_chunk: int) -> None:
        self._segments = [_items(segment) for segment in segments]
        self._per_chunk = per_chunk

    def copy(self, way: Way, rows: Rows, buffers: BlockBuffers, fence: Event | None) -> None:
        """`fence` is of no meaning here."""
        for (first, blocks), buffer in zip(rows, buffers, strict=True):
            at, chunk = 0, np.frombuffer(buffer, np.uint8)
            for segment in self._segments:
                width = segment.itemsize
                start = at + first * width
                there = chunk[start : start + len(blocks) * width].view(segment.dtype)
                if way == "out":
                    np.take(segment, blocks, out=there, mode="clip")
                else:
                    segment[blocks] = there
                at += self._per_chunk * width


class StreamCopies:
    """On the side streams of a device, waiting for nothing but their own end.

    Where one segment holds whole blocks, each run of neighbours is one copy by the device's
    copy engines. Where blocks are scattered over segments, a kernel per segment collects a
    chunk in staging memory of the device, and one copy takes it across. Nothing is allocated
    for a copy.
    """

    def __init__(
        self,
        segments: Sequence[torch.Tensor],
        per_chunk: int,
        streams: Device,
        staging: Staging,
        chunks: int,
        users: int,
    ) -> None:
        """`chunks` at most in one call, `users` calls at once."""
        self._segments, self._per_chunk = list(segments), per_chunk
        self._item = _widest(segments)
        self._wide = [segment.view(self._item) for segment in segments]
        self._streams, self._staging = streams, staging
        new = partial(_Ids, chunks * per_chunk, segments[0].device, streams)
        self._ids = Ring(new, users)
        if len(segments) > 1:
            staging.add_device(segments[0].device)
            self._ids.fill()

    def copy(self, way: Way, rows: Rows, buffers: BlockBuffers, fence: Event | None) -> None:
        """Wait for `fence`, and until the bytes are there; `buffers` of the host, or tensors of the
        device.

        Raises RuntimeError if the device fails, NoStaging.
        """
        if fence is not None:
            fence.synchronize()
        tensors = [as_tensor(buffer) for buffer in buffers]
        with ExitStack() as held:
            if len(self._segments) == 1:
                work: Callable[[], None] = partial(self._rows, way, rows, tensors)
            else:
                ids = held.enter_context(self._ids.take())
                ids.set([block for _, blocks in rows for block in blocks])
                stage: Any = tensors
                if not isinstance(buffers[0], torch.Tensor):
                    stage = held.enter_context(self._staging.take(len(rows), device=True))
                work = partial(self._collect, way, rows, tensors, stage, ids)
            carry_out(self._streams, way, work)

    @torch.inference_mode()  # the engine's tensors may be made in it, and then refuse others
    def _rows(self, way: Way, rows: Rows, tensors: Sequence[torch.Tensor]) -> None:
        (segment,) = self._segments
        width = segment.shape[1]
        dense = segment.stride(0) == width
        for (first, blocks), tensor in zip(rows, tensors, strict=True):
            chunk = tensor.view(self._per_chunk, width)
            single = ((i, block, 1) for i, block in enumerate(blocks))
            for i, block, n in runs(blocks, 0, len(blocks)) if dense else single:
                here, there = segment[block : block + n], chunk[first + i : first + i + n]
                copy_pairs(way, [(here, there)])

    @torch.inference_mode()
    def _collect(
        self,
        way: Way,
        rows: Rows,
        tensors: Sequence[torch.Tensor],
        stage: Sequence[torch.Tensor],
        ids: _Ids,
    ) -> None:
        ids.upload()
        at = 0
        for (first, blocks), tensor, chunk in zip(rows, tensors, stage, strict=True):
            index = ids.there[at : at + len(blocks)]
            at += len(blocks)
            if way == "in" and chunk is not tensor:
                copy_pairs(way, [(chunk, tensor)])
            for segment, piece in self._pieces(chunk, first, len(blocks)):
                if way == "out":
                    torch.index_select(segment, 0, index, out=piece)
                else:
                    segment.index_copy_(0, index, piece)
            if way == "out" and chunk is not tensor:
                copy_pairs(way, [(chunk, tensor)])

    def _pieces(
        self, chunk: torch.Tensor, first: int, count: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(a segment, `count` rows of the chunk from the `first` on that are the segment's)."""
        at = 0
        for segment, wide in zip(self._segments, self._wide, strict=True):
            width = segment.shape[1]
            start = at + first * width
            piece = chunk[start : start + count * width].view(self._item)
            yield wide, piece.view(count, wide.shape[1])
            at += self._per_chunk * width


class _Ids:
    """Numbers of engine blocks on their way to the device. Of one user at a time."""

    def __init__(self, size: int, device: torch.device, streams: Device) -> None:
        self.there = device_tensor((size,), torch.int64, device, streams)
        self._here = host_tensor(size, torch.int64, device)
        self._count = 0

    def set(self, blocks: Sequence[int]) -> None:
        self._count = len(blocks)
        self._here.numpy()[: self._count] = blocks

    def upload(self) -> None:
        self.there[: self._count].copy_(self._here[: self._count], non_blocking=True)


def _items(segment: torch.Tensor) -> Any:
    """An array with one item per row, which numpy copies whole."""
    array = segment.numpy()
    return array.view(f"V{array.shape[1]}")[:, 0]


def _widest(segments: Sequence[torch.Tensor]) -> torch.dtype:
    """The widest item that rows of all segments consist of: kernels copy item by item."""
    for item in (torch.int64, torch.int32, torch.int16):
        sizes = (s for seg in segments for s in (seg.shape[1], seg.stride(0), seg.storage_offset()))
        if not any(size % item.itemsize for size in sizes):
            return item
    return torch.uint8
