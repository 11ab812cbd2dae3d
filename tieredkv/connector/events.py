"""Residency events in vLLM's terms, for routers that follow which engine caches what."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from tieredkv.events import Event, EventKind

log = logging.getLogger(__name__)


def translate(
    events: Iterable[Event], media: Mapping[str, str], chunk_tokens: int
) -> Iterator[KVCacheEvent]:
    """`media`: medium by tier name.

    A chunk is named by the hash of the engine block that it ends with; hashes are chained and
    a chunk never outlives what comes before it, so the hash stands for the whole prefix.
    """
    for event in events:
        if event.kind is EventKind.LOST:
            log.warning("residency events were dropped: routers may route to blocks that left")
        if not event.keys:
            continue
        hashes = [maybe_convert_block_hash(BlockHash(key)) for key in event.keys]
        if event.kind is EventKind.STORED:
            yield BlockStored(
                block_hashes=hashes,
                parent_block_hash=None,
                token_ids=[],
                block_size=chunk_tokens,
                lora_id=None,
                lora_name=None,
                medium=media[event.tier],
                group_idx=0,
            )
        elif event.kind is EventKind.REMOVED:
            yield BlockRemoved(block_hashes=hashes, medium=media[event.tier], group_idx=0)
