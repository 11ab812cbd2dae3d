"""Replay requests against a real store, with contents that prove themselves.

Every block's bytes follow from its key, so each byte a store returns can be checked without
keeping what was stored.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from tieredkv.errors import UsageError
from tieredkv.keys import chain_keys
from tieredkv.sim.request import Request
from tieredkv.types import Outcome, Turn

if TYPE_CHECKING:
    from tieredkv.store import TieredKVStore

T = TypeVar("T")
Words = npt.NDArray[np.uint64]


class Contents:
    """The bytes of blocks, derived from their keys.

    Word `i` of a block is `key word XOR page[i]`, with one random page for all blocks: a
    block in another's place, a shift, a tear, old bytes and a flipped bit all show, and both
    making and checking run at memory speed.
    """

    def __init__(self, block_bytes: int, seed: int = 0) -> None:
        """`block_bytes`: a multiple of 8. `seed` of the page."""
        if block_bytes < 8 or block_bytes % 8:
            raise UsageError(f"block_bytes is {block_bytes}; use a multiple of 8")
        page = np.random.default_rng(seed).integers(0, 1 << 64, block_bytes // 8, np.uint64)
        self._page: Words = page
        self.block_bytes = block_bytes

    def fill(self, keys: Sequence[bytes], out: Words) -> None:
        """Write the blocks of `keys` to `out`, shape (blocks, block_bytes / 8)."""
        np.bitwise_xor(self._page, self._words(keys)[:, None], out=out)

    def wrong(self, keys: Sequence[bytes], blocks: Words, scratch: Words) -> list[int]:
        """Indices of the blocks that differ from those of `keys` in any bit.

        `scratch` has the shape of `blocks` and is overwritten.
        """
        self.fill(keys, scratch)
        return [int(index) for index in np.flatnonzero((blocks != scratch).any(axis=1))]

    @staticmethod
    def _words(keys: Sequence[bytes]) -> Words:
        return np.frombuffer(b"".join(key[:8] for key in keys), dtype="<u8").astype(np.uint64)


def trace_keys(hash_ids: Sequence[int]) -> list[bytes]:
    """The chain keys of a request's blocks; an id counts as two 32-bit tokens."""
    return chain_keys(np.array(hash_ids, dtype="<u8").view("<u4"), block_tokens=2)


@dataclass(slots=True)
class Tally:
    """What a replay has seen. Tokens count full blocks only, except `input_tokens`."""

    requests: int = 0
    input_tokens: int = 0
    hit_tokens: int = 0
    """Tokens of leading blocks that came back OK and right."""
    potential_tokens: int = 0
    """The same from an infinite cache."""
    verification_errors: int = 0
    """Blocks returned as OK with other bytes than were stored."""
    get_outcomes: Counter[str] = field(default_factory=Counter)
    put_outcomes: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, array[float]] = field(
        default_factory=lambda: {name: array("d") for name in ("lookup", "get", "put")}
    )
    """Duration of every call."""


class Replay:
    """Runs requests one after the other: lookup, pin, get, verify, put what is new."""

    def __init__(self, store: TieredKVStore, contents: Contents) -> None:
        """Borrows `store`. Not thread-safe. Two buffers grow to the longest request."""
        self._store = store
        self._contents = contents
        self._buffer: Words = np.empty((0, 0), np.uint64)
        self._scratch: Words = np.empty((0, 0), np.uint64)
        self._seen: set[int] = set()
        self.tally = Tally()

    def run(self, requests: Iterable[Request], done: Callable[[], None] | None = None) -> Tally:
        """Replay in the given order, as fast as the store allows; `done` after each request."""
        for request in requests:
            self._one(request)
            if done is not None:
                done()
        return self.tally

    def _one(self, request: Request) -> None:
        tally, ids = self.tally, request.hash_ids
        tally.requests += 1
        tally.input_tokens += request.input_length
        tally.potential_tokens += request.block_size * _leading(ids, self._seen)
        self._seen.update(ids)
        if not ids:
            return
        self._reserve(len(ids))
        keys = trace_keys(ids)
        match = self._timed("lookup", lambda: self._store.lookup(keys))
        # A running request keeps its prefix, as in an engine.
        with self._store.pin(keys):
            hit = self._read(keys[: match.blocks]) if match.blocks else 0
            self._write(keys, hit, request)
        tally.hit_tokens += hit * request.block_size

    def _read(self, keys: list[bytes]) -> int:
        """Get and verify the blocks of `keys`; how many leading ones came back."""
        target, scratch = self._buffer[: len(keys)], self._scratch[: len(keys)]
        # The last request may have left these very bytes here: a read that does nothing
        # must not pass.
        target.fill(0xA5A5A5A5A5A5A5A5)
        outcomes = self._timed("get", lambda: self._store.get(keys, target.view(np.uint8)))
        self.tally.get_outcomes.update(outcomes)
        wrong = set(self._contents.wrong(keys, target, scratch))
        returned = [index for index, outcome in enumerate(outcomes) if outcome is Outcome.OK]
        self.tally.verification_errors += len(wrong.intersection(returned))
        return _leading(range(len(keys)), set(returned) - wrong)

    def _write(self, keys: list[bytes], start: int, request: Request) -> None:
        if start == len(keys):
            return
        blocks = self._buffer[start : len(keys)]
        self._contents.fill(keys[start:], blocks)
        turn = Turn(session=request.session, category=request.category, finish_reason=request.stop)
        outcomes = self._timed(
            "put", lambda: self._store.put(keys, blocks.view(np.uint8), start=start, turn=turn)
        )
        self.tally.put_outcomes.update(outcomes)

    def _timed(self, name: str, call: Callable[[], T]) -> T:
        start = perf_counter()
        result = call()
        self.tally.seconds[name].append(perf_counter() - start)
        return result

    def _reserve(self, blocks: int) -> None:
        if len(self._buffer) < blocks:
            shape = (blocks, self._contents.block_bytes // 8)
            self._buffer, self._scratch = np.empty(shape, np.uint64), np.empty(shape, np.uint64)


def _leading(ids: Sequence[int], seen: set[int]) -> int:
    """How many leading ids have been seen."""
    return next((i for i, block in enumerate(ids) if block not in seen), len(ids))
