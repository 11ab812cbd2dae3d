"""Eviction policies, one per module; `base` has the protocol."""

from __future__ import annotations

from tieredkv.eviction.arc import ArcPolicy
from tieredkv.eviction.delay import DelayPolicy
from tieredkv.eviction.fifo import FifoPolicy
from tieredkv.eviction.gdsf import GdsfPolicy
from tieredkv.eviction.lfu import LfuPolicy
from tieredkv.eviction.lhd import LhdPolicy
from tieredkv.eviction.lru import LruPolicy
from tieredkv.eviction.s3fifo import S3FifoPolicy
from tieredkv.eviction.sieve import SievePolicy
from tieredkv.eviction.ttl import TtlPolicy
from tieredkv.eviction.workload import WorkloadPolicy

BUILTIN: dict[str, type] = {
    "lru": LruPolicy,
    "fifo": FifoPolicy,
    "lfu": LfuPolicy,
    "arc": ArcPolicy,
    "s3fifo": S3FifoPolicy,
    "sieve": SievePolicy,
    "gdsf": GdsfPolicy,
    "lhd": LhdPolicy,
    "ttl": TtlPolicy,
    "workload": WorkloadPolicy,
    "delay": DelayPolicy,
}
"""Name in the configuration -> class; others are loaded as plug-ins."""

__all__ = [
    "BUILTIN",
    "ArcPolicy",
    "DelayPolicy",
    "FifoPolicy",
    "GdsfPolicy",
    "LfuPolicy",
    "LhdPolicy",
    "LruPolicy",
    "S3FifoPolicy",
    "SievePolicy",
    "TtlPolicy",
    "WorkloadPolicy",
]
