"""A connector that only tells which identity its process sees. Imported by vLLM."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from tieredkv.connector import identity
from tieredkv.keys import fingerprint_digest


class Probe(KVConnectorBase_V1):
    """Writes <role>-<pid>.json into the directory `report` of its configuration."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = SimpleNamespace(engine=None, weights_id=None)
        found = identity.fingerprint(vllm_config, kv_cache_config, settings)
        chunk = identity.chunk_tokens(kv_cache_config, None)
        self._told: dict[str, Any] = {
            "model": found.model,
            "layout": found.layout,
            "world": found.world,
            "digest": fingerprint_digest(found, chunk).hex(),
            "block_bytes": identity.block_bytes(kv_cache_config),
            "engine": identity.engine_name(vllm_config, settings),
            "rope": vllm_config.model_config.hf_config.rope_parameters["rope_type"],
        }
        self._blocks = kv_cache_config.num_blocks
        self._tell()

    def _tell(self) -> None:
        extra = self._kv_transfer_config.kv_connector_extra_config
        name = f"{self.role.name.lower()}-{os.getpid()}.json"
        (Path(extra["report"]) / name).write_text(json.dumps(self._told))

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        total = sum(cache.numel() * cache.element_size() for cache in kv_caches.values())
        self._told["registered"] = total // self._blocks
        self._tell()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()
