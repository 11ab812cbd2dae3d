"""`TieredKVConnector`: the face that vLLM loads by configuration. It forwards, nothing else.

{"kv_connector": "TieredKVConnector", "kv_connector_module_path": "tieredkv.connector.vllm",
 "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
 "kv_connector_extra_config": {...the configuration of tieredkv...}}
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from tieredkv.connector.setup import setup
from tieredkv.connector.stats import TieredProm, TieredStats
from tieredkv.connector.wire import StepMetadata

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class TieredKVConnector(KVConnectorBase_V1):
    """Keeps an engine's KV blocks in DRAM and on NVMe. One object per scheduler and worker."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises ConfigError, DirectoryInUse and other errors of `tieredkv.errors` that name
        value and remedy."""
        super().__init__(vllm_config, role, kv_cache_config)
        parts = setup(vllm_config, kv_cache_config)
        self.scheduler = parts.scheduler() if role is KVConnectorRole.SCHEDULER else None
        self.worker = parts.worker() if role is KVConnectorRole.WORKER else None
        self._geometry = parts.geometry

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a dropped save is a later miss

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Blocks that span all layers, where the platform can have them."""
        from vllm.platforms import current_platform

        return None if current_platform.is_cpu() else "BLHNC"

    # -- worker ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        assert self.worker is not None
        self.worker.register(kv_caches.values(), self._geometry.blocks, self._geometry.block)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert self.worker is not None
        assert isinstance(connector_metadata, StepMetadata)
        super().bind_connector_metadata(connector_metadata)
        self.worker.mark(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self.worker is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        self.worker.begin(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return

    def wait_for_save(self) -> None:
        return  # the scheduler holds the blocks until their copies have ended

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self.worker is not None
        return None, self.worker.settle() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self.worker is not None
        return self.worker.take_invalid()

    def build_connector_worker_meta(self) -> Any:
        assert self.worker is not None
        return self.worker.report()

    # -- scheduler ------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        assert self.scheduler is not None
        self.scheduler.bind(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        assert self.scheduler is not None
        self.scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self.scheduler is not None
        return self.scheduler.lookup(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        assert self.scheduler is not None
        self.scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        assert self.scheduler is not None
        return self.scheduler.sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        assert self.scheduler is not None
        return self.scheduler.build(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self.scheduler is not None
        self.scheduler.heard(
            connector_output.kv_connector_worker_meta,
            connector_output.finished_recving or (),
            connector_output.invalid_block_ids or (),
        )

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self.scheduler is not None
        self.scheduler.finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self.scheduler is not None and self.scheduler.pending

    def has_pending_block_frees(self) -> bool:
        return self.scheduler is not None and self.scheduler.holds_blocks

    def reset_cache(self) -> bool | None:
        return None if self.scheduler is None else self.scheduler.reset()

    def take_events(self) -> Iterable[Any]:
        return () if self.scheduler is None else self.scheduler.events()

    # -- both -----------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> TieredStats | None:
        return None if self.scheduler is None else self.scheduler.stats()

    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.close()
        if self.scheduler is not None:
            self.scheduler.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TieredStats:
        return TieredStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> TieredProm:
        return TieredProm(*args)
