"""A connector that lies: it has every prompt, and loads nothing."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
    ExampleConnectorMetadata,
)


class LyingConnector(ExampleConnector):
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        block = self._vllm_config.cache_config.block_size
        full = (request.num_tokens - 1) // block * block
        return max(0, full - num_computed_tokens), False

    def update_state_after_alloc(self, *_: Any) -> None:
        pass

    def build_connector_meta(self, *_: Any) -> ExampleConnectorMetadata:
        return ExampleConnectorMetadata()
