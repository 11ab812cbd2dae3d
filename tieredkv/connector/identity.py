"""What an engine's KV blocks are: whose they are, how large, and whether we can keep them.

Everything here must come out equal in the scheduler's process and in every worker, and again
after a restart. So nothing is read that a worker changes while it loads the model (the parsed
`hf_config`, `cache_config.cache_dtype`), nor what only one side resolves: of a group with
several specs the scheduler sees the first alone. All functions are thread-safe.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tieredkv.chain_hash import digest
from tieredkv.connector.weights import config_files, weight_files_identity
from tieredkv.errors import ConfigError
from tieredkv.types import Fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger(__name__)

FORMAT = 1
"""Of the fingerprint's fields below; a change makes every stored block a miss."""
CHUNK_BYTES = 1 << 20
"""Least size of a chunk that the user did not size."""

_HASHES = ("sha256", "sha256_cbor")
_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
_NO_DRAFT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
_LENGTH_MATTERS = ('"longrope"', '"su"', "llama4")
"""In a model's configuration: attention that depends on max_model_len."""


class ConnectorConfig(Protocol):
    """The part of the connector's configuration that is needed here."""

    @property
    def engine(self) -> str | None: ...
    @property
    def weights_id(self) -> str | None: ...


def fingerprint(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, connector_config: ConnectorConfig
) -> Fingerprint:
    """Everything that makes KV bytes of equal block hashes differ, except the rank.

    The model's path or name is no part of it. Reads up to a few MiB of each weight file.
    Raises ConfigError where the weights or the model's configuration cannot be identified.
    """
    parallel = vllm_config.parallel_config
    return Fingerprint(
        model=_model(vllm_config),
        weights=weights_identity(vllm_config, connector_config.weights_id),
        dtype=_dtype(vllm_config, kv_cache_config),
        layout=_layout(vllm_config, kv_cache_config),
        world=(parallel.tensor_parallel_size, parallel.pipeline_parallel_size),
    )


def weights_identity(vllm_config: VllmConfig, given: str | None) -> str:
    """`given` if set; else a digest of the weight files of the model and of its draft model.

    Files count with their names, sizes and samples (of safetensors the header and the middle
    of the tensors), not with their place or age. Raises ConfigError if there are none here.
    """
    if given:
        return given
    models = [(vllm_config.model_config, vllm_config.load_config)]
    if (draft := _draft(vllm_config)) is not None:
        load = getattr(vllm_config.speculative_config, "draft_load_config", None)
        models.append((draft, load or vllm_config.load_config))
    return "+".join(weight_files_identity(model, load) for model, load in models)


def block_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Bytes of one engine block over all layers of a rank, with the padding of its pages."""
    # each tensor is a part of one allocation and tells the size of the whole
    return int(kv_cache_config.kv_cache_tensors[0].size // kv_cache_config.num_blocks)


def chunk_tokens(kv_cache_config: KVCacheConfig, block_tokens: int | None) -> int:
    """Tokens per stored chunk: `block_tokens`, by default as few as make 1 MiB per rank.

    Raises ConfigError if `block_tokens` is no positive multiple of the engine's block size.
    """
    block = _spec(kv_cache_config).block_size
    if block_tokens is None:
        return int(block * -(-CHUNK_BYTES // block_bytes(kv_cache_config)))
    if block_tokens < 1 or block_tokens % block:
        near = block * max(1, round(block_tokens / block))
        raise ConfigError(
            f"block_tokens = {block_tokens} is not a multiple of vLLM's block size of {block} "
            f"tokens; set it to {near}, or leave it out"
        )
    return block_tokens


def engine_block_tokens(kv_cache_config: KVCacheConfig) -> int:
    """Tokens of one engine block."""
    return int(_spec(kv_cache_config).block_size)


def engine_name(vllm_config: VllmConfig, connector_config: ConnectorConfig) -> str:
    """Name of this engine's directory: `engine` if set, else its data parallel rank."""
    if connector_config.engine:
        return connector_config.engine
    # data_parallel_rank is 0 in every engine of a model without experts
    return f"dp{vllm_config.parallel_config.data_parallel_index}"


def refuse(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise ConfigError, one line per reason, if the blocks of this engine cannot be kept right.

    Warns of a setting that is legal but turns a failed load into a failed request.
    """
    problems = [
        *_unsupported_model(vllm_config, kv_cache_config),
        *_unsupported_setting(vllm_config),
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_load_failure_policy == "fail":
        log.warning(
            "kv_load_failure_policy = 'fail': a request whose blocks cannot be loaded ends with "
            "an error; set it to 'recompute' in kv_transfer_config"
        )


# --- refusals -------------------------------------------------------------------------


def _unsupported_model(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Iterator[str]:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        yield (
            f"the model has {len(groups)} groups of KV caches, and one can be stored; use a "
            "model whose layers all have full attention, or --disable-hybrid-kv-cache-manager"
        )
    for spec in {type(s).__name__: s for group in groups for s in _specs(group)}.values():
        kind = type(spec).__name__
        if kind not in _SPECS:
            yield f"KV caches of kind {kind} cannot be stored, only {' and '.join(_SPECS)}"
        elif getattr(spec, "non_causal", False):
            yield (
                "the model's attention is not causal, so its KV depends on later tokens and "
                "cannot be stored by prefix; run it without a connector"
            )
        elif kind == "MLAAttentionSpec" and vllm_config.device_config.device_type == "cpu":
            yield (
                "MLA attention on the CPU gives wrong results with loaded blocks; use a GPU or a "
                "model without MLA"
            )
    if vllm_config.model_config.is_encoder_decoder:
        yield "encoder-decoder models cannot be stored; use a decoder-only model"
    if getattr(kv_cache_config, "kv_cache_layout", None) is None:
        yield "this vLLM does not tell the layout of its KV cache; use vLLM 0.32 or later"


def _unsupported_setting(vllm_config: VllmConfig) -> Iterator[str]:
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        yield (
            "enable_sleep_mode takes the memory away that blocks are copied from and to; "
            "start without it"
        )
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in _HASHES:
        yield (
            f"prefix_caching_hash_algo = {algorithm!r}: its hashes may collide and differ between "
            "processes; prefix_caching_hash_algo must be sha256 or sha256_cbor"
        )
    for name in ("pipeline", "decode_context", "prefill_context"):
        size = getattr(vllm_config.parallel_config, f"{name}_parallel_size", 1)
        if size > 1:
            yield f"{name}_parallel_size = {size} is not supported; set it to 1"
    transfer = vllm_config.kv_transfer_config
    tiers = transfer.kv_connector_extra_config.get("tiers") if transfer is not None else None
    for i, tier in enumerate(tiers or ()):
        if isinstance(tier, Mapping) and tier.get("kind") == "hbm":
            yield (
                f"tiers[{i}].kind = 'hbm': under vLLM its own paged KV cache is the GPU tier; "
                "remove this tier and size vLLM's with gpu_memory_utilization"
            )


# --- fields of the fingerprint --------------------------------------------------------


def _model(vllm_config: VllmConfig) -> str:
    """Architecture, and a digest of what vLLM makes the model's configuration from."""
    model, draft = vllm_config.model_config, _draft(vllm_config)
    if callable(model.hf_overrides):
        raise ConfigError(
            f"hf_overrides is the function {model.hf_overrides!r}, whose effect cannot be named "
            "in a cache's identity; pass a dict"
        )
    overrides = _canonical(model.hf_overrides or {})
    config = config_files(model)
    facts: dict[str, Any] = {
        "dtype": model.dtype,
        "quantization": model.quantization,
        "quantization_config": getattr(model, "quantization_config", None),
        "disable_sliding_window": model.disable_sliding_window,
        "code": model.code_revision,
    }
    text = config.decode("utf-8", "replace") + overrides
    if any(word in text for word in _LENGTH_MATTERS):
        facts["length"] = [model.max_model_len, model.override_generation_config]
    parts: list[str | bytes] = [config, overrides, _canonical(facts)]
    if draft is not None:
        spec: Any = vllm_config.speculative_config
        parts += [spec.method, config_files(draft), str(getattr(spec, "kv_cache_dtype", None))]
    return f"{model.architecture}:{digest(b'tieredkv model', *parts).hex()}"


def _dtype(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    spec = _spec(kv_cache_config)
    name = str(spec.dtype).removeprefix("torch.")
    if spec.kv_quant_mode.value:
        name += f"/{spec.kv_quant_mode.name}"
    # both kinds of fp8 are uint8 in the spec
    return name + ("/e5m2" if "e5m2" in vllm_config.cache_config.cache_dtype else "")


def _layout(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """The bytes of a block, and the hashes that name it, as canonical JSON."""
    from vllm import __version__

    spec, cache = _spec(kv_cache_config), vllm_config.cache_config
    layers = [name for t in kv_cache_config.kv_cache_tensors for name in t.layers]
    facts = {
        "format": FORMAT,
        # what vLLM packs into a block, and how it reads a configuration, may change with it
        "vllm": ".".join(__version__.split(".")[:2]),
        "order": kv_cache_config.kv_cache_layout,
        "block": [spec.block_size, block_bytes(kv_cache_config)],
        "spec": {
            "kind": type(spec).__name__,
            **{f.name: getattr(spec, f.name) for f in fields(spec)},
        },
        "places": _places(kv_cache_config),
        "layers": digest(b"tieredkv layers", *layers).hex()[:16],
        "skip": sorted(cache.kv_cache_dtype_skip_layers),
        "hash": [cache.prefix_caching_hash_algo, os.environ.get("PYTHONHASHSEED")],
        "device": _device(vllm_config),
        "backend": vllm_config.attention_config.backend,
    }
    return _canonical(facts)


def _places(kv_cache_config: KVCacheConfig) -> list[list[int]]:
    """Where layers lie within a block, whatever the number of blocks."""
    # with the layers outermost, a layer takes as many pages as there are blocks
    outer = str(kv_cache_config.kv_cache_layout).startswith("L")
    per = kv_cache_config.num_blocks if outer else 1
    return [
        [len(t.layers), t.block_stride, t.layer_stride // per, t.offset // per]
        for t in kv_cache_config.kv_cache_tensors
    ]


def _device(vllm_config: VllmConfig) -> list[str]:
    kind = str(vllm_config.device_config.device_type)
    if kind == "cpu":
        # the kernels for AMX pack keys in an order of their own
        return [kind, platform.machine(), "amx" if torch.cpu._is_amx_tile_supported() else ""]
    return [kind, "hip" if torch.version.hip else ""]


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _specs(group: Any) -> list[Any]:
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return list(inner.values()) if inner else [group.kv_cache_spec]


def _spec(kv_cache_config: KVCacheConfig) -> Any:
    """The spec that scheduler and workers agree on: that of the first layer."""
    return _specs(kv_cache_config.kv_cache_groups[0])[0]


def _draft(vllm_config: VllmConfig) -> Any | None:
    """Configuration of the draft model if it has layers in the KV cache."""
    spec = vllm_config.speculative_config
    return None if spec is None or spec.method in _NO_DRAFT_KV else spec.draft_model_config
