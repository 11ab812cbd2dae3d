"""Engine blocks that are held while their bytes are being copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

PART = 4  # copies may hold one in so many of the engine's blocks


class Pinning:
    """References on blocks of the engine's pool. Not thread-safe: the engine's thread only."""

    def __init__(self, blocks: int) -> None:
        """`blocks` in the engine's pool."""
        self.held = 0
        self._limit = max(1, blocks // PART)
        self._pool: Any = None
        self._pins: dict[int, int] = {}
        """Our references by block."""

    def bind(self, pool: Any) -> None:
        self._pool = pool

    def fits(self, blocks: int, own: int = 0) -> bool:
        """May so many more be held, by somebody who holds `own` of them already? One request
        alone always may, or it could never be saved."""
        others = self.held - own
        return not others or others + blocks <= self._limit

    def pin(self, blocks: Iterable[int]) -> Callable[[], None]:
        """Keep these blocks from being reused until the returned function is called, once."""
        pool, ids = self._pool, list(blocks)
        held = [pool.blocks[block] for block in ids]
        pool.touch(held)
        self.held += len(ids)
        pins = self._pins
        for block in ids:
            pins[block] = pins.get(block, 0) + 1

        def release() -> None:
            self.held -= len(ids)
            for block in ids:
                pins[block] -= 1
                if not pins[block]:
                    del pins[block]
            pool.free_blocks(reversed(held))

        return release

    @property
    def frees(self) -> bool:
        """Will a release make a block free, because nobody else has it? O(blocks held)."""
        blocks = self._pool.blocks if self._pins else []
        return any(blocks[block].ref_cnt <= pins for block, pins in self._pins.items())
