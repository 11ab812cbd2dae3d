"""A09: after SIGKILL at any moment every acknowledged block is read back right."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.nvme.world import MIB, MiniStore, key_of
from tieredkv.types import Outcome

WRITER = """
import random, sys
from pathlib import Path
from tests.nvme.world import MIB, MiniStore, key_of
store = MiniStore(Path(sys.argv[1]), 70_000, 4 * MIB, segment=MIB)
rng = random.Random(int(sys.argv[2]))
print("ready", flush=True)
while True:
    keys = [k for k in {key_of(rng.randrange(300)) for _ in range(8)} if k not in store.where]
    room = store.tier.slots - len(store.where)
    evict = rng.sample(sorted(store.where), max(0, len(keys) - room))
    for key in evict:
        print("-", key.hex(), flush=True)
    for key in store.put(keys, evict):
        print("+", key.hex(), flush=True)
"""
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("group", range(2))
def test_a09_kill(tmp_path: Path, group: int) -> None:
    rng = random.Random(group)
    durable: set[bytes] = set()
    acknowledged = 0
    for life in range(5):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(group * 100 + life)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0.02, 0.2))
            writer.send_signal(signal.SIGKILL)
            lines = writer.stdout.read().decode().split("\n")[:-1]
        for line in lines:
            sign, key = line.split()
            (durable.add if sign == "+" else durable.discard)(bytes.fromhex(key))
            acknowledged += sign == "+"
        store = MiniStore(tmp_path, 70_000, 4 * MIB, segment=MIB)
        try:
            outcomes = {key_of(n): store.get(key_of(n)) for n in range(300)}
            assert set(outcomes.values()) <= {Outcome.OK, Outcome.MISSING}
            assert [key for key in durable if outcomes[key] is not Outcome.OK] == []
            assert store.index.check() == []
            durable = set(store.where)
        finally:
            store.close()
    assert acknowledged > 50


def test_a09_a_clean_close_keeps_everything(tmp_path: Path) -> None:
    store = MiniStore(tmp_path)
    keys = [key_of(n) for n in range(50)]
    assert store.put(keys) == keys
    store.close()
    store = MiniStore(tmp_path)
    assert [store.get(key) for key in keys] == [Outcome.OK] * 50
    store.close()
