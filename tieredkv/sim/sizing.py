"""The cheapest tier sizes that meet a target, from a curve and the cost model.

The tiers form an exclusive hierarchy under LRU: the fastest holds the head of the LRU order,
the next one continues it, so a tier between cumulative capacities a and b hits what the curve
gains from a to b (Mattson et al. 1970 for hierarchies of stack algorithms). The mean time to
first token follows from means alone, since the cost model is linear in tokens and in pairs of
tokens: no replay is needed. Every request is charged the latency of every tier that has a size.

Where the curve was sampled, its lower end counts: a target is met with the stated error taken off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, product
from math import inf, nan

import numpy as np

from tieredkv.errors import UsageError
from tieredkv.sim.cost import CostModel
from tieredkv.sim.curve import Curve
from tieredkv.sim.stack import Floats, Integers

GIB = 1 << 30
_POINTS = {1: 2000, 2: 600, 3: 120, 4: 50}
"""Capacities tried per number of tiers: some 2e5 combinations."""
_ZOOM = 9
_ROUNDS = 40


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier of a plan."""

    name: str
    blocks: int
    nbytes: int
    cost: float
    hit_rate: float
    """Share of all input tokens that this tier serves."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes and what follows from them. Rates and times are estimates, not the lower end."""

    tiers: list[TierPlan]
    """Fastest first; a tier that does not pay has no blocks."""
    cost: float
    hit_rate: float
    error: float
    """Stated error of `hit_rate`."""
    ttft: float
    """Mean seconds to first token; NaN without a model."""


@dataclass(frozen=True, slots=True)
class Best:
    """The most that any allowed sizes reach, with the error taken off."""

    hit_rate: float
    ttft: float


class Sizing:
    """Chooses sizes for one curve. Holds no state between calls."""

    def __init__(
        self,
        curve: Curve,
        cost: CostModel,
        prices: Mapping[str, float],
        limits: Mapping[str, int] | None = None,
    ) -> None:
        """`prices`: tier -> price per GiB in any currency; these tiers are used. `limits`: tier ->
        most bytes it may have. Raises UsageError for tiers that the cost model does not know,
        negative prices, or limits of tiers without a price."""
        limits = limits or {}
        for name, price in prices.items():
            cost.link(name)
            if not 0 <= price < inf:
                raise UsageError(f"price of {name} is {price}; pass a number >= 0")
        for name in limits:
            if name not in prices:
                raise UsageError(f"{name} has a limit but no price; add its price per GiB")
        if not prices:
            raise UsageError("no tier has a price; pass one per GiB for every tier to use")
        self.names = [name for name in cost.tiers if name in prices]
        self._curve, self._cost = curve, cost
        self.block_bytes = curve.block_tokens * cost.bytes_per_token
        self._prices = np.array([prices[name] for name in self.names])
        self._limits = np.array(
            [limits[name] // self.block_bytes if name in limits else inf for name in self.names]
        )
        self.limited = bool(limits)
        self._links = np.array([cost.link(name) for name in self.names])
        # The lower end of the curve, made to rise like the curve itself.
        self._low = np.maximum.accumulate(np.maximum(curve.hit_rate - curve.error, 0))
        share = np.divide(self._low, curve.hit_rate, where=curve.hit_rate > 0, out=0 * self._low)
        self._low_pairs = curve.hit_pairs * share

    def cheapest(
        self, target_hit: float | None = None, target_ttft: float | None = None
    ) -> Plan | Best:
        """The cheapest sizes that reach a hit rate, a mean time to first token (s), or both; of
        equally cheap ones the fastest, then the smallest. `Best` if nothing reaches them.

        Cheapest among some 1e5 combinations of sizes spread along the curve, refined around
        the best of them to single blocks. Raises UsageError for targets that make no sense.
        """
        self._check(target_hit, target_ttft)
        need = 0.0 if target_hit is None else target_hit
        limit = inf if target_ttft is None else target_ttft
        grid = self._grid(need)
        choices = np.array(list(combinations_with_replacement(grid, len(self.names))))
        best, step = None, max(1.0, float(np.diff(grid).max(initial=1)))
        for _ in range(_ROUNDS):
            choices = self._allowed(choices)
            hit, ttft = self._outcome(choices, self._low, self._low_pairs)
            meets = np.flatnonzero((hit >= need) & ~(ttft > limit))
            if not len(meets):
                return Best(float(hit.max()), float(ttft.min()))
            prices = self._bill(choices[meets]).sum(axis=1)
            order = np.lexsort((choices[meets][:, -1], ttft[meets], prices))
            best = choices[meets[order[0]]]
            if step < 1:
                break
            step /= _ZOOM // 2
            choices = self._around(best, step)
        assert best is not None
        return self.plan(best)

    def plan(self, cumulative: Sequence[int] | Integers) -> Plan:
        """What these sizes bring: cumulative blocks per tier, fastest first."""
        choice = np.asarray(cumulative, np.int64)[None, :]
        curve = self._curve
        _, ttft = self._outcome(choice, curve.hit_rate, curve.hit_pairs)
        rates = curve.at(choice[0])
        bill = self._bill(choice)[0]
        sizes, gains = np.diff(choice[0], prepend=0), np.diff(rates, prepend=0.0)
        tiers = [
            TierPlan(name, int(size), int(size) * self.block_bytes, float(price), float(gain))
            for name, size, price, gain in zip(self.names, sizes, bill, gains, strict=True)
        ]
        total = int(choice[0, -1])
        return Plan(
            tiers, float(bill.sum()), float(rates[-1]), float(curve.error_at(total)), float(ttft[0])
        )

    def infinite(self) -> Plan:
        """Everything in the fastest tier, without limits."""
        return self.plan([int(self._curve.capacity[-1])] * len(self.names))

    def _check(self, target_hit: float | None, target_ttft: float | None) -> None:
        if target_hit is None and target_ttft is None:
            raise UsageError("no target; pass a hit rate, a time to first token, or both")
        if target_hit is not None and not 0 < target_hit <= 1:
            raise UsageError(f"target hit rate {target_hit}: pass a share in (0, 1]")
        if target_ttft is not None and not target_ttft > 0:
            raise UsageError(f"target time to first token {target_ttft}: pass seconds > 0")
        if target_ttft is not None and not self._cost.knows_prefill:
            raise UsageError("a time to first token needs the model's work per token: name a model")

    def _grid(self, need: float) -> Integers:
        """Cumulative capacities to try: even steps of hit rate and of capacity, the limits,
        and the least capacity that reaches `need`."""
        capacity, points = self._curve.capacity, _POINTS[len(self.names)]
        full = int(capacity[-1])
        by_rate = np.interp(np.linspace(0, self._low[-1], points // 2), self._low, capacity)
        by_size = np.geomspace(1, max(2, full), points - points // 2)
        reached = int(np.searchsorted(self._low, need))
        limits = np.cumsum(self._limits)
        special = [0, full, capacity[min(reached, len(capacity) - 1)]]
        every = np.concatenate((np.ceil(by_rate), np.ceil(by_size), special, limits))
        return np.unique(np.clip(every, 0, full)).astype(np.int64)

    def _around(self, best: Integers, step: float) -> Integers:
        spread = np.rint(np.linspace(-step, step, _ZOOM) * (_ZOOM // 2))
        full = self._curve.capacity[-1]
        axes = [np.unique(np.clip(value + spread, 0, full)).astype(np.int64) for value in best]
        return np.array(list(product(*axes)))

    def _allowed(self, choices: Integers) -> Integers:
        sizes = np.diff(choices, axis=1, prepend=0)
        within: Integers = choices[((sizes >= 0) & (sizes <= self._limits)).all(axis=1)]
        return within

    def _bill(self, choices: Integers) -> Floats:
        sizes = np.diff(choices, axis=1, prepend=0)
        bill: Floats = sizes * (self.block_bytes / GIB) * self._prices
        return bill

    def _outcome(self, choices: Integers, hits: Floats, pairs: Floats) -> tuple[Floats, Floats]:
        """Hit rate and mean time to first token of each row of cumulative capacities."""
        curve, cost = self._curve, self._cost
        rates = np.interp(choices, curve.capacity, hits)
        saved = np.interp(choices[:, -1], curve.capacity, pairs)
        total = rates[:, -1]
        if not cost.knows_prefill:
            return total, np.full(len(choices), nan)
        tokens = curve.input_tokens / curve.requests
        ttft = cost.mean_prefill(tokens * (1 - total), curve.pairs / curve.requests * (1 - saved))
        latency, per_byte = self._links.T
        gained = np.diff(rates, axis=1, prepend=0.0) * tokens * cost.bytes_per_token
        used = np.diff(choices, axis=1, prepend=0) > 0
        ttft = ttft + (used * latency + gained * per_byte).sum(axis=1)
        return total, ttft
