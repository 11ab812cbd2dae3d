"""The checksums of payloads, against the words of their definition."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import xxhash

from tests.pretender import pretend
from tieredkv.errors import BlockSizeError
from tieredkv.testing import LateDevice
from tieredkv.tiers.nvme.checksum import NH_64, PIECE, WORDS, XXH3_64, Checksums

SEED = b"seed\0\1\2\3"
CUDA = torch.cuda.is_available()


def nh(block: bytes) -> int:
    """Word by word; the large ones at once, in other words than the code under test."""
    if len(block) > 1 << 20:
        words = np.frombuffer(block, "<u4") + np.frombuffer(
            hashlib.shake_128(SEED).digest(len(block)), "<u4"
        )
        products = words[0::2].astype(np.uint64) * words[1::2]
        return int(np.bitwise_and.reduce([products.sum(dtype=np.uint64)]))
    keys = hashlib.shake_128(SEED).digest(len(block))
    total = 0
    for at in range(0, len(block), 8):
        even, odd = struct.unpack_from("<II", block, at)
        key_even, key_odd = struct.unpack_from("<II", keys, at)
        total += ((even + key_even) % 2**32) * ((odd + key_odd) % 2**32)
    return total % 2**64


def blocks(size: int) -> Iterator[bytes]:
    draw = np.random.default_rng(size)
    yield bytes(size)
    yield b"\xff" * size
    for _ in range(3):
        yield draw.integers(0, 256, size, np.uint8).tobytes()


NEEDS_CUDA = pytest.mark.skipif(not CUDA, reason="no CUDA device")


@pytest.fixture(params=["late", pytest.param("cuda", marks=NEEDS_CUDA)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "cuda":
        yield "cuda"
        return
    with LateDevice(0.001) as late:
        monkeypatch.setattr("tieredkv.device.streams_of", lambda _: late)
        yield "cpu"


@pytest.mark.parametrize(
    "size", [8, 4096, 4 * WORDS, 4 * WORDS + 4096, 9 * WORDS + 8, 8 * PIECE + 4096]
)
def test_host_and_device_agree_with_the_definition(size: int, place: str) -> None:
    sums = Checksums(SEED, size)
    given = list(blocks(size))
    tensors = [torch.frombuffer(bytearray(block), dtype=torch.uint8).to(place) for block in given]
    there = tensors if place == "cuda" else [pretend(tensor) for tensor in tensors]
    expected = [nh(block) for block in given]
    assert sums.on_device(there) == expected
    assert [sums.of(NH_64, memoryview(block)) for block in given] == expected
    seed = int.from_bytes(SEED, "little")
    xxh = [xxhash.xxh3_64_intdigest(block, seed) for block in given]
    assert [sums.of(XXH3_64, np.frombuffer(block, np.uint8)) for block in given] == xxh


def test_blocks_that_begin_anywhere_and_many_at_once(place: str) -> None:
    size = 4096
    sums = Checksums(SEED, size)
    memory = torch.randint(0, 256, (40 * size + 8,), dtype=torch.uint8)
    there = memory.to(place)
    there = there if place == "cuda" else pretend(there)
    for first in (0, 1, 4):
        rows = [there[first + i * size : first + (i + 1) * size] for i in range(40)]
        expected = [nh(bytes(memory[first + i * size :][:size].numpy())) for i in range(40)]
        assert sums.on_device(rows) == expected


def test_every_bit_and_every_order_counts() -> None:
    sums = Checksums(SEED, 64)
    block = bytearray(range(64))
    found = {sums.of(NH_64, memoryview(block))}
    for bit in range(512):
        changed = bytearray(block)
        changed[bit // 8] ^= 1 << bit % 8
        found.add(sums.of(NH_64, memoryview(changed)))
    swapped = block[8:16] + block[:8] + block[16:]
    found |= {sums.of(NH_64, memoryview(swapped)), Checksums(b"another!", 64).of(NH_64, block)}
    assert len(found) == 515


def test_other_sizes_are_refused() -> None:
    with pytest.raises(BlockSizeError, match="8 bytes instead of 64"):
        Checksums(SEED, 64).of(NH_64, memoryview(bytes(8)))
