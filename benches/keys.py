"""Keys of a chain of 5,000 blocks of 16 tokens: new, known, and grown by a turn."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterator
from itertools import count

import numpy as np

from benches.common import Result, absolute, compare, seconds
from tieredkv.keys import chain_keys

BLOCK = 16
TOKENS = 5000 * BLOCK
SAMPLES = 31


def run() -> Iterator[Result]:
    rng = random.Random(1)
    tokens = [rng.randrange(150_000) for _ in range(TOKENS)]
    fresh = count(200_000)

    def new() -> float:
        tokens[0] = next(fresh)  # another chain from its first block on
        return 1e3 * seconds(lambda: chain_keys(tokens, BLOCK))

    def bare() -> float:
        return 1e3 * seconds(lambda: _bare(tokens))

    def known() -> float:
        return 1e3 * seconds(lambda: chain_keys(tokens, BLOCK))

    def grown() -> float:
        longer = tokens + [next(fresh) for _ in range(512)]
        return 1e3 * seconds(lambda: chain_keys(longer, BLOCK))

    yield absolute("keys.new", "ms", [new() for _ in range(SAMPLES)], bar=2.0)
    yield compare("keys.new/bare", "ms", new, bare, bar=1.2, higher_is_better=False)
    chain_keys(tokens, BLOCK)
    yield compare("keys.known/bare", "ms", known, bare, bar=0.5, higher_is_better=False)
    yield compare("keys.grown/bare", "ms", grown, bare, bar=0.5, higher_is_better=False)
    packed = np.array(tokens, dtype=np.uint32)
    known_array = [1e3 * seconds(lambda: chain_keys(packed, BLOCK)) for _ in range(SAMPLES)]
    yield absolute("keys.known.array", "ms", known_array)


def _bare(tokens: list[int]) -> list[bytes]:
    """What cannot be saved without a memo: convert, and one update and digest per block."""
    data, width = array("I", tokens).tobytes(), 4 * BLOCK
    hasher = hashlib.sha256(b"seed")
    keys = []
    for start in range(0, len(data), width):
        hasher.update(data[start : start + width])
        keys.append(hasher.digest())
    return keys
