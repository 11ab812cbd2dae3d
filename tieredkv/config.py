"""The configuration schema: one model for YAML, JSON and Python.

Every way to build a `Config` (`load`, `model_validate`, `Config(...)`) raises `ConfigError`
with one line per problem, naming the source, the key, the value and the remedy. All models
are frozen, hence safe to share between threads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tieredkv.config_errors import Origin, explain
from tieredkv.errors import CapacityError, ConfigError
from tieredkv.plugins import ADMISSIONS, POLICIES, TIERS, unknown_plugin

BUILTIN_POLICIES = (
    *("lru", "fifo", "lfu", "arc", "s3fifo", "sieve", "gdsf", "lhd", "ttl", "workload"),
    "delay",
)
BUILTIN_ADMISSIONS = ("all", "delay")


_SIZE_TEXT = re.compile(r"\s*[0-9]*\.?[0-9]+\s*[A-Za-z]*\s*")


def _size(value: object) -> object:
    """pydantic's ByteSize takes True for 1 and "1,000GiB" for one byte; this does not."""
    if isinstance(value, bool) or (isinstance(value, str) and not _SIZE_TEXT.fullmatch(value)):
        raise PydanticCustomError("byte_size", "no size")
    return value


_LARGEST = 1 << 60
Size = Annotated[ByteSize, BeforeValidator(_size), Field(ge=0, le=_LARGEST)]
"""Bytes: an integer, or text with a unit ("40GiB", "512 MB")."""
Positive = Annotated[ByteSize, BeforeValidator(_size), Field(gt=0, le=_LARGEST)]
Seconds = Annotated[float, Field(gt=0, le=365 * 86400)]
"""Up to a year: longer waits overflow the platform's timers."""


class Model(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


class EvictionConfig(Model):
    """Which blocks leave a full tier."""

    policy: str = "lru"
    """`lru`, `fifo`, `lfu`, `arc`, `s3fifo`, `sieve`, `gdsf`, `lhd`, `ttl`, `workload`, the name
    of an entry point (group `tieredkv.policies`) or `module:Class`."""
    seed: int = 0

    @field_validator("policy")
    @classmethod
    def _known(cls, value: str) -> str:
        return _plugin(POLICIES, value, BUILTIN_POLICIES)


METRICS_PORT = 9003
"""Where a Mooncake master serves its metrics unless it is told otherwise."""
_ADDRESS = r"^(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$"


class TierConfig(Model):
    """Fields that all kinds share."""

    name: str | None = Field(default=None, pattern=r"^[a-z][a-z0-9_-]{0,31}$")
    """Label in metrics and results; the kind by default."""
    kind: str
    capacity: Positive
    """Bytes of payload (dram, hbm) or of the whole directory (nvme). A hard limit."""
    eviction: EvictionConfig | None = None
    """Overrides the global `eviction` for this tier."""

    @property
    def label(self) -> str:
        """`name`, else the kind (of `module:Class` the class, in lower case)."""
        return self.name or self.kind.rpartition(":")[2].rpartition(".")[2].lower()


class HbmConfig(TierConfig):
    """Slots in one torch tensor."""

    kind: Literal["hbm"]
    device: str = "auto"
    """`auto` (cuda if present, else cpu), or a torch device."""


class DramConfig(TierConfig):
    """Slots in one slab of host memory."""

    kind: Literal["dram"]
    copy_threads: int = Field(default=2, ge=1, le=64)
    """Threads that share the copies of one large batch."""
    pin: Literal["auto", "off"] = "auto"
    """`auto`: page-lock the slab when CUDA is present."""


class NvmeConfig(TierConfig):
    """Slots in preallocated segment files under one directory, with a durable index."""

    kind: Literal["nvme"]
    path: Path
    min_free: Size = ByteSize(1 << 30)
    """Bytes of the filesystem that stay free: the tier stops growing before."""
    engine: Literal["auto", "gds", "direct", "portable"] = "auto"
    """`gds` kvikio, `direct` O_DIRECT, `portable` buffered; `auto` falls back with a warning."""
    segment: Positive = ByteSize(256 << 20)
    """Size of one segment file."""
    write: Literal["on_evict", "through", "off"] = "on_evict"
    """When blocks of faster tiers are written: when they are about to be evicted (and in
    the background while the disk is idle), with every put, or never."""
    admission: str = "all"
    """Which runs are worth writing: `all`, `delay` (those that somebody will probably come back
    to), or `module:Class` or entry point (group `tieredkv.admissions`) of an `Admission`."""
    write_budget: Size = ByteSize(0)
    """Bytes of blocks written in any 24 hours, of all ranks together; 0 for no limit. What is
    over budget is not written until it is used again or budget comes."""

    @field_validator("admission")
    @classmethod
    def _known(cls, value: str) -> str:
        return _plugin(ADMISSIONS, value, BUILTIN_ADMISSIONS)


class MooncakeConfig(TierConfig):
    """Objects in the memory of a Mooncake pool, shared with all that use the same master."""

    kind: Literal["mooncake"]
    capacity: Size = ByteSize(0)
    """Bytes of payload that are known here, whoever has put them; 0: 85 % of what the master
    counts in all when the tier opens."""
    master: str = Field(pattern=_ADDRESS)
    """`host:port` of the pool's master."""
    segment: Size = ByteSize(0)
    """Bytes of this process's memory that join the pool: 0 for none, else 16 MiB or more."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""
    """RDMA devices, separated by commas; by default the library chooses."""
    host: str | None = None
    """Address of this machine for the pool; by default the one that reaches the master."""
    metrics: str | None = Field(default=None, pattern=_ADDRESS)
    """`host:port` of the master's metrics; by default its host and port 9003."""
    soft_pin: bool = True
    """Keep what is put from the master's eviction for as long as its session is expected."""

    @property
    def meter_address(self) -> str:
        return self.metrics or self.master.rpartition(":")[0] + f":{METRICS_PORT}"

    @field_validator("segment")
    @classmethod
    def _large_enough(cls, value: int) -> int:
        if 0 < value < 16 << 20:
            raise PydanticCustomError("segment", "is too small: pass 0, or 16MiB or more")
        return value


class PluginTierConfig(TierConfig):
    """A tier of another package."""

    kind: str
    """Entry-point name (group `tieredkv.tiers`) or `module:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the plug-in as they are."""


def _plugin(group: str, ref: str, builtin: tuple[str, ...]) -> str:
    reason = unknown_plugin(group, ref, builtin)
    if reason:
        raise PydanticCustomError("plugin", "{reason}", {"reason": reason})
    return ref


class PromotionConfig(Model):
    """Copies of hit blocks into faster tiers."""

    enabled: bool = True
    budget: Size = ByteSize(0)
    """Bytes per second, 0 for no limit."""


class MoverConfig(Model):
    """Threads, queues and deadlines of the data path."""

    threads: int = Field(default=8, ge=1, le=256)
    """Threads that read and write tiers which can block."""
    load_queue: Positive = ByteSize(1 << 30)
    """Bytes of loads queued or running; beyond it a get returns BUSY."""
    store_queue: Positive = ByteSize(256 << 20)
    """Bytes of stores queued or running; beyond it stores are dropped and counted."""
    batch: Positive = ByteSize(8 << 20)
    """Largest single transfer."""
    get_deadline: Seconds = 30.0
    """Seconds a get may take when the call gives no deadline."""
    put_deadline: Seconds = 30.0
    """Seconds a put may take to reach the first tier."""
    room_wait: float = Field(default=0.1, ge=0, le=365 * 86400)
    """Seconds a put waits for demotions to make room before cold blocks are dropped."""
    close_deadline: Seconds = 30.0
    """Seconds that close() waits for work in flight and for the write-back."""


class ConnectorConfig(Model):
    """What only the vLLM connector needs."""

    engine: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Sub-directory of the nvme path that is this engine's own, stable across restarts. By
    default `dp0`, `dp1`, ... by data-parallel rank: name engines that share a path."""
    load: Literal["async", "sync"] = "async"
    """`async`: requests wait for their blocks beside the running batch. `sync`: the step waits."""
    load_deadline: Seconds = 10.0
    """Seconds after which a load that has not ended counts as failed and is recomputed."""
    recompute: Literal["auto", "never"] = "auto"
    """`auto`: what takes longer to load than to compute is computed. `never`: all is loaded."""
    prefill_rate: int | None = Field(default=None, ge=1)
    """Tokens per second that the engine computes of a prompt; by default it is measured."""
    weights_id: str | None = None
    """Identity of the weights; by default a hash over the weight files."""
    stop_tokens: dict[int, str] = Field(default_factory=dict)
    """Token ids that end a turn -> category of what follows, e.g. {128008: tool}."""
    marker_tokens: dict[int, str] = Field(default_factory=dict)
    """Token ids in the output -> category: where they occur, the turn ended in a tool call."""


_BUILTIN_TIERS: dict[str, type[TierConfig]] = {
    "hbm": HbmConfig,
    "dram": DramConfig,
    "mooncake": MooncakeConfig,
    "nvme": NvmeConfig,
}
_PLUGIN = "<plugin>"
TIER_MODELS: Mapping[str, type[TierConfig]] = {**_BUILTIN_TIERS, _PLUGIN: PluginTierConfig}


def tier_tag(value: object) -> str | None:
    """The key of `TIER_MODELS` that parses this tier, or the reason why none does.

    None if it has no kind. The reason travels as pydantic's "invalid tag", so that a
    misspelt kind is one error and not a dozen about the keys beside it.
    """
    if not isinstance(value, Mapping | TierConfig):
        return f"{value!r:.60} is not a mapping such as {{kind: dram, capacity: 40GiB}}"
    kind = value.get("kind") if isinstance(value, Mapping) else value.kind
    if kind is None:
        return None
    if not isinstance(kind, str):
        return f"{kind!r} is not a text"
    if kind in _BUILTIN_TIERS:
        return kind
    return unknown_plugin(TIERS, kind, _BUILTIN_TIERS) or _PLUGIN


AnyTier = Annotated[
    Annotated[HbmConfig, Tag("hbm")]
    | Annotated[DramConfig, Tag("dram")]
    | Annotated[MooncakeConfig, Tag("mooncake")]
    | Annotated[NvmeConfig, Tag("nvme")]
    | Annotated[PluginTierConfig, Tag(_PLUGIN)],
    Discriminator(tier_tag),
]


class Config(Model):
    """The whole configuration. One dial is enough to start: a capacity per tier."""

    block_tokens: int = Field(default=256, ge=1, le=1 << 20)
    """Tokens per block."""
    block_bytes: Positive | None = None
    """Bytes per block; by default taken from the NVMe directory or the first put."""
    tiers: tuple[AnyTier, ...]
    """Fastest first; at most one nvme, and it is the last."""
    eviction: EvictionConfig = EvictionConfig()
    promotion: PromotionConfig = PromotionConfig()
    mover: MoverConfig = MoverConfig()
    pin_ttl: Seconds = 300.0
    """Seconds after which a forgotten pin ends."""
    connector: ConnectorConfig = ConnectorConfig()
    events: int = Field(default=0, ge=0)
    """Residency events kept for `take_events()`; 0 turns them off."""

    @classmethod
    def load(cls, path: str | Path | None = None) -> Config:
        """Read a YAML or JSON file, apply `TIEREDKV_*` variables, validate.

        `path` None: the file that `TIEREDKV_CONFIG_FILE` names. Raises ConfigError, one
        line per problem, or CapacityError. `tieredkv.config_load` tells sources as well.
        """
        from tieredkv.config_load import load  # it imports the schema above

        return load(path).config

    @model_validator(mode="wrap")
    @classmethod
    def _one_error(
        cls, value: object, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        # ConfigError is no ValueError, so pydantic lets it through to every kind of caller.
        origin = (info.context or {}).get("origin", Origin())
        try:
            config = handler(value)
        except ValidationError as error:
            raise ConfigError(explain(error, origin, cls, TIER_MODELS)) from None
        problems = list(_contradictions(config, origin))
        if problems:
            raise ConfigError("\n".join(problems))
        _check_room(config, origin)
        return config


def _contradictions(config: Config, origin: Origin) -> Iterator[str]:
    """Rules that span several tiers, one line per breach."""
    if not config.tiers:
        where = origin.of(("tiers",))
        yield f"{where}: tiers is empty; name at least one, e.g. {{kind: dram, capacity: 40GiB}}"
    last = len(config.tiers) - 1
    owner: dict[str, int] = {}
    for i, tier in enumerate(config.tiers):
        where = f"{origin.of(('tiers', i, 'kind'))}: tiers[{i}]"
        if tier.label in owner:
            yield (
                f"{where}.name = {tier.label!r} is also the name of tiers[{owner[tier.label]}]; "
                "give each tier a name of its own"
            )
        owner.setdefault(tier.label, i)
        if tier.kind == "hbm" and i > 0:
            yield f"{where} is hbm, the fastest kind: there can be one, and it must be first"
        if tier.kind == "nvme" and i < last:
            yield f"{where} is nvme, the slowest kind: there can be one, and it must be last"
        if tier.kind == "mooncake" and "mooncake" in (t.kind for t in config.tiers[:i]):
            yield f"{where} is a second mooncake: there can be one; remove it"


def _check_room(config: Config, origin: Origin) -> None:
    if config.block_bytes is None:
        return
    for i, tier in enumerate(config.tiers):
        if 0 < tier.capacity < config.block_bytes:
            raise CapacityError(
                f"{origin.of(('tiers', i, 'capacity'))}: tiers[{i}].capacity = {tier.capacity} "
                f"holds no block of block_bytes = {config.block_bytes}; "
                "raise capacity or lower block_bytes"
            )
