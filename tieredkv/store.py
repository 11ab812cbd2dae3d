"""TieredKVStore: the hierarchy as a library in one process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, Self

from tieredkv.buffers import HostBlocks, host_blocks
from tieredkv.build import Disk, WrapTier, build, load_policies, nvme_config, open_disk
from tieredkv.config import Config
from tieredkv.core import Core
from tieredkv.errors import BlockSizeError, ClosedError, ConfigError, UsageError
from tieredkv.events import Event
from tieredkv.executor import DaemonExecutor
from tieredkv.metrics import Metrics, Stats
from tieredkv.mover import Mover
from tieredkv.planner import Planner
from tieredkv.session import PinGuard, Session
from tieredkv.snapshot import snapshot
from tieredkv.types import Clock, Fingerprint, Match, Outcome, Turn

log = logging.getLogger(__name__)

KEY_BYTES = 32
ASYNC_THREADS = 2


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
        self.config = config
        self.fingerprint = fingerprint
        self._clock = clock or time.time
        self._wrap = wrap_tier
        self._opening = threading.Lock()
        self._closed = False
        self._core: Core | None = None
        self.metrics = Metrics(config.block_tokens, self.stats)
        load_policies(config)
        self._disk = open_disk(config, fingerprint)
        limits = config.mover
        self._mover = Mover(
            DaemonExecutor(limits.threads, "tieredkv-mover"),
            limits.threads,
            limits.load_queue,
            limits.store_queue,
        )
        # Whole calls wait for transfers, so they need threads that transfers do not use;
        # and gets others than puts, which may wait for room.
        self._gets = _calls("get", limits.load_queue)
        self._puts = _calls("put", limits.store_queue)
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
        stack: anything with the buffer protocol, numpy arrays, torch tensors. Returns once
        the first tier holds the bytes (on `nvme` alone: once they are durable); the buffers
        are the caller's again. Blocks that are stored already are OK at once.

        OK stored; MISSING an ancestor is not stored; BUSY no room or too late; FAILED the
        tier returned an error. Raises UsageError, BlockSizeError, CapacityError.
        """
        began = time.perf_counter()
        chain = self._chain(keys, start, blocks=True)
        host = host_blocks(blocks, len(chain) - start, writable=False)
        outcomes = self._put(chain, host, start, _turn(turn))
        elapsed = time.perf_counter() - began
        self.metrics.seconds("put", elapsed)
        if log.isEnabledFor(logging.INFO):
            self._log_put(outcomes, host, elapsed)
        return outcomes

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
        began = time.perf_counter()
        chain = self._chain(keys, start, blocks=False)
        host = host_blocks(out, len(chain) - start, writable=True)
        outcomes, hits = self._get(chain, host, start, self._until(deadline))
        elapsed = time.perf_counter() - began
        self.metrics.seconds("get", elapsed)
        if log.isEnabledFor(logging.INFO):
            self._log_get(outcomes, hits, host, elapsed)
        return outcomes

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
        chain = self._chain(keys, start, blocks=True)
        host = host_blocks(blocks, len(chain) - start, writable=False)
        given = _turn(turn)

        def job() -> list[Outcome]:
            outcomes = self._put(chain, host, start, given)
            return self._acknowledge(chain, start, outcomes)

        return self._later(self._puts, job, host, len(chain) - start)

    def get_async(
        self,
        keys: Sequence[bytes],
        out: object,
        start: int = 0,
        deadline: float | None = None,
    ) -> Future[list[Outcome]]:
        """`get` in the background; `out` is the store's until the future is done."""
        chain = self._chain(keys, start, blocks=False)
        host = host_blocks(out, len(chain) - start, writable=True)
        until = self._until(deadline)
        return self._later(
            self._gets, lambda: self._get(chain, host, start, until)[0], host, len(chain) - start
        )

    def lookup(self, keys: Sequence[bytes]) -> Match:
        """The longest stored prefix; no side effect, not counted. O(log n) for n keys."""
        began = time.perf_counter()
        chain = self._chain(keys, 0, blocks=False)
        if self._core is None:
            return Match(0)
        with self._core.lock:
            match = self._core.planner.match(chain)
        self.metrics.seconds("lookup", time.perf_counter() - began)
        return match

    def contains(self, key: bytes) -> bool:
        """Is this block stored and visible?"""
        self._chain([key], 0, blocks=False)
        if self._core is None:
            return False
        with self._core.lock:
            return bool(self._core.planner.visible(key))

    # -- retention ------------------------------------------------------------------------

    def pin(self, keys: Sequence[bytes], ttl: float | None = None) -> PinGuard:
        """Keep the longest stored prefix from being evicted until the context ends, or for
        `ttl` seconds (default `pin_ttl`), whichever is first. O(log n)."""
        chain = self._chain(keys, 0, blocks=False)
        ttl = self.config.pin_ttl if ttl is None else ttl
        if not ttl > 0:
            raise UsageError(f"ttl={ttl}: pass a number of seconds above 0")
        if self._core is None:
            return PinGuard(None, None, 0)
        with self._core.lock:
            pin, blocks = self._core.planner.pin(chain, ttl, self._clock())
        return PinGuard(self._core, pin, blocks)

    def prefetch(self, keys: Sequence[bytes]) -> Future[int]:
        """Copy the chain's blocks that only NVMe holds into memory, within the promotion
        budget; the future has the number of blocks copied."""
        chain = self._chain(keys, 0, blocks=False)
        memory = [i for i, tier in enumerate(self.config.tiers) if tier.kind != "nvme"]
        if self._core is None or not memory:
            nothing: Future[int] = Future()
            nothing.set_result(0)
            return nothing
        return self._core.prefetch(chain, memory[-1])

    def session(self, session: str) -> Session:
        """What is known about a session, to be told to the policies."""
        if not isinstance(session, str) or not session:
            raise UsageError(f"session {session!r}: pass a non-empty text")
        return Session(self, session)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forget these very blocks, and all that descend from any of them; how many."""
        chain = self._chain(keys, 0, blocks=False)
        return self._change(lambda core: core.planner.delete(chain))

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
        return self._core is None or self._core.flush(timeout)

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

        Waits at most `timeout` seconds (default `mover.close_deadline`); False if something
        still hung or could not be written by then. Idempotent. Later calls raise ClosedError.
        """
        with self._opening:
            if self._closed:
                return True
            self._closed = True
        limit = self.config.mover.close_deadline if timeout is None else timeout
        deadline = time.monotonic() + limit

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        good = self._puts.close(left()) and self._gets.close(left())
        if self._core is not None:
            good &= self._core.flush(left())
            ended = self._core.close(left())
        else:
            ended = self._mover.close(left())
            if self._disk is not None:
                ended &= self._disk.index.close(left())
        if ended and self._disk is not None:
            self._disk.directory.close()
        return good and ended

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- inside ---------------------------------------------------------------------------

    def _put(
        self, chain: Sequence[bytes], host: HostBlocks, start: int, turn: Turn | None
    ) -> list[Outcome]:
        if not len(host):
            return []
        core = self._open(host.block_bytes)
        outcomes = core.put(chain, host, start, turn)
        good = outcomes.count(Outcome.OK)
        with core.lock:
            self.metrics.stored_tokens += good * self.config.block_tokens
            self.metrics.dropped_tokens += outcomes.count(Outcome.BUSY) * self.config.block_tokens
        return outcomes

    def _get(
        self, chain: Sequence[bytes], host: HostBlocks, start: int, deadline: float
    ) -> tuple[list[Outcome], dict[str, int]]:
        asked = len(chain) - start
        core = self._core
        if core is None or not asked:
            self.metrics.query_tokens += asked * self.config.block_tokens
            return [Outcome.MISSING] * asked, {}
        self._check_size(core, host)
        outcomes, hits = core.get(chain, host, start, deadline, self.config.promotion.enabled)
        host.finish(outcomes)
        with core.lock:
            self.metrics.query_tokens += asked * self.config.block_tokens
            for tier, blocks in hits.items():
                self.metrics.hit_tokens[tier] += blocks * self.config.block_tokens
        return outcomes, hits

    def _acknowledge(
        self, chain: Sequence[bytes], start: int, outcomes: list[Outcome]
    ) -> list[Outcome]:
        """Under `through`, wait until the stored blocks are durable."""
        nvme = nvme_config(self.config)
        good = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.OK]
        if nvme is None or nvme.write != "through" or not good or self._core is None:
            return outcomes
        deadline = time.monotonic() + self.config.mover.put_deadline
        for i in reversed(good):  # the deepest durable block vouches for its ancestors
            if self._core.await_durable(chain[start + i], max(0.0, deadline - time.monotonic())):
                break
            outcomes[i] = Outcome.FAILED
        return outcomes

    def _later(
        self, lane: Mover, job: Callable[[], list[Outcome]], host: HostBlocks, blocks: int
    ) -> Future[list[Outcome]]:
        future: Future[list[Outcome]] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except Exception as error:  # the future carries it to the caller
                future.set_exception(error)

        if not lane.submit(run, blocks * host.block_bytes, load=False):
            future.set_result([Outcome.BUSY] * blocks)
        return future

    def _hint(self, work: Callable[[Planner, float], None]) -> None:
        self._check_open()
        core = self._core
        if core is not None:
            with core.lock:
                work(core.planner, self._clock())

    def _change(self, work: Callable[[Core], int]) -> int:
        core = self._core
        if core is None:
            return 0
        with core.lock:
            return core.change(work(core))

    def _open(self, block_bytes: int) -> Core:
        core = self._core
        if core is None:
            with self._opening:
                if self._core is None:
                    self._core = self._build(block_bytes)
                core = self._core
        if core.block_bytes != block_bytes:
            raise BlockSizeError(
                f"blocks of {block_bytes} bytes: this store holds blocks of {core.block_bytes}; "
                "use another store, or another directory"
            )
        return core

    def _build(self, block_bytes: int) -> Core:
        disk: Disk | None = self._disk
        parts = build(self.config, disk, block_bytes, self._wrap)
        index = None if disk is None else disk.index
        return Core(parts, self._mover, self.config.mover, index, self.metrics, self._clock)

    def _check_size(self, core: Core, host: HostBlocks) -> None:
        if host.block_bytes != core.block_bytes:
            raise BlockSizeError(
                f"buffers of {host.block_bytes} bytes for blocks of {core.block_bytes}: "
                "pass buffers of exactly one block each"
            )

    def _until(self, deadline: float | None) -> float:
        limit = self.config.mover.get_deadline if deadline is None else deadline
        if not limit >= 0:
            raise UsageError(f"deadline={deadline}: pass a number of seconds from now, 0 or more")
        return time.monotonic() + limit

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the store is closed: open a new one")

    def _chain(self, keys: Sequence[bytes], start: int, *, blocks: bool) -> Sequence[bytes]:
        """Validate what is cheap to validate: everything that will be stored, else both ends."""
        self._check_open()
        if isinstance(keys, bytes | str) or not isinstance(keys, Sequence):
            raise UsageError(f"keys is a {type(keys).__name__}: pass the list of chain_keys()")
        if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start <= len(keys):
            raise UsageError(f"start={start!r}: pass an index into the {len(keys)} keys")
        if not len(keys):
            return keys
        for i in range(start, len(keys)) if blocks else (0, len(keys) - 1):
            key = keys[i]
            if type(key) is not bytes or len(key) != KEY_BYTES:
                raise UsageError(f"keys[{i}] = {key!r:.80}: keys are {KEY_BYTES} bytes each")
        return keys

    def _log_put(self, outcomes: list[Outcome], host: HostBlocks, elapsed: float) -> None:
        good, tokens = outcomes.count(Outcome.OK), self.config.block_tokens
        nbytes = good * host.block_bytes
        log.info(
            "stored %d of %d tokens, %d bytes, %.3f ms, %.2f GB/s",
            good * tokens, len(outcomes) * tokens, nbytes, elapsed * 1e3, nbytes / elapsed / 1e9,
        )  # fmt: skip

    def _log_get(
        self, outcomes: list[Outcome], hits: dict[str, int], host: HostBlocks, elapsed: float
    ) -> None:
        good, tokens = outcomes.count(Outcome.OK), self.config.block_tokens
        nbytes = good * host.block_bytes
        log.info(
            "total %d tokens, hit %d (%s), %d bytes, %.3f ms, %.2f GB/s",
            len(outcomes) * tokens, good * tokens,
            ", ".join(f"{tier} {n * tokens}" for tier, n in hits.items()) or "nothing",
            nbytes, elapsed * 1e3, nbytes / elapsed / 1e9,
        )  # fmt: skip


def _turn(turn: Any) -> Turn | None:
    if turn is None or isinstance(turn, Turn):
        return turn
    if isinstance(turn, str):
        return Turn(session=turn)
    raise UsageError(f"turn is a {type(turn).__name__}: pass a session id or a Turn")


def _calls(operation: Literal["get", "put"], limit: int) -> Mover:
    executor = DaemonExecutor(ASYNC_THREADS, f"tieredkv-{operation}")
    return Mover(executor, ASYNC_THREADS, limit, limit)
