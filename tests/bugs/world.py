"""Real stores whose bytes are derived from keys, so that any wrong hit shows."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tieredkv import Config, Fingerprint, Outcome, TieredKVStore, chain_keys
from tieredkv.metrics import Stats, TierStats
from tieredkv.testing import FaultyTier

ROOT = Path(__file__).parents[2]
SIZE = 4096
TOKENS = 16
MIB = 1 << 20
OK, MISSING, BUSY, FAILED = Outcome.OK, Outcome.MISSING, Outcome.BUSY, Outcome.FAILED
FP = Fingerprint("model", weights="w1", dtype="bf16", layout="nhd")


def tokens(blocks: int, seed: int = 0) -> list[int]:
    return [seed * 1_000_003 + i for i in range(blocks * TOKENS)]


def chain(blocks: int, seed: int = 0, **extras: Any) -> list[bytes]:
    """The keys of a conversation; another `seed`, another conversation from the root on."""
    return chain_keys(tokens(blocks, seed), block_tokens=TOKENS, **extras)


def content(key: bytes, size: int = SIZE) -> bytes:
    return hashlib.shake_128(key).digest(size)


def blocks_of(keys: Sequence[bytes], size: int = SIZE) -> list[bytes]:
    return [content(key, size) for key in keys]


def hbm(blocks: int, size: int = SIZE) -> dict[str, Any]:
    return {"kind": "hbm", "device": "cpu", "capacity": blocks * size}


def dram(blocks: int, size: int = SIZE, **more: Any) -> dict[str, Any]:
    return {"kind": "dram", "capacity": blocks * size, **more}


def nvme(root: Path, capacity: int = 4 * MIB, **more: Any) -> dict[str, Any]:
    return {"kind": "nvme", "path": str(root), "capacity": capacity, "min_free": 0, **more}


def tiers(kind: str, root: Path) -> list[dict[str, Any]]:
    """A roomy hierarchy by name, such as "dram+nvme"."""
    made = {"hbm": hbm(64), "dram": dram(64), "nvme": nvme(root)}
    return [made[name] for name in kind.split("+")]


KINDS = ("hbm", "dram", "nvme", "dram+nvme")


def config(*specs: dict[str, Any], **more: Any) -> Config:
    return Config.model_validate({"block_tokens": TOKENS, "tiers": list(specs), **more})


@contextmanager
def opened(
    *specs: dict[str, Any], fp: Fingerprint = FP, clock: Any = None, wrap: Any = None, **more: Any
) -> Iterator[TieredKVStore]:
    """A store whose invariants are checked at the end."""
    store = TieredKVStore(config(*specs, **more), fp, clock=clock, wrap_tier=wrap)
    try:
        yield store
        assert store.check() == []
    finally:
        store.close()


class Faulty:
    """A `wrap_tier` that puts a FaultyTier around every tier, to be found under its name."""

    def __init__(self) -> None:
        self.tiers: dict[str, FaultyTier] = {}

    def __call__(self, inner: Any) -> Any:
        self.tiers[inner.name] = FaultyTier(inner, inline=inner.inline)
        return self.tiers[inner.name]


def put(
    store: TieredKVStore, keys: Sequence[bytes], start: int = 0, size: int = SIZE, turn: Any = None
) -> list[Outcome]:
    return store.put(keys, blocks_of(keys[start:], size), start=start, turn=turn)


def get(
    store: TieredKVStore,
    keys: Sequence[bytes],
    start: int = 0,
    size: int = SIZE,
    deadline: float | None = None,
) -> list[Outcome]:
    """Outcomes; what is OK has been compared."""
    out = np.full((len(keys) - start, size), 0xAA, np.uint8)
    outcomes = store.get(keys, out, start=start, deadline=deadline)
    compare(keys[start:], out, outcomes)
    return outcomes


def compare(keys: Sequence[bytes], out: Any, outcomes: Sequence[Outcome]) -> None:
    assert len(outcomes) == len(keys)
    for key, row, outcome in zip(keys, out, outcomes, strict=True):
        if outcome is OK:
            assert bytes(row) == content(key, len(row)), "wrong bytes"


def eventually_stored(store: TieredKVStore, keys: Sequence[bytes], start: int = 0) -> bool:
    """Slots of deleted blocks and hung writes come back when the last move has really ended."""
    for _ in range(500):
        if put(store, keys, start) == [OK] * (len(keys) - start):
            return True
        time.sleep(0.01)
    return False


def tier(stats: Stats, name: str) -> TierStats:
    return next(t for t in stats.tiers if t.name == name)


def resident(store: TieredKVStore) -> dict[str, set[bytes]]:
    """The keys that each tier holds, from the store's own books."""
    core = store._core
    assert core is not None
    found: dict[str, set[bytes]] = {}
    with core.lock:
        for number, level in enumerate(core.planner.res.levels):
            found[level.name] = {
                run.keys[offset]
                for run in core.planner.res.tree.runs.values()
                for offset in run.tail(number)
            }
    return found


def disk_usage(root: Path) -> int:
    """Like `du`: allocated bytes of everything below."""
    total = 0
    for path in root.rglob("*"):
        try:
            total += os.lstat(path).st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def process(code: str, **env: str) -> subprocess.Popen[str]:
    """Another interpreter that runs `code` with this module imported as `w`."""
    return subprocess.Popen(
        [sys.executable, "-c", "import tests.bugs.world as w\n" + code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(child: subprocess.Popen[str]) -> list[str]:
    """Its lines; it must end well."""
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    return out.splitlines()


def line(child: subprocess.Popen[str]) -> str:
    """Its next line; fails with its traceback if it died."""
    assert child.stdout is not None
    text = child.stdout.readline()
    if not text:
        _, err = child.communicate(timeout=60)
        raise AssertionError(err)
    return text.strip()


def kill(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate(timeout=60)
