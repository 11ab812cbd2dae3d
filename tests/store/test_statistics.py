"""What the `delay` policy has learned outlives the store, and who may come back is known."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.store.world import Shape, chain, core_of, open_store, payload, settle
from tieredkv import Outcome, TieredKVStore, Turn
from tieredkv.eviction.delay_model import DelayModel
from tieredkv.index import durable
from tieredkv.index.environment import Environment
from tieredkv.planner.sessions import CHAIN
from tieredkv.testing import ManualClock

SHAPE = Shape(dram=6, write="on_evict", policy="delay")


def model_of(store: TieredKVStore) -> DelayModel:
    model = core_of(store).planner.sessions.model
    assert isinstance(model, DelayModel)
    return model


def observed(store: TieredKVStore) -> float:
    """Returns that the statistics know of."""
    return float(model_of(store)._classes[()].events.sum())


def turn(store: TieredKVStore, session: str, path: tuple[int, ...]) -> None:
    keys = chain(path)
    told = Turn(session, category="chat")
    assert set(store.put(keys, [payload(key) for key in keys], turn=told)) == {Outcome.OK}
    store.session(session).turn_ended("end_turn")


def talk(store: TieredKVStore, clock: ManualClock) -> None:
    """Twelve sessions of two turns, half a minute between them."""
    for n in range(12):
        turn(store, f"s{n}", (n,))
        clock.advance(30.0)
        turn(store, f"s{n}", (n, 1))
        settle(store)


def index_path(root: Path) -> Path:
    (found,) = root.glob("*/index")
    return found


def test_a_restart_keeps_the_statistics(tmp_path: Path) -> None:
    clock = ManualClock(1e6)
    store, _ = open_store(SHAPE, tmp_path, clock)
    talk(store, clock)
    before = observed(store)
    assert before == pytest.approx(12, abs=1)
    assert store.close()
    again, _ = open_store(SHAPE, tmp_path, clock)
    assert observed(again) == pytest.approx(before, rel=1e-5)
    assert ("end_turn", "chat") in model_of(again)._classes
    assert again.close()


@pytest.mark.parametrize("what", [b"", b"TKVDELAY nonsense", bytes(5_000)])
def test_damaged_statistics_are_ignored(
    tmp_path: Path, what: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock(1e6)
    store, _ = open_store(SHAPE, tmp_path, clock)
    talk(store, clock)
    assert store.close()
    env = Environment(index_path(tmp_path), 1 << 20, 1 << 20, 5.0)
    env.write(lambda txn: txn.put_bytes(durable.STATISTICS, what))
    env.close(5.0)
    with caplog.at_level(logging.WARNING, "tieredkv"):
        again, _ = open_store(SHAPE, tmp_path, clock)
    assert "learning delays anew" in caplog.text
    assert observed(again) == 0
    assert again.lookup(chain((11, 1))).blocks == 2
    assert again.check() == []
    assert again.close()


def test_they_are_written_while_the_store_is_open_and_not_by_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "KEEP_EVERY", 0.0)
    clock = ManualClock(1e6)
    store, _ = open_store(SHAPE, tmp_path, clock)
    talk(store, clock)
    assert store.flush(20.0)
    assert store._disk is not None
    kept = DelayModel()
    kept.restore(store._disk.index.statistics() or b"")
    assert kept._classes[()].events.sum() > 5
    assert store.close()


def test_what_has_no_room_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "SHARE", 1 << 20)
    clock = ManualClock(1e6)
    store, _ = open_store(SHAPE, tmp_path, clock)
    talk(store, clock)
    assert store.close()
    again, _ = open_store(SHAPE, tmp_path, clock)
    assert observed(again) == 0
    assert again.lookup(chain((11, 1))).blocks == 2
    assert again.close()


def test_another_policy_leaves_them_alone(tmp_path: Path) -> None:
    clock = ManualClock(1e6)
    store, _ = open_store(SHAPE, tmp_path, clock)
    talk(store, clock)
    before = observed(store)
    assert store.close()
    other, _ = open_store(Shape(dram=6, write="on_evict"), tmp_path, clock)
    assert core_of(other).planner.sessions.model is None
    assert other.close()
    again, _ = open_store(SHAPE, tmp_path, clock)
    assert observed(again) == pytest.approx(before, rel=1e-5)
    assert again.close()


def test_recovered_chains_have_sessions_as_old_as_they_are(tmp_path: Path) -> None:
    clock = ManualClock(1e6)
    store, _ = open_store(SHAPE, tmp_path, clock)
    for n in range(3):
        turn(store, f"s{n}", (n, 1))
        clock.advance(100.0)
    assert store.flush(20.0)
    assert store.close()
    clock.advance(1000.0)
    again, _ = open_store(SHAPE, tmp_path, clock)
    sessions = core_of(again).planner.sessions
    found = {n: sessions._by_id[CHAIN + chain((n, 1))[-1].hex()] for n in range(3)}
    assert [clock.now - found[n].since for n in range(3)] == pytest.approx([1300, 1200, 1100])
    assert not any(state.running for state in found.values())
    turn(again, "s1", (1, 1, 7))  # the very session that it was, by name
    assert len(sessions) == 3
    assert again.check() == []
    assert observed(again) == 0  # when it began to wait is not known
    assert again.close()
