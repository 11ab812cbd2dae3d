"""Memory for bytes on their way between two media that lend each other none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

from tieredkv.device import current_device, device_tensor, page_lock, page_unlock, streams_of
from tieredkv.errors import ConfigError
from tieredkv.tiers.base import BlockBuffers
from tieredkv.tiers.slab import Slab

T = TypeVar("T")
WAIT = 60.0


class NoStaging(Exception):
    """There is no staging memory: all of it stayed in use, or it cannot be had."""


class Ring(Generic[T]):
    """At most `size` equal things, each lent to one user at a time. Thread-safe."""

    def __init__(self, make: Callable[[], T], size: int) -> None:
        """What is not made by `fill` is made when it is first needed."""
        self._make, self._size = make, size
        self._made = 0
        self._free: list[T] = []
        self._changed = threading.Condition()

    @contextmanager
    def take(self) -> Iterator[T]:
        """Raises NoStaging where none comes back for a minute, or none can be made."""
        item = self._get()
        try:
            yield item
        finally:
            with self._changed:
                self._free.append(item)
                self._changed.notify()

    def fill(self) -> None:
        """Make all of them now. Raises what making one raises."""
        with self._changed:
            while self._made < self._size:
                self._free.append(self._make())
                self._made += 1

    def _get(self) -> T:
        with self._changed:
            found = self._changed.wait_for(lambda: self._free or self._made < self._size, WAIT)
            if self._free:
                return self._free.pop()
            if not found:
                raise NoStaging(f"all {self._size} staging buffers are in use")
            self._made += 1
        try:
            return self._make()
        except Exception as error:
            with self._changed:
                self._made -= 1
                self._changed.notify()
            raise NoStaging(str(error)) from error


class Staging:
    """Blocks of host memory, page-aligned from 64 KiB on and page-locked where CUDA is, and
    blocks of a device where `add_device` has been called.

    For `users` at a time; others wait. Thread-safe.
    """

    def __init__(self, block_bytes: int, blocks: int, users: int) -> None:
        """Each user takes `blocks` at most."""
        self._block_bytes, self._blocks, self._users = block_bytes, blocks, users
        self._cuda = current_device()
        self._held = ExitStack()
        self._host = Ring(self._slab, users)
        self.memory: Any = None
        """Of the device: one uint8 tensor of shape (users * blocks, block_bytes), or None."""
        self._parts: Ring[Any] = Ring(lambda: None, 0)

    @property
    def on_device(self) -> bool:
        return self.memory is not None

    def add_device(self, device: Any) -> None:
        """Take memory of this torch device as well, now. Idempotent. Raises ConfigError."""
        if self.memory is not None:
            return
        import torch

        shape = (self._users * self._blocks, self._block_bytes)
        try:
            self.memory = device_tensor(shape, torch.uint8, device, streams_of(device))
        except RuntimeError as error:
            raise ConfigError(
                f"no {shape[0] * shape[1]} bytes for staging on {device} ({error}); lower "
                "mover.batch or mover.threads, or what else uses the device"
            ) from error
        self._parts = Ring(iter(self.memory.split(self._blocks)).__next__, self._users)

    def fill(self) -> None:
        """Take all host memory now: locking pages while the device works would disturb it.
        Raises ConfigError."""
        self._host.fill()

    @contextmanager
    def take(self, count: int, *, device: bool = False) -> Iterator[BlockBuffers]:
        """`count` blocks, of the host unless `device`; their content is undefined.

        Raises NoStaging.
        """
        if count > self._blocks:
            raise NoStaging(f"{count} blocks are asked for, {self._blocks} are the most")
        if device:
            with self._parts.take() as part:
                yield part[:count].unbind(0)
        else:
            with self._host.take() as slab:
                yield slab.rows[:count]

    def close(self) -> None:
        """Give the memory back; nobody uses it any more. Idempotent."""
        self._held.close()
        self.memory = None
        self._parts = Ring(lambda: None, 0)

    def _slab(self) -> Slab:
        slab = Slab(self._blocks, self._block_bytes)
        self._held.callback(slab.close)
        if page_lock(slab.address, slab.nbytes, self._cuda):
            self._held.callback(page_unlock, slab.address, self._cuda)
        return slab
