"""The suite accepts an honest tier and catches every defect below."""

from __future__ import annotations

import inspect
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tieredkv.testing import TierSuite
from tieredkv.tiers.base import BlockBuffer, BlockBuffers, Tier
from tieredkv.types import Batch, Outcome


class Honest:
    """A tier over a dict of bytes, one method per thing that a defect changes."""

    inline = True
    durable = False
    name = "honest"

    def __init__(self, slots: int, block_bytes: int) -> None:
        self.slots = slots
        self.block_bytes = block_bytes
        self.data: dict[int, Any] = {}

    def write(self, batch: Batch, sources: BlockBuffers) -> list[Outcome]:
        return [self.put(s, b) for s, b in zip(batch.slots, sources, strict=True)]

    def read(self, batch: Batch, targets: BlockBuffers) -> list[Outcome]:
        return [self.get(s, t) for s, t in zip(batch.slots, targets, strict=True)]

    def put(self, slot: int, source: BlockBuffer) -> Outcome:
        self.data[slot] = bytearray(source)
        return Outcome.OK

    def get(self, slot: int, target: BlockBuffer) -> Outcome:
        memoryview(target)[:] = self.data[slot]
        return Outcome.OK

    def views(self, slots: Sequence[int]) -> list[memoryview] | None:
        return [memoryview(self.data[slot]) for slot in slots]

    def close(self) -> None:
        return None


class WrongNeighbour(Honest):
    def put(self, slot: int, source: BlockBuffer) -> Outcome:
        self.data[slot + 1] = bytearray(source)
        return super().put(slot, source)


class ShortCopy(Honest):
    def get(self, slot: int, target: BlockBuffer) -> Outcome:
        memoryview(target)[:-1] = self.data[slot][:-1]
        return Outcome.OK


class FirstWriteWins(Honest):
    def put(self, slot: int, source: BlockBuffer) -> Outcome:
        self.data.setdefault(slot, bytearray(source))
        return Outcome.OK


class KeepsTheCallersBuffer(Honest):
    def put(self, slot: int, source: BlockBuffer) -> Outcome:
        self.data[slot] = source
        return Outcome.OK


class AssumesConsecutiveSlots(Honest):
    def write(self, batch: Batch, sources: BlockBuffers) -> list[Outcome]:
        first = batch.slots[0] if batch.slots else 0
        return [self.put(first + i, source) for i, source in enumerate(sources)]

    def read(self, batch: Batch, targets: BlockBuffers) -> list[Outcome]:
        first = batch.slots[0] if batch.slots else 0
        return [self.get(first + i, target) for i, target in enumerate(targets)]


class NoOutcomes(Honest):
    def read(self, batch: Batch, targets: BlockBuffers) -> list[Outcome]:
        super().read(batch, targets)
        return None  # type: ignore[return-value]


class OneOutcomeForAll(Honest):
    def write(self, batch: Batch, sources: BlockBuffers) -> list[Outcome]:
        return super().write(batch, sources)[:1]


class CopiesAsViews(Honest):
    def views(self, slots: Sequence[int]) -> list[memoryview] | None:
        return [memoryview(bytearray(self.data[slot])) for slot in slots]


class SharedScratch(Honest):
    def __init__(self, slots: int, block_bytes: int) -> None:
        super().__init__(slots, block_bytes)
        self.scratch = bytearray(block_bytes)

    def put(self, slot: int, source: BlockBuffer) -> Outcome:
        self.scratch[:] = source
        time.sleep(0.0005)
        return super().put(slot, memoryview(self.scratch))


class NeedsWritableSources(Honest):
    def put(self, slot: int, source: BlockBuffer) -> Outcome:
        return super().put(slot, source) if not memoryview(source).readonly else Outcome.FAILED


class NeedsAlignment(Honest):
    def get(self, slot: int, target: BlockBuffer) -> Outcome:
        if np.frombuffer(target, np.uint8).ctypes.data % 2:
            return Outcome.FAILED
        return super().get(slot, target)


class ChangesTheSource(Honest):
    def put(self, slot: int, source: BlockBuffer) -> Outcome:
        outcome = super().put(slot, source)
        if not memoryview(source).readonly:
            memoryview(source)[:1] = b"\0"
        return outcome


class ClosesOnce(Honest):
    def close(self) -> None:
        del self.data


class ForgetsAtClose(Honest):
    durable = True


class OneAtATime(Honest):
    """Refuses what another thread is doing at the same time."""

    def __init__(self, slots: int, block_bytes: int) -> None:
        super().__init__(slots, block_bytes)
        self.lock = threading.Lock()

    def read(self, batch: Batch, targets: BlockBuffers) -> list[Outcome]:
        if not self.lock.acquire(blocking=False):
            return [Outcome.BUSY] * len(batch)
        try:
            time.sleep(0.001)
            return super().read(batch, targets)
        finally:
            self.lock.release()


def suite_of(kind: type[Honest]) -> TierSuite:
    class Suite(TierSuite):
        block_bytes = 512

        def make(self, tmp_path: Path) -> Tier:
            return kind(self.blocks, self.block_bytes)

        def reopen(self, tier: Tier, tmp_path: Path) -> Tier:
            tier.close()
            return self.make(tmp_path)

    return Suite()


def cases(suite: TierSuite) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every test of the suite with every combination of its parameters."""
    for name, test in inspect.getmembers(suite, inspect.ismethod):
        if name.startswith("test_"):
            marks = [m for m in getattr(test, "pytestmark", []) if m.name == "parametrize"]
            values = [[(m.args[0], value) for value in m.args[1]] for m in marks]
            for chosen in itertools.product(*values):
                yield name, dict(chosen)


def failures(kind: type[Honest], tmp_path: Path) -> set[str]:
    """Names of the suite's tests that a new tier of this kind fails."""
    suite = suite_of(kind)
    failed = set()
    for name, arguments in cases(suite):
        test = getattr(suite, name)
        if "tmp_path" in inspect.signature(test).parameters:
            arguments["tmp_path"] = tmp_path
        try:
            test(tier=suite.make(tmp_path), **arguments)
        except Exception:
            failed.add(name)
    return failed


def test_an_honest_tier_passes(tmp_path: Path) -> None:
    assert len(list(cases(suite_of(Honest)))) >= 20
    assert failures(Honest, tmp_path) == set()


@pytest.mark.parametrize(
    ("kind", "caught_by"),
    [
        (WrongNeighbour, "test_writes_leave_neighbours_alone"),
        (ShortCopy, "test_round_trip_of_one_block"),
        (FirstWriteWins, "test_overwrite_keeps_only_the_new_block"),
        (KeepsTheCallersBuffer, "test_sources_are_borrowed_and_unchanged"),
        (AssumesConsecutiveSlots, "test_reading_in_another_order_than_written"),
        (NoOutcomes, "test_outcomes_are_a_list_in_order"),
        (OneOutcomeForAll, "test_outcomes_are_a_list_in_order"),
        (CopiesAsViews, "test_views_are_the_slots"),
        (SharedScratch, "test_four_threads_on_their_own_slots"),
        (OneAtATime, "test_four_threads_read_the_same_slots"),
        (NeedsWritableSources, "test_read_only_sources"),
        (NeedsAlignment, "test_unaligned_buffers"),
        (ChangesTheSource, "test_sources_are_borrowed_and_unchanged"),
        (ClosesOnce, "test_close_twice"),
        (ForgetsAtClose, "test_blocks_survive_reopening_if_durable"),
    ],
)
def test_defects_are_caught(kind: type[Honest], caught_by: str, tmp_path: Path) -> None:
    assert caught_by in failures(kind, tmp_path)


def test_hooks_must_be_defined(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="make"):
        TierSuite().make(tmp_path)
    with pytest.raises(NotImplementedError, match="reopen"):
        TierSuite().reopen(Honest(16, 512), tmp_path)
