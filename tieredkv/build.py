"""The composition root: from a configuration to tiers, policies, planner and index."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from tieredkv.build_pool import (
    catalogue,
    mooncake_config,
    mooncake_tier,
    pool_identity,
    pool_share,
)
from tieredkv.config import (
    Config,
    DramConfig,
    HbmConfig,
    MooncakeConfig,
    NvmeConfig,
    PluginTierConfig,
    TierConfig,
)
from tieredkv.engine import Parts
from tieredkv.errors import CapacityError, FormatError, PluginError
from tieredkv.events import EventLog
from tieredkv.eviction import BUILTIN
from tieredkv.eviction.admission import DelayAdmission
from tieredkv.eviction.base import Admission, EvictionPolicy
from tieredkv.eviction.delay import DelayPolicy
from tieredkv.eviction.delay_model import DelayModel
from tieredkv.eviction.lru import LruPolicy
from tieredkv.executor import DaemonExecutor
from tieredkv.index.durable import DurableIndex
from tieredkv.planner import Planner
from tieredkv.planner.level import Level
from tieredkv.planner.plans import TokenBucket
from tieredkv.planner.residency import Residency
from tieredkv.planner.room import Room
from tieredkv.planner.shadow import Guard, shadow_slots
from tieredkv.plugins import ADMISSIONS, POLICIES, TIERS, load_plugin
from tieredkv.tiers.base import Tier
from tieredkv.tiers.dram import DramTier
from tieredkv.tiers.hbm import HbmTier
from tieredkv.tiers.mooncake.tier import MooncakeTier
from tieredkv.tiers.nvme.directory import Directory
from tieredkv.tiers.nvme.tier import NvmeTier
from tieredkv.types import Fingerprint

log = logging.getLogger(__name__)


class Slots(Protocol):
    """What the planner has to know of a tier."""

    @property
    def name(self) -> str: ...

    @property
    def durable(self) -> bool: ...

    @property
    def slots(self) -> int: ...


WrapTier: TypeAlias = Callable[[Tier], Tier]
WATERMARK = 64  # free slots that the durable tier keeps ready: one group commit


@dataclass(frozen=True, slots=True)
class Disk:
    """The directory of the NVMe tier and its index, open and locked."""

    directory: Directory
    index: DurableIndex
    executor: DaemonExecutor
    """Of the index's commits."""

    def close(self, timeout: float) -> bool:
        """False if a commit hangs; then the directory stays locked until the process ends."""
        deadline = time.monotonic() + timeout
        if not self.index.close(timeout):
            return False
        self.executor.close(max(0.0, deadline - time.monotonic()))
        self.directory.close()
        return True


def open_disk(config: Config, fingerprint: Fingerprint, rank: int | None = 0) -> Disk | None:
    """Open what the nvme tier keeps on disk; None without such a tier. `rank` None: the index
    alone, the segments are other processes'.

    Raises DirectoryError, DirectoryInUse, FormatError.
    """
    tier = nvme_config(config)
    if tier is None:
        return None
    directory = Directory.open(tier.path, fingerprint, config.block_tokens, rank)
    try:
        executor = DaemonExecutor(1, "tieredkv-index")
        try:
            return Disk(directory, DurableIndex(directory.index_path, executor), executor)
        except BaseException:
            executor.close(1.0)
            raise
    except BaseException:
        directory.close()
        raise


def nvme_config(config: Config) -> NvmeConfig | None:
    last = config.tiers[-1]
    return last if isinstance(last, NvmeConfig) else None


def load_policies(config: Config) -> list[type]:
    """The policy class of each tier; PluginError if one cannot be loaded."""
    chosen = [tier.eviction or config.eviction for tier in config.tiers]
    return [load_plugin(POLICIES, eviction.policy, BUILTIN) for eviction in chosen]


def build(
    config: Config,
    fingerprint: Fingerprint,
    disk: Disk | None,
    block_bytes: int,
    wrap: WrapTier | None,
) -> Parts:
    """Tiers and planner for blocks of this size; the index's blocks are adopted.

    Raises CapacityError, ConfigError, PluginError, FormatError; nothing stays open then.
    """
    directory = None
    if disk is not None:
        directory = disk.directory
        if disk.index.block_bytes is not None:
            disk.index.set_block_bytes(block_bytes)  # refuses another size before tiers open
    load_policies(config)  # before memory and files are taken
    identity = pool_identity(config, fingerprint, 0)
    tiers = build_tiers(config, directory, block_bytes, identity)
    shared = None
    try:
        if disk is not None and isinstance(tiers[-1], NvmeTier):
            disk.index.set_map_limit(tiers[-1].index_bytes)
        spec = mooncake_config(config)
        pool = next((tier for tier in tiers if isinstance(tier, MooncakeTier)), None)
        if spec is not None and pool is not None:
            shared = catalogue(spec, pool.client, [pool.identity], block_bytes)
            pool.refused = shared.doomed
        tiers = tiers if wrap is None else [wrap(tier) for tier in tiers]
        planner = build_planner(config, tiers, disk, block_bytes)
    except BaseException:
        if shared is not None:
            shared.close()
        for tier in reversed(tiers):
            tier.close()
        raise
    return Parts(tiers, planner, block_bytes, shared)


def build_tiers(
    config: Config,
    directory: Directory | None,
    block_bytes: int,
    identity: str,
    ranks: int = 1,
) -> list[Tier]:
    """The tiers, fastest first; with `ranks` > 1, one rank's equal share of each. `identity`:
    all that makes the bytes of equal keys differ, for tiers that others see.

    Raises CapacityError, ConfigError, PluginError, DirectoryError; nothing stays open then.
    """
    tiers: list[Tier] = []
    try:
        for spec in config.tiers:
            tiers.append(_tier(spec, block_bytes, directory, identity, ranks))
        for pool in (tier for tier in tiers if isinstance(tier, MooncakeTier)):
            for tier in tiers:
                if isinstance(tier, DramTier):
                    pool.register(*tier.memory)
        for disk in (tier for tier in tiers if isinstance(tier, NvmeTier) and tier.device):
            for tier in tiers:
                if isinstance(tier, HbmTier) and tier.device:
                    disk.register(tier.tensor)
    except BaseException:
        for tier in reversed(tiers):
            tier.close()
        raise
    return tiers


def build_planner(
    config: Config, tiers: Sequence[Slots], disk: Disk | None, block_bytes: int
) -> Planner:
    """A planner for these tiers that has adopted what the index holds."""
    planner = _planner(config, tiers, load_policies(config), disk, block_bytes)
    if disk is not None:
        found = planner.recover(disk.index.load(tiers[-1].slots))
        log.info("tier %s: recovered %d blocks", tiers[-1].name, found)
        disk.index.set_block_bytes(block_bytes)  # last: a size that cannot work binds nobody
    return planner


def _planner(
    config: Config,
    tiers: Sequence[Slots],
    policies: list[type],
    disk: Disk | None,
    block_bytes: int,
) -> Planner:
    nvme = nvme_config(config)
    levels = []
    for spec, tier, policy in zip(config.tiers, tiers, policies, strict=True):
        eviction = spec.eviction or config.eviction
        capacity = tier.slots * block_bytes
        levels.append(
            Level(
                tier.name,
                _policy(policy, eviction.policy, capacity, block_bytes, eviction.seed),
                tier.slots,
                durable=tier.durable and spec is nvme,
                shared=isinstance(spec, MooncakeConfig),
                accepts=not (spec is nvme and nvme.write == "off"),
            )
        )
    events = EventLog(config.events) if config.events else None
    residency = Residency(levels, block_bytes, events)
    learners = [level for level in levels if isinstance(level.policy, DelayPolicy)]
    admission = _admission(config)
    pool = mooncake_config(config)
    pins = pool is not None and pool.soft_pin
    learns = learners or pins or isinstance(admission, DelayAdmission)
    model = _model(disk) if learns else None
    if model is not None and isinstance(admission, DelayAdmission):
        admission.model = model
    guards = [_guard(level, model, block_bytes) for level in learners if model is not None]
    return Planner(
        residency,
        Room(residency, admission, WATERMARK, _write_budget(config, block_bytes)),
        boot=disk.index.boot if disk else 0,
        epoch=disk.index.epoch if disk else 0,
        through=nvme is not None and nvme.write == "through",
        model=model,
        guards=guards,
        promotion_budget=config.promotion.budget / block_bytes,
    )


def _model(disk: Disk | None) -> DelayModel:
    """What an earlier process has learned is kept in the index."""
    model = DelayModel()
    known = None if disk is None else disk.index.statistics()
    if known is not None:
        try:
            model.restore(known)
        except FormatError as error:
            log.warning("learning delays anew: %s", error)
    return model


def _write_budget(config: Config, block_bytes: int) -> TokenBucket | None:
    """Blocks that may be written to the nvme tier. Raises CapacityError."""
    nvme = nvme_config(config)
    if nvme is None or not nvme.write_budget:
        return None
    if nvme.write_budget < 2 * block_bytes:
        raise CapacityError(
            f"tier {nvme.label!r}: write_budget of {nvme.write_budget} bytes a day is less than "
            f"two blocks of {block_bytes}: raise it, or set 0 for no limit"
        )
    batch = max(1, config.mover.batch // block_bytes)
    return TokenBucket.daily(nvme.write_budget / block_bytes, batch)


def _guard(level: Level, model: DelayModel, block_bytes: int) -> Guard:
    """Lets the tier's `delay` policy decide as long as its shadow hits more than LRU's."""
    slots = shadow_slots(level.slots)
    shadow = DelayPolicy(slots * block_bytes, block_bytes)
    shadow.use(model)
    guard = Guard(LruPolicy(slots * block_bytes, block_bytes), shadow, level.slots, block_bytes)
    assert isinstance(level.policy, DelayPolicy)
    level.policy.use(model, guard.trusted)
    return guard


def _policy(kind: type, name: str, capacity: int, block_bytes: int, seed: int) -> EvictionPolicy:
    try:
        policy: EvictionPolicy = kind(capacity, block_bytes, seed)
    except Exception as error:  # foreign code
        raise PluginError(f"policy {name!r} cannot be constructed: {error}") from error
    _implements(policy, name, "record", "forget", "victims")
    return policy


def _tier(
    spec: TierConfig, block_bytes: int, directory: Directory | None, identity: str, ranks: int
) -> Tier:
    capacity = (spec.capacity or pool_share(spec)) // ranks
    if capacity < block_bytes:
        share = f" (of {spec.capacity} for {ranks} ranks)" if ranks > 1 else ""
        raise CapacityError(
            f"tier {spec.label!r} of {capacity} bytes{share} holds no block of {block_bytes}: "
            "raise its capacity"
        )
    if isinstance(spec, HbmConfig):
        return HbmTier(spec.label, capacity, block_bytes, spec.device)
    if isinstance(spec, DramConfig):
        return DramTier(spec.label, capacity, block_bytes, spec.copy_threads, spec.pin)
    if isinstance(spec, NvmeConfig):
        assert directory is not None
        return NvmeTier(
            directory,
            spec.label,
            block_bytes,
            spec.capacity,
            min_free=spec.min_free,
            engine=spec.engine,
            segment=spec.segment,
            ranks=ranks,
        )
    if isinstance(spec, MooncakeConfig):
        return mooncake_tier(spec, capacity, block_bytes, identity)
    assert isinstance(spec, PluginTierConfig)
    return _plugin_tier(spec, capacity, block_bytes)


def _plugin_tier(spec: PluginTierConfig, capacity: int, block_bytes: int) -> Tier:
    kind = load_plugin(TIERS, spec.kind, {})
    try:
        tier: Tier = kind(spec.label, capacity, block_bytes, **spec.options)
    except Exception as error:  # foreign code
        raise PluginError(f"tier {spec.kind!r} cannot be constructed: {error}") from error
    _implements(tier, spec.kind, "write", "read", "views", "close", "slots", "inline", "durable")
    return tier


def _admission(config: Config) -> Admission | None:
    nvme = nvme_config(config)
    if nvme is None or nvme.admission == "all":
        return None
    name = nvme.admission
    kind = load_plugin(ADMISSIONS, name, {"delay": DelayAdmission})
    try:
        admission: Admission = kind()
    except Exception as error:  # foreign code
        raise PluginError(f"admission {name!r} cannot be constructed: {error}") from error
    _implements(admission, name, "admit")
    return admission


def _implements(plugin: Any, name: str, *members: str) -> None:
    missing = [member for member in members if not hasattr(plugin, member)]
    if missing:
        raise PluginError(f"plug-in {name!r} lacks {', '.join(missing)}: implement its protocol")
