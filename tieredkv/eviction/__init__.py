"""Eviction policies, one per module; `base` has the protocol."""

from __future__ import annotations

from tieredkv.eviction.arc import ArcPolicy
from tieredkv.eviction.fifo import FifoPolicy
from tieredkv.eviction.lfu import LfuPolicy
from tieredkv.eviction.lru import LruPolicy

BUILTIN: dict[str, type] = {
    "lru": LruPolicy,
    "fifo": FifoPolicy,
    "lfu": LfuPolicy,
    "arc": ArcPolicy,
}
"""Name in the configuration -> class; others are loaded as plug-ins."""

__all__ = ["BUILTIN", "ArcPolicy", "FifoPolicy", "LfuPolicy", "LruPolicy"]
