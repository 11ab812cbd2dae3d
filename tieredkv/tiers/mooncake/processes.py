"""The processes of a Mooncake pool on one machine: a master, and owners of its memory.

For development and tests; docs/mooncake.md says how a cluster runs them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from tieredkv.errors import ConfigError
from tieredkv.tiers.mooncake.child import LOCALHOST, Process, binary, free_port
from tieredkv.tiers.mooncake.meter import fetch, metric

__all__ = ["LOCALHOST", "MIN_OWNER_BYTES", "Master", "Owner", "Process", "binary", "free_port"]

MIN_OWNER_BYTES = 16 << 20
"""Mooncake refuses a smaller segment."""


class Master(Process):
    """`mooncake_master`, the authority on what the pool holds. A restart forgets all of it."""

    program = "mooncake_master"

    def __init__(
        self,
        port: int | None = None,
        metrics_port: int | None = None,
        *,
        host: str = LOCALHOST,
        lease_ttl_ms: int = 5000,
        client_ttl: int = 10,
        eviction_watermark: float = 0.95,
        eviction_ratio: float = 0.05,
        evict_soft_pinned: bool = False,
        log: Path | None = None,
    ) -> None:
        """Ports are free ones unless given.

        For `lease_ttl_ms` after a get or a question of existence nothing evicts or removes the
        key. After `client_ttl` seconds without a sign of life an owner and all that it holds is
        gone. Above the share `eviction_watermark` of the capacity the master evicts
        `eviction_ratio` of it, soft-pinned objects only with `evict_soft_pinned`; 1.0 and 0
        switch its eviction off.
        """
        self.port = free_port(host) if port is None else port
        self.metrics_port = free_port(host) if metrics_port is None else metrics_port
        super().__init__(host, (self.port, self.metrics_port), log)
        self._flags = {
            "rpc_address": host,
            "rpc_port": self.port,
            "metrics_host": host,
            "metrics_port": self.metrics_port,
            "enable_metric_reporting": "false",
            "default_kv_lease_ttl": lease_ttl_ms,
            "client_ttl": client_ttl,
            "eviction_high_watermark_ratio": eviction_watermark,
            "eviction_ratio": eviction_ratio,
            "allow_evict_soft_pinned_objects": str(evict_soft_pinned).lower(),
        }

    @property
    def address(self) -> str:
        """`host:port`, as clients and the tier's `master` take it."""
        return f"{self.host}:{self.port}"

    def metric(self, name: str) -> float:
        """The value of a metric without labels; OSError if the master does not answer.

        KeyError if there is no such metric.
        """
        return metric(self._get("/metrics"), name)

    def capacity(self) -> int:
        """Bytes of all owners and of clients that lend memory; OSError as `metric`."""
        return int(self.metric("master_total_capacity_bytes"))

    def _arguments(self) -> list[str]:
        return [f"--{name}={value}" for name, value in self._flags.items()]

    def _serves(self) -> bool:
        try:
            health = json.loads(self._get("/health"))
        except (OSError, ValueError):
            return False
        return health.get("service_ready") is True and super()._serves()

    def _get(self, path: str) -> str:
        return fetch(self.host, self.metrics_port, path)


class Owner(Process):
    """`mooncake_client` as a process that lends memory to the pool; what it holds ends with it.

    It finds a restarted master by itself. The master counts its memory until `client_ttl` after
    its end. Its data ports are chosen by Mooncake and bound to all interfaces.
    """

    program = "mooncake_client"

    def __init__(
        self,
        master: str,
        size: int,
        port: int | None = None,
        *,
        host: str = LOCALHOST,
        log: Path | None = None,
    ) -> None:
        """`master` is its `host:port`, `size` in bytes; `port` a free one unless given.

        Raises ConfigError if the size is below 16 MiB or above this machine's memory.
        """
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if not MIN_OWNER_BYTES <= size <= memory:
            raise ConfigError(
                f"an owner of {size:,} bytes: Mooncake needs {MIN_OWNER_BYTES:,} (16 MiB) or"
                f" more, and this machine has {memory:,}; change the size or the owners' number"
            )
        self.port = free_port(host) if port is None else port
        self.size = size
        super().__init__(host, (self.port,), log)
        # The size without a unit: "64MiB" is taken for no memory at all.
        self._flags = {
            "master_server_address": master,
            "metadata_server": "P2PHANDSHAKE",
            "host": host,
            "port": self.port,
            "global_segment_size": size,
        }

    def _arguments(self) -> list[str]:
        return [f"--{name}={value}" for name, value in self._flags.items()]
