"""The simulator decides what a store decides: the same calls at the same times, one on real
bytes and files and one on none, leave the same log of what entered and left which tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.world import core_of
from tieredkv import Config, Fingerprint, Outcome, TieredKVStore
from tieredkv.arguments import YEAR
from tieredkv.events import Event
from tieredkv.session import PinGuard
from tieredkv.sim.generate import generate
from tieredkv.sim.lab import Lab
from tieredkv.sim.replay import Replayer
from tieredkv.sim.replay_bytes import Contents
from tieredkv.sim.request import Request
from tieredkv.testing import ManualClock
from tieredkv.types import Match, Turn

SIZE = 512
POLICIES = ["lru", "arc", "delay"]
DISK = 800_000
"""Capacity of the NVMe tier that makes 108 slots."""


class AtOnce:
    """An executor whose jobs run inside `submit`: the order in which the lab does things. Any
    order that threads may take is one a store must get right, but only this one is the lab's."""

    def __init__(self, threads: int, name: str) -> None:
        pass

    def submit(self, fn: Callable[[], None]) -> None:
        fn()

    def close(self, timeout: float) -> bool:
        return True


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tieredkv.store.DaemonExecutor", AtOnce)  # of moves
    monkeypatch.setattr("tieredkv.build.DaemonExecutor", AtOnce)  # of index commits


def wide(keys: Sequence[bytes]) -> list[bytes]:
    """A lab takes keys of any length, a store those of 32 bytes."""
    return [key.ljust(32, b"\0") for key in keys]


class Hints:
    """The planner calls of a `Replayer` through the public API of a store."""

    def __init__(self, store: TieredKVStore) -> None:
        self._store = store
        self.pins = self

    def turn_began(self, session: str, now: float) -> None:
        core = core_of(self._store)  # the public API has no word for this
        with core.lock:
            core.planner.turn_began(session, now)

    def turn_ended(self, session: str, now: float, **facts: Any) -> None:
        facts["reason"] = facts.pop("finish_reason")
        self._store.session(session).turn_ended(**facts)

    def end_session(self, session: str, now: float) -> None:
        self._store.session(session).finish()

    def fork(self, session: str, new: str, now: float) -> None:
        self._store.session(session).fork(new)

    def pin(self, keys: Sequence[bytes], ttl: float, now: float) -> tuple[PinGuard, int]:
        guard = self._store.pin(wide(keys), YEAR)
        return guard, guard.blocks

    def release(self, pin: PinGuard) -> None:
        pin.release()


class StoreLab:
    """A store where a `Replayer` expects a lab. Every byte it reads is compared."""

    def __init__(self, store: TieredKVStore, clock: ManualClock) -> None:
        self.store, self._clock, self.planner = store, clock, Hints(store)
        self._contents = Contents(SIZE)

    @property
    def now(self) -> float:
        return self._clock.now

    @now.setter
    def now(self, now: float) -> None:
        self._clock.now = now

    def lookup(self, keys: Sequence[bytes]) -> Match:
        return self.store.lookup(wide(keys))

    def get(self, keys: Sequence[bytes]) -> None:
        out = np.full((len(keys), SIZE // 8), 0xA5A5A5A5A5A5A5A5, np.uint64)
        assert set(self.store.get(wide(keys), out.view(np.uint8))) == {Outcome.OK}
        assert self._contents.wrong(keys, out, np.empty_like(out)) == []

    def put(self, keys: Sequence[bytes], start: int, turn: Turn | None) -> list[Outcome]:
        start = min(start, len(keys) - 1)  # with nothing to store a store would not even listen
        blocks = np.empty((len(keys) - start, SIZE // 8), np.uint64)
        self._contents.fill(keys[start:], blocks)
        return self.store.put(wide(keys), blocks.view(np.uint8), start=start, turn=turn)


def config(root: Path, policy: str, hbm: int, dram: int, write: str | None) -> Config:
    tiers: list[dict[str, Any]] = [{"kind": "dram", "capacity": dram * SIZE, "pin": "off"}]
    if hbm:
        tiers.insert(0, {"kind": "hbm", "capacity": hbm * SIZE, "device": "cpu"})
    if write is not None:
        tiers.append(
            {
                "kind": "nvme", "path": root / "nvme", "capacity": DISK, "min_free": 0,
                "segment": 1 << 20, "write": write, "engine": "portable",
            }
        )  # fmt: skip
    return Config.model_validate(
        {
            "block_tokens": 1, "block_bytes": SIZE, "tiers": tiers, "events": 1 << 20,
            "eviction": {"policy": policy}, "mover": {"room_wait": 60.0},
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return generate("agentic", sessions=6, seed=1, block_size=4096)


def log(events: Sequence[Event]) -> list[tuple[str, str, tuple[bytes, ...]]]:
    return [(e.kind.value, e.tier, tuple(key[:8] for key in e.keys)) for e in events]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("hbm", "dram", "write"),
    [
        (0, 60, None),
        (25, 40, None),
        (0, 60, "through"),
        (0, 60, "on_evict"),
        (25, 40, "on_evict"),
    ],
)
@pytest.mark.usefixtures("at_once")
def test_every_decision_is_the_same(
    hbm: int, dram: int, write: str | None, policy: str, requests: list[Request], tmp_path: Path
) -> None:
    last = {request.session: at for at, request in enumerate(requests)}
    over = {at for name, at in last.items() if sum(name.encode()) % 2}  # half of them say so
    shape, clock = config(tmp_path, policy, hbm, dram, write), ManualClock()
    with TieredKVStore(shape, Fingerprint("model"), clock) as store:
        planner = core_of(store).planner
        lab = Lab(shape, [level.slots for level in planner.res.levels], SIZE)
        real, simulated = Replayer(StoreLab(store, clock)), Replayer(lab)  # type: ignore[arg-type]
        told = lab.planner.res.events
        assert told is not None
        for at, request in enumerate(requests):
            assert real.serve(request, at in over) == simulated.serve(request, at in over)
            assert log(store.take_events()) == log(told.take())
        assert store.check() == lab.planner.check([]) == []
        assert planner.room.evicted == lab.planner.room.evicted
        assert all(planner.room.evicted), "never full: it proves nothing"
        lab.core.mover.close(1.0)
