"""What every tier must do, as a pytest class to inherit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tieredkv.tiers.base import BlockBuffers, Bytes, Tier
from tieredkv.types import Batch, Outcome

DEADLINE = 60.0
FILL = 0xAA


def content(slot: int, generation: int, nbytes: int) -> bytes:
    """The bytes that a test stores in a slot; different for every slot and generation."""
    return hashlib.shake_128(f"{slot}/{generation}".encode()).digest(nbytes)


def key(slot: int, generation: int) -> bytes:
    """The key that a test stores them under, 32 bytes."""
    return hashlib.sha256(f"key {slot}/{generation}".encode()).digest()


def batch(slots: Sequence[int], generation: int = 1) -> Batch:
    """A batch of these slots with the suite's keys."""
    slots = list(slots)
    return Batch(slots, [key(slot, generation) for slot in slots], [generation] * len(slots))


class TierSuite:
    """Inherit, define `make`, and pytest runs the contract of `tieredkv.tiers.base.Tier`.

    A durable tier defines `reopen` as well. `block_bytes` and `blocks` may be overridden:
    run the suite with an unaligned size too.
    """

    block_bytes = 8192
    blocks = 32
    """How many blocks the tier made by `make` has room for, at least 16."""

    def make(self, tmp_path: Path) -> Tier:
        """A new empty tier with blocks of `self.block_bytes` and room for `self.blocks`."""
        raise NotImplementedError("define make(self, tmp_path)")

    def reopen(self, tier: Tier, tmp_path: Path) -> Tier:
        """Close `tier` and open its data again (durable tiers)."""
        raise NotImplementedError("a durable tier must define reopen(self, tier, tmp_path)")

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = self.make(tmp_path)
        yield tier
        tier.close()

    def write(self, tier: Tier, slots: Sequence[int], generation: int = 1) -> None:
        """Store the suite's content in `slots`; all must be OK."""
        sources = self.stack(slots, generation)
        outcomes = tier.write(batch(slots, generation), sources)
        assert outcomes == [Outcome.OK] * len(slots)

    def verify(self, tier: Tier, slots: Sequence[int], generation: int = 1) -> None:
        """Read `slots` into one buffer each and compare."""
        targets = [bytearray([FILL]) * self.block_bytes for _ in slots]
        outcomes = tier.read(batch(slots, generation), [memoryview(t) for t in targets])
        assert outcomes == [Outcome.OK] * len(slots)
        for slot, target in zip(slots, targets, strict=True):
            assert target == content(slot, generation, self.block_bytes), f"slot {slot}"

    def stack(self, slots: Sequence[int], generation: int = 1) -> Bytes:
        """The suite's content of `slots` as one array of shape (len(slots), block_bytes)."""
        joined = b"".join(content(slot, generation, self.block_bytes) for slot in slots)
        return np.frombuffer(bytearray(joined), np.uint8).reshape(len(slots), self.block_bytes)

    def test_attributes(self, tier: Tier) -> None:
        assert isinstance(tier.name, str)
        assert tier.name
        assert tier.block_bytes == self.block_bytes
        assert isinstance(tier.inline, bool)
        assert isinstance(tier.durable, bool)
        assert tier.slots >= 16

    def test_round_trip_of_one_block(self, tier: Tier) -> None:
        self.write(tier, [3])
        self.verify(tier, [3])

    def test_every_slot_holds_its_own_block(self, tier: Tier) -> None:
        slots = range(tier.slots)
        for first in range(0, tier.slots, 16):
            self.write(tier, slots[first : first + 16])
        for first in range(0, tier.slots, 16):
            self.verify(tier, slots[first : first + 16])

    def test_empty_batch(self, tier: Tier) -> None:
        assert tier.write(batch([]), []) == []
        assert tier.read(batch([]), []) == []

    @pytest.mark.parametrize(
        "slots",
        [[0, 1, 2, 3, 4, 5, 6, 7], [5, 1, 9, 3], [7, 6, 5, 4], [2, 3, 4, 9, 10, 0, 15, 14]],
        ids=["contiguous", "scattered", "descending", "mixed"],
    )
    def test_batch_into_one_stack(self, tier: Tier, slots: list[int]) -> None:
        self.write(tier, slots)
        target = np.full((len(slots), self.block_bytes), FILL, np.uint8)
        assert tier.read(batch(slots), target) == [Outcome.OK] * len(slots)
        assert target.tobytes() == self.stack(slots).tobytes()

    def test_batch_of_separate_buffers(self, tier: Tier) -> None:
        slots = [8, 2, 3, 4, 11]
        sources = [bytearray(content(slot, 1, self.block_bytes)) for slot in slots]
        assert tier.write(batch(slots), [memoryview(s) for s in sources]) == [Outcome.OK] * 5
        self.verify(tier, slots)

    def test_reading_in_another_order_than_written(self, tier: Tier) -> None:
        self.write(tier, range(12))
        self.verify(tier, [11, 0, 7, 3])

    def test_overwrite_keeps_only_the_new_block(self, tier: Tier) -> None:
        self.write(tier, range(8), generation=1)
        self.write(tier, [2, 5], generation=2)
        self.verify(tier, [2, 5], generation=2)
        self.verify(tier, [0, 1, 3, 4, 6, 7], generation=1)

    def test_writes_leave_neighbours_alone(self, tier: Tier) -> None:
        self.write(tier, [0, 1, 2, 3, 5, 6, 7])
        self.write(tier, [4])
        self.verify(tier, [0, 1, 2, 3, 5, 6, 7])

    def test_reads_fill_their_targets_and_nothing_else(self, tier: Tier) -> None:
        self.write(tier, [1, 4])
        size = self.block_bytes
        memory = np.full(4 * size, FILL, np.uint8)
        targets = [memory[size : 2 * size], memory[2 * size : 3 * size]]
        assert tier.read(batch([4, 1]), targets) == [Outcome.OK] * 2
        assert (memory[:size] == FILL).all()
        assert (memory[3 * size :] == FILL).all()
        assert memory[size : 3 * size].tobytes() == self.stack([4, 1]).tobytes()

    def test_unaligned_buffers(self, tier: Tier) -> None:
        size = self.block_bytes
        memory = np.zeros(3 * size + 1, np.uint8)
        source = memory[1 : 1 + size]
        source[:] = np.frombuffer(content(6, 1, size), np.uint8)
        assert tier.write(batch([6]), [source]) == [Outcome.OK]
        target = memory[1 + size : 1 + 2 * size]
        assert tier.read(batch([6]), [target]) == [Outcome.OK]
        assert target.tobytes() == content(6, 1, size)

    def test_read_only_sources(self, tier: Tier) -> None:
        sources: list[memoryview] = [memoryview(content(s, 1, self.block_bytes)) for s in (1, 2)]
        assert tier.write(batch([1, 2]), sources) == [Outcome.OK] * 2
        frozen = self.stack([3, 4])
        frozen.flags.writeable = False
        assert tier.write(batch([3, 4]), frozen) == [Outcome.OK] * 2
        self.verify(tier, [1, 2, 3, 4])

    def test_sources_are_borrowed_and_unchanged(self, tier: Tier) -> None:
        source = self.stack([0, 1])
        assert tier.write(batch([0, 1]), source) == [Outcome.OK] * 2
        assert source.tobytes() == self.stack([0, 1]).tobytes()
        source[:] = FILL  # the caller may reuse its memory at once
        self.verify(tier, [0, 1])

    def test_outcomes_are_a_list_in_order(self, tier: Tier) -> None:
        slots = [9, 0, 4]
        sources: BlockBuffers = self.stack(slots)
        for outcomes in (tier.write(batch(slots), sources), tier.read(batch(slots), sources)):
            assert isinstance(outcomes, list)
            assert outcomes == [Outcome.OK] * 3

    def test_four_threads_on_their_own_slots(self, tier: Tier) -> None:
        def work(first: int) -> None:
            slots = list(range(first, 16, 4))
            for generation in range(1, 6):
                self.write(tier, slots, generation)
                self.verify(tier, slots, generation)

        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(work, first) for first in range(4)]:
                future.result(DEADLINE)
        self.verify(tier, range(16), generation=5)

    def test_four_threads_read_the_same_slots(self, tier: Tier) -> None:
        self.write(tier, range(8))
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(self.verify, tier, range(8)) for _ in range(8)]:
                future.result(DEADLINE)

    def test_views_are_the_slots(self, tier: Tier) -> None:
        self.write(tier, [2, 3, 9])
        views = tier.views([9, 2])
        if views is None:
            return
        for slot, view in zip([9, 2], views, strict=True):
            assert view.format == "B"
            assert view.shape == (self.block_bytes,)
            assert view.c_contiguous
            assert view.tobytes() == content(slot, 1, self.block_bytes)
        views[1][:] = content(2, 7, self.block_bytes)
        self.verify(tier, [2], generation=7)
        self.verify(tier, [3, 9])

    def test_blocks_survive_reopening_if_durable(self, tier: Tier, tmp_path: Path) -> None:
        if not tier.durable:
            return
        self.write(tier, range(10), generation=1)
        self.write(tier, [3], generation=2)
        again = self.reopen(tier, tmp_path)
        try:
            assert again.slots >= 16
            self.verify(again, [s for s in range(10) if s != 3], generation=1)
            self.verify(again, [3], generation=2)
        finally:
            again.close()

    def test_close_twice(self, tier: Tier) -> None:
        self.write(tier, [0])
        tier.close()
        tier.close()
