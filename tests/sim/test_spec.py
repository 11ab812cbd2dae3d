"""The texts that say what to simulate."""

from __future__ import annotations

from typing import Any

import pytest

from tieredkv.errors import UsageError
from tieredkv.sim.spec import (
    Spec,
    TierSize,
    label,
    parse_capacities,
    parse_integers,
    parse_pairs,
    parse_shares,
    parse_tier,
    parse_words,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("dram=1TiB", TierSize("dram", 2.0**40, "bytes")),
        ("nvme= 40 GiB", TierSize("nvme", 40 * 2.0**30, "bytes")),
        ("dram=10%", TierSize("dram", 0.1, "unique")),
        ("dram=2.5 %", TierSize("dram", 0.025, "unique")),
        ("hbm=0.5live", TierSize("hbm", 0.5, "live")),
        ("hbm=.5x live", TierSize("hbm", 0.5, "live")),
    ],
)
def test_tier_sizes(text: str, size: TierSize) -> None:
    assert parse_tier(text) == size
    assert parse_tier(f"{size.name}={size.size}") == size, "a label reads back"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dram", "write NAME=SIZE"),
        ("ram=1GiB", "hbm, dram, mooncake, nvme"),
        ("dram=", "no size"),
        ("dram=1,000GiB", "'1,000GiB' is no size"),
        ("dram=0", "no size"),
        ("dram=0%", "above 0"),
        ("dram=ten", "a share of the unique blocks"),
        ("dram=-1live", "no size"),
    ],
)
def test_bad_tier_sizes_name_the_option_and_the_forms(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_tier(text)
    assert said in str(caught.value)
    assert f"--tier {text}" in str(caught.value)


def test_sizes_in_blocks() -> None:
    assert parse_tier("dram=10 KiB").blocks(1024, 999, 999) == 10
    assert parse_tier("dram=10%").blocks(1, 200, 50) == 20
    assert parse_tier("dram=0.5live").blocks(1, 200, 50) == 25
    assert parse_tier("dram=1KiB").blocks(1 << 20, 1, 1) == 1


def test_settings_replace_and_add_sizes_and_are_ordered_by_speed() -> None:
    settings = parse_capacities(["nvme=8TiB", "dram=1TiB"], ["dram=5%", "hbm=2live,nvme=40%"])
    assert [label(tiers) for tiers in settings] == [
        "dram=5% nvme=8TiB",
        "hbm=2xlive dram=1TiB nvme=40%",
    ]
    assert [label(tiers) for tiers in parse_capacities([], ["dram=5%", "dram=1GiB"])] == [
        "5 %",
        "dram=1GiB",
    ]


def test_missing_and_doubled_tiers() -> None:
    with pytest.raises(UsageError, match="no tier"):
        parse_capacities([], [])
    with pytest.raises(UsageError, match=r"--tier dram=\.\.\. is given twice; .* --capacity"):
        parse_capacities(["dram=1%", "dram=2%"], [])


def test_lists_of_words_numbers_and_pairs() -> None:
    assert parse_words("--policy", "lru, delay,lru") == ("lru", "delay")
    assert parse_integers("--seed", "0,12") == (0, 12)
    assert parse_shares("--hints", "0,.5,1") == (0.0, 0.5, 1.0)
    assert parse_pairs("--tier-policy", ["nvme=lru", "dram = delay"]) == {
        "nvme": "lru",
        "dram": "delay",
    }


@pytest.mark.parametrize(
    ("parse", "argument"),
    [
        (parse_words, "lru,,delay"),
        (parse_words, ""),
        (parse_integers, "1,-2"),
        (parse_integers, "1.5"),
        (parse_integers, "²"),
        (parse_shares, "half"),
        (parse_shares, "1.5"),
        (parse_shares, "nan"),
        (parse_pairs, ["nvme"]),
        (parse_pairs, ["nvme=lru", "nvme=arc"]),
    ],
)
def test_bad_lists_name_the_option(parse: Any, argument: Any) -> None:
    with pytest.raises(UsageError, match=r"^--some "):
        parse("--some", argument)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"traces": ()}, "no traces"),
        ({"policies": ()}, "no policies"),
        ({"warmup": 0.95}, "--warmup 0.95"),
        ({"warmup": float("nan")}, "--warmup nan"),
        ({"hints": (2.0,)}, "--hints 2"),
        ({"tp": 0}, "--tp 0"),
        ({"bytes_per_token": 0}, "--bytes-per-token 0"),
        ({"seeds": (-1,)}, "--seed -1"),
        ({"tier_policies": {"nvme": "lru"}}, "no tier has this name; they are dram"),
    ],
)
def test_a_spec_refuses_what_cannot_run(wrong: dict[str, Any], said: str) -> None:
    good: dict[str, Any] = {
        "traces": ("t",),
        "policies": ("lru",),
        "capacities": parse_capacities(["dram=1%"], []),
    }
    Spec(**good)
    with pytest.raises(UsageError) as caught:
        Spec(**good | wrong)
    assert said in str(caught.value)
