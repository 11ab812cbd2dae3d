"""Counters of one store and their Prometheus form."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tieredkv.types import Outcome

log = logging.getLogger(__name__)

BUCKETS = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3, 10, 30)


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier, now."""

    name: str
    blocks: int
    """Readable blocks."""
    slots: int
    """Blocks that fit."""
    used_bytes: int
    """Bytes of payload in slots that are not free."""
    capacity_bytes: int
    hit_tokens: int
    """Tokens that gets returned from here."""
    read_bytes: int
    written_bytes: int
    evicted_blocks: int
    quarantined_slots: int
    """Slots withdrawn because their content failed verification."""
    healthy: bool
    """False while the last write to it failed."""
    mode: str
    """How the medium is accessed, e.g. direct or portable."""


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of a store."""

    tiers: tuple[TierStats, ...]
    blocks: int
    """Distinct blocks stored in any tier."""
    query_tokens: int
    """Tokens that gets asked for, each once."""
    hit_tokens: int
    """Tokens that gets returned; the sum over tiers."""
    stored_tokens: int
    dropped_tokens: int
    """Tokens of puts refused for want of room, queue or time."""
    dropped_moves: int
    """Blocks of background moves refused by a full queue."""
    forgotten_blocks: int
    """Blocks whose last copy was evicted."""
    over_budget_blocks: int
    """Blocks that `write_budget` turned down, again each time they were tried again."""
    corrupt_blocks: int
    pins: int
    pinned_bytes: int
    queued_load_bytes: int
    queued_store_bytes: int
    quarantined_transfers: int
    """Timed-out operations that still hold their buffers and slots."""
    index_failures: int
    """Transactions of the durable index that failed."""


class Metrics:
    """Counters of what happened. Called under the store's lock; `registry` may be scraped from
    any thread."""

    def __init__(self, block_tokens: int, stats: Callable[[], Stats]) -> None:
        self.block_tokens = block_tokens
        self.registry = CollectorRegistry()
        self.query_tokens = 0
        self.stored_tokens = 0
        self.dropped_tokens = 0
        self.dropped_moves = 0
        self.hit_tokens: Counter[str] = Counter()
        self.blocks: Counter[tuple[str, str, str]] = Counter()
        """(operation, tier, outcome) -> blocks."""
        self.bytes: Counter[tuple[str, str]] = Counter()
        """(operation, tier) -> bytes moved."""
        self._stats = stats
        self._seconds = Histogram(
            "tieredkv:operation_seconds", "Duration of calls.", ["operation"],
            buckets=BUCKETS, registry=self.registry,
        )  # fmt: skip
        self._timers = {op: self._seconds.labels(op) for op in ("put", "get", "lookup")}
        self.registry.register(self)

    def put_ended(self, outcomes: Sequence[Outcome], block_bytes: int, elapsed: float) -> None:
        """A put answered these outcomes after `elapsed` seconds."""
        good, tokens = outcomes.count(Outcome.OK), self.block_tokens
        self.stored_tokens += good * tokens
        self.dropped_tokens += outcomes.count(Outcome.BUSY) * tokens
        self._timers["put"].observe(elapsed)
        if log.isEnabledFor(logging.INFO):
            log.info(
                "stored %d of %d tokens, %s",
                good * tokens, len(outcomes) * tokens, _speed(good * block_bytes, elapsed),
            )  # fmt: skip

    def get_ended(
        self, outcomes: Sequence[Outcome], hits: dict[str, int], block_bytes: int, elapsed: float
    ) -> None:
        """A get answered these outcomes; `hits`: blocks returned per tier."""
        good, tokens = outcomes.count(Outcome.OK), self.block_tokens
        self.query_tokens += len(outcomes) * tokens
        for tier, blocks in hits.items():
            self.hit_tokens[tier] += blocks * tokens
        self._timers["get"].observe(elapsed)
        if log.isEnabledFor(logging.INFO):
            tiers = ", ".join(f"{tier} {blocks * tokens}" for tier, blocks in hits.items())
            log.info(
                "total %d tokens, hit %d (%s), %s",
                len(outcomes) * tokens, good * tokens, tiers or "nothing",
                _speed(good * block_bytes, elapsed),
            )  # fmt: skip

    def looked_up(self, elapsed: float) -> None:
        self._timers["lookup"].observe(elapsed)

    def moved(
        self,
        operation: Literal["read", "write"],
        tier: str,
        outcomes: Sequence[Outcome],
        block_bytes: int,
    ) -> None:
        """Blocks read from or written to a tier, whatever for."""
        good = outcomes.count(Outcome.OK)
        if good:
            self.blocks[operation, tier, Outcome.OK.value] += good
            self.bytes[operation, tier] += good * block_bytes
        if good != len(outcomes):
            for outcome in outcomes:
                if outcome is not Outcome.OK:
                    self.blocks[operation, tier, outcome.value] += 1

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client asks of a collector."""
        stats = self._stats()
        for name, value, text in (
            ("query_tokens", stats.query_tokens, "Tokens that gets asked for."),
            ("stored_tokens", stats.stored_tokens, "Tokens that puts stored."),
            ("dropped_tokens", stats.dropped_tokens, "Tokens of puts that found no room."),
            ("dropped_move_blocks", stats.dropped_moves, "Blocks of refused background moves."),
            ("forgotten_blocks", stats.forgotten_blocks, "Blocks whose last copy was evicted."),
            ("over_budget_blocks", stats.over_budget_blocks, "Blocks beyond write_budget."),
            ("corrupt_blocks", stats.corrupt_blocks, "Blocks that failed verification."),
            ("index_failures", stats.index_failures, "Failed transactions of the index."),
        ):
            yield CounterMetricFamily(f"tieredkv:{name}", text, value=value)
        for name, value, text in (
            ("pins", stats.pins, "Pins in force."),
            ("pinned_bytes", stats.pinned_bytes, "Bytes that pins keep."),
            ("queued_load_bytes", stats.queued_load_bytes, "Loads queued or running."),
            ("queued_store_bytes", stats.queued_store_bytes, "Stores queued or running."),
            ("quarantined_transfers", stats.quarantined_transfers, "Timed-out operations alive."),
        ):
            yield GaugeMetricFamily(f"tieredkv:{name}", text, value=value)
        yield from self._per_tier(stats)

    def _per_tier(self, stats: Stats) -> Iterator[Metric]:
        hits = CounterMetricFamily("tieredkv:hit_tokens", "Tokens returned.", labels=["tier"])
        used = GaugeMetricFamily("tieredkv:used_bytes", "Bytes in slots.", labels=["tier"])
        room = GaugeMetricFamily("tieredkv:capacity_bytes", "Bytes that fit.", labels=["tier"])
        health = GaugeMetricFamily("tieredkv:healthy", "0 after a failed write.", labels=["tier"])
        mode = GaugeMetricFamily("tieredkv:mode", "Access in force.", labels=["tier", "mode"])
        gone = CounterMetricFamily("tieredkv:evicted_blocks", "Copies evicted.", labels=["tier"])
        for tier in stats.tiers:
            hits.add_metric([tier.name], tier.hit_tokens)
            used.add_metric([tier.name], tier.used_bytes)
            room.add_metric([tier.name], tier.capacity_bytes)
            health.add_metric([tier.name], int(tier.healthy))
            mode.add_metric([tier.name, tier.mode], 1)
            gone.add_metric([tier.name], tier.evicted_blocks)
        yield from (hits, used, room, health, mode, gone)
        blocks = CounterMetricFamily(
            "tieredkv:blocks", "Blocks by outcome.", labels=["operation", "tier", "outcome"]
        )
        for labels, value in list(self.blocks.items()):
            blocks.add_metric(list(labels), value)
        nbytes = CounterMetricFamily("tieredkv:bytes", "Bytes moved.", labels=["operation", "tier"])
        for pair, value in list(self.bytes.items()):
            nbytes.add_metric(list(pair), value)
        yield from (blocks, nbytes)


def _speed(nbytes: int, elapsed: float) -> str:
    return f"{nbytes} bytes, {elapsed * 1e3:.3f} ms, {nbytes / max(elapsed, 1e-9) / 1e9:.2f} GB/s"
