"""The checksums of payloads: XXH3 by the host alone, NH by the host or by a GPU.

NH is of Black, Halevi, Krawczyk, Krovetz, Rogaway, "UMAC: Fast and Secure Message
Authentication" (CRYPTO 1999): with a pseudorandom 32-bit key k_i for each 32-bit word m_i,
the sum of (m_2i + k_2i mod 2^32) * (m_2i+1 + k_2i+1 mod 2^32), mod 2^64. Whatever happens to a
payload, it goes unnoticed with a probability of 2^-32. Its terms are independent of each other, so
a GPU adds them up in any order.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import xxhash

from tieredkv.device import host_tensor, on_stream
from tieredkv.errors import BlockSizeError
from tieredkv.tiers.base import BlockBuffer

XXH3_64 = 1
NH_64 = 2
WORDS = 1 << 15  # that the host adds up at once: their intermediate results stay in its caches
LOW = 0xFFFF_FFFF
BITS_64 = (1 << 64) - 1


class Checksums:
    """Checksums of blocks of one size under one seed. Thread-safe."""

    def __init__(self, seed: bytes, block_bytes: int) -> None:
        """`seed`: 8 bytes."""
        self._seed, self._block_bytes = seed, block_bytes
        self._number = int.from_bytes(seed, "little")
        self._on_device: dict[Any, Any] = {}
        self._moving = threading.Lock()

    def of(self, kind: int, block: BlockBuffer) -> int:
        """Of a block of host memory.

        Raises BlockSizeError, and ValueError if the memory was taken away.
        """
        if len(block) != self._block_bytes:
            raise BlockSizeError(f"block of {len(block)} bytes instead of {self._block_bytes}")
        if kind == XXH3_64:
            return xxhash.xxh3_64_intdigest(cast(Any, block), self._number)
        words, total = np.frombuffer(block, "<u4"), 0
        for at in range(0, len(words), WORDS):
            pairs = (words[at : at + WORDS] + self._keys[at : at + WORDS]).view("<u8")
            total += int(np.dot(pairs & np.uint64(LOW), pairs >> np.uint64(32)))
        return total & BITS_64

    def on_device(self, blocks: Sequence[Any]) -> list[int]:
        """NH of each of these uint8 tensors, computed where they are, on a side stream.

        Raises RuntimeError if the device fails.
        """
        import torch

        keys = self._device_keys(blocks[0].device)
        sums = host_tensor(len(blocks), torch.int64, keys.device)

        def work() -> None:
            for i, block in enumerate(blocks):
                words = block.view(torch.int64)
                even, odd = (words + keys) & LOW, ((words >> 32) + (keys >> 32)) & LOW
                sums[i].copy_((even * odd).sum(), non_blocking=True)

        on_stream("out", blocks[0].device, work)
        return [total & BITS_64 for total in sums.tolist()]

    @functools.cached_property
    def _keys(self) -> Any:
        """One 32-bit key per word. Made twice at worst, and the same."""
        stream = hashlib.shake_128(self._seed).digest(self._block_bytes)
        return np.frombuffer(stream, "<u4")

    def _device_keys(self, device: Any) -> Any:
        import torch

        with self._moving:
            if device not in self._on_device:
                keys = torch.from_numpy(self._keys.view("<i8").copy())
                self._on_device[device] = keys.to(device)
            return self._on_device[device]
