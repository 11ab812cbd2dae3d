"""A pool in a dict, which loses what it likes, and one core's ways to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

import numpy as np

from tieredkv.buffers import check_batch
from tieredkv.tiers.base import BlockBuffers
from tieredkv.types import Batch, Clock, Outcome

T = TypeVar("T")
LEASE = 2.0
"""Seconds for which a block that somebody has asked for or read cannot be removed."""
KNOWN, GONE = 1.0, 10.0
"""Seconds for which a block counts as present, and as absent."""
RETRY = 0.5


class Pool:
    """Blocks by key. The first writer's bytes stay; when it is full, the oldest blocks go."""

    def __init__(self, capacity: int, clock: Clock) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.up = True
        self._capacity, self._clock = capacity, clock
        self._leased: dict[bytes, float] = {}

    def exists(self, key: bytes) -> bool:
        if key in self.blocks:
            self._leased[key] = self._clock() + LEASE
        return key in self.blocks

    def put(self, key: bytes, block: bytes) -> Outcome:
        if key not in self.blocks:
            if len(self.blocks) >= self._capacity and not self.evict(1):
                return Outcome.BUSY
            self.blocks[key] = block
        return Outcome.OK

    def get(self, key: bytes) -> bytes | None:
        return self.blocks[key] if self.exists(key) else None

    def remove(self, key: bytes) -> bool:
        """False if somebody has a lease."""
        if self._held(key):
            return False
        self.blocks.pop(key, None)
        return True

    def evict(self, count: int) -> int:
        """The oldest go, as far as nobody has a lease; how many."""
        victims = [key for key in self.blocks if not self._held(key)][:count]
        for key in victims:
            del self.blocks[key]
        return len(victims)

    def _held(self, key: bytes) -> bool:
        return key in self.blocks and self._leased.get(key, 0.0) > self._clock()


class Link:
    """One core's connection: after a failure nobody calls until a probe has succeeded."""

    def __init__(self, pool: Pool) -> None:
        self.closed = True
        """As of a circuit breaker: calls may go."""
        self.failures = 0
        self._pool = pool

    def call(self, work: Callable[[Pool], T]) -> T | None:
        """None if the pool does not answer."""
        self.failures += self.closed and not self._pool.up
        self.closed = self.closed and self._pool.up
        return work(self._pool) if self.closed else None

    def probe(self) -> None:
        self.closed = self._pool.up


class PoolTier:
    """Implements `tieredkv.tiers.base.Tier`: slots are numbers only, blocks go by their keys."""

    inline = False
    durable = False

    def __init__(self, name: str, link: Link, slots: int, block_bytes: int) -> None:
        self.name, self.slots, self.block_bytes = name, slots, block_bytes
        self.refused: dict[bytes, None] = {}
        """Not to be put: old blocks of these keys are being removed."""
        self.written: set[bytes] = set()
        """All that was ever put through it."""
        self.pins: set[float] = set()
        """All that writes have asked for."""
        self.sealed: int | None = None
        """Only moves of generations up to this one may still arrive; None: any."""
        self.intruders: list[list[bytes]] = []
        """Blocks of the others. Not raised: a mover would swallow that."""
        self._link = link

    def write(self, batch: Batch, sources: BlockBuffers) -> list[Outcome]:
        self._enter(batch, sources)
        self.pins.add(batch.pin)
        if any(key in self.refused for key in batch.keys):
            return [Outcome.BUSY] * len(batch)
        blocks = dict(zip(batch.keys, map(bytes, sources), strict=True))
        outcomes = self._link.call(lambda pool: [pool.put(k, b) for k, b in blocks.items()])
        if outcomes is None:
            return [Outcome.FAILED] * len(batch)
        done = zip(batch.keys, outcomes, strict=True)
        self.written.update(key for key, outcome in done if outcome is Outcome.OK)
        return outcomes

    def read(self, batch: Batch, targets: BlockBuffers) -> list[Outcome]:
        self._enter(batch, targets)
        blocks = self._link.call(lambda pool: [pool.get(key) for key in batch.keys])
        outcomes = [Outcome.FAILED] * len(batch)
        for i, block in enumerate(blocks or ()):
            if block is not None:
                np.frombuffer(targets[i], np.uint8)[:] = np.frombuffer(block, np.uint8)
                outcomes[i] = Outcome.OK
        return outcomes

    def views(self, slots: Sequence[int]) -> list[memoryview] | None:
        return None

    def close(self) -> None:
        pass

    def _enter(self, batch: Batch, buffers: BlockBuffers) -> None:
        check_batch(batch, buffers, self.block_bytes, self.slots)
        if self.sealed is not None and max(batch.generations) > self.sealed:
            self.intruders.append(list(batch.keys))


@dataclass(eq=False)
class Question:
    keys: list[bytes]
    found: int | None = None


class FakeCatalogue:
    """Implements `tieredkv.tiers.base.SharedCatalogue`. What a thread would do waits for `step`."""

    def __init__(self, link: Link, clock: Clock, *, soft_pins: bool) -> None:
        self.soft_pins = soft_pins
        self.shed: Callable[[int], object] | None = None
        self.own: set[bytes] = set()
        self.leaving: dict[bytes, None] = {}
        self.doomed: dict[bytes, None] = {}
        self.removing: Callable[[bytes, bool], None] = lambda key, deleted: None
        """Told of each removal, and whether it was asked for with `remove`."""
        self.sealed = False
        self._link, self._clock = link, clock
        self._questions: deque[Question] = deque()
        self._present: dict[bytes, float] = {}
        self._absent: dict[bytes, float] = {}
        self._retry = 0.0

    @property
    def available(self) -> bool:
        return self._link.closed

    @property
    def failures(self) -> int:
        return self._link.failures

    def ask(self, keys: Sequence[bytes]) -> Question:
        assert not (self.sealed and keys), "asked by a core that has left the pool"
        question = Question(list(keys))
        if keys and self.available:
            self._questions.append(question)
        else:
            question.found = 0
        return question

    def answer(self, question: Question, *, wait: float) -> int | None:
        while wait and question.found is None:
            self.step()
        return question.found

    def lost(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.own.discard(key)
            self._present.pop(key, None)
            if self.available:
                self._absent[key] = self._clock() + GONE

    def coming(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.leaving.pop(key, None)

    def stored(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.own.add(key)
            self._absent.pop(key, None)
            self._present[key] = self._clock() + KNOWN

    def left(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in self.own:
                self.own.remove(key)
                self._present.pop(key, None)
                self.leaving[key] = None

    def remove(self, keys: Iterable[bytes]) -> None:
        for key in list(keys):
            self.own.discard(key)
            self.leaving.pop(key, None)
            self._present.pop(key, None)
            self.doomed[key] = None
        self._retry = 0.0

    def remove_own(self) -> None:
        self.remove(self.own)

    def disown(self) -> None:
        self.own.clear()
        self.leaving.clear()
        self._present.clear()

    def close(self) -> None:
        pass

    # -- what its thread would do -----------------------------------------------------------

    def step(self) -> bool:
        """Answer a question, or else remove something; False if there is nothing to do now."""
        if self._questions:
            question = self._questions.popleft()
            question.found = self._found(question.keys)
            return True
        if self.doomed and self._clock() >= self._retry:
            return self._remove(next(iter(self.doomed)), deleted=True)
        if self.leaving:
            return self._remove(next(iter(self.leaving)), deleted=False)
        return False

    def _found(self, keys: Sequence[bytes]) -> int:
        now = self._clock()
        self._present = {key: until for key, until in self._present.items() if until > now}
        self._absent = {key: until for key, until in self._absent.items() if until > now}
        gone = {*self._absent, *self.doomed, *self.leaving}
        keys = list(takewhile(lambda key: key not in gone, keys))
        unknown = [key for key in keys if key not in self._present]
        there = self._link.call(lambda pool: [key for key in unknown if pool.exists(key)])
        self._present.update(dict.fromkeys(there or (), now + KNOWN))
        return sum(1 for _ in takewhile(self._present.__contains__, keys))

    def _remove(self, key: bytes, *, deleted: bool) -> bool:
        gone = self._link.call(lambda pool: pool.remove(key))
        if gone is None:
            return False
        if gone:
            self.removing(key, deleted)
        if gone or not deleted:  # of what was evicted, who uses it may keep it
            (self.doomed if deleted else self.leaving).pop(key)
            return True
        del self.doomed[key]
        self.doomed[key] = None
        self._retry = self._clock() + RETRY
        return False
