"""kill -9 at any moment: nothing acknowledged is lost, and no byte is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.crash.life import SHAPES, Record, judge, kill_one

KILLS = int(os.environ.get("TIEREDKV_CRASHES", "12"))
LIVES = 3  # in one directory: each writes over what the one before has left


@pytest.mark.parametrize("name", SHAPES)
def test_kill(name: str, tmp_path: Path) -> None:
    kills = max(2, -(-KILLS // len(SHAPES)))
    reports = found = acknowledged = 0
    for number in range(kills):
        root = tmp_path / str(number // LIVES)
        if number % LIVES == 0:
            record = Record()
            root.mkdir()
        reports += kill_one(name, root, number, record)
        found += judge(name, root, record)
        acknowledged += len(record.acknowledged)
    assert reports > kills, "killed before anything happened: it proves nothing"
    assert found
    assert acknowledged or kills < 5
    print(f"{name}: {kills} kills, {acknowledged} acknowledged, {found} found")
