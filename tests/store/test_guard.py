"""The guard: `delay` decides while it helps, and LRU decides when its statistics are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tieredkv.config import Config
from tieredkv.eviction.base import LOST, SessionState
from tieredkv.eviction.delay import DelayPolicy
from tieredkv.eviction.delay_model import DelayModel
from tieredkv.eviction.delay_table import BINS, Table
from tieredkv.eviction.lru import LruPolicy
from tieredkv.planner.shadow import SLOTS, Guard
from tieredkv.sim.generate import generate
from tieredkv.sim.lab import Lab
from tieredkv.sim.optimum import look_ahead
from tieredkv.sim.replay import Replayer

REQUESTS = generate("agentic", sessions=24, seed=5)
SLOTS_HERE = look_ahead(r.hash_ids for r in REQUESTS).peak_live // 2


def lab(policy: str) -> Lab:
    tier = {"kind": "dram", "capacity": 1 << 40}
    config = Config.model_validate(
        {"block_tokens": 512, "tiers": [tier], "eviction": {"policy": policy}}
    )
    return Lab(config, [SLOTS_HERE], 1024)


def replayed(policy: str) -> tuple[int, list[bool]]:
    """(hit blocks, whether the policy was trusted after each request)."""
    here = lab(policy)
    replayer, hits, trusted = Replayer(here), 0, []
    for request in REQUESTS:
        hits += replayer.serve(request).hit
        trusted += [guard.trusted() for guard in here.planner.sessions.guards]
    assert here.planner.check([]) == []
    for guard in here.planner.sessions.guards:
        assert [problem for cache in guard.caches for problem in cache.tree.check()] == []
    return hits, trusted


@contextmanager
def wrong(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Statistics that value old waits most."""
    right = DelayModel.table

    def reversed_table(model: DelayModel, session: SessionState) -> Table:
        table = right(model, session)
        return Table(table.index[::-1], table.returns)

    with monkeypatch.context() as patch:
        patch.setattr(DelayModel, "table", reversed_table)
        yield


def test_statistics_that_help_are_followed() -> None:
    hits, trusted = replayed("delay")
    assert hits >= replayed("lru")[0]
    assert any(trusted)


def test_statistics_that_are_wrong_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    lru = replayed("lru")[0]
    with wrong(monkeypatch):
        hits, trusted = replayed("delay")
        with monkeypatch.context() as patch:
            patch.setattr(Guard, "trusted", lambda guard: True)
            unguarded = replayed("delay")[0]
    assert unguarded < 0.95 * lru, "these statistics do no harm: the test shows nothing"
    assert hits >= 0.99 * lru
    assert sum(trusted) < 0.2 * len(trusted)


def test_large_tiers_are_watched_on_a_sample() -> None:
    slots = 16 * SLOTS
    policies = LruPolicy(SLOTS, 1), DelayPolicy(SLOTS, 1)
    guard = Guard(*policies, slots, 1)
    for number in range(400):
        state = SessionState(f"s{number}", turns=1)
        guard.stored([number.to_bytes(32, "big")], state, float(number))
    stored = guard.caches[0].tree.blocks
    assert 5 <= stored <= 60, "one in sixteen"
    assert [cache.tree.blocks for cache in guard.caches] == [stored, stored]


def test_a_request_under_way_keeps_its_blocks_in_the_shadows() -> None:
    guard = Guard(LruPolicy(3, 1), DelayPolicy(3, 1), 3, 1)
    running, other = SessionState("a", turns=1, running=True), SessionState("b", turns=1)
    keys = [number.to_bytes(32, "big") for number in range(2)]
    guard.stored(keys, running, 1.0)
    later = [number.to_bytes(32, "big") for number in range(10, 13)]
    guard.stored(later, other, 2.0)
    assert all(cache.tree.find(keys[1]) is not None for cache in guard.caches)
    running.running = False
    guard.ended(running)
    guard.stored([key[::-1] for key in later], other, 3.0)
    assert all(cache.tree.find(keys[1]) is None for cache in guard.caches)


def test_tables_have_a_value_for_every_bin() -> None:
    table = DelayModel().table(SessionState("s"))
    assert len(table.index) == len(table.returns) == BINS


def test_what_is_no_chain_for_a_shadow_leaves_it_sound() -> None:
    """It remembers blocks that the real cache has forgotten, under other parents."""
    guard = Guard(LruPolicy(9, 1), DelayPolicy(9, 1), 9, 1)
    a, b, x, y = (bytes([number]) * 32 for number in range(4))
    for at, keys in enumerate(([a, b], [b, x], [x, y, b], [a, y], [b])):
        guard.stored(keys, SessionState(str(at), turns=1), float(at))
    assert [problem for cache in guard.caches for problem in cache.tree.check()] == []
    assert guard.caches[0].tree.blocks == 3


def test_sessions_that_never_end_give_their_blocks_back() -> None:
    guard = Guard(LruPolicy(8, 1), DelayPolicy(8, 1), 8, 1)

    def store(number: int, now: float) -> list[bool]:
        key = number.to_bytes(32, "big")
        guard.stored([key], SessionState(str(number), turns=1, running=True), now)
        return [cache.tree.find(key) is not None for cache in guard.caches]

    for number in range(8):
        assert store(number, float(number)) == [True, True]
    assert store(8, 9.0) == [False, False]
    for number in range(9, 500):
        assert store(number, 2 * LOST * number) == [True, True]
        assert max(len(cache.pins) for cache in guard.caches) <= 2
