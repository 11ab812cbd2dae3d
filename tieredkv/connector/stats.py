"""Figures of the connector: counted in the scheduler, shown by the engine's log and /metrics."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from tieredkv.planner.residency import Residency
from tieredkv.types import Outcome

COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "hit_tokens": ("Prompt tokens that requests loaded, by tier.", ("tier",)),
    "missed_tokens": ("Prompt tokens that neither the engine nor a tier had.", ()),
    "shortened_tokens": ("Prompt tokens that a tier had, computed because that is faster.", ()),
    "moved_blocks": ("Chunks read or written.", ("operation", "tier", "outcome")),
    "moved_bytes": ("Bytes of chunks read or written well.", ("operation", "tier")),
    "dropped_blocks": ("Chunks not stored: no room, or too many saves under way.", ()),
    "over_budget_blocks": ("Chunks that write_budget turned down, each time.", ()),
}
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "used_bytes": ("Bytes of resident chunks.", ("tier",)),
    "capacity_bytes": ("Bytes that a tier can hold.", ("tier",)),
    "pending_jobs": ("Moves that the workers have not reported.", ()),
    "held_blocks": ("Engine blocks held while they are copied.", ()),
}
SEPARATOR = "|"


class Counts:
    """Counters since the last `take`, by 'name|label|...'. Not thread-safe beyond the GIL:
    increments come under the planner's lock or from the engine's thread."""

    def __init__(self) -> None:
        self._tally: Tally[str] = Tally()

    def add(self, name: str, *labels: str, by: int = 1) -> None:
        if by:
            self._tally[SEPARATOR.join((name, *labels))] += by

    def hit(self, tokens: Mapping[str, int]) -> None:
        for tier, count in tokens.items():
            self.add("hit_tokens", tier, by=count)

    def moved(self, operation: str, tier: str, outcomes: Sequence[Outcome], size: int) -> None:
        for outcome in set(outcomes):
            self.add("moved_blocks", operation, tier, outcome.value, by=outcomes.count(outcome))
        self.add("moved_bytes", operation, tier, by=size * outcomes.count(Outcome.OK))

    def take(self) -> dict[str, int]:
        tally, self._tally = self._tally, Tally()
        return dict(tally)


def residency(res: Residency) -> dict[str, int]:
    """The gauges of each tier."""
    gauges = {}
    for level in res.levels:
        gauges[f"used_bytes{SEPARATOR}{level.name}"] = level.pool.used * res.block_bytes
        gauges[f"capacity_bytes{SEPARATOR}{level.name}"] = level.slots * res.block_bytes
    return gauges


class TieredStats(KVConnectorStats):
    """What one step adds. `data`: {"counters": {...}, "gauges": {...}}."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {"counters": {}, "gauges": {}}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        total = Tally(self.data.get("counters", {}))
        total.update(other.data.get("counters", {}))
        gauges = {**self.data.get("gauges", {}), **other.data.get("gauges", {})}
        return TieredStats({"counters": dict(total), "gauges": gauges})

    def reduce(self) -> dict[str, int | float]:
        return {**self.data.get("counters", {}), **self.data.get("gauges", {})}

    def is_empty(self) -> bool:
        return not self.data.get("counters")


class TieredProm(KVConnectorPromMetrics):
    """The same as Prometheus metrics named `tieredkv:<name>`, with the engine's labels."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._metrics = {
            name: self._build(self._counter_cls, name, *spec) for name, spec in COUNTERS.items()
        } | {name: self._build(self._gauge_cls, name, *spec) for name, spec in GAUGES.items()}

    def _build(self, kind: Any, name: str, text: str, labels: tuple[str, ...]) -> Any:
        return kind(
            name=f"tieredkv:{name}",
            documentation=text,
            labelnames=[*self._labelnames, *labels],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.get("counters", {}).items():
            name, *labels = key.split(SEPARATOR)
            self._metrics[name].labels(*engine, *labels).inc(value)
        for key, value in transfer_stats_data.get("gauges", {}).items():
            name, *labels = key.split(SEPARATOR)
            self._metrics[name].labels(*engine, *labels).set(value)
