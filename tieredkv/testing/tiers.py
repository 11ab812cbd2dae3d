"""Tiers that misbehave on purpose."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from tieredkv.testing.faults import BlockCall, Fault, FaultSpec, Gate, Op, fault, hits
from tieredkv.tiers.base import BlockBuffer, BlockBuffers, Bytes, Tier, device_views, takes_device
from tieredkv.types import Batch, Outcome


class FaultyTier:
    """Wraps any tier and injects faults; everything else is forwarded.

    The faults are attributes, to be switched at any time from any thread:

    - `latency`: seconds that every call sleeps first
    - `hang`: a `Gate` that holds calls (True: a new one that holds all)
    - `error`: the inner tier is not asked for these blocks; they are FAILED (or the given
      outcome), or the call raises the given exception
    - `short_read`: a read fills the first half of the block and reports it FAILED
    - `flip_bit`: a read returns one wrong bit and OK: corruption that nothing below has
      noticed. `Fault(op="write")` stores it instead. An int is the bit number in the block

    Each takes the forms of `FaultSpec`. `calls` counts calls per operation; `injected`
    counts blocks per fault (calls for `latency` and `hang`). `inline` is False, because
    faults can block. `views` are given only while no fault is set: memory that is reached
    around the wrapper cannot misbehave.
    """

    def __init__(
        self,
        inner: Tier,
        *,
        latency: float = 0.0,
        error: FaultSpec = None,
        short_read: FaultSpec = None,
        flip_bit: FaultSpec = None,
        hang: Gate | bool | None = None,
        inline: bool = False,
    ) -> None:
        """`inline` True keeps even a blocking fault in the caller's thread."""
        self.inner = inner
        self.name = inner.name
        self.block_bytes = inner.block_bytes
        self.durable = inner.durable
        self.inline = inline
        self.latency = latency
        self.error = error
        self.short_read = short_read
        self.flip_bit = flip_bit
        self.hang: Gate | None = Gate() if hang is True else (hang or None)
        self.calls: Counter[str] = Counter()
        self.injected: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def slots(self) -> int:
        return self.inner.slots

    def write(self, batch: Batch, sources: BlockBuffers) -> list[Outcome]:
        return self._call("write", batch, sources)

    def read(self, batch: Batch, targets: BlockBuffers) -> list[Outcome]:
        return self._call("read", batch, targets)

    def views(self, slots: Sequence[int]) -> list[memoryview] | None:
        return self.inner.views(slots) if self._sound else None

    @property
    def device(self) -> bool:
        """Faults are for memory of the host: while one is set no other is taken."""
        return takes_device(self.inner) and self._sound

    def device_views(self, slots: Sequence[int]) -> Sequence[Any] | None:
        return device_views(self.inner, slots) if self._sound else None

    @property
    def _sound(self) -> bool:
        specs = (self.error, self.short_read, self.flip_bit)
        return not (self.latency or self.hang or any(fault(spec) for spec in specs))

    def close(self) -> None:
        self.inner.close()

    def _call(self, op: Op, batch: Batch, buffers: BlockBuffers) -> list[Outcome]:
        at = self._enter(op, batch)
        error, flip = fault(self.error), fault(self.flip_bit, "read")
        short = fault(self.short_read) if op == "read" else None
        failing = hits(error, at)
        halved = hits(short, at) - failing
        flipped = hits(flip, at) - failing - halved
        self._count(error=len(failing), short_read=len(halved), flip_bit=len(flipped))
        if not (failing or halved or flipped):
            return self._forward(op, batch, buffers)
        if error and failing and error.raises is not None:
            raise error.raises
        rows: list[BlockBuffer] = list(buffers)
        for i in halved:
            rows[i] = np.empty(self.block_bytes, np.uint8)
        if flip and op == "write":
            for i in flipped:
                rows[i] = _flipped(_array(rows[i]).copy(), flip.bit)
        outcomes = self._forward_some(op, batch, rows, failing)
        for i, outcome in enumerate(outcomes):
            if flip and op == "read" and i in flipped and outcome is Outcome.OK:
                _flipped(_array(rows[i]), flip.bit)
        for i in halved:
            half = self.block_bytes // 2
            _array(buffers[i])[:half] = _array(rows[i])[:half]
        for cause, hit in ((error, failing), (short, halved)):
            if cause is not None and hit:
                outcomes = _report(cause, hit, outcomes)
        return outcomes

    def _enter(self, op: Op, batch: Batch) -> list[BlockCall]:
        """Count the call and delay it."""
        with self._lock:
            self.calls[op] += 1
            call = self.calls[op]
        at = [
            BlockCall(op, call, i, slot, key)
            for i, (slot, key) in enumerate(zip(batch.slots, batch.keys, strict=True))
        ]
        if self.latency > 0:
            self._count(latency=1)
            time.sleep(self.latency)
        gate = self.hang
        if gate is not None and hits(gate.fault, at) and not gate.is_open:
            self._count(hang=1)
            gate.hold()
        return at

    def _count(self, **faults: int) -> None:
        with self._lock:
            self.injected.update(faults)

    def _forward(self, op: Op, batch: Batch, buffers: BlockBuffers) -> list[Outcome]:
        inner = self.inner.write if op == "write" else self.inner.read
        return inner(batch, buffers)

    def _forward_some(
        self, op: Op, batch: Batch, rows: list[BlockBuffer], without: set[int]
    ) -> list[Outcome]:
        """Outcomes of the whole batch; the blocks `without` are not passed on and FAILED."""
        asked = [i for i in range(len(rows)) if i not in without]
        part = Batch(
            [batch.slots[i] for i in asked],
            [batch.keys[i] for i in asked],
            [batch.generations[i] for i in asked],
            batch.epoch,
        )
        outcomes = [Outcome.FAILED] * len(rows)
        answers = self._forward(op, part, [rows[i] for i in asked]) if asked else []
        for i, outcome in zip(asked, answers, strict=True):
            outcomes[i] = outcome
        return outcomes


class LatencyTier:
    """Wraps any tier and makes it slow: `per_op` seconds a call and `per_byte` a byte.

    Calls sleep independently of each other, as on a device with room for all of them.
    It has no `views`, so that no byte gets around the delay.
    """

    inline = False

    def __init__(self, inner: Tier, per_op: float = 0.0, per_byte: float = 0.0) -> None:
        self.inner = inner
        self.name = inner.name
        self.block_bytes = inner.block_bytes
        self.durable = inner.durable
        self.per_op = per_op
        self.per_byte = per_byte

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def slots(self) -> int:
        return self.inner.slots

    def write(self, batch: Batch, sources: BlockBuffers) -> list[Outcome]:
        self._sleep(len(batch))
        return self.inner.write(batch, sources)

    def read(self, batch: Batch, targets: BlockBuffers) -> list[Outcome]:
        self._sleep(len(batch))
        return self.inner.read(batch, targets)

    def views(self, slots: Sequence[int]) -> list[memoryview] | None:
        return None

    def device_views(self, slots: Sequence[int]) -> Sequence[Any] | None:
        return None

    def close(self) -> None:
        self.inner.close()

    def _sleep(self, blocks: int) -> None:
        time.sleep(self.per_op + self.per_byte * blocks * self.block_bytes)


def _array(buffer: BlockBuffer) -> Bytes:
    return np.frombuffer(buffer, np.uint8) if isinstance(buffer, memoryview) else buffer


def _flipped(array: Bytes, bit: int) -> Bytes:
    array[bit // 8] ^= np.uint8(1 << (bit % 8))
    return array


def _report(cause: Fault, hit: set[int], outcomes: list[Outcome]) -> list[Outcome]:
    if cause.raises is not None:
        raise cause.raises
    if cause.reply == "none":
        return cast("list[Outcome]", None)
    if cause.reply == "few":
        return outcomes[: min(hit)]
    return [cause.outcome if i in hit else outcome for i, outcome in enumerate(outcomes)]
