"""Small traces, and a lab to replay them on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tieredkv.config import Config
from tieredkv.sim.lab import Lab
from tieredkv.sim.replay import Replayer, Served
from tieredkv.sim.request import Request

SIZE = 512


def request(
    ts: float,
    session: str,
    ids: Sequence[int],
    turn: int = 1,
    *,
    parent: str | None = None,
    service: float = 1.0,
    stop: str | None = None,
) -> Request:
    return Request(
        ts, session, turn, len(ids), 10, 1, list(ids), service=service, stop=stop, parent=parent
    )


@contextmanager
def opened(
    policy: str, *slots: int, nvme: int = 0, write: str = "on_evict", admission: str = "all"
) -> Iterator[Lab]:
    """A lab of memory tiers with so many slots, fastest first, above `nvme` slots of disk."""
    names = ["dram"] if len(slots) == 1 else [f"memory-{n}" for n in range(len(slots))]
    tiers: list[dict[str, Any]] = [{"kind": "dram", "name": n, "capacity": SIZE} for n in names]
    if nvme:
        disk = {"kind": "nvme", "path": "/nowhere", "capacity": "1GiB"}
        tiers.append({**disk, "write": write, "admission": admission})
    config = Config.model_validate(
        {
            "block_tokens": 1, "block_bytes": SIZE, "tiers": tiers, "events": 1 << 20,
            "eviction": {"policy": policy},
        }
    )  # fmt: skip
    lab = Lab(config, [*slots, *([nvme] if nvme else [])], SIZE)
    try:
        yield lab
    finally:
        lab.core.mover.close(1.0)  # its thread


def replay(lab: Lab, requests: Sequence[Request], finishes: Sequence[int] = ()) -> list[Served]:
    """`finishes`: positions of the requests that are the last of their session."""
    replayer = Replayer(lab)
    return [replayer.serve(r, at in finishes) for at, r in enumerate(requests)]


@dataclass
class Random:
    """A random trace."""

    requests: list[Request]
    finishes: list[int]

    @property
    def chains(self) -> list[list[int]]:
        return [r.hash_ids for r in self.requests]

    @property
    def spans(self) -> list[tuple[float, float]]:
        return [(r.ts, r.ts + (r.service or 0.0)) for r in self.requests]


@st.composite
def traces(draw: st.DrawFn, requests: int = 14, new: int = 3, longest: int = 9) -> Random:
    """Sessions that go on, are reset, fork, or begin with what others have; up to so many
    requests with so many new blocks, none longer than `longest`."""
    chains: dict[str, list[int]] = {}
    turns: dict[str, int] = {}
    made, finishes, now, fresh = [], [], 0.0, 0
    for at in range(draw(st.integers(1, requests))):
        now += draw(st.sampled_from([0.0, 0.5, 3.0, 40.0]))
        known = sorted(chains)
        session, parent = draw(st.sampled_from([*known, f"s{len(known)}"])), None
        chain = chains.get(session, [])
        if session not in chains and known:
            other = draw(st.sampled_from(known))
            chain = chains[other]
            parent = other if draw(st.booleans()) else None
        keep = len(chain) if draw(st.booleans()) else draw(st.integers(0, len(chain)))
        grown = draw(st.integers(0, new))
        chain = [*chain[:keep], *range(fresh, fresh + grown)][:longest]
        fresh += grown
        chains[session], turns[session] = chain, turns.get(session, 0) + 1
        stop = draw(st.sampled_from([None, "tool_use", "end_turn"]))
        service = draw(st.sampled_from([0.1, 1.0, 30.0]))
        made.append(
            request(now, session, chain, turns[session], parent=parent, service=service, stop=stop)
        )
        if draw(st.integers(0, 3)) == 0:
            finishes.append(at)
    return Random(made, finishes)
