"""Stores on a pool, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tieredkv import Config, Fingerprint, Outcome, TieredKVStore, chain_keys

BLOCK, TOKENS = 1 << 16, 16
FINGERPRINT = Fingerprint(model="m", weights="w", dtype="f")


def config(
    master: str,
    *before: dict[str, Any],
    after: Sequence[dict[str, Any]] = (),
    **more: Any,
) -> Config:
    """A pool of 16 MiB, with these tiers before and after it, and `more` keys of its own."""
    pool = {"kind": "mooncake", "master": master, "capacity": "16MiB", **more}
    tiers = [*before, pool, *after]
    document = {"block_tokens": TOKENS, "block_bytes": BLOCK, "tiers": tiers}
    return Config.model_validate(document)


def memory(blocks: int = 64) -> dict[str, Any]:
    return {"kind": "dram", "capacity": blocks * BLOCK}


def disk(path: Path, blocks: int = 64) -> dict[str, Any]:
    return {
        "kind": "nvme",
        "path": str(path),
        "capacity": blocks * BLOCK + (64 << 20),
        "segment": "4MiB",
        "min_free": 0,
    }


def opened(wanted: Config, fingerprint: Fingerprint = FINGERPRINT) -> TieredKVStore:
    return TieredKVStore(wanted, fingerprint)


def chain(number: int, blocks: int = 8) -> list[bytes]:
    """The keys of the conversation of this number."""
    first = number * 1_000_000
    return chain_keys(range(first, first + blocks * TOKENS), block_tokens=TOKENS)


def content(keys: Sequence[bytes]) -> np.ndarray:
    """What belongs to these keys, whoever stores it: shape (blocks, BLOCK)."""
    seeds = np.array([int.from_bytes(key[:8], "little") for key in keys], np.uint64)
    ramp = np.arange(BLOCK // 8, dtype=np.uint64)
    return (seeds[:, None] + ramp * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8)


def put(store: TieredKVStore, number: int, blocks: int = 8) -> list[Outcome]:
    keys = chain(number, blocks)
    return store.put(keys, content(keys))


def right(store: TieredKVStore, number: int, blocks: int = 8) -> int:
    """Leading blocks that a get returns; each that is OK has its own bytes."""
    keys = chain(number, blocks)
    out = np.zeros((blocks, BLOCK), np.uint8)
    outcomes = store.get(keys, out)
    wanted = content(keys)
    for at, outcome in enumerate(outcomes):
        if outcome is Outcome.OK:
            assert np.array_equal(out[at], wanted[at]), f"block {at} has other bytes"
    bad = (at for at, outcome in enumerate(outcomes) if outcome is not Outcome.OK)
    return next(bad, blocks)
