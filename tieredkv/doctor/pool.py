"""A mooncake tier: its library, its master, and RDMA."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

from tieredkv.config import MooncakeConfig
from tieredkv.doctor import system
from tieredkv.doctor.finding import Finding, ok, problem, size, warning
from tieredkv.errors import ConfigError

CONNECT = 2.0
"""Seconds for a connection to the master."""
FORCE = "MC_FORCE_HCA"


def library(tier: MooncakeConfig) -> Iterator[Finding]:
    """Can it be loaded?"""
    from tieredkv.tiers.mooncake.client import load_library

    label = f"{tier.label} library"
    try:
        load_library()
    except ConfigError as error:
        found, _, remedy = str(error).partition("): ")
        yield problem(label, found=f"{found})", remedy=remedy)
    else:
        yield ok(label, found="mooncake.store can be loaded")


def master(tier: MooncakeConfig) -> Iterator[Finding]:
    """Does it answer, and what does it say of the pool?"""
    host, _, port = tier.master.rpartition(":")
    label, start = f"{tier.label} master", time.monotonic()
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT) as connection:
            ours = connection.getsockname()[0]
    except OSError as error:
        remedy = "start the master, or correct `master`; a firewall may be in between"
        yield problem(label, found=f"{tier.master}: {error}", remedy=remedy)
    else:
        took = 1000 * (time.monotonic() - start)
        yield ok(label, found=f"{tier.master} accepts after {took:.1f} ms, from {ours}")
    yield _metrics(tier)


def _metrics(tier: MooncakeConfig) -> Finding:
    from tieredkv.tiers.mooncake.meter import Meter

    label, usage = f"{tier.label} metrics", Meter(tier.meter_address).read()
    # without a capacity of its own the tier takes it from there
    bad = warning if tier.capacity else problem
    if usage is None:
        found = f"{tier.meter_address} tells nothing of a pool"
        remedy = "set `metrics` to where the master serves them, or start it with --metrics_host"
        return bad(label, found=found, remedy=remedy)
    used, total = usage
    found = f"{tier.meter_address}: {size(used)} of {size(total)} in use"
    if not total:
        return bad(label, found=found, remedy="start an owner, which lends memory to the pool")
    if tier.capacity > total:
        remedy = "lower `capacity`, or leave it out"
        return warning(label, found=f"{found}, capacity {size(tier.capacity)}", remedy=remedy)
    return ok(label, found=found)


def rdma(tier: MooncakeConfig) -> Iterator[Finding]:
    """Its devices, and whether their absence would be noticed."""
    if tier.protocol != "rdma":
        return
    root = system.SYS / "class/infiniband"
    devices = sorted(os.listdir(root)) if root.is_dir() else []
    active = [name for name in devices if _active(name)]
    wanted = [name.strip() for name in tier.devices.split(",") if name.strip()]
    missing = [name for name in wanted if name not in devices]
    label, found = f"{tier.label} rdma", f"devices {', '.join(devices) or 'none'}"
    if not devices or missing:
        found += f"; configured {', '.join(wanted) or 'any'}"
        remedy = "install the drivers of the adapter, correct `devices`, or use protocol: tcp"
        yield problem(label, found=found, remedy=remedy)
    elif not set(wanted or devices) & set(active):
        remedy = "see ibv_devinfo: bring a port up"
        yield problem(label, found=f"{found}; no port of them is active", remedy=remedy)
    else:
        yield ok(label, found=f"{found}; active {', '.join(active)}")
    if os.environ.get(FORCE) != "1":
        remedy = f"set {FORCE}=1: without a usable device RDMA silently becomes TCP"
        yield warning(label, found=f"{FORCE} is not 1", remedy=remedy)


def _active(device: str) -> bool:
    ports = (system.SYS / "class/infiniband" / device / "ports").glob("*/state")
    return any("ACTIVE" in system.text(port) for port in ports)
