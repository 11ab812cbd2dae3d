"""Memory for bytes on their way between two media that lend each other none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

from tieredkv.device import current_device, page_lock, page_unlock
from tieredkv.errors import ConfigError
from tieredkv.tiers.base import BlockBuffers
from tieredkv.tiers.slab import Slab

T = TypeVar("T")
WAIT = 60.0


class Ring(Generic[T]):
    """At most `size` equal things, made when first needed, each lent to one user at a time.

    With one per thread that uses it nobody ever waits. Thread-safe.
    """

    def __init__(self, make: Callable[[], T], size: int) -> None:
        self._make, self._size = make, size
        self._made = 0
        self._free: list[T] = []
        self._changed = threading.Condition()

    @contextmanager
    def take(self) -> Iterator[T]:
        """Raises TimeoutError where none comes back for a minute."""
        item = self._get()
        try:
            yield item
        finally:
            with self._changed:
                self._free.append(item)
                self._changed.notify()

    def _get(self) -> T:
        with self._changed:
            if not self._free and self._made < self._size:
                self._made += 1
            elif self._changed.wait_for(lambda: bool(self._free), WAIT):
                return self._free.pop()
            else:
                raise TimeoutError(f"all {self._size} staging buffers are in use")
        try:
            return self._make()
        except BaseException:
            with self._changed:
                self._made -= 1
                self._changed.notify()
            raise


class Staging:
    """Blocks of host memory, page-aligned from 64 KiB on and page-locked where CUDA is, and
    blocks of a device where one is named.

    Enough for `users` threads that each take some once. Thread-safe.
    """

    def __init__(self, block_bytes: int, blocks: int, users: int, device: Any = None) -> None:
        """Each user takes `blocks` at most, or usually where it takes host memory. That of the
        torch device is allocated now, that of the host on first use.

        Raises ConfigError if the device has not so much memory.
        """
        self._block_bytes, self._blocks = block_bytes, blocks
        self._cuda = current_device()
        self._held = ExitStack()
        self._host = Ring(self._slab, users)
        self.memory: Any = None
        """Of the device: one uint8 tensor of shape (users * blocks, block_bytes), or None."""
        if device is not None:
            self.memory = _tensor(users * blocks, block_bytes, device)
            self._parts = Ring(iter(self.memory.split(blocks)).__next__, users)

    @property
    def on_device(self) -> bool:
        return self.memory is not None

    @contextmanager
    def take(self, count: int, *, device: bool = False) -> Iterator[BlockBuffers]:
        """`count` blocks, of the host unless `device`; their content is undefined.

        Raises ConfigError if host memory cannot be had, TimeoutError.
        """
        if device:
            with self._parts.take() as part:
                yield part[:count].unbind(0)
        elif count > self._blocks:
            yield Slab(count, self._block_bytes).rows
        else:
            with self._host.take() as slab:
                yield slab.rows[:count]

    def close(self) -> None:
        """Give the memory back; nobody uses it any more. Idempotent."""
        self._held.close()
        self.memory = None

    def _slab(self) -> Slab:
        slab = Slab(self._blocks, self._block_bytes)
        self._held.callback(slab.close)
        if page_lock(slab.address, slab.nbytes, self._cuda):
            self._held.callback(page_unlock, slab.address, self._cuda)
        return slab


def _tensor(blocks: int, block_bytes: int, device: Any) -> Any:
    import torch

    try:
        return torch.empty((blocks, block_bytes), dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise ConfigError(
            f"no {blocks * block_bytes} bytes for staging on {device} ({error}); lower "
            "mover.batch or mover.threads, or what else uses the device"
        ) from error
