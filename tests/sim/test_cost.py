"""The cost model: by hand, against published figures, and its errors."""

from __future__ import annotations

from math import isnan
from timeit import repeat
from typing import Any

import numpy as np
import pytest

from tieredkv.errors import ConfigError, UsageError
from tieredkv.sim.cost import CostModel, preset_names
from tieredkv.sim.spec import MEDIA

SMALL = {
    "models": {
        "small": {
            "layers": 10,
            "heads": 4,
            "kv_heads": 2,
            "qk_dim": 8,
            "v_dim": 8,
            "active_billions": 2.0,
            "kv_bytes": 2,
        }
    },
    "gpus": {"slow": {"bf16_tflops": 10, "memory_gbps": 100, "pcie_gbps": 5, "mfu": 0.4}},
    "tiers": {"nvme": {"link": "node", "gbps": 2, "latency": 0.25}},
    "prefill": {"overhead": 0.5, "weight_bytes": 0},
}


def small(tp: int = 1, **changed: Any) -> CostModel:
    return CostModel.load("small", "slow", tp, overrides={**SMALL, **changed})


@pytest.mark.parametrize(
    ("model", "published"),
    [
        ("llama-3.1-8b", 128 << 10),
        ("llama-3.1-70b", 320 << 10),
        ("llama-3.1-405b", 504 << 10),
        ("qwen2.5-7b", 56 << 10),
        ("qwen2.5-32b", 256 << 10),
        ("qwen3-235b-a22b", 188 << 10),
        ("deepseek-v3", 70_272),
        ("gpt-oss-120b", 72 << 10),
    ],
)
def test_bytes_per_token(model: str, published: int) -> None:
    assert CostModel.load(model).bytes_per_token == published


def test_by_hand() -> None:
    cost = small()
    assert cost.bytes_per_token == 10 * 2 * (8 + 8) * 2
    # 4e12 FLOPS: 2 x 2e9 per token, 2 x 10 x 4 x 16 = 1,280 per pair.
    assert cost.prefill(1000, 0) == 0.5
    pairs = 1000 * 1000 / 2
    assert cost.prefill(1000, 1000) == pytest.approx(0.5 + 1000 * 1e-3 + pairs * 1280 / 4e12)
    cached = cost.prefill(1000, 1000) + cost.prefill(3000, 2000) - 0.5
    assert cost.prefill(3000, 3000) == pytest.approx(cached), "positions add up"
    assert cost.fetch("dram", 5_000_000_000) == pytest.approx(1, rel=1e-3)
    assert cost.fetch("nvme", 2_000_000_000) == pytest.approx(1.25)
    assert cost.fetch("nvme", 0) == cost.fetch("hbm", 1 << 40) == 0
    assert cost.link("nvme") == pytest.approx((0.25, 0.5e-9))
    hits = {"hbm": 100, "dram": 200, "nvme": 300, "mooncake": 0}
    whole = cost.fetch("dram", 200 * 640) + cost.fetch("nvme", 300 * 640) + cost.prefill(1000, 400)
    assert cost.ttft(hits, 400, 1000) == pytest.approx(whole)


def test_mean_prefill_is_the_mean() -> None:
    cost = CostModel.load("llama-3.1-70b", "h100", 4)
    requests = [(1000, 1000), (50_000, 600), (120_000, 30_000), (9, 0)]
    new = float(np.mean([new for _, new in requests]))
    pairs = float(np.mean([new * (context - new / 2) for context, new in requests]))
    single = float(np.mean([cost.prefill(*request) for request in requests]))
    assert cost.mean_prefill(new, pairs) == pytest.approx(single)
    array = cost.mean_prefill(np.array([new, 0]), np.array([pairs, 0]))
    assert array.tolist() == pytest.approx([single, cost.prefill(9, 0)])


def test_tensor_parallel_ranks_share_work_and_load_side_by_side() -> None:
    one, two, four = small(1), small(2), small(4)
    assert one.prefill(1000, 1000) - 0.5 == pytest.approx(4 * (four.prefill(1000, 1000) - 0.5))
    gigabytes = 10**10
    alone = one.fetch("dram", gigabytes)
    assert two.fetch("dram", gigabytes) == pytest.approx(alone / 2, rel=1e-3)
    assert four.fetch("dram", gigabytes) == two.fetch("dram", gigabytes), "two KV heads only"
    assert four.fetch("nvme", gigabytes) == one.fetch("nvme", gigabytes), "one set of disks"
    latent = [CostModel.load("deepseek-v3", tp=tp).fetch("dram", gigabytes) for tp in (1, 8)]
    assert latent[0] == latent[1], "every rank needs the whole latent"


def test_nothing_is_faster_than_pcie() -> None:
    cost = small(tiers={"nvme": {"link": "node", "gbps": 900, "latency": 0}})
    assert cost.fetch("nvme", 10**10) == pytest.approx(2.0)


def test_magnitude_of_the_measured_prototype() -> None:
    """70B on four GPUs, agents with 122,637 tokens of which 95.85 % hit: 1.2 to 1.4 s."""
    cost = CostModel.load("llama-3.1-70b", "h100", 4)
    hit = round(122_637 * 0.9585)
    from_memory = cost.ttft({"hbm": hit}, 122_637 - hit, 122_637)
    from_disk = cost.ttft({"hbm": hit // 2, "dram": hit // 2}, 122_637 - hit, 122_637)
    assert 1.0 < from_memory < from_disk < 1.5


def test_every_preset_loads() -> None:
    assert preset_names("tiers") == MEDIA
    for model in preset_names("models"):
        for gpu in preset_names("gpus"):
            cost = CostModel.load(model, gpu, 8)
            assert 0 < cost.prefill(10_000, 10) < cost.prefill(10_000, 10_000) < 60
            times = [cost.fetch(tier, 1 << 30) for tier in ("hbm", "dram", "nvme")]
            assert times == sorted(times)
    fast, slow = (
        CostModel.load("llama-3.1-70b", gpu).prefill(8192, 8192) for gpu in ("b200", "a100")
    )
    assert fast < slow / 5


def test_only_the_size_of_a_token_is_known() -> None:
    cost = CostModel.load(None, bytes_per_token=1000)
    assert cost.bytes_per_token == 1000
    assert not cost.knows_prefill
    assert isnan(cost.prefill(10, 10))
    assert isnan(cost.ttft({"dram": 5}, 5, 10))
    assert cost.fetch("dram", 10**9) > 0
    assert CostModel.load("llama-3.1-8b", bytes_per_token=7).bytes_per_token == 7


def test_overrides_leave_the_presets_alone() -> None:
    changed = CostModel.load("llama-3.1-8b", overrides={"gpus": {"h100": {"mfu": 0.25}}})
    preset = CostModel.load("llama-3.1-8b")
    base = preset.prefill(10, 0)
    assert changed.prefill(10**5, 10**5) - base == pytest.approx(
        2 * (preset.prefill(10**5, 10**5) - base)
    )


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (("llama-3.1-70", "h100"), UsageError, "no model 'llama-3.1-70'.*'llama-3.1-70b'"),
        (("llama-3.1-70b", "H-100"), UsageError, "no gpu 'H-100'.*nearest: 'h100'"),
        ((None,), UsageError, "size of a token is unknown"),
        (("llama-3.1-8b", "h100", 0), UsageError, "tp=0"),
        ((None, "h100", 1, 0), UsageError, "bytes_per_token=0"),
    ],
)
def test_wrong_calls(arguments: tuple[Any, ...], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        CostModel.load(*arguments)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"gpu": {}}, "unknown section 'gpu'; nearest: 'gpus'"),
        ({"gpus": {"h100": {"mfuu": 0.3}}}, "gpus.h100: unknown key 'mfuu'.*'mfu'"),
        ({"gpus": {"h100": {"mfu": 1.3}}}, "mfu = 1.3"),
        ({"gpus": {"h100": 5}}, "gpus.h100"),
        ({"gpus": 5}, "gpus = 5: must be a mapping"),
        ({"tiers": {"disk": {}}}, "no tier 'disk'"),
        ({"tiers": {"nvme": {"gbps": None}}}, "give gbps"),
        ({"models": {"llama-3.1-8b": {"latent": 5}}}, "either kv_heads or latent"),
        ({"prefill": {"overhead": -1}}, "overhead = -1"),
    ],
)
def test_wrong_overrides(overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CostModel.load("llama-3.1-8b", overrides=overrides)


def test_unknown_tiers() -> None:
    for call in (lambda c: c.fetch("nvm", 1), lambda c: c.ttft({"nvm": 1}, 0, 1)):
        with pytest.raises(UsageError, match=r"no tier 'nvm'.*nearest: 'nvme'"):
            call(small())


def test_a_call_takes_two_microseconds() -> None:
    cost = CostModel.load("llama-3.1-70b", "h100", 4)
    hits = {"hbm": 1000, "dram": 5000, "nvme": 900}
    for call in (
        lambda: cost.ttft(hits, 2000, 100_000),
        lambda: cost.prefill(100_000, 2000),
        lambda: cost.fetch("nvme", 10**9),
    ):
        assert min(repeat(call, number=2000, repeat=15)) / 2000 < 2e-6
