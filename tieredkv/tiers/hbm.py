"""GPU memory, or host memory in its place.

torch is imported when a tier is made: it takes seconds that other hierarchies need not pay.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tieredkv.buffers import check_batch
from tieredkv.device import (
    Device,
    Way,
    as_tensor,
    carry_out,
    copy_pairs,
    device_tensor,
    streams_of,
)
from tieredkv.errors import ConfigError
from tieredkv.tiers.base import BlockBuffers
from tieredkv.tiers.slab import Slab, copy_in, copy_out, runs, slot_count
from tieredkv.types import Batch, Outcome

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class HbmTier:
    """Slots in one torch uint8 tensor; implements `tieredkv.tiers.base.DeviceTier`.

    `tensor` has shape (slots, block_bytes). On CUDA all copies run on the device's side streams,
    one for each way, and are complete when a call returns. On the CPU the tensor lies over a
    page-aligned slab. Thread-safe as the protocol says.
    """

    inline = True
    durable = False

    def __init__(
        self,
        name: str,
        capacity: int,
        block_bytes: int,
        device: str = "auto",
        streams: Device | None = None,
    ) -> None:
        """`capacity` in bytes of payload; `device` is "auto" (cuda, else cpu) or a torch device.
        `streams` in place of the device's own.

        Raises CapacityError if no slot fits, ConfigError if the memory cannot be had.
        """
        import torch

        self._slots = slot_count(name, capacity, block_bytes)
        self.name = name
        self.block_bytes = block_bytes
        self._slab: Slab | None = None
        target = _device(name, device)
        try:
            self._streams = streams or streams_of(target)
            if self._streams is None:
                log.warning("hbm tier runs on cpu: %s", _why_cpu(device))
                self._slab = Slab(self._slots, block_bytes)
                self.tensor = torch.from_numpy(self._slab.rows)
                return
            shape = (self._slots, block_bytes)
            self.tensor = device_tensor(shape, torch.uint8, target, self._streams)
        except RuntimeError as error:
            raise ConfigError(
                f"tier {name}: {capacity} bytes cannot be had on {target} ({error}); "
                "lower the capacity, or what else uses the device"
            ) from error

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def device(self) -> bool:
        """Do `write` and `read` take memory of a device?"""
        return self._streams is not None

    def write(self, batch: Batch, sources: BlockBuffers) -> list[Outcome]:
        check_batch(batch, sources, self.block_bytes, self._slots)
        if self._slab is None:
            return self._on_stream("in", batch, sources, Outcome.FAILED)
        copy_in(self._slab.rows, batch.slots, sources, 0, len(batch))
        return [Outcome.OK] * len(batch)

    def read(self, batch: Batch, targets: BlockBuffers) -> list[Outcome]:
        check_batch(batch, targets, self.block_bytes, self._slots)
        if self._slab is None:
            return self._on_stream("out", batch, targets, Outcome.BUSY)
        copy_out(self._slab.rows, batch.slots, targets, 0, len(batch))
        return [Outcome.OK] * len(batch)

    def views(self, slots: Sequence[int]) -> list[memoryview] | None:
        return None if self._slab is None else self._slab.views(slots)

    def device_views(self, slots: Sequence[int]) -> list[torch.Tensor] | None:
        return [self.tensor[slot] for slot in slots] if self.device else None

    def close(self) -> None:
        import torch

        self.tensor = torch.empty((0, self.block_bytes), dtype=torch.uint8)
        if self._slab is not None:
            self._slab.close()

    def _on_stream(
        self, way: Way, batch: Batch, buffers: BlockBuffers, failed: Outcome
    ) -> list[Outcome]:
        """Copy and wait for it; an error of the device is the outcome of all blocks. (When they
        were read it says nothing about them.)"""
        assert self._streams is not None
        pairs = list(self._pairs(batch.slots, buffers))
        try:
            carry_out(self._streams, way, partial(copy_pairs, way, pairs))
        except RuntimeError:
            log.exception("tier %s: copy of %d blocks failed", self.name, len(batch))
            return [failed] * len(batch)
        return [Outcome.OK] * len(batch)

    def _pairs(
        self, slots: Sequence[int], buffers: BlockBuffers
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A pair per copy: one for each run of neighbours on both sides."""
        if isinstance(buffers, np.ndarray) and buffers.flags.c_contiguous:
            for i, slot, n in runs(slots, 0, len(slots)):
                yield self.tensor[slot : slot + n], as_tensor(buffers[i : i + n])
        else:
            for slot, buffer in zip(slots, buffers, strict=True):
                yield self.tensor[slot], as_tensor(buffer)


def _device(name: str, device: str) -> torch.device:
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(
            f"tier {name}: device {device!r} ({error}); use cuda, cpu or auto"
        ) from error
    if target.type not in ("cuda", "cpu"):
        raise ConfigError(f"tier {name}: device {device!r} is not supported; use cuda, cpu or auto")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"tier {name}: torch finds no CUDA device for {device!r}; use cpu or auto"
        )
    return target


def _why_cpu(device: str) -> str:
    return "torch finds no CUDA device" if device == "auto" else f"device is {device!r}"
