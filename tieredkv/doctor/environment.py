"""The configuration, and environment variables that change what it means."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from tieredkv.config import Config, MooncakeConfig, TierConfig
from tieredkv.config_load import FILE_VARIABLE, load, unknown_variables
from tieredkv.doctor.finding import Finding, note, ok, problem, size, warning
from tieredkv.errors import TieredKVError

CHECKSUM = "MOONCAKE_STORE_CHECKSUM"
OF_A_TIER = re.compile(r"TIEREDKV_TIERS_\d+_")


def configuration(file: Path | None) -> tuple[Config | None, list[Finding]]:
    """The configuration in `file`, else in the file that the environment names, and what is to
    be said of it. None if there is none, or if it is wrong."""
    source = file or os.environ.get(FILE_VARIABLE)
    if not source:
        remedy = f"name a file, or set {FILE_VARIABLE}: its tiers are then checked as well"
        return None, [note("configuration", found="none", remedy=remedy), *_homeless()]
    try:
        config = load(file).config
    except TieredKVError as error:
        return None, [_mistake(line) for line in str(error).splitlines()]
    tiers = ", ".join(_tier(tier) for tier in config.tiers)
    return config, [ok("configuration", found=f"{source}: {tiers}")]


def _tier(tier: TierConfig) -> str:
    return f"{tier.label} {size(tier.capacity)}" if tier.capacity else tier.label


def _mistake(line: str) -> Finding:
    found, _, remedy = line.rpartition("; ")
    if not found:
        found, remedy = line, "correct it: docs/configuration.md says what is valid"
    return problem("configuration", found=found, remedy=remedy)


def _homeless() -> Iterator[Finding]:
    """Variables that set no key, as far as that can be told without tiers."""
    for name, nearest in unknown_variables({}, os.environ).items():
        if not OF_A_TIER.match(name):
            remedy = f"unset it, or correct it: the nearest valid name is {nearest}"
            yield problem("environment", found=f"{name}: unknown variable", remedy=remedy)


def environment(config: Config | None) -> Iterator[Finding]:
    """Variables of other software."""
    rows = [*_checksum(), *_patience(config), *_hash_seed()]
    yield from rows or [ok("environment", found="no variable that would do harm")]


def _checksum() -> Iterator[Finding]:
    value = os.environ.get(CHECKSUM, "")
    if value.lower() not in ("", "0", "false", "off"):
        remedy = f"unset {CHECKSUM}: a pool is some twenty times slower, and blocks have checksums"
        yield warning("environment", found=f"{CHECKSUM}={value}", remedy=remedy)


def _patience(config: Config | None) -> Iterator[Finding]:
    """Deadlines of Mooncake that are longer than those that the tier sets."""
    if config is None or not any(isinstance(tier, MooncakeConfig) for tier in config.tiers):
        return
    from tieredkv.tiers.mooncake.client import PATIENCE

    for name, ours in PATIENCE.items():
        value = os.environ.get(name, ours)
        if not value.isdigit() or int(value) > int(ours):
            remedy = f"unset it: tieredkv sets {ours}, so that a frozen pool is noticed soon"
            yield note("environment", found=f"{name}={value}", remedy=remedy)


def _hash_seed() -> Iterator[Finding]:
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None and find_spec("vllm"):
        remedy = "keep it the same after each restart: vLLM's blocks are not found with another one"
        yield note("environment", found=f"PYTHONHASHSEED={seed}", remedy=remedy)
