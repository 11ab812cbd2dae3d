"""A store that lives until somebody kills it, and what must be true afterwards."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from tests.store.world import (
    SIZE,
    Path_,
    Shape,
    chain,
    core_of,
    durable,
    open_store,
    payload,
)
from tieredkv import Outcome, TieredKVStore
from tieredkv.cli.check import check_directory

ROOMY = 24 << 20
"""Capacity in bytes of a disk that nothing is evicted from."""
BLOCKS = 1500
"""Most distinct blocks of a roomy life."""
TIGHT = 500_000

SHAPES = {
    "on_evict": Shape(dram=24, write="on_evict", disk=ROOMY),
    "through": Shape(dram=24, write="through", disk=ROOMY),
    "disk alone": Shape(write="through", disk=ROOMY),
    "on_evict, tight": Shape(dram=12, write="on_evict", disk=TIGHT),
    "through, tight": Shape(dram=12, write="through", policy="arc", disk=TIGHT),
    "disk alone, tight": Shape(write="through", disk=TIGHT),
}


@dataclass
class Record:
    """What a life has reported, in the order of its reports."""

    ever: set[Path_] = field(default_factory=set)
    acknowledged: set[bytes] = field(default_factory=set)

    def note(self, kind: str, path: Path_, keys: list[bytes]) -> None:
        if kind == "put":
            self.ever.add(path)
        self.acknowledged.update(keys)


def steps(rng: random.Random, symbols: int) -> Iterator[Path_]:
    """Chains that extend or leave earlier ones."""
    known: list[Path_] = []
    while True:
        base = rng.choice(known) if known and rng.random() < 0.7 else ()
        base = base[: rng.randint(0, len(base))]
        path = base + tuple(rng.randrange(symbols) for _ in range(rng.randint(1, 6)))
        known = [*known[-200:], path[:24]]
        yield path[:24]


def live(name: str, root: Path, seed: int, pipe: Connection) -> None:
    """Put and flush for ever; what is acknowledged goes into the pipe at once."""
    store, _ = open_store(SHAPES[name], root)
    tight = "tight" in name
    rng = random.Random(seed)
    stored: set[bytes] = set()
    pipe.send(("ready", (), []))
    for path in steps(rng, 2 if tight else 1000):
        if not tight and len(stored) > BLOCKS:
            break
        pipe.send(("put", path, []))
        step(store, name, path, rng, stored, pipe)
        if rng.random() < 0.3:
            read(store, path, sure=False)
    pipe.send(("full", (), []))
    time.sleep(60.0)


def step(
    store: TieredKVStore,
    name: str,
    path: Path_,
    rng: random.Random,
    stored: set[bytes],
    pipe: Connection,
) -> None:
    keys = chain(path)
    blocks = [payload(key) for key in keys]
    later = name.startswith("through") and rng.random() < 0.5
    outcomes = store.put_async(keys, blocks).result(60.0) if later else store.put(keys, blocks)
    good = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.OK]
    stored.update(good)
    if later or name.startswith("disk"):
        pipe.send(("future", (), good))
    elif rng.random() < 0.2 and store.flush(60.0):
        # a plain put is memory's word only: what memory has dropped since was never promised
        pipe.send(("flush", (), [key for key in stored if store.contains(key)]))


def kill_one(name: str, root: Path, seed: int, record: Record) -> int:
    """One life until SIGKILL at a random moment; how many reports it made."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "tests.crash.life"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=live, args=(name, root, seed, theirs), daemon=True)
    process.start()
    theirs.close()
    reports = 0
    try:
        assert ours.poll(60.0), "the child does not start"
        wait = random.Random(seed).random() ** 2 * 0.5
        until = time.monotonic() + wait
        while (left := until - time.monotonic()) > 0:
            if ours.poll(left):
                record.note(*ours.recv())
                reports += 1
    finally:
        process.kill()
        process.join(30.0)
    assert process.exitcode == -signal.SIGKILL, "the child failed before it was killed"
    with suppress(EOFError):
        while ours.poll(10.0):
            record.note(*ours.recv())
            reports += 1
    ours.close()
    return reports


def judge(name: str, root: Path, record: Record) -> int:
    """Reopen; no wrong byte, nothing acknowledged lost. Blocks found."""
    store, _ = open_store(SHAPES[name], root)
    try:
        assert store.check() == []
        keys = {key for path in record.ever for key in chain(path)}
        found = {key for key in keys if store.contains(key)}
        if "tight" not in name:
            lost = record.acknowledged - found
            assert not lost, f"{len(lost)} of {len(record.acknowledged)} acknowledged blocks lost"
        assert core_of(store).planner.res.tree.blocks == len(found), "blocks that nobody put"
        for path in sorted(record.ever):
            read(store, path)
        if "tight" not in name:
            assert durable(store, list(found)) == found
        assert store.check() == []
    finally:
        assert store.close()
    report = check_directory(root)
    assert report.ok, report
    return len(found)


def read(store: TieredKVStore, path: Path_, sure: bool = True) -> None:
    """Every stored block of the chain comes back, byte for byte. Unless `sure`, some may have
    been evicted since the lookup."""
    keys = chain(path)
    blocks = store.lookup(keys).blocks
    buffer = bytearray(blocks * SIZE)
    outcomes = store.get(keys[:blocks], buffer)
    good = outcomes.count(Outcome.OK)
    assert not sure or good == blocks, "a block that was found cannot be read"
    for i in range(good):
        assert buffer[i * SIZE : (i + 1) * SIZE] == payload(keys[i]), "wrong bytes"
