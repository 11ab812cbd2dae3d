"""Losing power at any write or sync loses nothing acknowledged and shows no wrong byte."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.nvme.powerloss import PowerLossEngine
from tests.nvme.world import MIB, MiniStore, key_of
from tieredkv.types import Outcome

SEEDS = int(os.environ.get("TIEREDKV_CRASHES", "60"))
SIZE = 5000  # not a multiple of a page, so tails are padded


def live_and_crash(root: Path, engine: PowerLossEngine, seed: int) -> tuple[set[bytes], set[bytes]]:
    """Puts and evictions until the power fails: acknowledged keys, and all keys ever put."""
    rng = random.Random(seed)
    store = MiniStore(root, SIZE, MIB // 2, engine=engine, segment=64 << 10)
    durable: set[bytes] = set(store.where)
    ever: set[bytes] = set(durable)
    for _ in range(40):
        if engine.is_off:
            break
        keys = [key_of(rng.randrange(60)) for _ in range(rng.randint(1, 6))]
        keys = [key for key in dict.fromkeys(keys) if key not in durable]
        room = store.tier.slots - len(durable)
        count = min(len(durable), max(0, len(keys) - room))
        evict = rng.sample(sorted(durable), count)
        durable -= set(evict)
        ever |= set(keys)
        durable |= set(store.put(keys, evict))
    engine.power_off()
    store.close()
    engine.crash()
    return durable, ever


def losses(root: Path, durable: set[bytes], ever: set[bytes]) -> list[bytes]:
    """Acknowledged keys that cannot be read after a restart; wrong bytes raise."""
    store = MiniStore(root, SIZE, MIB // 2, segment=64 << 10)
    try:
        outcomes = {key: store.get(key) for key in ever}
        assert set(outcomes.values()) <= {Outcome.OK, Outcome.MISSING, Outcome.CORRUPT}
        assert store.index.check() == []
        return [key for key in durable if outcomes[key] is not Outcome.OK]
    finally:
        store.close()


@pytest.mark.parametrize("group", range(4))
def test_acknowledged_blocks_survive(tmp_path: Path, group: int) -> None:
    acknowledged = 0
    for seed in range(group, SEEDS, 4):
        root = tmp_path / str(seed)
        for life in range(2):  # the second life overwrites what the first crash left
            limit = random.Random(seed * 2 + life).randint(1, 60)
            engine = PowerLossEngine(seed * 2 + life, limit)
            durable, ever = live_and_crash(root, engine, seed * 2 + life)
            acknowledged += len(durable)
            assert losses(root, durable, ever) == [], f"seed {seed}, life {life}"
    assert acknowledged > SEEDS // 4


def test_a_disk_that_ignores_flushes_is_noticed(tmp_path: Path) -> None:
    lost = 0
    for seed in range(10):
        engine = PowerLossEngine(seed, 40, honest_sync=False)
        lost += len(
            losses(tmp_path / str(seed), *live_and_crash(tmp_path / str(seed), engine, seed))
        )
    assert lost > 0
