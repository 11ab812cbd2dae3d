"""The directory of an nvme tier. No lock is taken: a store may be running in it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tieredkv.config import NvmeConfig
from tieredkv.doctor import system
from tieredkv.doctor.finding import Finding, note, ok, problem, size, warning
from tieredkv.errors import DirectoryError

PREFIX = ".tieredkv-doctor-"
"""Of the directory for the test page. A store takes it for somebody else's and leaves it alone."""
SLOWER = {
    "portable": "a filesystem with O_DIRECT, such as ext4 or xfs, is faster",
    "compat": "see the rows of gds; engine: auto takes what this machine has",
}
"""What to do about an engine that does its work by more copies."""
READABLE = os.R_OK | os.X_OK
FILESYSTEMS = {
    "tmpfs": "it is memory: name a directory on a drive",
    "ramfs": "it is memory: name a directory on a drive",
    "overlay": "it goes with the container: mount a volume",
    "nfs": "it is on another machine: name a directory on a local drive",
    "nfs4": "it is on another machine: name a directory on a local drive",
    "cifs": "it is on another machine: name a directory on a local drive",
    "smb3": "it is on another machine: name a directory on a local drive",
}
"""Where an nvme tier works, and is not what one wants."""


def disk(tier: NvmeConfig) -> Iterator[Finding]:
    """Everything about the tier's directory."""
    path = Path(os.path.realpath(tier.path))
    place = _existing(path)
    yield _filesystem(tier, path, place)
    yield from _access(tier, place)
    yield from _space(tier, path, place)
    if os.access(place, READABLE):
        yield from _users(tier, path)
    yield from _device(tier, place)


def _existing(path: Path) -> Path:
    """The path, or the nearest of its parents that exists."""
    return next((place for place in (path, *path.parents) if os.path.exists(place)), Path("/"))


def _filesystem(tier: NvmeConfig, path: Path, place: Path) -> Finding:
    kind, source = mount_of(place)
    state = "" if place == path else f", to be created in {place}"
    found = f"{tier.path}{state}, {kind} on {source}"
    if kind in FILESYSTEMS:
        return warning(f"{tier.label} path", found=found, remedy=FILESYSTEMS[kind])
    return ok(f"{tier.label} path", found=found)


def mount_of(path: Path) -> tuple[str, str]:
    """Type and source of the filesystem that an absolute path is on."""
    best, answer = -1, ("a filesystem of unknown type", "an unknown device")
    for line in system.text(system.PROC / "self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4].encode().decode("unicode_escape")  # \040 for a space
        depth = len(Path(point).parts)
        if path.is_relative_to(point) and depth >= best:  # of equal ones the last is on top
            best, (kind, source) = depth, right.split()[:2]
            answer = kind, source
    return answer


def _access(tier: NvmeConfig, place: Path) -> Iterator[Finding]:
    """Write a test page as the tier will, in a directory of our own."""
    from tieredkv.tiers.nvme.lock import refused
    from tieredkv.tiers.nvme.selection import select

    label = f"{tier.label} access"
    try:
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=place) as ours:
            engine, reason = select(tier.engine, Path(ours))
            engine.close()
    except OSError as error:
        found, _, remedy = str(refused(place, error)).rpartition("; ")
        yield problem(label, found=found, remedy=remedy)
    except DirectoryError as error:
        found, _, remedy = str(error).removeprefix(f"{ours}: ").rpartition("; ")
        yield problem(label, found=found or str(error), remedy=remedy or "check the filesystem")
    else:
        found = f"{engine.name}: {reason}"
        if engine.name in ("direct", "gds") or tier.engine == engine.name:
            yield ok(label, found=found)
        else:
            yield warning(label, found=found, remedy=SLOWER[engine.name])


def _space(tier: NvmeConfig, path: Path, place: Path) -> Iterator[Finding]:
    from tieredkv.tiers.nvme.usage import disk_usage

    stat = os.statvfs(place)
    free = stat.f_bavail * stat.f_frsize
    used = sum(disk_usage(found) for found in _directories(path))
    more, room = max(0, tier.capacity - used), max(0, free - tier.min_free)
    found = (
        f"{size(free)} free, of which min_free keeps {size(tier.min_free)};"
        f" {size(used)} of {size(tier.capacity)} in use"
    )
    label = f"{tier.label} space"
    if room >= more:
        yield ok(label, found=found)
    elif room + used < min(tier.segment, tier.capacity):
        remedy = "free space, or lower min_free: no segment fits"
        yield problem(label, found=found, remedy=remedy)
    else:
        remedy = f"lower capacity, or free space: the tier stops growing at {size(used + room)}"
        yield warning(label, found=found, remedy=remedy)


def _users(tier: NvmeConfig, path: Path) -> Iterator[Finding]:
    from tieredkv.tiers.nvme.usage import lock_files

    label = f"{tier.label} use"
    directories = _directories(path)
    holders: dict[int, Path] = {}
    for directory in directories:
        for pid in lock_holders(lock_files(directory)):
            holders.setdefault(pid, directory)
    found = f"{len(directories)} models' directories" if directories else "no model's directory"
    if not holders:
        yield ok(label, found=f"{found}, none in use" if directories else f"{found} yet")
        return
    for pid, directory in holders.items():
        name = system.text(system.PROC / str(pid) / "comm").strip() or "unknown"
        where = directory.relative_to(path)
        short = f"{where.parent / where.name[:12]}"
        yield note(
            label,
            found=f"{found}, {short}... in use by process {pid} ({name})",
            remedy="for the same model, stop it first, or give this store another directory",
        )


def _directories(path: Path) -> list[Path]:
    """Of all fingerprints, those of vLLM's engines included, which are one level deeper."""
    from tieredkv.tiers.nvme.usage import fingerprint_directories

    if not os.path.isdir(path) or not os.access(path, READABLE):
        return []
    found = fingerprint_directories(path)
    for inner in sorted(path.iterdir()):
        if inner not in found and inner.is_dir() and os.access(inner, READABLE):
            found += fingerprint_directories(inner)
    return found


def lock_holders(files: Iterable[Path]) -> set[int]:
    """The processes that hold a lock on one of these, by the kernel's list, which shows those
    of this container only."""
    inodes = {}
    for file in files:
        try:
            stat = file.stat()
        except OSError:
            continue
        inodes[stat.st_ino] = (os.major(stat.st_dev), os.minor(stat.st_dev)), file
    found = set()
    for line in system.text(system.PROC / "locks").splitlines():
        match line.split():
            case [_, "FLOCK", _, _, pid, place, *_]:
                major, minor, inode = place.split(":")
                known = inodes.get(int(inode))
                # btrfs tells programs another device than it tells the kernel
                same = known and (int(major, 16), int(minor, 16)) == known[0]
                if known and (same or system.text(known[1]).strip() == pid):
                    found.add(int(pid))
    return found


def _device(tier: NvmeConfig, place: Path) -> Iterator[Finding]:
    """A hint where the drive turns; nothing where the kernel does not say."""
    number = os.stat(place).st_dev
    node = system.SYS / f"dev/block/{os.major(number)}:{os.minor(number)}"
    for queue in (node / "queue", Path(os.path.realpath(node)).parent / "queue"):  # a partition
        rotational = system.text(queue / "rotational").strip()
        if rotational:
            name = queue.resolve().parent.name
            break
    else:
        return
    if rotational == "0":
        yield ok(f"{tier.label} device", found=f"{name}, solid-state")
        return
    remedy = "name a directory on a solid-state drive (virtual disks can be one and say otherwise)"
    yield note(
        f"{tier.label} device", found=f"{name} says that it is a rotating disk", remedy=remedy
    )
