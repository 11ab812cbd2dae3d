"""From served requests to a `Result`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import isnan
from typing import Any

import numpy as np

from tieredkv.sim.cost import CostModel
from tieredkv.sim.lab import Lab
from tieredkv.sim.replay import service_of
from tieredkv.sim.request import Request
from tieredkv.sim.result import Result, Share

GAPS = ((15.0, "< 15 s"), (120.0, "15 s - 2 min"), (float("inf"), "> 2 min"))
QUANTILES = {"p50": 50, "p90": 90, "p99": 99}


class Meter:
    """Adds up what requests found, from the end of the warm-up on."""

    def __init__(self, cost: CostModel, seen: Sequence[int], warmup: int) -> None:
        """`seen`: blocks of each request that an earlier one had; `warmup`: requests that do
        not count."""
        self._cost = cost
        self._seen = seen
        self._warmup = warmup
        self._index = 0
        self._first = self._last = 0.0
        self._ends: dict[str, float] = {}
        self._total = Share()
        self._by_category: dict[str, Share] = {}
        self._by_gap = {"first turn": Share(), **{name: Share() for _, name in GAPS}}
        self._by_tier: dict[str, int] = {}
        self._ttft: array[float] = array("d")
        self._lab: Lab | None = None
        self._before: tuple[dict[Any, int], list[int]] = ({}, [])

    def add(
        self,
        request: Request,
        spans: Sequence[tuple[str, int]],
        lab: Lab | None = None,
        place: int | None = None,
        end: float | None = None,
    ) -> None:
        """The next request found these (tier, blocks), in a hierarchy `lab`. In a closed loop
        its `place` in the trace and the `end` of its response are not those of the trace."""
        index, self._index = self._index, self._index + 1
        place = index if place is None else place
        before = self._ends.get(request.session)
        self._ends[request.session] = request.ts + service_of(request) if end is None else end
        if index == self._warmup:
            self._first = request.ts
            if lab is not None:
                self._lab = lab
                self._before = dict(lab.moved), list(lab.planner.room.evicted)
        if index < self._warmup:
            return
        self._last = request.ts
        size, tokens = request.block_size, dict[str, int]()
        for name, blocks in spans:
            tokens[name] = tokens.get(name, 0) + blocks * size
        for name, found in tokens.items():
            self._by_tier[name] = self._by_tier.get(name, 0) + found
        hit = sum(tokens.values())
        category = self._by_category.setdefault(request.category or "none", Share())
        for share in (self._total, category, self._by_gap[_gap(request, before)]):
            share.requests += 1
            share.input_tokens += request.input_length
            share.hit_tokens += hit
            share.potential_tokens += self._seen[place] * size
        length = request.input_length
        self._ttft.append(self._cost.ttft(tokens, length - hit, length))

    def result(self, **facts: Any) -> Result:
        """Everything measured; `facts` are the other fields of `Result`."""
        names = [name for name, _ in facts["tiers"]]
        moved, evicted = self._flows(names)
        ttft: dict[str, float] = {}
        if self._ttft and not isnan(self._ttft[0]):
            values = np.frombuffer(self._ttft, dtype=np.float64)
            ttft = {"mean": float(values.mean())}
            ttft |= {name: float(np.percentile(values, q)) for name, q in QUANTILES.items()}
        size = facts["block_bytes"]
        written = sum(n for way, n in moved.items() if way.endswith(">nvme"))
        return Result(
            requests=self._total.requests,
            duration=self._last - self._first,
            total=self._total,
            hit_by_tier={name: self._by_tier.get(name, 0) for name in names},
            by_category=self._by_category,
            by_gap=self._by_gap,
            ttft=ttft,
            moved_bytes={way: n * size for way, n in moved.items()},
            nvme_written_bytes=written * size,
            evicted_blocks=evicted,
            **facts,
        )

    def _flows(self, names: list[str]) -> tuple[dict[str, int], dict[str, int]]:
        """(blocks moved by way, blocks evicted by tier) since the warm-up."""
        if self._lab is None:
            return {}, {}
        flows, evicted = self._before
        moved = {
            f"{_name(src, names)}>{_name(dst, names)}": n - flows.get((src, dst), 0)
            for (src, dst), n in self._lab.moved.items()
        }
        now = self._lab.planner.room.evicted
        return moved, {
            name: total - before for name, total, before in zip(names, now, evicted, strict=True)
        }


def _name(tier: int | None, names: list[str]) -> str:
    return "gpu" if tier is None else names[tier]


def _gap(request: Request, before: float | None) -> str:
    if before is None:
        return "first turn"
    gap = request.ts - before
    return next(name for limit, name in GAPS if gap < limit)
