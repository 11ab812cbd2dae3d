"""Blocks in the memory of a Mooncake pool, which several processes share.

A block is one object: a header of 32 bytes, then the bytes of the block. Its name has the whole
identity of the block, so that equal names mean equal bytes, and whoever stored it first has
stored it for all. Slots are numbers only: what is there, and what goes, is the business of
`catalogue`.
"""

from __future__ import annotations

import importlib
import queue
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import ceil
from typing import Any, TypeAlias

import numpy as np

from tieredkv.buffers import check_batch
from tieredkv.tiers.base import BlockBuffers, Bytes
from tieredkv.tiers.mooncake.client import CALLS, TURN, PoolClient
from tieredkv.tiers.mooncake.objects import (
    HEADER,
    Stage,
    get_outcome,
    header,
    object_name,
    put_outcome,
)
from tieredkv.tiers.slab import slot_count
from tieredkv.types import Batch, Outcome

LONGEST_PIN = 24 * 3600.0
"""Seconds; Mooncake takes no more."""

_Work: TypeAlias = "Callable[[list[str], list[Bytes], Stage], list[Outcome]]"


class MooncakeTier:
    """Implements `tieredkv.tiers.base.Tier`, and shares what it holds; thread-safe.

    With TCP the library reads and writes the caller's buffers themselves. With RDMA it needs
    memory that was registered with it: buffers inside `register`ed memory are used as they are,
    others pass through the tier's own.
    """

    inline = False
    durable = False
    far = True

    def __init__(
        self,
        name: str,
        client: PoolClient,
        identity: str,
        capacity: int,
        block_bytes: int,
        *,
        staged: bool = False,
    ) -> None:
        """`capacity` in bytes of payload that this process knows in the pool. `identity` begins
        the names: all that makes bytes of equal keys differ. `staged`: the library cannot reach
        memory that was not registered. The client is the tier's from now on.

        Raises CapacityError if no slot fits.
        """
        self._slots = slot_count(name, capacity, block_bytes)
        self.name = name
        self.block_bytes = block_bytes
        self.identity = identity
        """Begins the names of its objects."""
        self.client, self._staged = client, staged
        self.refused: Container[bytes] = ()
        """Blocks that are not to be put: older bytes of theirs are being removed."""
        self._stages: queue.Queue[Stage] = queue.Queue()
        for _ in range(CALLS):
            stage = Stage(block_bytes, staged)
            client.register(stage.address, stage.nbytes)
            self._stages.put(stage)

    @property
    def slots(self) -> int:
        return self._slots

    def register(self, address: int, nbytes: int) -> None:
        """Blocks in this memory need no copy. It must stay until `close`."""
        self.client.register(address, nbytes)

    # -- the protocol ---------------------------------------------------------------------

    def write(self, batch: Batch, sources: BlockBuffers) -> list[Outcome]:
        check_batch(batch, sources, self.block_bytes, self._slots)
        if any(key in self.refused for key in batch.keys):
            return [Outcome.BUSY] * len(batch)
        config = _replicate(batch.pin)
        return self._parts(partial(self._put, config), batch, sources)

    def read(self, batch: Batch, targets: BlockBuffers) -> list[Outcome]:
        check_batch(batch, targets, self.block_bytes, self._slots)
        return self._parts(self._get, batch, targets)

    def views(self, slots: Sequence[int]) -> list[memoryview] | None:
        return None

    def close(self) -> None:
        self.client.close()

    # -- inside ---------------------------------------------------------------------------

    def _parts(self, work: _Work, batch: Batch, buffers: BlockBuffers) -> list[Outcome]:
        """Several calls where one would be too long: its lease might end under it."""
        names = [object_name(self.identity, key) for key in batch.keys]
        outcomes: list[Outcome] = []
        with self._stage() as stage:
            if stage is None:
                return [Outcome.BUSY] * len(names)
            for lo in range(0, len(names), stage.blocks):
                part = slice(lo, lo + stage.blocks)
                try:
                    rows = [np.frombuffer(buffer, np.uint8) for buffer in buffers[part]]
                except ValueError:  # taken away from us: too late
                    return outcomes + [Outcome.BUSY] * (len(names) - lo)
                outcomes += work(names[part], rows, stage)
        return outcomes

    def _put(self, config: Any, names: list[str], rows: list[Bytes], stage: Stage) -> list[Outcome]:
        for i, (name, row) in enumerate(zip(names, rows, strict=True)):
            stage.header(i)[:] = header(name, row)
            if self._foreign(row):
                stage.row(i)[:] = row
                rows[i] = stage.row(i)
        pointers, sizes = stage.lists(rows)

        def put(store: Any) -> tuple[list[int], list[int]]:
            codes = list(store.batch_put_from_multi_buffers(names, pointers, sizes, config))
            stored = [name for name, code in zip(names, codes, strict=True) if code == 0]
            return codes, list(store.batch_is_exist(stored)) if stored else []

        answer = self.client.call(put)
        if answer is None:
            return self._untried(names)
        codes, seen = answer
        self.client.answered([*codes, *seen])
        visible = iter(seen)
        return [put_outcome(code, visible) for code in codes]

    def _get(self, names: list[str], rows: list[Bytes], stage: Stage) -> list[Outcome]:
        places = [stage.row(i) if self._foreign(row) else row for i, row in enumerate(rows)]
        pointers, sizes = stage.lists(places)
        codes = self.client.call(
            lambda store: list(store.batch_get_into_multi_buffers(names, pointers, sizes))
        )
        if codes is None:
            return self._untried(names)
        self.client.answered(codes)
        outcomes = []
        for i, (name, code) in enumerate(zip(names, codes, strict=True)):
            outcome = get_outcome(code, HEADER.size + self.block_bytes)
            if outcome is Outcome.OK:
                if places[i] is not rows[i]:
                    rows[i][:] = places[i]
                if not np.array_equal(stage.header(i), header(name, rows[i])):
                    outcome = Outcome.CORRUPT
            outcomes.append(outcome)
        corrupt = [n for n, o in zip(names, outcomes, strict=True) if o is Outcome.CORRUPT]
        if corrupt:  # for everybody, as far as nobody reads it
            self.client.remove(corrupt)
        return outcomes

    def _untried(self, names: list[str]) -> list[Outcome]:
        """While the pool answers, others were before us: that says nothing about the blocks."""
        return [Outcome.BUSY if self.client.breaker.closed else Outcome.FAILED] * len(names)

    def _foreign(self, row: Bytes) -> bool:
        """Can the library not reach this memory?"""
        return self._staged and not self.client.reaches(row.ctypes.data, len(row))

    @contextmanager
    def _stage(self) -> Iterator[Stage | None]:
        """The memory of one call; None where all is in use for too long."""
        try:
            stage = self._stages.get(timeout=TURN)
        except queue.Empty:
            yield None
            return
        try:
            yield stage
        finally:
            self._stages.put(stage)


def _replicate(pin: float) -> Any:
    """How objects are put: once, and for so many seconds not evicted by the master."""
    library = importlib.import_module("mooncake.store")
    config = library.ReplicateConfig()
    config.replica_num = 1
    if pin > 0:
        config.soft_pin_action = library.SoftPinAction.ENABLE
        config.soft_pin_ttl_ms = ceil(1000 * min(pin, LONGEST_PIN))
    return config
