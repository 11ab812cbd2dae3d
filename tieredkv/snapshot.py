"""The state of a store in numbers."""

from __future__ import annotations

from tieredkv.config import Config
from tieredkv.core import Core
from tieredkv.metrics import Metrics, Stats, TierStats


def snapshot(config: Config, metrics: Metrics, core: Core | None) -> Stats:
    """Counters and gauges, consistent with each other; takes the store's lock."""
    if core is None:
        tiers = tuple(
            TierStats(t.label, 0, 0, 0, int(t.capacity), 0, 0, 0, 0, 0, True, "closed")
            for t in config.tiers
        )
        return Stats(tiers, 0, metrics.query_tokens, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    with core.lock:
        planner, size = core.planner, core.block_bytes
        loads, stores = core.mover.queued_bytes
        return Stats(
            tiers=tuple(_tier(core, metrics, i) for i in range(len(core.tiers))),
            blocks=planner.res.tree.blocks,
            query_tokens=metrics.query_tokens,
            hit_tokens=sum(metrics.hit_tokens.values()),
            stored_tokens=metrics.stored_tokens,
            dropped_tokens=metrics.dropped_tokens,
            dropped_moves=metrics.dropped_moves,
            forgotten_blocks=planner.room.forgotten,
            over_budget_blocks=planner.room.over_budget,
            corrupt_blocks=planner.corrupt,
            pins=len(planner.pins),
            pinned_bytes=planner.pins.blocks() * size,
            queued_load_bytes=loads,
            queued_store_bytes=stores,
            quarantined_transfers=core.mover.quarantined,
            index_failures=core.index.failures if core.index is not None else 0,
        )


def _tier(core: Core, metrics: Metrics, number: int) -> TierStats:
    tier, size = core.tiers[number], core.block_bytes
    level = core.planner.res.levels[number]
    return TierStats(
        name=tier.name,
        blocks=sum(run.count[number] for run in core.planner.res.tree.runs.values()),
        slots=level.pool.limit,
        used_bytes=level.pool.used * size,
        capacity_bytes=level.pool.limit * size,
        hit_tokens=metrics.hit_tokens[tier.name],
        read_bytes=metrics.bytes["read", tier.name],
        written_bytes=metrics.bytes["write", tier.name],
        evicted_blocks=core.planner.room.evicted[number],
        quarantined_slots=level.pool.lost,
        healthy=core.healthy[number],
        mode=str(getattr(tier, "mode", "memory")),
    )
