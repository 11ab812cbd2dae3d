"""What a request costs: seconds of prefill and of loads, from presets in `cost.yaml`.

Time to first token = overhead + loads of all tiers, one after another + prefill of the rest.

- Prefill: `2 x active parameters` FLOPs per new token for the weights, and for attention
  `2 x layers x heads x (key size + value size)` per pair of a new token and a token before
  it, as usually counted (PaLM, arXiv 2204.02311, appendix B), at `tp x peak x mfu`.
- Load: latency + bytes / bandwidth. Tensor-parallel ranks load their KV heads side by side.

Queueing, decode steps in between and overlap of loads with prefill are left out: times are
of one request on an idle replica. They rank settings; they do not replace a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from math import nan
from typing import Any, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError, model_validator

from tieredkv.config import Model
from tieredkv.config_errors import Origin, explain
from tieredkv.config_file import parse_yaml
from tieredkv.errors import ConfigError, UsageError
from tieredkv.suggest import nearest

GIGA = 1e9
Mean = TypeVar("Mean", float, npt.NDArray[np.float64])


DEFAULT_MODEL = "llama-3.1-70b"
"""Of the commands, where neither a model nor the size of a token is named; on 4 GPUs."""


class ModelShape(Model):
    """One entry of `models`; the fields are explained in cost.yaml."""

    layers: int = Field(gt=0)
    attention_layers: int | None = Field(default=None, gt=0)
    heads: int = Field(gt=0)
    kv_heads: int | None = Field(default=None, gt=0)
    latent: int | None = Field(default=None, gt=0)
    qk_dim: int = Field(gt=0)
    v_dim: int = Field(gt=0)
    active_billions: float = Field(gt=0)
    kv_bytes: float = Field(gt=0)

    @model_validator(mode="after")
    def _one_kind_of_cache(self) -> Self:
        if (self.kv_heads is None) == (self.latent is None):
            raise ValueError("give either kv_heads or latent")
        return self

    @property
    def bytes_per_token(self) -> int:
        """Of the whole model, once, however many ranks there are."""
        width = self.latent or (self.kv_heads or 0) * (self.qk_dim + self.v_dim)
        return round(self.layers * width * self.kv_bytes)

    @property
    def pair_flops(self) -> float:
        """FLOPs of attention per pair of a token and one before it."""
        layers = self.attention_layers or self.layers
        return 2.0 * layers * self.heads * (self.qk_dim + self.v_dim)


class Gpu(Model):
    """One entry of `gpus`."""

    bf16_tflops: float = Field(gt=0)
    memory_gbps: float = Field(gt=0)
    pcie_gbps: float = Field(gt=0)
    mfu: float = Field(gt=0, le=1)


class Tier(Model):
    """One entry of `tiers`."""

    link: Literal["none", "pcie", "gpu", "node"]
    gbps: float | None = Field(gt=0)
    latency: float = Field(ge=0)

    @model_validator(mode="after")
    def _has_bandwidth(self) -> Self:
        if (self.gbps is None) == (self.link in ("gpu", "node")):
            raise ValueError("give gbps with link gpu or node, null with none or pcie")
        return self


class Prefill(Model):
    """The section `prefill`."""

    overhead: float = Field(ge=0)
    weight_bytes: float = Field(ge=0)


class CostModel:
    """Seconds for one model on one kind of GPU. Immutable, hence safe to share."""

    __slots__ = ("_fetch", "_fixed", "_pair", "_token", "bytes_per_token", "gpu", "model", "tp")

    def __init__(
        self,
        *,
        bytes_per_token: int,
        token: float,
        pair: float,
        fixed: float,
        fetch: Mapping[str, tuple[float, float]],
        names: tuple[str | None, str, int],
    ) -> None:
        """Use `load`. `token`: seconds per new token; `pair`: per pair of tokens; `fixed`: per
        request; `fetch`: tier -> (seconds per load, seconds per byte)."""
        self.bytes_per_token = bytes_per_token
        """Bytes of KV cache per token, of all ranks together."""
        self.model, self.gpu, self.tp = names
        self._token, self._pair, self._fixed = token, pair, fixed
        self._fetch = dict(fetch)

    @classmethod
    def load(
        cls,
        model: str | None,
        gpu: str = "h100",
        tp: int = 1,
        bytes_per_token: int | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> CostModel:
        """Take the presets `model` and `gpu`, on `tp` GPUs (tensor parallel).

        `bytes_per_token` replaces the model's. With `model` None it is needed, and what depends
        on prefill is NaN (see `knows_prefill`). `overrides` has the shape of cost.yaml and may
        add models and GPUs. Raises ConfigError for a bad override, UsageError for the rest.
        """
        constants = _merge(_presets(), overrides or {})
        if tp < 1 or (bytes_per_token is not None and bytes_per_token < 1):
            raise UsageError(f"tp={tp}, bytes_per_token={bytes_per_token}: pass at least 1")
        if model is None and bytes_per_token is None:
            raise UsageError("the size of a token is unknown: name a model or pass bytes_per_token")
        shape = None if model is None else _entry(constants, "models", model, ModelShape)
        device = _entry(constants, "gpus", gpu, Gpu)
        prefill = _validate(constants["prefill"], Prefill, "prefill")
        # A latent is not split; more ranks than KV heads keep copies of them.
        parts = 1 if shape is None or shape.kv_heads is None else min(tp, shape.kv_heads)
        fetch = {}
        for name in constants["tiers"]:
            tier = _entry(constants, "tiers", name, Tier)
            fetch[name] = tier.latency, _seconds_per_byte(tier, device, parts)
        token = pair = weights = nan
        if shape is not None:
            rate = tp * device.bf16_tflops * 1e12 * device.mfu
            token = 2 * shape.active_billions * GIGA / rate
            pair = shape.pair_flops / rate
            weights = shape.active_billions * prefill.weight_bytes / (tp * device.memory_gbps)
        size = bytes_per_token or (shape.bytes_per_token if shape else 0)
        return cls(
            bytes_per_token=size,
            token=token,
            pair=pair,
            fixed=prefill.overhead + weights,
            fetch=fetch,
            names=(model, gpu, tp),
        )

    @property
    def knows_prefill(self) -> bool:
        """Whether a model was named; without one, `prefill` and `ttft` are NaN."""
        return self.model is not None

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names that `fetch` knows, fastest first."""
        return tuple(self._fetch)

    def prefill(self, context: int, new: int) -> float:
        """Seconds to compute the last `new` of the `context` tokens of a prompt, the rest being
        cached; 0 <= new <= context. Includes the fixed overhead of a request."""
        return self._fixed + new * (self._token + self._pair * (context - 0.5 * new))

    def mean_prefill(self, new: Mean, pairs: Mean) -> Mean:
        """Mean of `prefill` over requests with these means: `new` tokens, and `pairs` = the sum
        of the positions of a request's new tokens (`new x (context - new / 2)`). Arrays give
        an array."""
        return self._fixed + new * self._token + pairs * self._pair

    def fetch(self, tier: str, nbytes: float) -> float:
        """Seconds to bring `nbytes` from a tier to the GPU; 0 for none.

        Raises UsageError for a tier that `cost.yaml` does not have.
        """
        try:
            latency, per_byte = self._fetch[tier]
        except KeyError:
            raise self._unknown(tier) from None
        return latency + nbytes * per_byte if nbytes else 0.0

    def link(self, tier: str) -> tuple[float, float]:
        """(seconds per load, seconds per byte) of a tier. Raises UsageError as `fetch` does."""
        if tier not in self._fetch:
            raise self._unknown(tier)
        return self._fetch[tier]

    def ttft(self, hit_by_tier: Mapping[str, int], new_tokens: int, context: int) -> float:
        """Seconds to the first token: loads of `hit_by_tier` (tier -> tokens), one tier after
        another since all end on the same PCIe link, then `prefill(context, new_tokens)`."""
        seconds = self._fixed + new_tokens * (
            self._token + self._pair * (context - 0.5 * new_tokens)
        )
        table, size = self._fetch, self.bytes_per_token
        for tier, tokens in hit_by_tier.items():
            if tokens:
                pair = table.get(tier)
                if pair is None:
                    raise self._unknown(tier)
                seconds += pair[0] + tokens * size * pair[1]
        return seconds

    def _unknown(self, tier: str) -> UsageError:
        return UsageError(
            f"no tier {tier!r} in the cost model; nearest: {nearest(tier, self._fetch)!r} "
            f"(known: {', '.join(self._fetch)})"
        )


@cache
def _presets() -> dict[str, Any]:
    text = resources.files("tieredkv.sim").joinpath("cost.yaml").read_text("utf-8")
    presets: dict[str, Any] = parse_yaml(text, "cost.yaml")
    return presets


def preset_names(section: Literal["models", "gpus", "tiers"]) -> tuple[str, ...]:
    """The presets of a section, in the order of cost.yaml."""
    return tuple(_presets()[section])


def _seconds_per_byte(tier: Tier, gpu: Gpu, parts: int) -> float:
    if tier.link == "none":
        return 0.0
    gbps = gpu.pcie_gbps * parts
    if tier.gbps is not None:
        gbps = min(gbps, tier.gbps * (parts if tier.link == "gpu" else 1))
    return 1 / (gbps * GIGA)


def _merge(presets: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`presets` with the values of `overrides`, section by section and entry by entry."""
    merged = dict(presets)
    for section, entries in overrides.items():
        if section not in presets:
            raise ConfigError(
                f"cost model: unknown section {section!r}; nearest: {nearest(section, presets)!r} "
                f"(valid: {', '.join(presets)})"
            )
        if not isinstance(entries, Mapping):
            raise ConfigError(f"cost model: {section} = {entries!r}: must be a mapping")
        if section == "tiers":
            for name in entries:
                _known(name, presets["tiers"], "tiers", ConfigError)
        merged[section] = dict(presets[section])
        for name, value in entries.items():
            old = presets[section].get(name)
            both = isinstance(value, Mapping) and isinstance(old, Mapping)
            merged[section][name] = {**old, **value} if both else value
    return merged


M = TypeVar("M", bound=Model)


def _entry(constants: Mapping[str, Any], section: str, name: str, kind: type[M]) -> M:
    _known(name, constants[section], section, UsageError)
    return _validate(constants[section][name], kind, f"{section}.{name}")


def _known(name: str, valid: Mapping[str, Any], section: str, error: type[Exception]) -> None:
    if name not in valid:
        raise error(
            f"no {section.removesuffix('s')} {name!r} in the cost model; nearest: "
            f"{nearest(name, valid)!r} (known: {', '.join(valid)})"
        )


def _validate(value: object, kind: type[M], place: str) -> M:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise ConfigError(explain(error, Origin(f"cost model, {place}"), kind, {})) from None
