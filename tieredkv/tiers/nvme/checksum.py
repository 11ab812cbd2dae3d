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

from tieredkv.device import device_tensor, host_tensor, on_stream, streams_of
from tieredkv.errors import BlockSizeError
from tieredkv.tiers.base import BlockBuffer

XXH3_64 = 1
NH_64 = 2
WORDS = 1 << 15  # that the host adds up at once: their intermediate results stay in its caches
PIECE = 1 << 19  # pairs of words that a device adds up at once: 12 MiB of scratch memory
AT_ONCE = 16  # blocks
LOW = 0xFFFF_FFFF
BITS_64 = (1 << 64) - 1


class Checksums:
    """Checksums of blocks of one size under one seed. Thread-safe."""

    def __init__(self, seed: bytes, block_bytes: int) -> None:
        """`seed`: 8 bytes."""
        self._seed, self._block_bytes = seed, block_bytes
        self._number = int.from_bytes(seed, "little")
        self.kinds: tuple[int, ...] = (XXH3_64,) if block_bytes % 8 else (XXH3_64, NH_64)
        """Those that a block of this size may have."""
        self._devices: dict[Any, _OnDevice] = {}
        self._adding = threading.Lock()

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
        device = blocks[0].device
        with self._adding:
            if device not in self._devices:
                self._devices[device] = _OnDevice(self._keys, device)
            there = self._devices[device]
            sums: list[int] = []
            for at in range(0, len(blocks), AT_ONCE):
                sums += there.sums(blocks[at : at + AT_ONCE])
        return sums

    @functools.cached_property
    def _keys(self) -> Any:
        """One 32-bit key per word. Made twice at worst, and the same."""
        stream = hashlib.shake_128(self._seed).digest(self._block_bytes)
        return np.frombuffer(stream, "<u4")


class _OnDevice:
    """Keys and scratch memory on a device: nothing is allocated for a sum. Of one user at a time,
    whom others wait for no longer than it takes to add up some MiB."""

    def __init__(self, keys: Any, device: Any) -> None:
        import torch

        self._device = device
        streams = streams_of(device)
        pairs = len(keys) // 2
        self._keys = device_tensor((pairs,), torch.int64, device, streams)
        self._keys.copy_(torch.from_numpy(keys.view("<i8").copy()))
        piece = min(PIECE, pairs)
        self._scratch = device_tensor((3, piece), torch.int64, device, streams)
        shape = (AT_ONCE, -(-pairs // piece))
        self._parts = device_tensor(shape, torch.int64, device, streams)
        self._totals = device_tensor((AT_ONCE,), torch.int64, device, streams)
        self._here = host_tensor(AT_ONCE, torch.int64, device)

    def sums(self, blocks: Sequence[Any]) -> list[int]:
        """Of AT_ONCE blocks at most."""
        on_stream("check", self._device, functools.partial(self._work, blocks))
        return [total & BITS_64 for total in self._here[: len(blocks)].tolist()]

    def _work(self, blocks: Sequence[Any]) -> None:
        import torch

        size = self._scratch.shape[1]
        with torch.inference_mode():
            for block, parts in zip(blocks, self._parts, strict=False):
                # a caller's own tensor may begin anywhere
                words = (block.clone() if block.storage_offset() % 8 else block).view(torch.int64)
                pieces = zip(words.split(size), self._keys.split(size), strict=True)
                for (word, key), part in zip(pieces, parts, strict=True):
                    even, odd, high = self._scratch[:, : len(word)]
                    torch.add(word, key, out=even).bitwise_and_(LOW)
                    torch.bitwise_right_shift(key, 32, out=high)
                    torch.bitwise_right_shift(word, 32, out=odd).add_(high).bitwise_and_(LOW)
                    torch.sum(even.mul_(odd), 0, out=part)
            totals = torch.sum(self._parts[: len(blocks)], 1, out=self._totals[: len(blocks)])
            self._here[: len(blocks)].copy_(totals, non_blocking=True)
