"""The composition root's part for a pool that is shared: its tier and its catalogue."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tieredkv.config import Config, MooncakeConfig, TierConfig
from tieredkv.errors import ConfigError
from tieredkv.keys import fingerprint_digest
from tieredkv.tiers.base import SharedCatalogue
from tieredkv.tiers.mooncake.catalogue import WATERMARK, Catalogue
from tieredkv.tiers.mooncake.client import OPENING, PoolClient
from tieredkv.tiers.mooncake.meter import Meter
from tieredkv.tiers.mooncake.tier import MooncakeTier
from tieredkv.tiers.slab import slot_count
from tieredkv.types import Fingerprint


def mooncake_config(config: Config) -> MooncakeConfig | None:
    return next((tier for tier in config.tiers if isinstance(tier, MooncakeConfig)), None)


def open_client(config: Config) -> PoolClient | None:
    """Of a process that asks and moves no bytes; None without a pool. Raises ConfigError."""
    spec = mooncake_config(config)
    return None if spec is None else PoolClient(spec.master, 0, "tcp", "", spec.host)


def open_catalogue(
    config: Config,
    fingerprint: Fingerprint,
    client: PoolClient | None,
    block_bytes: int,
    ranks: int,
) -> SharedCatalogue | None:
    """Of what the workers of an engine share with others; None without a pool. `block_bytes` of
    all ranks together."""
    spec = mooncake_config(config)
    if spec is None or client is None:
        return None
    identities = [pool_identity(config, fingerprint, rank) for rank in range(ranks)]
    return catalogue(spec, client, identities, block_bytes)


def pool_identity(config: Config, fingerprint: Fingerprint, rank: int) -> str:
    """What begins the names of a rank's objects: all that makes bytes of equal keys differ."""
    return f"{fingerprint_digest(fingerprint, config.block_tokens).hex()}/{rank}"


def catalogue(
    spec: MooncakeConfig, client: PoolClient, identities: Sequence[str], block_bytes: int
) -> Catalogue:
    meter = Meter(spec.meter_address)
    return Catalogue(client, identities, block_bytes, meter, soft_pins=spec.soft_pin)


def pool_share(spec: TierConfig) -> int:
    """Bytes of the whole pool that are worth planning for. Raises ConfigError."""
    assert isinstance(spec, MooncakeConfig)
    meter = Meter(spec.meter_address)
    deadline = time.monotonic() + OPENING
    while True:
        usage = meter.read()
        if usage is not None and usage[1]:
            return int(WATERMARK * usage[1])
        if time.monotonic() >= deadline:
            state = "does not answer" if usage is None else "counts no memory"
            raise ConfigError(
                f"tier {spec.label!r}: the master's metrics at {meter.address} tell no capacity "
                f"(it {state}): set capacity, or metrics to where the master serves them"
            )
        time.sleep(0.1)


def mooncake_tier(
    spec: MooncakeConfig, capacity: int, block_bytes: int, identity: str
) -> MooncakeTier:
    slot_count(spec.label, capacity, block_bytes)  # complains before the pool is joined
    client = PoolClient(spec.master, spec.segment, spec.protocol, spec.devices, spec.host)
    staged = spec.protocol != "tcp"
    try:
        return MooncakeTier(spec.label, client, identity, capacity, block_bytes, staged=staged)
    except BaseException:
        client.close()
        raise
