"""What a root directory holds: directories of fingerprints, recognised by their marker.

Everything else in there is foreign: never touched, never counted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tieredkv.errors import DirectoryError
from tieredkv.tiers.nvme.lock import FileLock, is_free

MARKER = "fingerprint.json"
LOCK = "LOCK"
ROOT_LOCK = "tieredkv.lock"
RECLAIMED = ".tieredkv-reclaimed"
_NAME = re.compile(r"[0-9a-f]{64}")
_RECLAIMED = re.compile(rf"[0-9a-f]{{64}}{re.escape(RECLAIMED)}")


def read_marker(path: Path) -> dict[str, Any] | None:
    """The marker of a fingerprint directory; None if `path` is something else."""
    if not _NAME.fullmatch(path.name) or path.is_symlink():
        return None
    try:
        marker = json.loads((path / MARKER).read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(marker, dict) or marker.get("digest") != path.name:
        return None
    return marker


def fingerprint_directories(root: Path) -> list[Path]:
    """All of them, the longest unopened first."""
    found = [path for path in root.iterdir() if read_marker(path) is not None]
    return sorted(found, key=_last_opened)


def disk_usage(path: Path) -> int:
    """Allocated bytes of a tree with its directories, like `du`; 0 if it is not there."""
    try:
        total = os.lstat(path).st_blocks * 512
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    total += disk_usage(Path(entry.path))
                else:
                    total += os.lstat(entry.path).st_blocks * 512
    except FileNotFoundError:
        return 0  # removed meanwhile by its owner
    return total


def lock_files(path: Path) -> list[Path]:
    """Of a fingerprint directory and its ranks."""
    return [path / LOCK, *(rank / LOCK for rank in sorted(path.glob("rank-*")))]


def in_use(path: Path) -> bool:
    """Whether a process has the fingerprint directory, or a rank of it, open."""
    return not all(is_free(lock) for lock in lock_files(path))


def remove_reclaimed(root: Path) -> None:
    """Finish removals that were interrupted."""
    for path in root.iterdir():
        if _RECLAIMED.fullmatch(path.name) and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def reclaim(path: Path) -> bool:
    """Remove a fingerprint directory unless it is in use."""
    with ExitStack() as stack:
        try:
            for file in lock_files(path):
                stack.callback(FileLock(file).close)
        except DirectoryError:
            return False
        gone = path.with_name(path.name + RECLAIMED)
        try:
            os.rename(path, gone)
        except OSError:
            return False
        shutil.rmtree(gone, ignore_errors=True)
    return True


def _last_opened(path: Path) -> float:
    try:
        return (path / LOCK).stat().st_mtime
    except OSError:
        return 0.0
