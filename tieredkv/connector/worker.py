"""The worker side: executes the planner's jobs on this rank's tiers and engine blocks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from tieredkv.build import build_tiers, nvme_config
from tieredkv.build_pool import pool_identity
from tieredkv.config import Config
from tieredkv.connector.paged import PagedBlocks, PagedCache
from tieredkv.connector.wire import Hello, Job, Load, Outcomes, Report, StepMetadata, WorkerMetadata
from tieredkv.device import Event
from tieredkv.executor import DaemonExecutor
from tieredkv.mover import Mover
from tieredkv.tiers.base import Tier
from tieredkv.tiers.dram import DramTier
from tieredkv.tiers.nvme.directory import Directory
from tieredkv.tiers.nvme.tier import NvmeTier
from tieredkv.transfer import Transfer
from tieredkv.types import Fingerprint, Outcome

log = logging.getLogger(__name__)

PINNING = 600.0  # seconds until an engine starts with memory that is not page-locked


@dataclass(slots=True)
class Saving:
    """A copy out of engine blocks, which are held meanwhile."""

    deadline: float
    transfer: Transfer
    blocks: PagedBlocks


@dataclass(slots=True)
class Loading:
    """A request that waits for its blocks."""

    load: Load
    deadline: float
    parts: list[tuple[Job, Transfer, PagedBlocks]]
    left: set[int]
    """Jobs that have not ended."""
    cancelled: bool = False

    def give_up(self) -> bool:
        """Take the engine blocks away from what still runs; False while a copy into them is
        under way, which cannot hang."""
        gone = True
        for job, transfer, blocks in self.parts:
            if job.id in self.left:
                transfer.expire(0.0)
                gone &= blocks.revoke()
        return gone

    def invalid(self) -> set[int]:
        """Engine blocks that do not hold what was promised."""
        bad = set(self.load.missing)
        for job, transfer, _ in self.parts:
            for chunk, outcome in zip(job.blocks or (), transfer.write, strict=True):
                if self.cancelled or outcome is not Outcome.OK:
                    bad.update(chunk)
        return {block for block in bad if block >= 0}


class Worker:
    """One rank's tiers and mover. `begin`, `settle` and `report` are called by the engine's
    thread, once per step."""

    def __init__(self, config: Config, fingerprint: Fingerprint, rank: int, ranks: int) -> None:
        """`config`: with this engine's own directory. Raises DirectoryInUse, DirectoryError."""
        self._config, self._ranks = config, ranks
        self._identity = pool_identity(config, fingerprint, rank)
        self._directory: Directory | None = None
        nvme = nvme_config(config)
        if nvme is not None:
            self._directory = Directory.open(
                nvme.path, fingerprint, config.block_tokens, rank, index=False
            )
        self.tiers: list[Tier] = []
        self._lock = threading.Condition()
        self._loading: dict[str, Loading] = {}
        self._saving: dict[int, Saving] = {}
        """Oldest first; without those whose blocks were released."""
        self._released: dict[int, int] = {}
        """Of those, what is still to be told."""
        self._late: set[int] = set()
        self._freed: set[int] = set()
        """Jobs that were released and have not ended."""
        self._reports: dict[int, Report] = {}
        self._invalid: set[int] = set()
        self._store_failed = False
        self._hello: Hello | None = None
        self._fence: Event | None = None
        """Behind the computations of the steps before this one, which have written what is saved
        and read what is loaded over."""

    def register(self, tensors: Iterable[Any], num_blocks: int, block_tokens: int) -> None:
        """Take the engine's KV tensors (they stay its own) and open the tiers.

        Raises UsageError for tensors that are not understood, CapacityError, ConfigError.
        """
        config = self._config
        threads = config.mover.threads
        self._cache = PagedCache(
            tensors,
            num_blocks,
            config.block_tokens // block_tokens,
            batch=config.mover.batch,
            users=threads,
        )
        size = self._cache.chunk_bytes
        self.tiers = build_tiers(config, self._directory, size, self._identity, self._ranks)
        if self._cache.on_device:
            self._prepare_device()
        # Queues need no bound of their own: whatever is queued holds engine blocks.
        bound = max(1, num_blocks) * size
        executor = DaemonExecutor(threads, "tieredkv-mover")
        self._mover = Mover(executor, threads, bound, bound)
        self._hello = Hello(
            size,
            [(tier.name, tier.durable, tier.slots) for tier in self.tiers],
            getattr(self.tiers[-1], "index_bytes", 0),
        )
        log.info(
            "%d segments, chunks of %d tokens and %d bytes; tiers: %s",
            self._cache.segments,
            config.block_tokens,
            size,
            ", ".join(f"{tier.name} {tier.slots} slots" for tier in self.tiers),
        )

    def _prepare_device(self) -> None:
        """Take and lock all memory now: the engine is about to capture graphs, which such calls
        break, and then to serve, which they hold up."""
        staging = self._cache.staging
        staging.fill()
        deadline = time.monotonic() + PINNING
        for tier in self.tiers:
            if isinstance(tier, NvmeTier) and tier.device:
                staging.add_device(self._cache.device)
                tier.register(staging.memory)
            if isinstance(tier, DramTier) and not tier.wait_ready(deadline - time.monotonic()):
                log.warning("tier %s is not page-locked after %g s", tier.name, PINNING)
                tier.give_up_pinning()

    # -- one step -------------------------------------------------------------------------

    def mark(self, step: StepMetadata) -> None:
        """The engine has queued what comes before this step's computation."""
        self._fence = self._cache.fence() if step.loads or step.jobs else None

    def begin(self, step: StepMetadata) -> None:
        """Start the step's jobs; return once loads that the step waits for have settled."""
        for request in step.cancelled:
            if request in self._loading:
                self._loading[request].cancelled = True
        waited = []
        for load in step.loads:
            deadline = time.monotonic() + self._config.connector.load_deadline
            parts = [self._prepare(job) for job in load.jobs]
            loading = Loading(load, deadline, parts, {job.id for job in load.jobs})
            with self._lock:
                self._loading[load.request] = loading
            for _, transfer, _ in loading.parts:
                self._start(transfer, load=True)
            if load.wait:
                waited.append(loading)
        deadline = time.monotonic() + self._config.mover.put_deadline
        for job in step.jobs:
            _, transfer, blocks = self._prepare(job)
            if job.blocks is not None:
                self._saving[job.id] = Saving(deadline, transfer, blocks)
            self._start(transfer, load=False)
        for loading in waited:
            self._await(loading)

    def settle(self) -> set[str]:
        """Requests whose loads have ended, well or not; `take_invalid` says which blocks of
        them are bad."""
        self._release_late()
        settled = set()
        for request, loading in list(self._loading.items()):
            late = bool(loading.left) and time.monotonic() >= loading.deadline
            if loading.left and not (late and loading.give_up()):
                continue
            if late:
                log.warning("load of request %s missed its deadline: recomputing", request)
                self._late |= loading.left
                for _, transfer, _ in loading.parts:
                    self._mover.late(transfer)
            self._invalid |= loading.invalid()
            with self._lock:
                del self._loading[request]
            if not loading.load.wait:
                settled.add(request)
        return settled

    def take_invalid(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def report(self) -> WorkerMetadata | None:
        """What has really ended since the last call, for the scheduler; None if nothing."""
        with self._lock:
            reports, self._reports = self._reports, {}
            released, self._released = self._released, {}
            failed, self._store_failed = self._store_failed, False
        hello, self._hello = self._hello, None
        late, self._late = self._late, set()
        if not reports and not released and not late and hello is None:
            return None
        slots = [tier.slots for tier in self.tiers] if failed else None
        return WorkerMetadata(reports, [hello] if hello else [], released, late, slots)

    def close(self) -> bool:
        """End what runs; False if something hangs. Then its tiers stay open. Idempotent."""
        tiers, self.tiers = self.tiers, []
        if tiers and not self._mover.close(self._config.mover.close_deadline):
            log.error("close: transfers still hang; their tiers stay open")
            return False
        for tier in reversed(tiers):
            tier.close()
        if tiers:
            self._cache.staging.close()
        if self._directory is not None:
            self._directory.close()
        return True

    # -- jobs -----------------------------------------------------------------------------

    def _prepare(self, job: Job) -> tuple[Job, Transfer, PagedBlocks]:
        """A transfer of the job, in which the engine's blocks are one tier more."""
        move, tiers = job.move, self.tiers
        blocks = PagedBlocks(self._cache, job.blocks or [], self._fence)
        if job.blocks is not None:
            here, chunks = len(tiers), list(range(len(move)))
            tiers = [*tiers, blocks]
            if move.src is None:
                move = replace(move, src=here, src_slots=chunks)
            else:
                move = replace(move, dst=here, dst_slots=chunks)

        began = time.monotonic()

        def ended(transfer: Transfer) -> None:
            self._ended(job, transfer, time.monotonic() - began)

        return (
            job,
            Transfer(move, tiers, None, self._cache.part, ended, self._cache.staging),
            blocks,
        )

    def _start(self, transfer: Transfer, *, load: bool) -> None:
        if not self._mover.start(transfer, self._cache.chunk_bytes, load=load):
            transfer.refuse()

    def _ended(self, job: Job, transfer: Transfer, seconds: float) -> None:
        read: Outcomes = transfer.read if job.move.src is not None else []
        write: Outcomes = transfer.write if job.move.dst is not None else []
        if job.move.dst is None:  # read well, but it never reached the engine's blocks
            read = [
                Outcome.BUSY if got is Outcome.OK and put is not Outcome.OK else got
                for got, put in zip(read, transfer.write, strict=True)
            ]
        with self._lock:
            held = job.id not in self._freed
            self._freed.discard(job.id)
            self._reports[job.id] = Report(read, write, holding=int(held), seconds=seconds)
            self._saving.pop(job.id, None)
            for loading in self._loading.values():
                loading.left.discard(job.id)
            self._store_failed |= Outcome.FAILED in write
            self._lock.notify_all()

    def _release_late(self) -> None:
        """Give up on saves beyond their deadline: the engine needs its blocks."""
        now = time.monotonic()
        with self._lock:
            late = [(i, s) for i, s in self._saving.items() if s.deadline <= now]
        for number, saving in late:
            saving.transfer.expire(0.0)
            if saving.blocks.revoke():
                self._mover.late(saving.transfer)
                with self._lock:
                    if self._saving.pop(number, None) is not None:
                        self._released[number] = 1
                        self._freed.add(number)

    def _await(self, loading: Loading) -> None:
        with self._lock:
            left = max(0.0, loading.deadline - time.monotonic())
            self._lock.wait_for(lambda: not loading.left, left)
        while loading.left and not loading.give_up():
            time.sleep(0.001)  # a copy into engine blocks is under way; it cannot hang
