"""From the engine's configuration to the two sides of the connector."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tieredkv.build import nvme_config
from tieredkv.config import Config
from tieredkv.config_load import parse
from tieredkv.connector import identity
from tieredkv.connector.scheduler import Scheduler
from tieredkv.connector.sides import Geometry
from tieredkv.connector.worker import Worker
from tieredkv.types import Fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

EVENTS = 1 << 16  # kept between two steps, where somebody listens


@dataclass(frozen=True, slots=True)
class Setup:
    """What scheduler and workers have to agree on."""

    config: Config
    """With the chunk size and this engine's own directory filled in."""
    fingerprint: Fingerprint
    geometry: Geometry
    role: str

    def scheduler(self) -> Scheduler:
        return Scheduler(self.config, self.fingerprint, self.geometry, self.role)

    def worker(self) -> Worker:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        rank = get_tensor_model_parallel_rank()
        return Worker(self.config, self.fingerprint, rank, self.geometry.ranks)


def setup(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Setup:
    """Read `kv_connector_extra_config`, or the file that TIEREDKV_CONFIG_FILE names where it
    has no tiers. Raises ConfigError."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    identity.refuse(vllm_config, kv_cache_config)
    extra = transfer.kv_connector_extra_config
    given = Config.load() if not extra and "TIEREDKV_CONFIG_FILE" in os.environ else None
    config = given or parse(extra, "kv_connector_extra_config", os.environ).config
    wanted = config.block_tokens if "block_tokens" in config.model_fields_set else None
    name = identity.engine_name(vllm_config, config.connector)
    tiers = config.tiers
    nvme = nvme_config(config)
    if nvme is not None:
        tiers = (*tiers[:-1], nvme.model_copy(update={"path": nvme.path / name}))
    chunk = identity.chunk_tokens(kv_cache_config, wanted)
    listeners = vllm_config.kv_events_config
    events = max(config.events, EVENTS if listeners and listeners.enable_kv_cache_events else 0)
    filled = {"block_tokens": chunk, "tiers": tiers, "events": events}
    return Setup(
        config.model_copy(update=filled),
        identity.fingerprint(vllm_config, kv_cache_config, config.connector),
        geometry(vllm_config, kv_cache_config),
        str(transfer.kv_role),
    )


def geometry(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Geometry:
    block = identity.engine_block_tokens(kv_cache_config)
    return Geometry(
        block,
        kv_cache_config.hash_block_size or block,
        kv_cache_config.num_blocks,
        vllm_config.parallel_config.world_size,
    )
