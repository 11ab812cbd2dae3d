"""Limits of the process and of the machine, beside what the tiers take."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator

from tieredkv.config import Config, DramConfig, HbmConfig, MooncakeConfig, NvmeConfig
from tieredkv.doctor import system
from tieredkv.doctor.finding import Finding, note, ok, problem, size, warning

OTHER_FILES = 128
"""Open files of a process beside its segments."""
CAP_IPC_LOCK = 1 << 14


def memlock(config: Config | None) -> Iterator[Finding]:
    """RDMA counts what it registers against this limit, unless the process is privileged."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = "no limit" if limit == resource.RLIM_INFINITY else size(limit)
    if limit == resource.RLIM_INFINITY or config is None:
        yield ok("locked memory", found=found)
        return
    dram = sum(tier.capacity for tier in config.tiers if isinstance(tier, DramConfig))
    pool = next((tier for tier in config.tiers if isinstance(tier, MooncakeConfig)), None)
    remedy = "ulimit -l unlimited, LimitMEMLOCK=infinity, docker run --ulimit memlock=-1"
    if pool is not None and pool.protocol == "rdma":
        need = dram + (pool.segment or 16 << 20)
        found += f", RDMA registers {size(need)}"
        if need > limit and not _privileged():
            yield problem("locked memory", found=found, remedy=remedy)
            return
    elif system.has_nvidia() and _pinned(config) > limit and not _privileged():
        found += f", CUDA is asked to page-lock {size(_pinned(config))}"
        remedy = f"if the log says that the slab is not page-locked: {remedy}"
        yield note("locked memory", found=found, remedy=remedy)
        return
    yield ok("locked memory", found=found)


def _pinned(config: Config) -> int:
    return sum(
        tier.capacity
        for tier in config.tiers
        if isinstance(tier, DramConfig) and tier.pin == "auto"
    )


def _privileged() -> bool:
    status = system.text(system.PROC / "self/status")
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(match and int(match[1], 16) & CAP_IPC_LOCK)


def open_files(config: Config | None) -> Iterator[Finding]:
    """Each segment is an open file."""
    from tieredkv.tiers.nvme.segments import MAX_SEGMENTS  # brings numpy

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = hard if soft == resource.RLIM_INFINITY else soft
    disk = next((t for t in config.tiers if isinstance(t, NvmeConfig)), None) if config else None
    if limit == resource.RLIM_INFINITY:
        yield ok("open files", found="no limit")
        return
    segments = 0 if config else MAX_SEGMENTS
    if disk is not None:
        segments = min(MAX_SEGMENTS, -(-disk.capacity // disk.segment))
    need = OTHER_FILES + segments
    if limit >= need:
        yield ok("open files", found=str(limit))
        return
    bad = problem if disk is not None else note
    remedy = f"ulimit -n {max(4096, need)} (LimitNOFILE), or larger segments"
    yield bad(
        "open files", found=f"{limit}, the nvme tier can take {segments} segments", remedy=remedy
    )


def huge_pages(config: Config | None) -> Iterator[Finding]:
    """The slab asks for transparent huge pages."""
    file = system.SYS / "kernel/mm/transparent_hugepage/enabled"
    match = re.search(r"\[(\w+)\]", system.text(file))
    if match is None:
        yield note("huge pages", found="the kernel has none", remedy="copies of dram are slower")
    elif match[1] == "never":
        slow = warning if config and any(t.kind == "dram" for t in config.tiers) else note
        remedy = f"echo madvise > {file}: copies of dram are faster"
        yield slow("huge pages", found="never", remedy=remedy)
    else:
        yield ok("huge pages", found=match[1])


def memory(config: Config | None) -> Iterator[Finding]:
    """What the tiers take of host memory; in each process that opens a store."""
    total, available = _meminfo("MemTotal"), _meminfo("MemAvailable")
    limits = {"the machine": total, "the cgroup": cgroup_limit(), "ulimit -v": _address_space()}
    name, limit = min(
        ((name, limit) for name, limit in limits.items() if limit), key=lambda item: item[1]
    )
    found = f"{size(limit)} in {name}, {size(available)} available"
    need = sum(_taken(config)) if config else 0
    if need:
        found += f"; the tiers take {size(need)}"
    if need > limit:
        raising = "" if limit == total else f", or raise the limit of {name}"
        remedy = f"lower the capacities{raising}: the kernel would end the process"
        yield problem("memory", found=found, remedy=remedy)
    elif need > available:
        remedy = "see what else uses memory (a store that runs already?), or lower the capacities"
        yield warning("memory", found=found, remedy=remedy)
    else:
        yield ok("memory", found=found)


def _taken(config: Config) -> Iterator[int]:
    for tier in config.tiers:
        if isinstance(tier, DramConfig):
            yield tier.capacity
        elif isinstance(tier, MooncakeConfig):
            yield tier.segment
        elif isinstance(tier, HbmConfig):
            cuda = tier.device != "cpu" and system.has_nvidia()
            yield 0 if cuda else tier.capacity


def cgroup_limit() -> int | None:
    """The smallest limit of memory among the control groups of this process, of either version."""
    root = system.SYS / "fs/cgroup"
    found = []
    for line in system.text(system.PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        base, name = (root, "memory.max")
        if controllers:
            if "memory" not in controllers.split(","):
                continue
            base, name = root / "memory", "memory.limit_in_bytes"
        group = base / path.lstrip("/")  # inside a container it need not be visible
        for place in (group, *group.parents):
            text = system.text(place / name).strip()
            found += [int(text)] if text.isdigit() else []
            if place == base:
                break
    return min(found, default=None)


def _address_space() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _meminfo(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", system.text(system.PROC / "meminfo"), re.MULTILINE)
    return int(match[1]) << 10 if match else 0
