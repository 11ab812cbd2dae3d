"""An engine's paged KV cache, seen as rows of bytes.

A *segment* is one tensor of shape (engine blocks, bytes): a layer, half a layer where keys and
values lie apart, or all layers where they lie side by side in every block. A chunk holds, one
segment after the other, the rows of its engine blocks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tieredkv.errors import UsageError


def segments_of(tensors: Iterable[torch.Tensor], num_blocks: int) -> list[torch.Tensor]:
    """Byte views of shape (num_blocks, bytes) on an engine's KV tensors, as few as possible.

    `tensors` in layer order, each with one dimension of `num_blocks`. Raises UsageError where
    the bytes of a block do not lie together.
    """
    return _merged([s for t in tensors for s in _segments(t, num_blocks)])


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
