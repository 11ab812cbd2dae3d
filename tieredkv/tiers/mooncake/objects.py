"""One block as an object of a pool, and what the library's answers about it mean.

| offset | size | field |
|---|---|---|
| 0 | 8 | magic `TKVPOOL1` |
| 8 | 8 | bytes of the block |
| 16 | 8 | xxh3-64 of them, seeded with that of the name |
| 24 | 8 | 0 |
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from tieredkv.tiers.base import Bytes
from tieredkv.types import Outcome

MAGIC = b"TKVPOOL1"
HEADER = struct.Struct("<8sQQQ")
ROOM = 8 << 20
"""Bytes of one call's staging memory, or one block if that is more."""
ABSENT = frozenset({-703, -704, -710, -712, -800})
"""Codes that say that there is nothing."""
FULL = frozenset({-200, -706, -708, -714})
"""Codes after which trying later may work: no room, or in use."""


def object_name(identity: str, key: bytes) -> str:
    """`identity`: all that makes the bytes of equal keys differ, the rank included."""
    return f"{identity}/{key.hex()}"


class Stage:
    """Memory of one call: headers, and copies of blocks that the library cannot reach."""

    def __init__(self, block_bytes: int, staged: bool) -> None:
        self.blocks = max(1, ROOM // block_bytes)
        """Blocks of one call."""
        self._data = self.blocks * HEADER.size
        self._block = block_bytes
        self.nbytes = self._data + (self.blocks * block_bytes if staged else 0)
        self._memory: Bytes = np.frombuffer(mmap.mmap(-1, self.nbytes), np.uint8)
        self.address = int(self._memory.ctypes.data)

    def header(self, i: int) -> Bytes:
        """For the header of the call's i-th block."""
        return self._memory[i * HEADER.size : (i + 1) * HEADER.size]

    def row(self, i: int) -> Bytes:
        """For its bytes; of a staged call."""
        begin = self._data + i * self._block
        return self._memory[begin : begin + self._block]

    def lists(self, rows: Sequence[Bytes]) -> tuple[list[list[int]], list[list[int]]]:
        """(addresses, sizes) of header and bytes per object, as the library takes them."""
        addresses = [[self.header(i).ctypes.data, row.ctypes.data] for i, row in enumerate(rows)]
        return addresses, [[HEADER.size, self._block] for _ in rows]


def _checksum(name: str, row: Bytes) -> int:
    return xxhash.xxh3_64_intdigest(row.data, seed=xxhash.xxh3_64_intdigest(name.encode()))


def header(name: str, row: Bytes) -> Bytes:
    """Of the object with this name and these bytes."""
    return np.frombuffer(HEADER.pack(MAGIC, len(row), _checksum(name, row), 0), np.uint8)


def put_outcome(code: int, visible: Iterator[int]) -> Outcome:
    """`visible`: the next answer is that of this block, if it was put. The library says 0 as well
    where another writer has begun to put the block and has not ended."""
    if code == 0:
        return Outcome.OK if next(visible) == 1 else Outcome.BUSY
    return Outcome.BUSY if code in FULL else Outcome.FAILED


def get_outcome(code: int, nbytes: int) -> Outcome:
    """`nbytes`: of the whole object, which is what a get answers that has worked."""
    if code == nbytes:
        return Outcome.OK
    return Outcome.BUSY if code in FULL else Outcome.FAILED
