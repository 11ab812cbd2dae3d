"""Host memory, private to the process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Literal

from tieredkv.buffers import check_batch
from tieredkv.device import (
    Way,
    copy_blocks,
    cuda_present,
    current_device,
    on_device,
    page_lock,
    page_unlock,
)
from tieredkv.tiers.base import BlockBuffers
from tieredkv.tiers.slab import CopyPool, Slab, copy_in, copy_out, slot_count
from tieredkv.types import Batch, Outcome

log = logging.getLogger(__name__)

CLOSE_TIMEOUT = 60.0


class DramTier:
    """Slots in one slab of host memory; implements `tieredkv.tiers.base.DeviceTier`.

    A daemon thread touches the pages from the start on (`wait_ready`), so that puts do not
    pay for page faults, and then page-locks the slab where CUDA is present. Copies release
    the GIL; a batch of 8 MiB or more is shared by `copy_threads` threads. To and from memory of
    a device they run on its side streams.
    Thread-safe as the protocol says.
    """

    inline = True
    durable = False
    device = True

    def __init__(
        self,
        name: str,
        capacity: int,
        block_bytes: int,
        copy_threads: int = 2,
        pin: Literal["auto", "off"] = "auto",
    ) -> None:
        """`capacity` in bytes of payload.

        Raises CapacityError if no slot fits, ConfigError if the memory cannot be had.
        """
        self._slots = slot_count(name, capacity, block_bytes)
        self.name = name
        self.block_bytes = block_bytes
        self.pinned = False
        """True once the slab is page-locked for CUDA."""
        self._slab = Slab(self._slots, block_bytes)
        self._pool = CopyPool(copy_threads, f"{name}-copy")
        self._stop = threading.Event()
        self._pin, self._cuda = pin, current_device()
        self._preparation = threading.Thread(
            target=self._prepare, name=f"{name}-prefault", daemon=True
        )
        self._preparation.start()

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def memory(self) -> tuple[int, int]:
        """(address, bytes) of the slab, for those who register memory with a device."""
        return self._slab.address, self._slab.nbytes

    def wait_ready(self, timeout: float) -> bool:
        """Wait until the slab is pre-faulted and pinned; False at the deadline.

        The tier works before; its first writes are only slower.
        """
        self._preparation.join(timeout)
        return not self._preparation.is_alive()

    def give_up_pinning(self) -> None:
        """Let `wait_ready` come to its end: no page is touched or locked from now on, but for a
        call of CUDA's that is under way."""
        self._stop.set()

    def write(self, batch: Batch, sources: BlockBuffers) -> list[Outcome]:
        check_batch(batch, sources, self.block_bytes, self._slots)
        if len(batch) and on_device(sources[0]):
            return self._cross("out", batch, sources, Outcome.FAILED)
        self._pool.run(copy_in, self._slab.rows, batch.slots, sources)
        return [Outcome.OK] * len(batch)

    def read(self, batch: Batch, targets: BlockBuffers) -> list[Outcome]:
        check_batch(batch, targets, self.block_bytes, self._slots)
        if len(batch) and on_device(targets[0]):
            return self._cross("in", batch, targets, Outcome.BUSY)
        self._pool.run(copy_out, self._slab.rows, batch.slots, targets)
        return [Outcome.OK] * len(batch)

    def views(self, slots: Sequence[int]) -> list[memoryview] | None:
        return self._slab.views(slots)

    def device_views(self, slots: Sequence[int]) -> None:
        return None

    def close(self) -> None:
        self._stop.set()
        self._pool.close()
        if not self.wait_ready(CLOSE_TIMEOUT):
            log.warning("tier %s: page-locking still runs at close; its memory stays", self.name)
            return
        if self.pinned:
            page_unlock(self._slab.address, self._cuda)
            self.pinned = False
        self._slab.close()

    def _cross(
        self, way: Way, batch: Batch, tensors: BlockBuffers, failed: Outcome
    ) -> list[Outcome]:
        """Between device and slab; an error of the device is the outcome of all blocks. (When they
        were read it says nothing about them.)"""
        try:
            copy_blocks(way, tensors, [self._slab.rows[slot] for slot in batch.slots])
        except RuntimeError:
            log.exception("tier %s: copy of %d blocks failed", self.name, len(batch))
            return [failed] * len(batch)
        return [Outcome.OK] * len(batch)

    def _prepare(self) -> None:
        self._slab.prefault(self._stop)
        if self._pin == "off" or self._stop.is_set() or not cuda_present():
            return
        self.pinned = page_lock(self._slab.address, self._slab.nbytes, self._cuda)
        state = "page-locked for CUDA" if self.pinned else "not page-locked, CUDA copies are slower"
        log.info("tier %s: %d bytes %s", self.name, self._slab.nbytes, state)
