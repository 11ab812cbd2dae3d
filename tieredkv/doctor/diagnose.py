"""Which checks there are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from tieredkv.config import Config, HbmConfig, MooncakeConfig, NvmeConfig
from tieredkv.doctor import disk, environment, gpu, limits, pool, software
from tieredkv.doctor.examine import examine
from tieredkv.doctor.finding import Check, Finding

SLOW = 10.0
"""Seconds for what loads large libraries: torch takes some on an idle core."""
TRIAL = 70.0
"""Seconds for a directory in which GPUDirect Storage is tried: the trial is given 60."""


def diagnose(file: Path | None = None) -> list[Finding]:
    """Everything there is to say of this machine, and of a configuration: `file`, else the one
    that TIEREDKV_CONFIG_FILE names. Takes less than 15 s, and where GPUDirect Storage is tried
    and hangs, 75 s. Changes nothing."""
    config, findings = environment.configuration(file)
    return [*findings, *examine(list(checks(config)))]


def checks(config: Config | None) -> Iterator[Check]:
    """In the order of their rows."""
    tiers = config.tiers if config else ()
    yield Check("environment", partial(environment.environment, config))
    yield Check("versions", software.versions)
    hbm = next((tier for tier in tiers if isinstance(tier, HbmConfig)), None)
    yield Check(
        "gpu", partial(gpu.gpu, hbm), SLOW, remedy="see whether nvidia-smi answers; restart it all"
    )
    yield Check("gds", gpu.gds)
    yield Check("locked memory", partial(limits.memlock, config))
    yield Check("open files", partial(limits.open_files, config))
    yield Check("huge pages", partial(limits.huge_pages, config))
    yield Check("memory", partial(limits.memory, config))
    for tier in tiers:
        if isinstance(tier, MooncakeConfig):
            yield Check(f"{tier.label} library", partial(pool.library, tier), SLOW)
            yield Check(f"{tier.label} master", partial(pool.master, tier))
            yield Check(f"{tier.label} rdma", partial(pool.rdma, tier))
        elif isinstance(tier, NvmeConfig):
            tried = tier.engine in ("auto", "gds") and find_spec("kvikio") is not None
            wait = (TRIAL,) if tried else ()
            yield Check(f"{tier.label} path", partial(disk.disk, tier), *wait)
