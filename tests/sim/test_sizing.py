"""The cheapest sizes against every combination tried one by one."""

from __future__ import annotations

from itertools import combinations_with_replacement
from math import inf, isnan

import pytest

from tieredkv.errors import UsageError
from tieredkv.sim.cost import CostModel
from tieredkv.sim.curve import Curve, miss_ratio_curve
from tieredkv.sim.generate import generate
from tieredkv.sim.request import Request
from tieredkv.sim.sizing import GIB, Best, Plan, Sizing
from tieredkv.sim.stack import Stack

PRICES = {"hbm": 40.0, "dram": 3.0, "nvme": 0.1}


def model() -> CostModel:
    return CostModel.load("llama-3.1-70b", "h100", 4)


def tiny() -> Curve:
    """Large blocks, so that every combination of sizes can be tried."""
    return miss_ratio_curve(generate("mixed", 40, block_size=16_384))


def large() -> Curve:
    return miss_ratio_curve(generate("card942", 40))


def outcome(curve: Curve, cumulative: tuple[int, ...], names: list[str]) -> tuple[float, ...]:
    """Price, hit rate and mean TTFT, tier by tier in plain Python."""
    cost = model()
    tokens = curve.input_tokens / curve.requests
    size = curve.block_tokens * cost.bytes_per_token
    price = seconds = rate = 0.0
    before = 0
    for name, upto in zip(names, cumulative, strict=True):
        gained = float(curve.at(upto)) - rate
        price += PRICES[name] * (upto - before) * size / GIB
        if upto > before:
            latency, _ = cost.link(name)
            loaded = gained * tokens * cost.bytes_per_token
            seconds += cost.fetch(name, loaded) if loaded else latency
        rate, before = rate + gained, upto
    new, pairs = tokens * (1 - rate), curve.pairs / curve.requests
    seconds += cost.mean_prefill(new, pairs * (1 - float(curve.pairs_at(before))))
    return price, rate, seconds


@pytest.mark.parametrize("names", [["dram"], ["dram", "nvme"], ["hbm", "dram", "nvme"]])
@pytest.mark.parametrize("between", [0.2, 0.5, 0.9])
def test_no_other_sizes_are_cheaper(names: list[str], between: float) -> None:
    curve = tiny()
    full = int(curve.capacity[-1])
    assert 20 < full < 80
    every = [
        outcome(curve, sizes, names)
        for sizes in combinations_with_replacement(range(full + 1), len(names))
    ]
    fastest, slowest = (pick(ttft for _, _, ttft in every) for pick in (min, max))
    target = slowest + (fastest - slowest) * between
    sizing = Sizing(curve, model(), {name: PRICES[name] for name in names})
    found = sizing.cheapest(target_ttft=target)
    assert isinstance(found, Plan)
    assert found.ttft <= target
    assert found.cost == pytest.approx(min(price for price, _, ttft in every if ttft <= target))
    both = sizing.cheapest(target_hit=curve.infinite * 0.95, target_ttft=target)
    assert isinstance(both, Plan)
    assert both.cost == pytest.approx(
        min(p for p, rate, ttft in every if ttft <= target and rate >= curve.infinite * 0.95)
    )


def test_figures_of_a_plan_follow_from_its_sizes() -> None:
    curve = large()
    found = Sizing(curve, model(), PRICES).cheapest(target_hit=0.85, target_ttft=1.2)
    assert isinstance(found, Plan)
    assert [tier.name for tier in found.tiers] == list(PRICES)
    cumulative, total = [], 0
    for tier in found.tiers:
        total += tier.blocks
        cumulative.append(total)
        assert tier.nbytes == tier.blocks * 512 * 327_680
        assert tier.cost == pytest.approx(tier.nbytes / GIB * PRICES[tier.name])
    price, rate, ttft = outcome(curve, tuple(cumulative), list(PRICES))
    assert (found.cost, found.hit_rate, found.ttft) == pytest.approx((price, rate, ttft))
    assert sum(tier.hit_rate for tier in found.tiers) == pytest.approx(found.hit_rate)


def test_a_hit_rate_alone_goes_to_the_cheapest_tier() -> None:
    curve = large()
    found = Sizing(curve, model(), PRICES).cheapest(target_hit=0.9)
    assert isinstance(found, Plan)
    blocks = found.tiers[-1].blocks
    assert [tier.blocks for tier in found.tiers[:-1]] == [0, 0]
    assert float(curve.at(blocks)) >= 0.9 > float(curve.at(blocks - 1)), "to the block"


def test_limits_push_what_is_left_to_dearer_tiers() -> None:
    curve = large()
    limit = 100 * GIB + 1
    found = Sizing(curve, model(), PRICES, {"nvme": limit}).cheapest(target_hit=0.9)
    assert isinstance(found, Plan)
    hbm, dram, nvme = found.tiers
    assert hbm.blocks == 0 < dram.blocks
    assert limit - 512 * 327_680 < nvme.nbytes <= limit
    free = Sizing(curve, model(), {"hbm": 0, "nvme": 1}, {"hbm": limit}).cheapest(0.9)
    assert isinstance(free, Plan)
    assert free.tiers[0].nbytes > limit - 512 * 327_680, "what costs nothing is used"


def test_what_cannot_be_reached() -> None:
    curve = large()
    sizing = Sizing(curve, model(), PRICES)
    best = sizing.cheapest(target_hit=0.999)
    assert isinstance(best, Best)
    assert best.hit_rate == pytest.approx(curve.infinite)
    best = sizing.cheapest(target_ttft=0.01)
    assert isinstance(best, Best)
    assert best.ttft == pytest.approx(sizing.infinite().ttft)
    capped = Sizing(curve, model(), {"dram": 1}, {"dram": 50 * GIB}).cheapest(target_hit=0.9)
    assert isinstance(capped, Best)
    held = 50 * GIB // (512 * 327_680)
    assert capped.hit_rate == pytest.approx(float(curve.at(held)))
    nothing = Sizing(curve, model(), {"dram": 1}, {"dram": 5}).cheapest(target_hit=0.1)
    assert nothing == Best(0.0, pytest.approx(outcome(curve, (0,), ["dram"])[2]))


def test_a_sampled_curve_must_reach_the_target_with_its_lower_end() -> None:
    trace = generate("mixed", 800, seed=4)
    exact, sampled = miss_ratio_curve(trace), miss_ratio_curve(trace, 0.1)
    found = Sizing(sampled, model(), {"dram": 1}).cheapest(target_hit=0.8)
    assert isinstance(found, Plan)
    assert found.hit_rate - found.error >= 0.8 - 1e-9
    assert found.error > 0
    assert float(exact.at(found.tiers[0].blocks)) >= 0.8


def test_without_a_model_only_hit_rates_can_be_asked_for() -> None:
    sizing = Sizing(large(), CostModel.load(None, bytes_per_token=1000), {"dram": 1})
    found = sizing.cheapest(target_hit=0.5)
    assert isinstance(found, Plan)
    assert isnan(found.ttft)
    with pytest.raises(UsageError, match="name a model"):
        sizing.cheapest(target_ttft=1.0)


def test_a_trace_without_hits() -> None:
    requests = [Request(0.0, "a", 1, 10, 1, 10, [1]), Request(1.0, "b", 1, 15, 1, 10, [2])]
    best = Sizing(miss_ratio_curve(requests), model(), PRICES).cheapest(target_hit=0.1)
    assert isinstance(best, Best)
    assert best.hit_rate == 0


@pytest.mark.parametrize(
    ("prices", "limits", "said"),
    [
        ({}, {}, "no tier has a price"),
        ({"dram": -1}, {}, "price of dram is -1"),
        ({"dram": inf}, {}, "price of dram is inf"),
        ({"dran": 1}, {}, "no tier 'dran'.*'dram'"),
        ({"dram": 1}, {"nvme": 5}, "nvme has a limit but no price"),
    ],
)
def test_wrong_prices(prices: dict[str, float], limits: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Sizing(tiny(), model(), prices, limits)


def test_wrong_targets() -> None:
    sizing = Sizing(tiny(), model(), PRICES)
    for targets, said in (
        ((None, None), "no target"),
        ((1.2, None), "1.2: pass a share"),
        ((0, None), "0: pass a share"),
        ((None, 0), "0: pass seconds > 0"),
    ):
        with pytest.raises(UsageError, match=said):
            sizing.cheapest(*targets)


def test_a_stack_counts_no_more_than_it_holds() -> None:
    stack = Stack()
    for _ in range(3):
        stack.use([1, 2, 3], None)
    hits, weighted = stack.hits(4)
    assert hits.tolist() == [0, 2, 4, 6]
    assert weighted.tolist() == [0, 1, 4, 9]
