"""The scheduler side: the planner, driven by the engine's requests.

Hooks are called by the engine's thread. Commits of the index come in on a thread of their own,
under the planner's lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tieredkv.build import open_disk
from tieredkv.build_pool import open_client
from tieredkv.config import Config
from tieredkv.connector import sharing, turns
from tieredkv.connector.bandwidth import Prefill
from tieredkv.connector.events import translate
from tieredkv.connector.loads import prefetch
from tieredkv.connector.pinning import Pinning
from tieredkv.connector.requests import Tracked, turn_of
from tieredkv.connector.shipping import Shipping
from tieredkv.connector.sides import Geometry, Sides, open_sides
from tieredkv.connector.stats import Counts, TieredStats, residency
from tieredkv.connector.wire import Hello, Job, Load, StepMetadata, WorkerMetadata
from tieredkv.types import Fingerprint, Move

log = logging.getLogger(__name__)

HELLO_WAIT = 60.0  # seconds until requests go on without the cache
STUCK = 60.0  # seconds without any report after which an idle engine is not kept stepping
SOON = 1.0  # seconds without a report after which the engine had better preempt
PREFETCHES = 4  # queued requests looked at in one step


class Scheduler:
    """Plans loads, saves and background moves for one engine."""

    def __init__(
        self, config: Config, fingerprint: Fingerprint, geometry: Geometry, role: str = "kv_both"
    ) -> None:
        """`config`: with this engine's own directory and its chunk size.

        Raises DirectoryInUse, DirectoryError, FormatError, ConfigError.
        """
        self._config, self._geometry = config, geometry
        self._chunk = config.block_tokens
        self._stores, self._loads_too = role != "kv_consumer", role != "kv_producer"
        self._fingerprint = fingerprint
        self._pool = open_client(config)
        try:
            self._disk = open_disk(config, fingerprint, rank=None)
        except BaseException:
            if self._pool is not None:
                self._pool.close()
            raise
        self._left = False
        """Other engines' blocks are not this one's any more."""
        self._asked: float | None = None
        """When the first request had to wait for the ranks' hello."""
        self._hellos: list[Hello] = []
        self.sides: Sides | None = None
        self._pinning = Pinning(geometry.blocks)
        self._requests: dict[str, Tracked] = {}
        self._queued: dict[str, Tracked] = {}
        """Arrived and without blocks yet, in order."""
        self._new_loads: list[Load] = []
        self._cancelled: list[str] = []
        self.counts = Counts()
        self._prefill = Prefill(config.connector.prefill_rate)
        self._over_budget = 0

    # -- requests -------------------------------------------------------------------------

    def bind(self, pool: Any) -> None:
        """The engine's block pool, whose blocks are held while they are copied."""
        self._pinning.bind(pool)

    def arrived(self, request: Any) -> None:
        tracked = self._queued[request.request_id] = self._track(request)
        if self.sides is not None:
            turns.arrived(self.sides.shipping, tracked)
            sharing.ask(self.sides.shipping, tracked)

    def lookup(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """(tokens that can be loaded beyond `computed`, asynchronously); None: ask again.

        Repeatable, without side effect on the cache. O(log n).
        """
        tracked = self._track(request)
        tracked.computed, tracked.saved, tracked.hits = computed, 0, {}
        tracked.blocks = []
        tracked.fresh, tracked.ready, tracked.shortened, tracked.found = True, False, 0, 0
        if self.sides is not None:
            turns.began(self.sides.shipping, tracked)
        if not self._loads_too or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        if self.sides is None:
            self._asked = self._asked or time.monotonic()
            late = time.monotonic() - self._asked > HELLO_WAIT
            return (0 if late or not request.block_hashes else None), False
        shipping, _, loads = self.sides
        if not sharing.answered(shipping, tracked):
            return None, False
        keys = tracked.update_keys()
        if tracked.limit is not None:
            keys = keys[: tracked.limit]
        with shipping.lock:
            worth, sound = loads.offer(shipping.planner.match(keys), computed)
        tokens = worth * self._chunk
        tracked.shortened = max(0, sound * self._chunk - max(computed, tokens))
        tracked.found = sound if tracked.shortened else 0
        asynchronous = self._config.connector.load == "async"
        if not asynchronous:  # at least one token has to be computed
            block = self._geometry.block
            tokens = min(tokens, (request.num_tokens - 1) // block * block)
        return (tokens - computed, asynchronous) if tokens > computed else (0, False)

    def allocated(self, request: Any, blocks: Sequence[int], tokens: int) -> None:
        """The engine has given `request` these blocks and counts on `tokens` being loaded."""
        tracked = self._track(request)
        tracked.blocks = list(blocks)
        self._queued.pop(request.request_id, None)
        if tokens > 0:
            assert self.sides is not None
            self._new_loads.append(self.sides.loads.plan(tracked, tokens))
            self.counts.hit(tracked.hits)
            if self._config.connector.load == "sync":  # else it comes back for what is left
                self._shortened(tracked)
            log.info(
                "request %s: hit %d tokens beyond %d in the engine, to load %d (%s)",
                request.request_id, tokens, tracked.computed, sum(tracked.hits.values()),
                ", ".join(f"{tier} {n}" for tier, n in tracked.hits.items()),
            )  # fmt: skip
        elif not tracked.ready:  # all that is left has to be computed
            known = max(tracked.computed, request.num_computed_tokens)
            self.counts.add("missed_tokens", by=request.num_tokens - known - tracked.shortened)
            self._shortened(tracked)

    def sources(self, request: Any, tokens: int) -> dict[CacheHitSource, int]:
        """Where the tokens of the latest load come from."""
        tracked = self._requests.get(request.request_id)
        found = dict.fromkeys(CacheHitSource, 0)
        if tracked is not None and self.sides is not None:
            for level in self.sides.shipping.planner.res.levels:
                source = (
                    CacheHitSource.EXTERNAL_UNSPECIFIED if level.shared else CacheHitSource.HOST
                )
                source = CacheHitSource.DISK if level.durable else source
                part = min(tokens, tracked.hits.get(level.name, 0))
                found[source] += part
                tokens -= part
        found[CacheHitSource.HOST] += tokens
        return {source: count for source, count in found.items() if count}

    def finished(self, request: Any, blocks: Sequence[int]) -> None:
        """The request has ended; its last confirmed chunks are stored from `blocks`."""
        tracked = self._requests.pop(request.request_id, None)
        self._queued.pop(request.request_id, None)
        if tracked is None or self.sides is None:
            return
        tracked.active, tracked.blocks = False, list(blocks)
        done = min(tracked.confirmed(self._chunk), len(blocks) // self._per_chunk)
        tracked.saved_all = partial(self._end_turn, tracked)
        if done and self._stores:
            self.sides.saves.finish(tracked, done)
        else:
            tracked.settle()
        log.info(
            "request %s: stored %d of %d tokens",
            request.request_id, tracked.saved * self._chunk, request.num_tokens,
        )  # fmt: skip

    # -- steps ----------------------------------------------------------------------------

    def build(self, output: Any) -> StepMetadata:
        """The jobs of this step."""
        waits = bool(self._new_loads) and self._config.connector.load == "sync"
        tokens = output.total_num_scheduled_tokens
        self._prefill.begun(tokens, len(output.num_scheduled_tokens), waits=waits)
        self._follow(output)
        if self.sides is None:
            return StepMetadata()
        shipping, saves, loads = self.sides
        for name in output.num_scheduled_tokens:
            tracked = self._requests.get(name)
            if tracked is None:
                continue
            # the cheap test first: most requests only decode another token
            if tracked.request.num_computed_tokens >= (tracked.saved + 1) * self._chunk:
                done = tracked.confirmed(self._chunk) if self._stores else 0
                first = tracked.saved
                if done > first and saves.save(tracked, done) and first < tracked.found:
                    loads.recomputed(tracked, first, min(done, tracked.found))
            if not tracked.ready:
                turns.began(shipping, tracked)  # nobody has looked for its blocks
                tracked.ready, tracked.base = True, tracked.request.num_computed_tokens
        jobs: list[Job] = saves.take()
        if self._queued and self._config.promotion.enabled:
            jobs += self._prefetch(shipping)
        jobs += shipping.background()
        step = StepMetadata(self._new_loads, jobs, self._cancelled)
        self._new_loads, self._cancelled = [], []
        return step

    def heard(self, metadata: Any, finished: Iterable[str], invalid: Collection[int] = ()) -> None:
        """The workers' reports, the requests whose loads have ended, and the engine blocks that
        some connector could not load."""
        if isinstance(metadata, WorkerMetadata):
            self._hellos += metadata.hellos
            if len(self._hellos) >= self._geometry.ranks:
                self._open()
            if self.sides is not None:
                self.sides.shipping.hear(metadata)
                self.sides.loads.late(metadata.late)
        for name in finished:
            if name in self._requests:
                self._requests[name].loading = False
        if invalid:
            for tracked in self._requests.values():
                tracked.distrust(invalid, self._geometry.block, self._chunk)

    @property
    def pending(self) -> bool:
        """Must an idle engine go on stepping?"""
        if self.sides is None:
            return False
        shipping, saves, _ = self.sides
        if time.monotonic() - shipping.progress > STUCK:
            return False
        return shipping.waiting or saves.waiting or bool(self._new_loads)

    @property
    def holds_blocks(self) -> bool:
        """Will blocks of the engine come free by themselves, and soon?"""
        if self.sides is None or time.monotonic() - self.sides.shipping.progress > SOON:
            return False
        return self._pinning.frees

    def reset(self) -> bool:
        """Forget everything, also on disk, for good; False if the disk refused.

        The engine may have other weights now, which the next process will not have: it will
        find nothing of what is stored from here on.
        """
        for name, tracked in self._requests.items():
            tracked.fresh, tracked.saved = False, 0
            if tracked.loading:
                self._cancelled.append(name)
        dropped, self._left = 0, True
        try:
            if self.sides is not None:
                self.sides.saves.forget()
                dropped = self.sides.shipping.clear(None, until_reopened=True)
            elif self._disk is not None:
                self._disk.index.new_epoch(until_reopened=True)
        except Exception:
            log.exception("reset: the index could not be emptied")
            return False
        log.info("reset: %d chunks forgotten", dropped)
        return True

    def close(self) -> None:
        """Commit what is queued for the index and give the directory back. Idempotent."""
        if self.sides is not None:
            self.sides.shipping.close()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        disk, self._disk = self._disk, None
        if disk is not None and not disk.close(self._config.mover.close_deadline):
            log.error("close: a commit hangs; the directory stays locked")

    def stats(self) -> TieredStats | None:
        """What happened since the last call; None where nothing did. vLLM asks once at the end
        of each step."""
        self._prefill.ended()
        if self.sides is None:
            return None
        shipping, saves, _ = self.sides
        refused = shipping.planner.room.over_budget
        self.counts.add("over_budget_blocks", by=refused - self._over_budget)
        self._over_budget = refused
        dropped, saves.dropped = saves.dropped, 0
        self.counts.add("dropped_blocks", by=dropped)
        counters = self.counts.take()
        if not counters:
            return None
        return TieredStats(
            {
                "counters": counters,
                "gauges": {
                    "pending_jobs": len(shipping.shipped),
                    "held_blocks": self._pinning.held,
                    **residency(shipping.planner.res),
                },
            }
        )

    def events(self) -> list[Any]:
        """What entered and left the tiers since the last call, for cache-aware routers."""
        if self.sides is None:
            return []
        shipping = self.sides.shipping
        with shipping.lock:
            res = shipping.planner.res
            events = res.events.take() if res.events is not None else []
        media = {level.name: "STORAGE" if level.durable else "CPU" for level in res.levels}
        return list(translate(events, media, self._chunk))

    # -- inside ---------------------------------------------------------------------------

    @property
    def _per_chunk(self) -> int:
        return self._chunk // self._geometry.block

    def _track(self, request: Any) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            per_chunk = self._chunk // self._geometry.hash
            tracked = Tracked(request, per_chunk, turn_of(request))
            self._requests[request.request_id] = tracked
        return tracked

    def _shortened(self, tracked: Tracked) -> None:
        """Count what a tier has and the engine computes all the same."""
        if tracked.shortened:
            self.counts.add("shortened_tokens", by=tracked.shortened)
            log.info(
                "request %s: %d tokens in the tiers are computed, which is faster",
                tracked.request.request_id, tracked.shortened,
            )  # fmt: skip

    def _end_turn(self, tracked: Tracked) -> None:
        assert self.sides is not None
        live = self._requests.values()
        turns.ended(self.sides.shipping, tracked, self._config.connector, live)

    def _follow(self, output: Any) -> None:
        """Learn which blocks the scheduled requests have now."""
        for new in output.scheduled_new_reqs:
            tracked = self._requests.get(new.req_id)
            if tracked is not None:
                tracked.blocks = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks is None:
                continue
            tracked = self._requests.get(name)
            if tracked is not None:
                if name in cached.resumed_req_ids:
                    tracked.blocks = []
                tracked.blocks.extend(blocks[0])

    def _prefetch(self, shipping: Shipping) -> list[Job]:
        """Promote for requests that were already queued at the step before."""
        jobs: list[Job] = []
        for name in list(islice(self._queued, PREFETCHES)):
            tracked = self._queued.pop(name)
            jobs += prefetch(shipping, tracked.update_keys())
        return jobs

    def _open(self) -> None:
        """All ranks have said hello. What fails now must not take the engine down."""
        hellos, self._hellos = self._hellos, []
        try:
            self.sides = open_sides(
                self._config,
                self._geometry,
                self._fingerprint,
                self._disk,
                self._pool,
                hellos,
                self._pinning,
                self._count,
                self._prefill,
            )
            if self._left:  # before the ranks were heard of
                self.sides.shipping.leave()
        except Exception:
            self._asked = float("-inf")
            log.exception("the cache is off: nothing is stored and nothing loaded")

    def _count(self, move: Move, read: Sequence[Any], write: Sequence[Any]) -> None:
        assert self.sides is not None
        levels = self.sides.shipping.planner.res.levels
        size = self.sides.shipping.block_bytes
        if move.src is not None:
            self.counts.moved("read", levels[move.src].name, read, size)
        if move.dst is not None:
            self.counts.moved("write", levels[move.dst].name, write, size)
