"""Requests against a store with memory tiers only, where every decision can be foretold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tieredkv import Config, Fingerprint, Outcome, TieredKVStore
from tieredkv.events import EventKind
from tieredkv.testing import ManualClock

SIZE = 64
Names = Sequence[str]
"""A chain as the names of its blocks; a name belongs to one place in one chain."""


@dataclass
class Story:
    """What happened, request by request."""

    hits: dict[str, list[int]] = field(default_factory=dict)
    """Tier -> blocks of each request that came from it."""
    evicted: dict[str, str] = field(default_factory=dict)
    """Tier -> names of the blocks that left it, in order."""

    def total(self, tier: str) -> int:
        return sum(self.hits[tier])


def key_of(name: str) -> bytes:
    return name.encode().ljust(32, b".")


def play(requests: Iterable[tuple[float, Names]], policy: str, *, dram: int, hbm: int = 0) -> Story:
    """Each request gets what is stored of its chain and puts all of it."""
    tiers: list[dict[str, Any]] = []
    if hbm:
        tiers.append({"kind": "hbm", "capacity": hbm * SIZE, "device": "cpu"})
    tiers.append({"kind": "dram", "capacity": dram * SIZE, "pin": "off"})
    config = Config.model_validate(
        {
            "block_tokens": 1,
            "block_bytes": SIZE,
            "tiers": tiers,
            "eviction": {"policy": policy},
            "events": 1 << 20,
        }
    )
    clock = ManualClock()
    labels = [tier.label for tier in config.tiers]
    story = Story({label: [] for label in labels}, dict.fromkeys(labels, ""))
    with TieredKVStore(config, Fingerprint("golden"), clock) as store:
        for now, names in requests:
            clock.now = now
            _request(store, names, story)
            assert store.check() == []
    return story


def _request(store: TieredKVStore, names: Names, story: Story) -> None:
    keys = [key_of(name) for name in names]
    buffer = bytearray(len(keys) * SIZE)
    before = {tier.name: tier.hit_tokens for tier in store.stats().tiers}
    outcomes = store.get(keys, buffer)
    for tier in store.stats().tiers:
        story.hits[tier.name].append(tier.hit_tokens - before[tier.name])
    for i, outcome in enumerate(outcomes):
        if outcome is Outcome.OK:
            assert buffer[i * SIZE : (i + 1) * SIZE] == key_of(names[i]) * 2
    store.put(keys, [key_of(name) * 2 for name in names])
    for event in store.take_events():
        if event.kind is EventKind.REMOVED:
            for key in event.keys[::-1]:
                story.evicted[event.tier] += key.rstrip(b".").decode()
