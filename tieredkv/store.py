"""TieredKVStore: the hierarchy as a library in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Self

from tieredkv import arguments
from tieredkv.buffers import Blocks, view_blocks
from tieredkv.build import WrapTier, build, load_policies, open_disk
from tieredkv.build_pool import mooncake_config
from tieredkv.config import Config
from tieredkv.core import Core
from tieredkv.errors import BlockSizeError, ClosedError, ConfigError, UsageError
from tieredkv.events import Event
from tieredkv.executor import DaemonExecutor
from tieredkv.keys import fingerprint_digest
from tieredkv.metrics import Metrics, Stats
from tieredkv.mover import Mover
from tieredkv.planner import Planner
from tieredkv.session import PinGuard, Session
from tieredkv.snapshot import snapshot
from tieredkv.types import Clock, Fingerprint, Match, Outcome, Turn

ASYNC_THREADS = 4
CLOSE_FLOOR = 1.0  # seconds for what ends at once if nothing hangs


class TieredKVStore:
    """Blocks of KV cache by key chain, in the tiers that the configuration names.

    All methods are thread-safe. A block is an opaque string of bytes; all blocks of a store
    have one size, fixed by `Config.block_bytes`, by the NVMe directory or by the first put.
    Key chains come from `chain_keys` and always begin at the root.
    """

    def __init__(
        self,
        config: Config,
        fingerprint: Fingerprint,
        clock: Clock | None = None,
        wrap_tier: WrapTier | None = None,
    ) -> None:
        """Open the store; an NVMe directory is locked and its blocks are adopted.

        `clock` gives seconds for ages, pins and budgets (default `time.time`). `wrap_tier`
        lets tests put a wrapper around each tier.

        Raises ConfigError, PluginError, CapacityError, DirectoryError, DirectoryInUse,
        FormatError; nothing stays open then.
        """
        if not isinstance(config, Config):
            raise ConfigError(f"config is a {type(config).__name__}: pass a Config")
        if not isinstance(fingerprint, Fingerprint):
            raise UsageError(f"fingerprint is a {type(fingerprint).__name__}: pass a Fingerprint")
        fingerprint_digest(fingerprint, config.block_tokens)  # complains about wrong fields
        for name, hook in (("clock", clock), ("wrap_tier", wrap_tier)):
            if hook is not None and not callable(hook):
                raise UsageError(f"{name} is a {type(hook).__name__}: pass a function, or None")
        self.config = config
        self.fingerprint = fingerprint
        self._clock = clock or time.time
        self._wrap = wrap_tier
        self._opening = threading.Lock()
        self._closed = False
        self._closed_well = False
        self._core: Core | None = None
        self.metrics = Metrics(config.block_tokens, self.stats)
        load_policies(config)
        self._disk = open_disk(config, fingerprint)
        loads, stores = config.mover.load_queue, config.mover.store_queue
        self._mover = _mover("mover", config.mover.threads, loads, stores)
        # Whole calls wait for transfers, so they need threads that transfers do not use;
        # and gets others than puts, which may wait for room.
        self._gets = _mover("get", ASYNC_THREADS, loads, loads)
        self._puts = _mover("put", ASYNC_THREADS, stores, stores)
        try:
            known = config.block_bytes or (self._disk and self._disk.index.block_bytes)
            if known:
                self._open(int(known))
        except BaseException:
            self.close()
            raise

    # -- data -----------------------------------------------------------------------------

    def put(
        self,
        keys: Sequence[bytes],
        blocks: object,
        start: int = 0,
        turn: str | Turn | None = None,
    ) -> list[Outcome]:
        """Store `blocks`, one per key of `keys[start:]`; outcome per block.

        `keys` is the chain from the root. `blocks` is a list of buffers or one contiguous
        stack: anything with the buffer protocol, numpy arrays, torch tensors of the CPU or of
        one CUDA device (what is queued on the thread's stream there comes first). Returns once
        the first tier holds the bytes (on `nvme` alone: once they are durable); the buffers
        are the caller's again. Blocks that are stored already are OK at once.

        OK stored; MISSING an ancestor is not stored; BUSY no room or too late; FAILED the
        tier returned an error. Raises UsageError, BlockSizeError, CapacityError.
        """
        chain = self._chain(keys, start, every=True)
        views = view_blocks(blocks, len(chain) - start, writable=False)
        return self._put(chain, views, start, arguments.turn(turn))

    def get(
        self,
        keys: Sequence[bytes],
        out: object,
        start: int = 0,
        deadline: float | None = None,
    ) -> list[Outcome]:
        """Read the blocks of `keys[start:]` into `out`, each from its fastest tier.

        `out` as `blocks` of `put`, writable. `deadline` in seconds from now (default
        `mover.get_deadline`). Outcome per block: OK the bytes are there; MISSING; CORRUPT
        or FAILED the copy was unreadable and is dropped; BUSY a full queue or the deadline.
        Buffers of other outcomes are undefined. After BUSY an operation that hangs inside
        the operating system may still write to its buffer: the store keeps such buffers
        alive and counts them in `Stats.quarantined_transfers`; do not reuse them before it
        is back to 0. Raises UsageError, BlockSizeError.
        """
        chain, until = self._chain(keys, start), self._until(deadline)
        views = view_blocks(out, len(chain) - start, writable=True)
        return self._get(chain, views, start, until)

    def put_async(
        self,
        keys: Sequence[bytes],
        blocks: object,
        start: int = 0,
        turn: str | Turn | None = None,
    ) -> Future[list[Outcome]]:
        """`put` in the background. The store owns the buffers until the future is done: do
        not change them before.

        With write policy `through` the future is done once the blocks are durable, and
        FAILED those that are not. A full queue answers BUSY at once.
        """
        chain = tuple(self._chain(keys, start, every=True))  # the caller's list may grow meanwhile
        views = view_blocks(blocks, len(chain) - start, writable=False)
        given = arguments.turn(turn)
        if self._core is not None and len(views):
            self._open(views.block_bytes)  # a wrong size is the caller's error, not the future's

        def job() -> list[Outcome]:
            outcomes = self._put(chain, views, start, given)
            return outcomes if self._core is None else self._core.durable(chain, start, outcomes)

        return self._later(self._puts, job, views, len(chain) - start)

    def get_async(
        self,
        keys: Sequence[bytes],
        out: object,
        start: int = 0,
        deadline: float | None = None,
    ) -> Future[list[Outcome]]:
        """`get` in the background; `out` is the store's until the future is done."""
        chain = tuple(self._chain(keys, start))
        views = view_blocks(out, len(chain) - start, writable=True)
        until = self._until(deadline)
        if self._core is not None and len(views):
            self._check_size(self._core, views.block_bytes)
        return self._later(
            self._gets, lambda: self._get(chain, views, start, until), views, len(chain) - start
        )

    def lookup(self, keys: Sequence[bytes]) -> Match:
        """The longest stored prefix; not counted, and nothing moves. O(log n) for n keys, and
        with a tier of kind mooncake one question to its master about what is not known here."""
        began, chain = time.perf_counter(), self._chain(keys, 0)
        if (core := self._core) is None:
            return Match(0)
        core.discover(chain)
        with core.lock:
            match = core.planner.match(chain)
        self.metrics.looked_up(time.perf_counter() - began)
        return match

    def contains(self, key: bytes) -> bool:
        """Is this block stored and visible?"""
        self._chain([key], 0)
        if self._core is None:
            return False
        with self._core.lock:
            return bool(self._core.planner.visible(key))

    # -- retention ------------------------------------------------------------------------

    def pin(self, keys: Sequence[bytes], ttl: float | None = None) -> PinGuard:
        """Keep the longest stored prefix from being evicted until the context ends, or for
        `ttl` seconds (default `pin_ttl`), whichever is first. O(log n)."""
        chain = self._chain(keys, 0)
        ttl = arguments.seconds("ttl", self.config.pin_ttl if ttl is None else ttl, above_zero=True)
        if self._core is None:
            return PinGuard(None, None, 0)
        with self._core.lock:
            pin, blocks = self._core.planner.pin(chain, ttl, self._clock())
        return PinGuard(self._core, pin, blocks)

    def prefetch(self, keys: Sequence[bytes]) -> Future[int]:
        """Copy the chain's blocks that only slower tiers hold into memory of this process, within
        the promotion budget; the future has the number of blocks copied."""
        chain = self._chain(keys, 0)
        kinds = [tier.kind for tier in self.config.tiers]
        memory = [i for i, kind in enumerate(kinds) if kind not in ("mooncake", "nvme")]
        if self._core is None or not memory:
            nothing: Future[int] = Future()
            nothing.set_result(0)
            return nothing
        return self._core.prefetch(chain, memory[-1])

    def session(self, session: str) -> Session:
        """What is known about a session, to be told to the policies."""
        self._check_open()
        return Session(arguments.session(session), self._hint, self.prefetch)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forget these very blocks, and all that descend from any of them; how many."""
        chain = self._chain(keys, 0, every=True)
        return 0 if self._core is None else self._core.delete(chain)

    def clear(self, tier: str | None = None) -> int:
        """Forget everything, or every copy in one tier; blocks forgotten. Durable at return:
        what was on NVMe does not come back after a restart."""
        self._check_open()
        names = [t.label for t in self.config.tiers]
        if tier is not None and tier not in names:
            raise UsageError(f"tier {tier!r}: pass one of {', '.join(names)}, or None for all")
        if self._core is None:
            return 0
        return self._core.clear(None if tier is None else names.index(tier))

    # -- state ----------------------------------------------------------------------------

    def flush(self, timeout: float) -> bool:
        """Make all that NVMe should hold durable; True if it is by the deadline.

        With `on_evict` that is every stored block that admission wants; True at once
        without an nvme tier or with `write: off`.
        """
        self._check_open()
        limit = arguments.seconds("timeout", timeout)
        return self._core is None or self._core.flush(limit)

    def check(self) -> list[str]:
        """Violated invariants of the whole store; empty when sound. O(blocks)."""
        return [] if self._core is None else self._core.check()

    def stats(self) -> Stats:
        """A consistent snapshot."""
        return snapshot(self.config, self.metrics, self._core)

    def take_events(self) -> list[Event]:
        """Residency events since the last call (`Config.events` > 0), oldest first."""
        if self._core is None:
            return []
        with self._core.lock:
            log_ = self._core.planner.res.events
            return [] if log_ is None else log_.take()

    def close(self, timeout: float | None = None) -> bool:
        """Write back what is to be durable, finish work in flight, release everything.

        Waits `timeout` seconds (default `mover.close_deadline`) for the write-back, and a few
        more if operations hang; False if something hung or could not be written. A
        second call says the same, or False at once while the first runs. Later calls of
        others than `stats`, `check` and `take_events` raise ClosedError.
        """
        limit = self.config.mover.close_deadline
        if timeout is not None:
            limit = arguments.seconds("timeout", timeout)
        with self._opening:
            if self._closed:
                return self._closed_well
            self._closed = True
        deadline = time.monotonic() + limit

        def left(least: float = CLOSE_FLOOR) -> float:
            return max(least, deadline - time.monotonic())

        good = self._puts.close(left()) & self._gets.close(left())
        if self._core is not None:
            good &= self._core.flush(left(0.0))
            ended = self._core.close(left())
        else:
            ended = self._mover.close(left())
        if self._disk is not None:
            ended = self._disk.close(left()) if ended else ended
        self._closed_well = good and ended
        return self._closed_well

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside ---------------------------------------------------------------------------

    def _put(
        self, chain: Sequence[bytes], views: Blocks, start: int, turn: Turn | None
    ) -> list[Outcome]:
        if not len(views):
            return []
        began = time.perf_counter()
        core = self._open(views.block_bytes)
        outcomes = core.put(chain, views, start, turn)
        with core.lock:
            self.metrics.put_ended(outcomes, views.block_bytes, time.perf_counter() - began)
        return outcomes

    def _get(
        self, chain: Sequence[bytes], views: Blocks, start: int, deadline: float
    ) -> list[Outcome]:
        began, asked = time.perf_counter(), len(chain) - start
        if asked and (self._core is not None or mooncake_config(self.config)):
            self._open(views.block_bytes)  # checks the size; others may have stored the blocks
        core, hits, outcomes = self._core, dict[str, int](), [Outcome.MISSING] * asked
        if core is not None and asked:
            core.discover(chain)
            outcomes, hits = core.get(chain, views, start, deadline, self.config.promotion.enabled)
        with self._opening if core is None else core.lock:
            elapsed = time.perf_counter() - began
            self.metrics.get_ended(outcomes, hits, views.block_bytes, elapsed)
        return outcomes

    def _later(
        self, lane: Mover, job: Callable[[], list[Outcome]], views: Blocks, blocks: int
    ) -> Future[list[Outcome]]:
        future: Future[list[Outcome]] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # cancelled in time: the buffers were never touched
            try:
                future.set_result(job())
            except Exception as error:  # the future carries it to the caller
                future.set_exception(error)

        # as loads, of which all threads of a lane may run
        if not lane.submit(run, blocks * views.block_bytes, load=True):
            future.set_result([Outcome.BUSY] * blocks)
        return future

    def _hint(self, work: Callable[[Planner, float], None]) -> None:
        self._check_open()
        core = self._core
        if core is not None:
            with core.lock:
                work(core.planner, self._clock())

    def _open(self, block_bytes: int) -> Core:
        core = self._core
        if core is None:
            with self._opening:
                self._check_open()
                if self._core is None:
                    self._core = self._build(block_bytes)
                core = self._core
        self._check_size(core, block_bytes)
        return core

    def _build(self, block_bytes: int) -> Core:
        parts = build(self.config, self.fingerprint, self._disk, block_bytes, self._wrap)
        index = None if self._disk is None else self._disk.index
        return Core(parts, self._mover, self.config.mover, index, self.metrics, self._clock)

    @staticmethod
    def _check_size(core: Core, block_bytes: int) -> None:
        if block_bytes != core.block_bytes:
            raise BlockSizeError(
                f"buffers of {block_bytes} bytes: this store holds blocks of {core.block_bytes}; "
                "pass buffers of exactly one block each, or use another store and directory"
            )

    def _until(self, deadline: float | None) -> float:
        limit = self.config.mover.get_deadline
        if deadline is not None:
            limit = arguments.seconds("deadline", deadline)
        return time.monotonic() + limit

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the store is closed: open a new one")

    def _chain(self, keys: Sequence[bytes], start: int, *, every: bool = False) -> Sequence[bytes]:
        self._check_open()
        return arguments.chain(keys, start, every=every)


def _mover(name: str, threads: int, loads: int, stores: int) -> Mover:
    return Mover(DaemonExecutor(threads, f"tieredkv-{name}"), threads, loads, stores)
