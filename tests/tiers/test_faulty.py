"""The fault-injecting wrappers inject what they say, where they say, and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tieredkv.testing import BlockCall, Fault, FaultyTier, Gate, LatencyTier, TierSuite
from tieredkv.testing.tier_suite import batch, content, key
from tieredkv.tiers.base import Tier
from tieredkv.tiers.dram import DramTier
from tieredkv.types import Outcome

SIZE = 512
OK, FAILED = Outcome.OK, Outcome.FAILED


def dram(size: int = SIZE) -> DramTier:
    return DramTier("dram", 32 * size, size)


class TestFaultyWithoutFaults(TierSuite):
    def make(self, tmp_path: Path) -> Tier:
        return FaultyTier(dram(self.block_bytes))


class TestFaultyWithoutHits(TierSuite):
    """Every fault set, none selected: still an honest tier."""

    def make(self, tmp_path: Path) -> Tier:
        never = Fault(calls=())
        return FaultyTier(
            dram(self.block_bytes), error=never, short_read=never, flip_bit=never, hang=Gate(False)
        )


class TestLatency(TierSuite):
    def make(self, tmp_path: Path) -> Tier:
        return LatencyTier(dram(self.block_bytes), per_op=1e-4)


@pytest.fixture
def tier() -> Iterator[FaultyTier]:
    """Slots 0..7 hold the content of generation 1."""
    tier = FaultyTier(dram())
    store(tier, range(8))
    yield tier
    tier.close()


def store(tier: Tier, slots: Any, generation: int = 1) -> list[Outcome]:
    sources = [memoryview(content(slot, generation, SIZE)) for slot in slots]
    return tier.write(batch(slots, generation), sources)


def load(tier: Tier, slots: Any) -> tuple[list[Outcome], list[bytes]]:
    out = np.full((len(slots), SIZE), 0xAA, np.uint8)
    return tier.read(batch(slots), out), [row.tobytes() for row in out]


def stored(slots: Any, generation: int = 1) -> list[bytes]:
    return [content(slot, generation, SIZE) for slot in slots]


UNTOUCHED = b"\xaa" * SIZE


def test_error_fails_its_blocks_only(tier: FaultyTier) -> None:
    """A24: neighbours keep their outcome and bytes, the failed target stays as it was."""
    tier.error = {2}
    outcomes, blocks = load(tier, [1, 2, 3])
    assert outcomes == [OK, FAILED, OK]
    assert blocks == [content(1, 1, SIZE), UNTOUCHED, content(3, 1, SIZE)]
    assert tier.injected["error"] == 1
    tier.error = None
    assert load(tier, [1, 2, 3]) == ([OK] * 3, stored([1, 2, 3]))


@pytest.mark.parametrize(
    "when",
    [
        {key(2, 1)},
        [2],
        lambda at: at.slot == 2,
        lambda at: at.key == key(2, 1),
        lambda at: at.index == 1,
        Fault({2}),
        Fault(lambda at: at.op == "read" and at.index == 1, op="read"),
    ],
)
def test_selecting_blocks(tier: FaultyTier, when: Any) -> None:
    tier.error = when
    assert load(tier, [1, 2, 3])[0] == [OK, FAILED, OK]


def test_failed_writes_do_not_reach_the_medium(tier: FaultyTier) -> None:
    tier.error = Fault({2}, op="write")
    assert store(tier, [1, 2], generation=5) == [OK, FAILED]
    assert load(tier, [1, 2])[1] == [content(1, 5, SIZE), content(2, 1, SIZE)]


def test_selecting_operations_and_calls(tier: FaultyTier) -> None:
    tier.error = Fault(op="read", calls={2, 3})
    assert [load(tier, [0])[0] for _ in range(4)] == [[OK], [FAILED], [FAILED], [OK]]
    assert store(tier, [0]) == [OK]
    assert (tier.calls["read"], tier.calls["write"]) == (4, 2)


@pytest.mark.parametrize("outcome", [Outcome.BUSY, Outcome.CORRUPT, Outcome.MISSING])
def test_other_outcomes(tier: FaultyTier, outcome: Outcome) -> None:
    tier.error = outcome
    assert load(tier, [0, 1]) == ([outcome] * 2, [UNTOUCHED] * 2)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), OSError, MemoryError])
def test_raising(tier: FaultyTier, error: Any) -> None:
    tier.error = error
    kind = error if isinstance(error, type) else type(error)
    with pytest.raises(kind):
        load(tier, [0])
    with pytest.raises(kind):
        store(tier, [0])
    tier.error = Fault({9}, raises=OSError(28, "No space left on device"))
    assert load(tier, [0])[0] == [OK]


def test_short_read_fills_half_and_fails(tier: FaultyTier) -> None:
    tier.short_read = {4}
    outcomes, blocks = load(tier, [3, 4, 5])
    assert outcomes == [OK, FAILED, OK]
    half = SIZE // 2
    assert blocks == [
        content(3, 1, SIZE),
        content(4, 1, SIZE)[:half] + UNTOUCHED[half:],
        content(5, 1, SIZE),
    ]
    assert tier.injected["short_read"] == 1
    assert store(tier, [4]) == [OK]


@pytest.mark.parametrize("fault", ["error", "short_read"])
def test_broken_replies(tier: FaultyTier, fault: str) -> None:
    setattr(tier, fault, Fault({2}, reply="none"))
    assert load(tier, [1, 2, 3])[0] is None
    setattr(tier, fault, Fault({2}, reply="few"))
    assert load(tier, [1, 2, 3])[0] == [OK]
    assert load(tier, [1, 3])[0] == [OK, OK]


@pytest.mark.parametrize(("spec", "bit"), [(True, 0), (0, 0), (1001, 1001), (Fault(bit=9), 9)])
def test_flip_bit_on_read(tier: FaultyTier, spec: Any, bit: int) -> None:
    tier.flip_bit = spec
    outcomes, [block] = load(tier, [6])
    assert outcomes == [OK]
    wrong = int.from_bytes(block, "little") ^ int.from_bytes(content(6, 1, SIZE), "little")
    assert wrong == 1 << bit
    tier.flip_bit = None
    assert load(tier, [6]) == ([OK], stored([6]))


def test_flip_bit_on_write_stays(tier: FaultyTier) -> None:
    tier.flip_bit = Fault({6}, op="write", bit=3)
    source = np.frombuffer(bytearray(b"".join(stored([5, 6], 2))), np.uint8).reshape(2, SIZE)
    assert tier.write(batch([5, 6]), source) == [OK, OK]
    assert source.tobytes() == b"".join(stored([5, 6], 2))
    tier.flip_bit = None
    blocks = load(tier, [5, 6])[1]
    assert blocks[0] == content(5, 2, SIZE)
    assert blocks[1] == bytes([content(6, 2, SIZE)[0] ^ 8]) + content(6, 2, SIZE)[1:]


def test_latency(tier: FaultyTier) -> None:
    tier.latency = 0.05
    begin = time.monotonic()
    assert load(tier, [0])[0] == [OK]
    assert time.monotonic() - begin >= 0.05
    assert tier.injected["latency"] == 1


def test_hang_until_released(tier: FaultyTier) -> None:
    """A10, A11: a read that does not return, while other calls do."""
    gate = tier.hang = Gate({3}, op="read")
    results: list[Any] = []
    late = threading.Thread(target=lambda: results.append(load(tier, [3])), daemon=True)
    late.start()
    assert gate.wait_entered()
    assert gate.waiting == 1
    assert load(tier, [1]) == ([OK], stored([1]))
    assert store(tier, [3]) == [OK]
    assert results == []
    gate.release()
    late.join(10)
    assert results == [([OK], stored([3]))]
    assert gate.waiting == 0
    assert load(tier, [3])[0] == [OK]
    assert tier.injected["hang"] == 1


def test_hang_ends_at_its_timeout(tier: FaultyTier) -> None:
    tier.hang = Gate(timeout=0.05)
    begin = time.monotonic()
    assert load(tier, [3])[0] == [OK]
    assert 0.05 <= time.monotonic() - begin < 10


def test_hang_true_makes_a_gate(tier: FaultyTier) -> None:
    gate = FaultyTier(tier, hang=True).hang
    assert gate is not None
    assert not gate.is_open
    assert not gate.wait_entered(timeout=0.01)


def test_views_only_without_faults(tier: FaultyTier) -> None:
    views = tier.views([1])
    assert views is not None
    assert views[0].tobytes() == content(1, 1, SIZE)
    faults: dict[str, Any] = {
        "latency": 0.1,
        "error": {99},
        "short_read": True,
        "flip_bit": 0,
        "hang": Gate(),
    }
    for name, value in faults.items():
        off = getattr(tier, name)
        setattr(tier, name, value)
        assert tier.views([1]) is None
        setattr(tier, name, off)
    assert tier.views([1]) is not None


def test_everything_else_is_forwarded(tier: FaultyTier) -> None:
    inner = tier.inner
    assert (tier.name, tier.block_bytes, tier.slots) == ("dram", SIZE, 32)
    assert tier.durable is inner.durable
    assert tier.inline is False
    assert FaultyTier(inner, inline=True).inline is True
    assert tier.pinned is False
    with pytest.raises(AttributeError):
        _ = tier.nonsense


def test_wrappers_nest() -> None:
    inner = FaultyTier(dram(), error={1})
    outer = FaultyTier(LatencyTier(inner), error={2})
    assert store(outer, [0, 1, 2]) == [OK, FAILED, FAILED]
    assert (inner.injected["error"], outer.injected["error"]) == (1, 1)
    outer.close()


def test_predicates_see_the_call(tier: FaultyTier) -> None:
    seen: list[BlockCall] = []
    tier.error = lambda at: bool(seen.append(at))
    load(tier, [5, 7])
    assert seen == [
        BlockCall("read", 1, 0, 5, key(5, 1)),
        BlockCall("read", 1, 1, 7, key(7, 1)),
    ]


def test_latency_grows_with_bytes() -> None:
    tier = LatencyTier(dram(), per_op=0.01, per_byte=0.02 / SIZE)
    begin = time.monotonic()
    store(tier, [0, 1])
    assert time.monotonic() - begin >= 0.05
    assert tier.views([0]) is None
    assert (tier.inline, tier.durable, tier.slots) == (False, False, 32)
    tier.close()
