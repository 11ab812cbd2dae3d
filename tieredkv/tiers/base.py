"""The tier protocol: an array of equal slots on one medium.

A tier copies bytes and nothing else. It knows no policy, no index and no other tier; which
block lives in which slot is the planner's business. Plug-ins implement `Tier` and are
checked by inheriting `tieredkv.testing.TierSuite`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from tieredkv.types import Batch, Outcome

Bytes: TypeAlias = "npt.NDArray[np.uint8]"
BlockBuffer: TypeAlias = "memoryview | Bytes"
"""One block: C-contiguous, 1-D, format 'B', `block_bytes` long."""
BlockBuffers: TypeAlias = "Sequence[BlockBuffer] | Bytes"
"""One buffer per block of a batch, or one uint8 array of shape (blocks, block_bytes)."""


class Tier(Protocol):
    """An array of slots that each hold one block.

    Thread-safety: `write` and `read` are called from several threads at once, never for
    the same slot while a write to it is running (the planner sees to that).
    Ownership: buffers are borrowed for the duration of the call only.
    """

    name: str
    """Unique in the hierarchy; the `tier` label of metrics."""
    block_bytes: int
    inline: bool
    """True if calls are plain memory copies: the caller's thread runs them. False if they
    can block: they run on the mover's threads under a deadline."""
    durable: bool
    """True if bytes survive the process."""

    @property
    def slots(self) -> int:
        """Slots usable now. May shrink while running (disk full), never grows."""
        ...

    def write(self, batch: Batch, sources: BlockBuffers) -> list[Outcome]:
        """Copy `sources[i]` into slot `batch.slots[i]`; OK, BUSY or FAILED per block.

        A durable tier returns OK only once bytes and header would survive a power loss.
        After anything but OK the slot's content is undefined. Must not raise for
        conditions of the medium.
        """
        ...

    def read(self, batch: Batch, targets: BlockBuffers) -> list[Outcome]:
        """Copy slot `batch.slots[i]` into `targets[i]`; OK, CORRUPT, BUSY or FAILED per block.

        OK means: these are the bytes written under that key and generation. A failure of
        one block leaves its neighbours' outcomes and bytes intact.
        """
        ...

    def views(self, slots: Sequence[int]) -> list[memoryview] | None:
        """Writable host memory of these slots, or None where the medium has none.

        Lets other tiers move bytes to and from this one without a staging copy. The
        planner keeps the slots reserved while the views are in use.
        """
        ...

    def close(self) -> None:
        """Release the medium. No other call is running and none follows. Idempotent."""
        ...


class DeviceTier(Tier, Protocol):
    """A tier that also copies to and from memory of a device."""

    device: bool
    """May the buffers of a call be memory of a device instead: one contiguous uint8 torch tensor
    per block? What they hold must be there when the call begins; what it copies is there when
    it returns."""

    def device_views(self, slots: Sequence[int]) -> Sequence[Any] | None:
        """Like `views`, memory of a device."""
        ...


def takes_device(tier: Tier) -> bool:
    """False for a tier that is no `DeviceTier`."""
    return bool(getattr(tier, "device", False))


def device_views(tier: Tier, slots: Sequence[int]) -> Sequence[Any] | None:
    """None for a tier that is no `DeviceTier`."""
    views = getattr(tier, "device_views", None)
    return None if views is None else cast("Sequence[Any] | None", views(slots))


class SharedCatalogue(Protocol):
    """What a tier holds that other processes fill as well, asked and told where the planner is.

    Blocks are found by their keys; one may go at any time, and then `read` fails. Thread-safe,
    and no call but `answer` with `wait` and `close` waits for anything.
    """

    soft_pins: bool
    """Are blocks to be kept for as long as their sessions are expected back?"""
    shed: Callable[[int], object] | None
    """Called, on any thread, with a number of blocks that this process is to give up."""

    @property
    def doomed(self) -> Container[bytes]:
        """Blocks that `remove` was told of and that may still be there."""
        ...

    @property
    def available(self) -> bool:
        """Is the medium answering? While not, nothing is planned for it."""
        ...

    @property
    def failures(self) -> int:
        """How often it has stopped answering."""
        ...

    def disown(self) -> None:
        """Nothing is this process's own any more; nothing is removed."""
        ...

    def ask(self, keys: Sequence[bytes]) -> Any:
        """Begin to ask how many leading blocks of these are there."""
        ...

    def answer(self, question: Any, *, wait: float) -> int | None:
        """So many, a hint; None if that is not known after `wait` seconds. Of a question that is
        too old the answer is 0, so that a long wait ends as well."""
        ...

    def lost(self, keys: Iterable[bytes]) -> None:
        """These could not be read: they count as absent for a while."""
        ...

    def coming(self, keys: Iterable[bytes]) -> None:
        """These are about to be written: do not remove them now."""
        ...

    def stored(self, keys: Iterable[bytes]) -> None:
        """These were written, and are this process's own."""
        ...

    def left(self, keys: Iterable[bytes]) -> None:
        """These have left the tier as far as this process is concerned: its own are removed."""
        ...

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove these for everybody, sooner or later; they are not found from now on."""
        ...

    def remove_own(self) -> None:
        """Remove all that this process has written."""
        ...

    def close(self) -> None:
        """Release what it uses. Idempotent."""
        ...
