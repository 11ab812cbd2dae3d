"""GPU memory, or host memory in its place.

torch is imported when a tier is made: it takes seconds that other hierarchies need not pay.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tieredkv.buffers import check_batch
from tieredkv.errors import ConfigError
from tieredkv.tiers.base import BlockBuffer, BlockBuffers
from tieredkv.tiers.slab import Slab, copy_in, copy_out, runs, slot_count
from tieredkv.types import Batch, Outcome

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class HbmTier:
    """Slots in one torch uint8 tensor; implements `tieredkv.tiers.base.Tier`.

    `tensor` has shape (slots, block_bytes). On CUDA all copies run on a stream of the
    tier's own and are complete when a call returns. On the CPU the tensor lies over a
    page-aligned slab. Thread-safe as the protocol says.
    """

    inline = True
    durable = False

    def __init__(self, name: str, capacity: int, block_bytes: int, device: str = "auto") -> None:
        """`capacity` in bytes of payload; `device` is "auto" (cuda, else cpu) or a torch device.

        Raises CapacityError if no slot fits, ConfigError if the memory cannot be had.
        """
        import torch

        self._slots = slot_count(name, capacity, block_bytes)
        self.name = name
        self.block_bytes = block_bytes
        self._slab: Slab | None = None
        self._stream: Any = None
        target = _device(name, device)
        if target.type == "cpu":
            log.warning("hbm tier runs on cpu: %s", _why_cpu(device))
            self._slab = Slab(self._slots, block_bytes)
            self.tensor = torch.from_numpy(self._slab.rows)
        else:
            try:
                self.tensor = torch.empty(
                    (self._slots, block_bytes), dtype=torch.uint8, device=target
                )
                self._stream = torch.cuda.Stream(target)  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                raise ConfigError(
                    f"tier {name}: {capacity} bytes cannot be had on {target} ({error}); "
                    "lower the capacity, or what else uses the device"
                ) from error

    @property
    def slots(self) -> int:
        return self._slots

    def write(self, batch: Batch, sources: BlockBuffers) -> list[Outcome]:
        check_batch(batch, sources, self.block_bytes, self._slots)
        if self._slab is not None:
            copy_in(self._slab.rows, batch.slots, sources, 0, len(batch))
            return [Outcome.OK] * len(batch)
        return self._on_stream(self._to_device, batch, sources)

    def read(self, batch: Batch, targets: BlockBuffers) -> list[Outcome]:
        check_batch(batch, targets, self.block_bytes, self._slots)
        if self._slab is not None:
            copy_out(self._slab.rows, batch.slots, targets, 0, len(batch))
            return [Outcome.OK] * len(batch)
        return self._on_stream(self._to_host, batch, targets)

    def views(self, slots: Sequence[int]) -> list[memoryview] | None:
        return None if self._slab is None else self._slab.views(slots)

    def close(self) -> None:
        import torch

        self.tensor = torch.empty((0, self.block_bytes), dtype=torch.uint8)
        if self._slab is not None:
            self._slab.close()

    def _on_stream(self, copy: Any, batch: Batch, buffers: BlockBuffers) -> list[Outcome]:
        """Run `copy` and wait for it; a CUDA error fails the batch, it does not raise."""
        import torch

        try:
            with torch.cuda.stream(self._stream):
                copy(batch.slots, buffers)
            self._stream.synchronize()
        except RuntimeError:
            log.exception("tier %s: copy of %d blocks failed", self.name, len(batch))
            return [Outcome.FAILED] * len(batch)
        return [Outcome.OK] * len(batch)

    def _to_device(self, slots: Sequence[int], sources: BlockBuffers) -> None:
        import torch

        if isinstance(sources, np.ndarray):
            for i, slot, n in runs(slots, 0, len(slots)):
                host = torch.from_numpy(_plain(sources[i : i + n]))
                self.tensor[slot : slot + n].copy_(host, non_blocking=True)
            return
        for slot, source in zip(slots, sources, strict=True):
            self.tensor[slot].copy_(torch.from_numpy(_plain(source)), non_blocking=True)

    def _to_host(self, slots: Sequence[int], targets: BlockBuffers) -> None:
        import torch

        if isinstance(targets, np.ndarray):
            # one gather on the device and one transfer, however scattered the slots are
            index = torch.tensor(list(slots), device=self.tensor.device)
            gathered = self.tensor.index_select(0, index)
            torch.from_numpy(targets).copy_(gathered, non_blocking=True)
            return
        for slot, target in zip(slots, targets, strict=True):
            torch.from_numpy(_plain(target)).copy_(self.tensor[slot], non_blocking=True)


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


def _plain(buffer: BlockBuffer) -> Any:
    """The buffer as an array that torch accepts without a warning (read-only ones: a copy)."""
    array = np.frombuffer(buffer, np.uint8) if isinstance(buffer, memoryview) else buffer
    return array if array.flags.writeable else array.copy()
