"""Power fails during any write or sync, with any part of the unsynced sectors on the disk."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.crash.life import SHAPES, Record, judge, read, step, steps
from tests.nvme.powerloss import PowerLossEngine, install
from tests.store.world import open_store, settle

SEEDS = int(os.environ.get("TIEREDKV_CRASHES", "18"))


class Sink:
    """Stands for the pipe of a life: `record` hears everything at once."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def send(self, report: Any) -> None:
        self.record.note(*report)


def live(name: str, root: Path, engine: PowerLossEngine, seed: int, record: Record) -> None:
    """Puts and flushes until the power is off."""
    rng = random.Random(seed)
    store, _ = open_store(SHAPES[name], root, room_wait=0.05)
    stored: set[bytes] = set()
    sink: Any = Sink(record)
    for number, path in enumerate(steps(rng, 2 if "tight" in name else 1000)):
        if engine.is_off or number == 60:
            break
        record.ever.add(path)
        step(store, name, path, rng, stored, sink)
        settle(store)
        if rng.random() < 0.3 and not engine.is_off:  # later reads fail, and what fails is dropped
            read(store, path)
    engine.power_off()
    store.close(5.0)


@pytest.mark.parametrize("name", SHAPES)
def test_power_loss(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = max(2, -(-SEEDS // len(SHAPES)))
    lost = acknowledged = 0
    for seed in range(seeds):
        root, record = tmp_path / str(seed), Record()
        root.mkdir()
        for life in range(2):  # the second overwrites what the first crash has left
            number = seed * 2 + life
            engine = PowerLossEngine(number, random.Random(number).randint(4, 80))
            with monkeypatch.context() as patch:
                install(patch, engine)
                live(name, root, engine, number, record)
                lost += engine.crash()
            judge(name, root, record)
        acknowledged += len(record.acknowledged)
    assert lost, "every write survived: it proves nothing"
    assert acknowledged
    print(f"{name}: {seeds} x 2 power losses, {lost} sectors lost, {acknowledged} acknowledged")


def test_a_disk_that_ignores_flushes_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: without honest syncs, acknowledged blocks do get lost."""
    noticed = 0
    for seed in range(4):
        root, record = tmp_path / str(seed), Record()
        root.mkdir()
        engine = PowerLossEngine(seed, 40, honest_sync=False)
        with monkeypatch.context() as patch:
            install(patch, engine)
            live("disk alone", root, engine, seed, record)
            engine.crash()
        try:
            judge("disk alone", root, record)
        except AssertionError:
            noticed += 1
    assert noticed
