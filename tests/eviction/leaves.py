"""Leaf runs to record by hand, as a planner would; and the planner itself on chains of ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tieredkv.config import Config
from tieredkv.eviction.base import Access, Kind, SessionState
from tieredkv.sim.lab import Lab
from tieredkv.sim.replay import block_keys
from tieredkv.types import Turn

BLOCK = 10


class Leaves:
    """Keeps what a policy has to be told about each run; `now` is the time of the last event."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.now = 0.0
        self._state: dict[int, dict[str, Any]] = {}

    def insert(
        self,
        run: int,
        now: float,
        *sessions: SessionState,
        blocks: int = 1,
        depth: int = 0,
        key: bytes = b"",
        turn: Turn | None = None,
    ) -> None:
        key = key or b"%d" % run
        if hasattr(self.policy, "expect"):
            self.policy.expect(key)
        state = {"blocks": blocks, "depth": max(depth, blocks), "born": now, "last": now}
        self._state[run] = {**state, "hits": 0, "first": key, "turn": turn}
        self._record(Kind.INSERT, run, now, sessions)

    def hit(self, run: int, now: float, *sessions: SessionState) -> None:
        self._state[run]["hits"] += 1
        self._record(Kind.HIT, run, now, sessions)

    def session(self, run: int, now: float, *sessions: SessionState) -> None:
        self._record(Kind.SESSION, run, now, sessions)

    def end(self, run: int, now: float) -> None:
        self._record(Kind.END, run, now, ())

    def resize(self, run: int, blocks: int) -> None:
        self._state[run]["blocks"] = blocks
        self._record(Kind.RESIZE, run, self._state[run]["last"], ())

    def leaf(self, run: int, now: float, hits: int) -> None:
        """It lost its last child, whose last use was `now`."""
        self._state[run]["hits"] = hits
        self._record(Kind.LEAF, run, now, ())

    def child(self, run: int) -> None:
        self.policy.forget(run, evicted=False)

    def evict(self) -> int:
        """The policy's next victim, wholly."""
        run = self.order()[0]
        self.policy.forget(run, evicted=True)
        return run

    def order(self, now: float | None = None) -> list[int]:
        """All runs, worst first."""
        at = self.now if now is None else now
        return [run for run, _ in self.policy.victims(1 << 40, at, lambda run: 0)]

    def _record(self, kind: Kind, run: int, now: float, sessions: Sequence[SessionState]) -> None:
        state = self._state[run]
        state["last"] = max(state["last"], now)
        self.now = max(self.now, now)
        nbytes = state["blocks"] * BLOCK
        key = b"end of %d" % run
        self.policy.record(Access(kind, run, key, nbytes=nbytes, sessions=sessions, **state))


def away(name: str, since: float, turns: int = 1, **about: Any) -> SessionState:
    """A session whose turn has ended."""
    return SessionState(name, turns, running=False, since=since, **about)


def back(name: str, delay: float, turns: int = 2, **about: Any) -> SessionState:
    """A session whose next turn has begun; `about` is still what ended the last one."""
    return SessionState(name, turns, running=True, delay=delay, **about)


def lab_hits(
    policy: str, chains: Sequence[Sequence[int]], blocks: int, singly: bool = True
) -> list[int]:
    """Leading blocks that the real planner finds for each request; the k-th comes at k s.

    `singly`: each block is put alone, hence a run of its own: policies rank blocks."""
    tier = {"kind": "dram", "capacity": blocks * BLOCK}
    config = Config.model_validate({"tiers": [tier], "eviction": {"policy": policy}})
    lab = Lab(config, [blocks], BLOCK)
    hits = []
    for now, chain in enumerate(chains):
        lab.now = float(now)
        keys = block_keys(chain)
        found = len(lab.lookup(keys))
        if found:
            lab.get(keys[:found])
        if singly:
            for start in range(found, len(keys)):
                lab.put(keys[: start + 1], start, None)
        else:
            lab.put(keys, found, None)
        hits.append(found)
    return hits
