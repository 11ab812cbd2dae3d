"""What users pass as blocks, seen as bytes without a copy.

torch is never imported here: if the caller holds a tensor, it is loaded already.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np

from tieredkv.device import Event, loaded_torch, mark_caller, on_device
from tieredkv.errors import BlockSizeError, UsageError
from tieredkv.tiers.base import BlockBuffers, Bytes
from tieredkv.types import Batch

POLL = 0.0002


class Blocks:
    """`count` blocks of `block_bytes` bytes each, all in host memory or all on a device.

    The memory stays the caller's.
    """

    __slots__ = ("block_bytes", "buffers", "ready")

    def __init__(self, buffers: BlockBuffers, block_bytes: int, ready: Event | None = None) -> None:
        self.buffers = buffers
        """One uint8 array of shape (count, block_bytes), or a list of `count` 1-D ones; torch
        tensors if they are on a device."""
        self.block_bytes = block_bytes
        """0 only if there are no blocks."""
        self.ready = ready
        """Behind what the caller's stream has still to do with blocks on a device; None for those
        in host memory."""

    def __len__(self) -> int:
        return len(self.buffers)

    def await_ready(self, deadline: float) -> bool:
        """May they be touched now? False if not by the deadline, as of `time.monotonic`."""
        with suppress(RuntimeError):  # of the device: the copies will say so
            while self.ready is not None and not self.ready.query():
                if time.monotonic() >= deadline:
                    return False
                time.sleep(POLL)
        return True


def view_blocks(buffers: object, count: int, *, writable: bool) -> Blocks:
    """View `buffers` as `count` equal blocks of bytes.

    `buffers` is a sequence of `count` buffers, or one stack: a contiguous buffer whose
    first dimension is a multiple of `count`, or 1-D of any divisible size. A buffer is
    anything with the buffer protocol, a numpy array or a torch tensor of the host or of a CUDA
    device, of any dtype. For a device, notes what is queued on the calling thread's current stream.

    Raises BlockSizeError for wrong counts and sizes, UsageError for buffers that are not
    contiguous, not writable though `writable` is asked for, of the host and of a device in one
    call, or no buffers at all.
    Costs O(1) for a stack; per block of a list below 1 us for arrays and bytes-likes, 2 us
    for tensors.
    """
    if isinstance(buffers, (list, tuple)) or not _is_buffer(buffers):
        return _from_sequence(buffers, count, writable)
    flat = _flat(buffers, writable, "the stack")
    shape, size = _shape(buffers), len(flat)
    if count == 0 and size == 0:
        return Blocks([], 0)
    if count == 0 or size == 0 or size % count or (len(shape) > 1 and shape[0] % count):
        raise BlockSizeError(
            f"a stack of shape {shape} ({size} bytes) does not divide into {count} blocks: "
            "pass one with a first dimension of one entry per key, or a list with one buffer each"
        )
    stack = flat.reshape(count, -1)
    if on_device(stack):
        return Blocks(stack.unbind(0), size // count, mark_caller(stack))
    return Blocks(stack, size // count)


def _from_sequence(buffers: object, count: int, writable: bool) -> Blocks:
    if not isinstance(buffers, Sequence) or isinstance(buffers, str):
        raise UsageError(
            f"blocks of type {type(buffers).__name__}: pass a list of buffers, or one contiguous "
            "buffer (bytes-like, numpy array, torch tensor)"
        )
    if len(buffers) != count:
        raise BlockSizeError(f"{len(buffers)} buffers for {count} keys: pass one buffer per key")
    flats = [_flat(buffer, writable, i) for i, buffer in enumerate(buffers)]
    if not flats:
        return Blocks([], 0)
    block_bytes = len(flats[0])
    for i, flat in enumerate(flats):
        if len(flat) != block_bytes or not block_bytes:
            raise BlockSizeError(
                f"block {i} has {len(flat)} bytes, block 0 has {block_bytes}: "
                "all blocks must have one size, larger than 0"
            )
    device = set(map(type, flats)) != {np.ndarray}
    if device:
        _check_one_device(flats)
    if writable:
        _check_apart(flats, block_bytes, device)
    return Blocks(flats, block_bytes, mark_caller(flats[0]) if device else None)


def _check_one_device(flats: list[Any]) -> None:
    places = {str(flat.device) if on_device(flat) else "the host" for flat in flats}
    if len(places) > 1:
        raise UsageError(
            f"blocks on {', '.join(sorted(places))}: pass all blocks of a call in one memory"
        )


def _check_apart(flats: list[Any], block_bytes: int, device: bool) -> None:
    """Blocks to be filled must not share memory: the last one read would stand for all."""
    if device:
        starts = sorted(flat.data_ptr() for flat in flats)
    else:
        starts = sorted(flat.__array_interface__["data"][0] for flat in flats)
    if any(b - a < block_bytes for a, b in pairwise(starts)):
        raise UsageError("two of the buffers overlap: pass memory of its own for each block")


def _is_buffer(value: object) -> bool:
    if isinstance(value, np.ndarray) or _is_tensor(value):
        return True
    try:
        memoryview(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _shape(buffer: Any) -> tuple[int, ...]:
    shape = buffer.shape if hasattr(buffer, "shape") else memoryview(buffer).shape
    return tuple(shape or ())


def _is_tensor(value: object) -> bool:
    torch = loaded_torch()
    return torch is not None and isinstance(value, torch.Tensor)


def _flat(buffer: Any, writable: bool, place: int | str) -> Any:
    """1-D uint8 view of one buffer, an array or a tensor of a device."""
    if isinstance(buffer, np.ndarray):
        return _flat_array(buffer, writable, place)
    if _is_tensor(buffer):
        return _flat_tensor(buffer, place)
    try:
        view = memoryview(buffer)
    except TypeError:
        raise UsageError(
            f"{_name(place)} is a {type(buffer).__name__}: pass a bytes-like object, "
            "a numpy array or a torch tensor"
        ) from None
    if not view.c_contiguous:
        raise _not_contiguous(place, view.shape)
    if writable and view.readonly:
        raise _read_only(place)
    return np.frombuffer(view, np.uint8)


def _flat_array(array: Any, writable: bool, place: int | str) -> Bytes:
    flags = array.flags
    if not flags.c_contiguous:
        raise _not_contiguous(place, array.shape)
    if writable and not flags.writeable:
        raise _read_only(place)
    if array.dtype == np.uint8 and array.ndim == 1 and type(array) is np.ndarray:
        return array
    if array.dtype.hasobject:
        raise UsageError(f"{_name(place)} holds Python objects (dtype {array.dtype}): pass bytes")
    flat: Bytes = array.view(np.ndarray).reshape(-1).view(np.uint8)
    return flat


def _flat_tensor(tensor: Any, place: int | str) -> Any:
    torch = sys.modules["torch"]
    try:
        if not tensor.is_contiguous():
            raise _not_contiguous(place, tuple(tensor.shape))
        if tensor.requires_grad:
            tensor = tensor.detach()
        flat = (tensor if tensor.ndim else tensor.reshape(1)).view(torch.uint8)
        return flat.reshape(-1) if flat.is_cuda else flat.numpy().reshape(-1)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"{_name(place)} is a tensor without plain memory ({error}): pass a dense tensor of "
            "the CPU or of a CUDA device"
        ) from error


def _name(place: int | str) -> str:
    return f"block {place}" if isinstance(place, int) else place


def _not_contiguous(place: int | str, shape: Any) -> UsageError:
    return UsageError(
        f"{_name(place)} (shape {shape}) is not C-contiguous: pass a contiguous one "
        "(numpy.ascontiguousarray, Tensor.contiguous)"
    )


def _read_only(place: int | str) -> UsageError:
    return UsageError(
        f"{_name(place)} is read-only and cannot be filled: pass a writable buffer (bytearray, "
        "a writable numpy array, a tensor)"
    )


def check_batch(batch: Batch, buffers: BlockBuffers, block_bytes: int, slots: int) -> None:
    """Raise UsageError unless the batch names slots of the tier and has one block for each.

    For tiers over plain memory, where a wrong index or size would corrupt a neighbour.
    """
    numbers = batch.slots
    if len(buffers) != len(numbers):
        raise UsageError(f"{len(buffers)} buffers for {len(numbers)} slots")
    if len(numbers) and not (min(numbers) >= 0 and max(numbers) < slots):
        raise UsageError(f"slots {min(numbers)}..{max(numbers)} are not all in 0..{slots - 1}")
    if isinstance(buffers, np.ndarray):
        if buffers.ndim != 2 or buffers.shape[1] != block_bytes:
            raise BlockSizeError(f"stack of shape {buffers.shape}: blocks have {block_bytes} bytes")
    else:
        for buffer in buffers:
            if len(buffer) != block_bytes:
                raise BlockSizeError(f"block of {len(buffer)} bytes instead of {block_bytes}")


class RevocableViews(list[memoryview]):
    """Views of the caller's blocks that can be taken away from a worker.

    Hand the views or slices of this list to the worker and keep no other reference. One view
    per block, 1-D, format 'B', writable where the buffer is; about 1 us each.
    """

    def __init__(self, buffers: BlockBuffers) -> None:
        super().__init__()
        self._owners: list[weakref.ref[Bytes]] = []
        for buffer in buffers:
            # A private array is the exporter of the view and of everything derived from it
            # (slices, arrays, running system calls): it dies with the last of them.
            is_array = isinstance(buffer, np.ndarray)
            owner: Any = buffer[:] if is_array else np.frombuffer(buffer, np.uint8)
            self._owners.append(weakref.ref(owner))
            self.append(memoryview(owner))

    def revoke(self) -> int:
        """Release every view; how many are still in use (inside a system call, or by a slice or
        array that the worker derived).

        At 0 nobody can touch the memory through these views any more: a late worker gets
        ValueError. Otherwise the memory must stay quarantined; calling again tells the news.
        Thread-safe against the worker.
        """
        for view in self:
            try:
                view.release()
            except BufferError:  # exported right now; counted below
                continue
        return sum(owner() is not None for owner in self._owners)
