"""Blocks in the memory of a Mooncake pool, which several processes share.

A block is one object: a header of 32 bytes, then the bytes of the block. Its name has the whole
identity of the block, so that equal names mean equal bytes, and whoever stored it first has
stored it for all. The master alone knows what exists; what this process remembers are the blocks
that it counts as its own, one per slot.
"""

from __future__ import annotations

import importlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from cachetools import TTLCache

from tieredkv.buffers import check_batch
from tieredkv.tiers.base import BlockBuffers, Bytes
from tieredkv.tiers.mooncake.client import CALLS, TURN, PoolClient
from tieredkv.tiers.mooncake.objects import ABSENT, HEADER, Stage, get_outcome, header, put_outcome
from tieredkv.tiers.slab import slot_count
from tieredkv.types import Batch, Outcome

KNOWN, SECONDS = 1 << 16, 1.0
"""Names whose existence is remembered, and for how long: each question renews a lease in the
pool, and what is leased cannot be removed."""
GONE = 10.0
"""Seconds for which a block that could not be got counts as absent: as long as the master goes
on listing what a dead process held (its `client_ttl`)."""
RETRIED = 256
"""Removals that are tried again with each other one."""

_Work: TypeAlias = "Callable[[list[str], list[Bytes], Stage], list[Outcome]]"


class MooncakeTier:
    """Implements `tieredkv.tiers.base.Tier`, and shares what it holds; thread-safe.

    With TCP the library reads and writes the caller's buffers themselves. With RDMA it needs
    memory that was registered with it: buffers inside `register`ed memory are used as they are,
    others pass through the tier's own.
    """

    inline = False
    durable = False

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
        """`capacity` in bytes of payload that this process keeps in the pool. `identity` begins
        the names: all that makes bytes of equal keys differ. `staged`: the library cannot reach
        memory that was not registered. The client is the tier's from now on.

        Raises CapacityError if no slot fits.
        """
        self._slots = slot_count(name, capacity, block_bytes)
        self.name = name
        self.block_bytes = block_bytes
        self.identity = identity
        """Begins the names of its objects."""
        self._client, self._staged = client, staged
        self._lock = threading.Lock()
        self._name_in: dict[int, str] = {}
        """Slot -> the name that it was last used for."""
        self._slot_of: dict[str, int] = {}
        self._doomed: dict[str, None] = {}
        """Deleted, and perhaps still there because somebody was reading: not found any more."""
        self._present: TTLCache[str, bool] = TTLCache(KNOWN, SECONDS)
        self._absent: TTLCache[str, bool] = TTLCache(KNOWN, GONE)
        self._regions: list[tuple[int, int]] = []
        self._stages: queue.Queue[Stage] = queue.Queue()
        for _ in range(CALLS):
            stage = Stage(block_bytes, staged)
            client.register(stage.address, stage.nbytes)
            self._stages.put(stage)
        self._config = _replicate()

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def available(self) -> bool:
        return self._client.breaker.closed

    def register(self, address: int, nbytes: int) -> None:
        """Blocks in this memory need no copy. It must stay until `close`."""
        self._regions.append((address, nbytes))
        self._client.register(address, nbytes)

    # -- the protocol ---------------------------------------------------------------------

    def write(self, batch: Batch, sources: BlockBuffers) -> list[Outcome]:
        check_batch(batch, sources, self.block_bytes, self._slots)
        names = self._names(batch.keys)
        stale = self._claim(batch.slots, names)
        with self._lock:  # or the old bytes of a deleted block would win
            stale += [name for name in names if name in self._doomed]
        self.drop(stale)
        return self._parts(self._put, names, sources)

    def read(self, batch: Batch, targets: BlockBuffers) -> list[Outcome]:
        check_batch(batch, targets, self.block_bytes, self._slots)
        names = self._names(batch.keys)
        return self._parts(self._get, names, targets)

    def views(self, slots: Sequence[int]) -> list[memoryview] | None:
        return None

    def close(self) -> None:
        self._client.close()

    # -- sharing --------------------------------------------------------------------------

    def found(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks of these the pool has: a hint, since they may go at any time.
        One question to the master at most; 0 at once while it does not answer."""
        names = self._names(keys)
        with self._lock:
            unknown = [name for name in names if name not in self._present]
            gone = (at for at, n in enumerate(unknown) if n in self._absent or n in self._doomed)
            del unknown[next(gone, len(unknown)) :]
        codes = self._client.exist(unknown)
        with self._lock:
            for name, code in zip(unknown, codes or (), strict=False):
                if code == 1:
                    self._present[name] = True
            return next((i for i, n in enumerate(names) if n not in self._present), len(names))

    def adopt(self, slots: Sequence[int], keys: Sequence[bytes]) -> list[str]:
        return self._claim(slots, self._names(keys))

    def drop(self, stale: Sequence[str]) -> None:
        """Unforced: a forced removal under a reader gives him mixed bytes."""
        with self._lock:
            names = [*stale, *islice(self._doomed, RETRIED)]
            for name in names:
                self._present.pop(name, None)
        if not names:
            return
        codes = self._client.call(lambda store: [int(c) for c in store.batch_remove(names)])
        if codes is None:
            return
        self._client.answered(codes)
        with self._lock:
            for name, code in zip(names, codes, strict=True):
                if code == 0 or code in ABSENT:
                    self._doomed.pop(name, None)

    def remove(self, keys: Sequence[bytes]) -> None:
        self._remove(self._names(keys))

    def remove_own(self) -> None:
        with self._lock:
            names = list(self._slot_of)
        self._remove(names)

    # -- inside ---------------------------------------------------------------------------

    def _remove(self, names: list[str]) -> None:
        with self._lock:
            for name in names:
                slot = self._slot_of.pop(name, None)
                if slot is not None:
                    del self._name_in[slot]
                self._doomed[name] = None
            while len(self._doomed) > KNOWN:
                del self._doomed[next(iter(self._doomed))]
        for _ in range(0, len(names), RETRIED):
            self.drop(())

    def _names(self, keys: Iterable[bytes]) -> list[str]:
        return [f"{self.identity}/{key.hex()}" for key in keys]

    def _claim(self, slots: Sequence[int], names: Sequence[str]) -> list[str]:
        """Use these slots for these names; the names that they stood for before, and that
        nothing stands for now: they are to be removed."""
        with self._lock:
            before = [self._name_in.pop(slot, None) for slot in slots]
            for name in before:
                if name is not None:
                    self._slot_of.pop(name, None)
            for slot, name in zip(slots, names, strict=True):
                old = self._slot_of.get(name)
                if old is not None:
                    self._name_in.pop(old, None)
                self._name_in[slot], self._slot_of[name] = name, slot
            return [name for name in before if name is not None and name not in self._slot_of]

    def _parts(self, work: _Work, names: list[str], buffers: BlockBuffers) -> list[Outcome]:
        """Several calls where one would be too long: its lease might end under it."""
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

    def _put(self, names: list[str], rows: list[Bytes], stage: Stage) -> list[Outcome]:
        for i, (name, row) in enumerate(zip(names, rows, strict=True)):
            stage.header(i)[:] = header(name, row)
            if self._foreign(row):
                stage.row(i)[:] = row
                rows[i] = stage.row(i)
        pointers, sizes = stage.lists(rows)

        with self._lock:
            if any(name in self._doomed for name in names):
                return [Outcome.BUSY] * len(names)

        def put(store: Any) -> tuple[list[int], list[int]]:
            codes = list(store.batch_put_from_multi_buffers(names, pointers, sizes, self._config))
            stored = [name for name, code in zip(names, codes, strict=True) if code == 0]
            return codes, list(store.batch_is_exist(stored)) if stored else []

        answer = self._client.call(put)
        if answer is None:
            return [Outcome.FAILED] * len(names)
        codes, seen = answer
        self._client.answered([*codes, *seen])
        visible = iter(seen)
        outcomes = [put_outcome(code, visible) for code in codes]
        with self._lock:
            for name, outcome in zip(names, outcomes, strict=True):
                self._absent.pop(name, None)
                if outcome is Outcome.OK:
                    self._present[name] = True
        return outcomes

    def _get(self, names: list[str], rows: list[Bytes], stage: Stage) -> list[Outcome]:
        places = [stage.row(i) if self._foreign(row) else row for i, row in enumerate(rows)]
        pointers, sizes = stage.lists(places)
        codes = self._client.call(
            lambda store: list(store.batch_get_into_multi_buffers(names, pointers, sizes))
        )
        if codes is None:
            return [Outcome.FAILED] * len(names)
        self._client.answered(codes)
        outcomes = []
        for i, (name, code) in enumerate(zip(names, codes, strict=True)):
            outcome = get_outcome(code, HEADER.size + self.block_bytes)
            if outcome is Outcome.OK:
                if places[i] is not rows[i]:
                    rows[i][:] = places[i]
                if not np.array_equal(stage.header(i), header(name, rows[i])):
                    outcome = Outcome.CORRUPT
            outcomes.append(outcome)
        with self._lock:
            for name, outcome in zip(names, outcomes, strict=True):
                if outcome is Outcome.FAILED:
                    self._present.pop(name, None)
                    self._absent[name] = True
        self.drop([n for n, o in zip(names, outcomes, strict=True) if o is Outcome.CORRUPT])
        return outcomes

    def _foreign(self, row: Bytes) -> bool:
        """Can the library not reach this memory?"""
        if not self._staged:
            return False
        at = row.ctypes.data
        return not any(lo <= at and at + len(row) <= lo + size for lo, size in self._regions)

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


def _replicate() -> Any:
    config = importlib.import_module("mooncake.store").ReplicateConfig()
    config.replica_num = 1
    return config
