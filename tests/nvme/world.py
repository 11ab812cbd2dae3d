"""Blocks with recognisable content, and a tier with an index on a directory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tieredkv.index.durable import DurableIndex
from tieredkv.index.record import ROOT, Deletion, Piece
from tieredkv.testing import StepExecutor
from tieredkv.tiers.nvme.directory import Directory
from tieredkv.tiers.nvme.tier import NvmeTier
from tieredkv.types import Batch, Fingerprint, Outcome

FP = Fingerprint("model", layout="X")
MIB = 1 << 20
ENGINE = os.environ.get("TIEREDKV_TEST_ENGINE", "auto")
"""Of tiers whose test asks for no other: the tests of `gds` run these again with theirs."""


def key_of(n: int) -> bytes:
    return hashlib.sha256(b"key %d" % n).digest()


def content(key: bytes, generation: int, size: int) -> bytes:
    return hashlib.shake_128(key + generation.to_bytes(8, "little")).digest(size)


def batch(slots: Sequence[int], generation: int = 1, epoch: int = 1) -> Batch:
    """Slot n holds key n."""
    return Batch(list(slots), [key_of(s) for s in slots], [generation] * len(slots), epoch)


def sources(b: Batch, size: int) -> list[memoryview]:
    pairs = zip(b.keys, b.generations, strict=True)
    return [memoryview(content(key, generation, size)) for key, generation in pairs]


def put(tier: NvmeTier, slots: Sequence[int], generation: int = 1) -> None:
    b = batch(slots, generation)
    assert tier.write(b, sources(b, tier.block_bytes)) == [Outcome.OK] * len(b)


def get(tier: NvmeTier, slots: Sequence[int], generation: int = 1) -> list[Outcome]:
    """Outcomes; what is OK has been compared."""
    b = batch(slots, generation)
    targets = [bytearray(tier.block_bytes) for _ in slots]
    outcomes = tier.read(b, [memoryview(target) for target in targets])
    for i, outcome in enumerate(outcomes):
        if outcome is Outcome.OK:
            assert targets[i] == content(b.keys[i], generation, tier.block_bytes)
    return outcomes


@contextmanager
def opened(
    root: Path, size: int = 4096, capacity: int | None = 4 * MIB, **kw: Any
) -> Iterator[NvmeTier]:
    """A tier on its own directory; `fp` and `rank` may be given."""
    kw.setdefault("engine", ENGINE)
    directory = Directory.open(root, kw.pop("fp", FP), 16, kw.pop("rank", 0))
    try:
        tier = NvmeTier(directory, "nvme", size, capacity, min_free=kw.pop("min_free", 0), **kw)
        try:
            yield tier
        finally:
            tier.close()
    finally:
        directory.close()


class MiniStore:
    """Tier and index used in the one order that is safe; every block is a chain of its own."""

    def __init__(self, root: Path, size: int = 4096, capacity: int = 4 * MIB, **kw: Any) -> None:
        kw.setdefault("engine", ENGINE)
        self.directory = Directory.open(root, kw.pop("fp", FP), 16)
        self.executor = StepExecutor()
        self.index = DurableIndex(self.directory.index_path, self.executor)
        self.index.set_block_bytes(size)
        self.tier = NvmeTier(self.directory, "nvme", size, capacity, min_free=0, **kw)
        self.index.set_map_limit(self.tier.index_bytes)
        self.counter = 0
        self.where: dict[bytes, tuple[int, int]] = {}
        for piece in self.index.load(self.tier.slots):
            for key, slot in zip(piece.keys, piece.slots, strict=True):
                self.where[key] = (slot, piece.generation)

    def put(self, keys: Sequence[bytes], evict: Sequence[bytes] = ()) -> list[bytes]:
        """Keys that are durable afterwards; `evict` are deleted before their slots are used."""
        if evict and not self.commit([], evict):
            return []
        for key in evict:
            del self.where[key]
        used = {slot for slot, _ in self.where.values()}
        free = (slot for slot in range(self.tier.slots) if slot not in used)
        slots = [slot for slot, _ in zip(free, keys, strict=False)]
        self.counter += 1
        generation = self.index.boot << 40 | self.counter
        b = Batch(slots, list(keys[: len(slots)]), [generation] * len(slots), self.index.epoch)
        outcomes = self.tier.write(b, sources(b, self.tier.block_bytes))
        good = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.OK]
        pieces = [Piece([b.keys[i]], ROOT, [slots[i]], generation, 0, 1.0, 1.0) for i in good]
        if not pieces or not self.commit(pieces, []):
            return []
        for i in good:
            self.where[b.keys[i]] = (slots[i], generation)
        return [b.keys[i] for i in good]

    def commit(self, puts: Sequence[Piece], deletes: Sequence[bytes]) -> bool:
        answers: list[bool] = []
        pieces = self.index.load(1 << 32, prune=False) if deletes else []
        named = [
            Deletion(key, piece.generation, slot)
            for piece in pieces
            for key, slot in zip(piece.keys, piece.slots, strict=True)
            if key in deletes
        ]
        self.index.submit(puts, named, answers.append)
        self.executor.run_all()
        return answers == [True]

    def get(self, key: bytes) -> Outcome:
        """Outcome; OK has been compared."""
        if key not in self.where:
            return Outcome.MISSING
        slot, generation = self.where[key]
        target = bytearray(self.tier.block_bytes)
        b = Batch([slot], [key], [generation], self.index.epoch)
        outcome = self.tier.read(b, [memoryview(target)])[0]
        if outcome is Outcome.OK:
            assert target == content(key, generation, len(target)), "wrong bytes"
        return outcome

    def close(self) -> None:
        self.tier.close()
        self.index.close(1.0)
        self.directory.close()


def segment_file(root: Path, n: int = 0) -> Path:
    """Segment `n` of the only fingerprint below `root`."""
    return next(root.glob(f"*/rank-0/seg-{n:06d}.kv"))


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
