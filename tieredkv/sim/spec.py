"""What a call of the simulator is asked to replay, and the texts that say it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from tieredkv.config import Positive
from tieredkv.errors import UsageError

Unit = Literal["bytes", "unique", "live"]
MEDIA = ("hbm", "dram", "mooncake", "nvme")
"""Tier names that the cost model knows, fastest first."""

_SHARE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(%|x?\s*live)\s*")
_BYTES = TypeAdapter[int](Positive)


@dataclass(frozen=True, slots=True)
class TierSize:
    """Capacity of one tier."""

    name: str
    amount: float
    """Bytes; or a share (1.0 = all) of the unique blocks or of the peak live set."""
    unit: Unit

    def blocks(self, block_bytes: int, unique_blocks: int, live_blocks: int) -> int:
        """The capacity in whole blocks of a trace with these many, at least one."""
        if self.unit == "bytes":
            return max(1, int(self.amount) // block_bytes)
        return max(
            1, round(self.amount * (unique_blocks if self.unit == "unique" else live_blocks))
        )

    @property
    def size(self) -> str:
        """`1TiB`, `10 %`, `0.5x live`."""
        if self.unit == "unique":
            return f"{self.amount * 100:g} %"
        return f"{self.amount:g}x live" if self.unit == "live" else _binary(self.amount)


@dataclass(frozen=True, slots=True)
class Spec:
    """Everything that one call replays: traces x policies x capacities x seeds x hints.

    LRU and the bounds are always replayed, whether named or not.
    """

    traces: tuple[str, ...]
    """Files, or `generate:PRESET`."""
    policies: tuple[str, ...]
    capacities: tuple[tuple[TierSize, ...], ...]
    """Settings, each a list of tiers, fastest first."""
    tier_policies: Mapping[str, str] = field(default_factory=dict)
    """Tier name -> the policy of that tier in every setting."""
    model: str | None = None
    """Preset of the cost model: bytes per token and prefill work."""
    gpu: str = "h100"
    tp: int = 1
    """GPUs that share one replica of the model."""
    bytes_per_token: int | None = None
    """Overrides the model's."""
    cost_file: str | None = None
    """YAML with constants that replace those of the cost model."""
    loop: Literal["open", "closed"] = "open"
    """`open`: requests arrive at the trace's times. `closed`: `think` seconds after the
    session's previous response."""
    warmup: float = 0.0
    """Share of the requests, from the start, that are replayed but not measured."""
    seeds: tuple[int, ...] = (0,)
    hints: tuple[float, ...] = (0.0,)
    """Shares of the sessions that say when they have finished."""
    write: Literal["on_evict", "through"] = "on_evict"
    """When blocks of faster tiers are written to NVMe."""
    admission: str = "all"
    """Which of them: `all`, `delay`, an entry point or `module:Class`."""

    def __post_init__(self) -> None:
        _some("traces", "a trace file or generate:PRESET", self.traces)
        _some("policies", "a policy", self.policies)
        _some("capacities", "--tier NAME=SIZE", self.capacities)
        _some("seeds", "a seed", self.seeds)
        _some("hints", "a share", self.hints)
        _between("--warmup", self.warmup, 0, 0.9)
        for share in self.hints:
            _between("--hints", share, 0, 1)
        if self.tp < 1 or (self.bytes_per_token is not None and self.bytes_per_token < 1):
            raise UsageError(
                f"--tp {self.tp}, --bytes-per-token {self.bytes_per_token}: pass at least 1"
            )
        if min(self.seeds) < 0:
            raise UsageError(f"--seed {min(self.seeds)}: pass 0 or more")
        names = {tier.name for tiers in self.capacities for tier in tiers}
        for name in self.tier_policies:
            if name not in names:
                raise UsageError(
                    f"--tier-policy {name}=...: no tier has this name; they are "
                    f"{', '.join(sorted(names))}"
                )


def label(tiers: Iterable[TierSize]) -> str:
    """Name of a setting in reports: `10 %` for a single relative tier, else `dram=1TiB ...`."""
    tiers = tuple(tiers)
    if len(tiers) == 1 and tiers[0].unit != "bytes":
        return tiers[0].size
    return " ".join(f"{tier.name}={tier.size.replace(' ', '')}" for tier in tiers)


def parse_tier(text: str) -> TierSize:
    """`dram=1TiB`, `dram=10%` (of the unique blocks) or `dram=0.5live` (of the peak live set).

    Raises UsageError that names the text and the valid forms.
    """
    name, equals, size = text.partition("=")
    name = name.strip()
    if not equals or name not in MEDIA:
        raise UsageError(f"--tier {text}: write NAME=SIZE with NAME one of {', '.join(MEDIA)}")
    share = _SHARE.fullmatch(size)
    if share is not None:
        amount = float(share[1])
        if not 0 < amount < inf:
            raise UsageError(f"--tier {text}: a share above 0 is needed")
        return (
            TierSize(name, amount / 100, "unique")
            if share[2] == "%"
            else (TierSize(name, amount, "live"))
        )
    try:
        return TierSize(name, float(_BYTES.validate_python(size.strip())), "bytes")
    except ValidationError:
        raise UsageError(
            f"--tier {text}: {size.strip()!r} is no size; write bytes (1TiB, 40GiB), a share of "
            "the unique blocks (10%) or of the peak live set (0.5live)"
        ) from None


def parse_capacities(tiers: list[str], settings: list[str]) -> tuple[tuple[TierSize, ...], ...]:
    """The settings of one call.

    `tiers` (repeated --tier) are the tiers of one setting. Each of `settings` (repeated
    --capacity) is a setting of its own, `dram=10%,nvme=40%`; with both, --capacity replaces
    the sizes of the tiers that it names. Order within a setting is by speed. Raises UsageError.
    """
    common = [parse_tier(text) for text in tiers]
    chosen = [[parse_tier(part) for part in text.split(",")] for text in settings] or [[]]
    return tuple(_setting(common, own) for own in chosen)


def _setting(common: list[TierSize], own: list[TierSize]) -> tuple[TierSize, ...]:
    for part in (common, own):
        names = [tier.name for tier in part]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise UsageError(
                f"--tier {twice[0]}=... is given twice; for several settings repeat --capacity"
            )
    sizes = {tier.name: tier for tier in (*common, *own)}
    if not sizes:
        raise UsageError("no tier: pass --tier NAME=SIZE, for example --tier dram=10%")
    return tuple(sorted(sizes.values(), key=lambda tier: MEDIA.index(tier.name)))


def parse_pairs(option: str, texts: Iterable[str]) -> dict[str, str]:
    """Repeated NAME=VALUE texts as a mapping. Raises UsageError naming `option`."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not name or not equals or not value or name in pairs:
            raise UsageError(f"{option} {text}: write NAME=VALUE, each name once")
        pairs[name] = value
    return pairs


def parse_words(option: str, text: str) -> tuple[str, ...]:
    """`lru,delay` as a tuple, repetitions dropped. Raises UsageError naming `option`."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UsageError(f"{option} {text!r}: write names separated by commas")
    return tuple(dict.fromkeys(words))


def parse_integers(option: str, text: str) -> tuple[int, ...]:
    """`0,1,2` as a tuple. Raises UsageError naming `option`."""
    words = parse_words(option, text)
    if not all(word.isascii() and word.isdigit() for word in words):
        raise UsageError(f"{option} {text!r}: write integers >= 0 separated by commas")
    return tuple(map(int, words))


def parse_shares(option: str, text: str) -> tuple[float, ...]:
    """`0,0.5,1` as a tuple of shares in [0, 1]. Raises UsageError naming `option`."""
    try:
        shares = tuple(float(word) for word in parse_words(option, text))
    except ValueError:
        raise UsageError(f"{option} {text!r}: write numbers separated by commas") from None
    for share in shares:
        _between(option, share, 0, 1)
    return shares


def _some(name: str, remedy: str, values: tuple[object, ...]) -> None:
    if not values:
        raise UsageError(f"no {name}: pass {remedy}")


def _between(option: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise UsageError(f"{option} {value:g}: pass a number from {least:g} to {most:g}")


def _binary(amount: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:g}{unit}"
        amount /= 1024
    return f"{amount:g}TiB"
