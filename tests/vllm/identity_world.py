"""Configurations of engines that are not started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.vllm.engines import arguments
from tieredkv.connector.identity import fingerprint
from tieredkv.types import Fingerprint

TIERS = [{"kind": "dram", "capacity": "64MiB"}]
PAGE = 2 * 32 * 2 * 32 * 4
"""Bytes of a layer's block: K and V, tokens, heads, dimensions, float32."""


def settings(engine: str | None = None, weights_id: str | None = None) -> Any:
    return SimpleNamespace(engine=engine, weights_id=weights_id)


def configure(model: Path, **args: Any) -> Any:
    """What vLLM makes of engine arguments."""
    from vllm import EngineArgs

    transfer = {
        "kv_connector": "Probe",
        "kv_connector_module_path": "tests.vllm.identity_probe",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tiers": TIERS},
        **args.pop("transfer", {}),
    }
    return EngineArgs(**arguments(model, transfer, **args)).create_engine_config()


def spec(**fields: Any) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    shape = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    return FullAttentionSpec(**{**shape, **fields})


def caches(vllm_config: Any, *specs: Any, order: str = "LBHNC", blocks: int = 256) -> Any:
    """A worker's KVCacheConfig as the engine core makes it."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    layers = {f"model.layers.{i}.self_attn.attn": s for i, s in enumerate(specs or [spec()] * 2)}
    vllm_config.cache_config.kv_cache_layout = order
    vllm_config.cache_config.num_gpu_blocks_override = blocks
    (config,) = get_kv_cache_configs(vllm_config, [layers], [1 << 30])
    config.kv_cache_layout = order
    return config


def identify(model: Path, *specs: Any, weights_id: str | None = None, **args: Any) -> Fingerprint:
    order, blocks = args.pop("order", "LBHNC"), args.pop("blocks", 256)
    config = configure(model, **args)
    cache = caches(config, *specs, order=order, blocks=blocks)
    return fingerprint(config, cache, settings(weights_id=weights_id))
