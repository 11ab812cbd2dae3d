"""Damage of an LMDB data file that must be found before it is mapped.

A page that the file does not contain is a SIGBUS, not an error, so the size is compared with
the highest page of the newest meta page first. Being too short is no proof: LMDB does not
write pages that were allocated and freed in one transaction. Only then another process walks
all pages, and may die of it.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

from tieredkv.errors import DirectoryError

MAGIC = 0xBEEFC0DE
PAGE_HEADER = 16
META = struct.Struct("<II QQ II40x II40x QQ")  # magic version, address mapsize, 2 dbs, last txn
META_PAGES = 2
WALK_TIMEOUT = 120.0
WALK = """
import lmdb, os, sys
env = lmdb.open(sys.argv[1], readonly=True, lock=False, max_dbs=2)
env.copyfd(os.open(os.devnull, os.O_WRONLY), compact=True)
"""


class DamagedIndex(DirectoryError):
    """The index of a directory is damaged."""


def damage(path: Path) -> str | None:
    """What is wrong with the environment in directory `path`; None if it may be opened."""
    try:
        with (path / "data.mdb").open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(1 << 17)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"data.mdb cannot be read: {error}"
    if not size:
        return None  # a crash right after creation: LMDB starts it anew
    meta = _newest_meta(head)
    if (meta is not None and size >= (meta[1] + 1) * meta[0]) or _walk(path):
        return None
    if meta is None:
        return "data.mdb has no valid meta page"
    return f"data.mdb is truncated: {size} bytes end before page {meta[1]} of {meta[0]} bytes"


def _newest_meta(head: bytes) -> tuple[int, int] | None:
    """(page size, last page in use), or None unless both meta pages are valid."""
    found: list[tuple[int, int, int]] = []
    page = 0
    for _ in range(META_PAGES):
        at = (page if found else 0) + PAGE_HEADER
        if len(head) < at + META.size:
            return None
        magic, version, _, _, page, _, _, _, last_page, txn = META.unpack_from(head, at)
        if magic != MAGIC or version & 0xFFFF != 1 or not 512 <= page <= 65536:
            return None
        found.append((txn, page, last_page))
    return max(found)[1:]


def _walk(path: Path) -> bool:
    command = [sys.executable, "-c", WALK, str(path)]
    try:
        return not subprocess.run(command, capture_output=True, timeout=WALK_TIMEOUT).returncode
    except (OSError, subprocess.TimeoutExpired):
        return False


def set_aside(path: Path) -> Path:
    """Rename a damaged environment to a free `<name>.corrupt-<n>`; returns that path."""
    n = 0
    while (target := path.with_name(f"{path.name}.corrupt-{n}")).exists():
        n += 1
    os.rename(path, target)
    sync_directory(path.parent)
    return target


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory survive a power loss."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
