"""The hash under `tieredkv.keys`: canonical encoding, running digest, memo of recent chains."""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Mapping
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple

from cachetools import LRUCache
from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from hashlib import _Hash

Marks = Mapping[int, bytes]
"""Block index -> canonical encoding of the media items that begin in it, ascending."""

_CHUNK_BYTES = 32 << 10
"""Of tokens (8,192). Smaller finds longer prefixes, larger needs fewer look-ups."""


def encode(value: str | bytes | int | None) -> bytes:
    """Tag, length, payload: a sequence of these can be read back in one way only."""
    if value is None:
        return b"n"
    if isinstance(value, int):
        tag, payload = b"i", b"%d" % value
    elif isinstance(value, str):
        # surrogatepass: any str has an encoding, and no two have the same.
        tag, payload = b"s", value.encode("utf-8", "surrogatepass")
    else:
        tag, payload = b"b", value
    return tag + struct.pack("<Q", len(payload)) + payload


def digest(domain: bytes, *fields: str | bytes | int | None) -> bytes:
    """SHA-256 of the encoded fields; different domains never collide."""
    return hashlib.sha256(b"".join(map(encode, (domain, *fields)))).digest()


def hash_blocks(hasher: _Hash, data: bytes, width: int, marks: Marks) -> tuple[list[bytes], _Hash]:
    """Keys of the blocks of `width` bytes in `data`; `marks` by block index in `data`.

    Takes over `hasher`; returns the one to continue with.
    """
    keys: list[bytes] = []
    at = 0
    for block, mark in marks.items():
        start = block * width
        keys += _running(hasher, data[at:start], width)
        hasher = hashlib.sha256(digest(b"tieredkv media", hasher.digest(), mark))
        at = start
    keys += _running(hasher, data[at:], width)
    return keys, hasher


def _running(hasher: _Hash, data: bytes, width: int) -> list[bytes]:
    blocks = struct.Struct(f"{width}s").iter_unpack(data)
    return [hasher.digest() for _ in starmap(hasher.update, blocks)]


class _Chunk(NamedTuple):
    before: bytes
    """Key before the first block, or the seed."""
    tokens: bytes
    marks: dict[int, bytes]
    keys: tuple[bytes, ...]
    after: _Hash
    """State behind the last block; copied, never updated."""


class Memo:
    """Remembers hashed chunks of chains, so that a known prefix is compared, not hashed.

    A chunk is found by the key before it and its exact tokens and media: chains that branch
    share what they have in common, and a hit equals hashing again by construction.
    Holds at most `limit` bytes. Thread-safe: the lock guards look-ups, hashing is outside.
    """

    def __init__(self, limit: int) -> None:
        self._chunks: LRUCache[tuple[Any, ...], _Chunk] = LRUCache(limit, getsizeof=_size)
        self.reset_lock()

    def reset_lock(self) -> None:
        """For the child of a fork, which may have happened while another thread held it."""
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes held, at most the limit."""
        with self._lock:
            return int(self._chunks.currsize)

    def keys(self, seed: bytes, data: bytes, width: int, marks: Marks) -> list[bytes]:
        """Keys of `data`, a whole number of blocks of `width` bytes, in a new list."""
        if not data:
            return []
        per_chunk = max(1, _CHUNK_BYTES // width)
        step = per_chunk * width
        keys: list[bytes] = []
        hasher = hashlib.sha256(seed)
        for chunk in self._known(seed, data, step, per_chunk, marks):
            keys += chunk.keys
            hasher = chunk.after
        new: list[_Chunk] = []
        for start in range(len(keys) * width, len(data), step):
            tokens = data[start : start + step]
            within = _within(marks, len(keys), per_chunk)
            before = keys[-1] if keys else seed
            added, hasher = hash_blocks(hasher.copy(), tokens, width, within)
            keys += added
            if len(tokens) == step:
                new.append(_Chunk(before, tokens, within, tuple(added), hasher))
        self._remember(new)
        return keys

    def _known(
        self, before: bytes, data: bytes, step: int, per_chunk: int, marks: Marks
    ) -> list[_Chunk]:
        known: list[_Chunk] = []
        for start in range(0, len(data) - step + 1, step):
            tokens = data[start : start + step]
            within = _within(marks, len(known) * per_chunk, per_chunk)
            with self._lock:
                chunk = self._chunks.get(_ident(before, tokens, within))
            if chunk is None or chunk.tokens != tokens:
                break
            known.append(chunk)
            before = chunk.keys[-1]
        return known

    def _remember(self, chunks: list[_Chunk]) -> None:
        for chunk in chunks:
            if _size(chunk) <= self._chunks.maxsize:
                with self._lock:
                    self._chunks[_ident(*chunk[:3])] = chunk


def _ident(before: bytes, tokens: bytes, marks: dict[int, bytes]) -> tuple[Any, ...]:
    # A checksum instead of the tokens: five times faster than Python's hash of bytes.
    return before, xxh3_64_intdigest(tokens), tuple(marks.items())


def _within(marks: Marks, first: int, count: int) -> dict[int, bytes]:
    return {b - first: mark for b, mark in marks.items() if first <= b < first + count}


def _size(chunk: _Chunk) -> int:
    # Per key the bytes object (80) and its place in the tuple (8); per chunk the hash state,
    # tuples and the entries of two dictionaries, measured at about 1 KiB.
    marks = sum(192 + len(mark) for mark in chunk.marks.values())
    return len(chunk.tokens) + 88 * len(chunk.keys) + marks + 1024
