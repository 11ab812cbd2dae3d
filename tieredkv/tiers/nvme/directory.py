"""The directory of one fingerprint: its name, its locks, and its share of the root.

<root>/tieredkv.lock                                  flock while somebody grows
<root>/<fingerprint digest in hex>/fingerprint.json   what the name means
                                   LOCK               flock of the owner of the index
                                   index/             see tieredkv.index.durable
                                   rank-<r>/LOCK      flock of the owner of the segments
                                   rank-<r>/seg-000000.kv ...
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from tieredkv.errors import DirectoryError, DirectoryInUse
from tieredkv.index.damage import sync_directory
from tieredkv.keys import fingerprint_digest
from tieredkv.tiers.nvme import usage
from tieredkv.tiers.nvme.lock import FileLock, refused
from tieredkv.types import Fingerprint

log = logging.getLogger(__name__)

PROBE_WAIT = 0.2  # seconds; another store that looks for room holds a free lock for a moment
GROWTH_WAIT = 5.0
TEMPORARY = re.compile(r"(seg-\d{6}\.kv|fingerprint\.json(\.\d+)?|probe)\.tmp")
LEFTOVER = re.compile(r"index\.corrupt-\d+|seg-\d{6}\.kv\.quarantine")


class Directory:
    """An open fingerprint directory; the locks are held until `close`. Thread-safe."""

    def __init__(self, path: Path, digest: bytes, rank: int | None, index: bool) -> None:
        """Lock `path`, which exists. Use `open` or `attach`."""
        self.root = path.parent
        self.path = path
        self.digest = digest
        """Of the fingerprint, 32 bytes."""
        self.rank = rank
        self._pid = os.getpid()
        self._locks: list[FileLock] = []
        self._growing = threading.Lock()
        try:
            if index:
                self._locks.append(FileLock(path / usage.LOCK, PROBE_WAIT))
            if rank is not None:
                self.rank_path.mkdir(exist_ok=True)
                self._locks.append(FileLock(self.rank_path / usage.LOCK, PROBE_WAIT))
        except OSError as error:
            self.close()
            raise refused(path, error) from error
        except DirectoryError:
            self.close()
            raise

    @classmethod
    def open(
        cls,
        root: Path,
        fingerprint: Fingerprint,
        block_tokens: int,
        rank: int | None = 0,
        index: bool = True,
    ) -> Directory:
        """Create it if needed, and lock it.

        `index`: own the index. `rank`: own the segments of this rank, None for no segments.
        Whatever the fingerprint contains, the name below `root` is a digest. Raises
        DirectoryInUse naming the process that has it open, DirectoryError.
        """
        digest = fingerprint_digest(fingerprint, block_tokens)
        root = Path(root)
        try:
            root.mkdir(parents=True, exist_ok=True)
            path = root.resolve() / digest.hex()
            if path.is_symlink():
                raise DirectoryError(f"{path} is a symbolic link; remove it")
            path.mkdir(exist_ok=True)
            directory = cls(path, digest, rank, index)
        except OSError as error:
            raise refused(root, error) from error
        try:
            directory._mark(fingerprint, block_tokens)
            directory._remove_temporary(shared=index)
            if index:
                usage.remove_reclaimed(directory.root)
        except OSError as error:
            directory.close()
            raise refused(root, error) from error
        except DirectoryError:
            directory.close()
            raise
        return directory

    @classmethod
    def attach(cls, path: Path, rank: int = 0) -> Directory:
        """Lock an existing fingerprint directory, whose fingerprint is not known.

        Raises DirectoryInUse, or DirectoryError if `path` is no such directory.
        """
        path = Path(path).resolve()
        if usage.read_marker(path) is None:
            raise DirectoryError(f"{path} is no fingerprint directory: no valid {usage.MARKER}")
        return cls(path, bytes.fromhex(path.name), rank, True)

    @property
    def index_path(self) -> Path:
        return self.path / "index"

    @property
    def rank_path(self) -> Path:
        return self.path / f"rank-{self.rank}"

    @property
    def owned(self) -> bool:
        """False after `close`, and in a forked child, which must not write."""
        return bool(self._locks) and os.getpid() == self._pid

    def others(self) -> int:
        """Bytes of the root that cannot be had: fingerprints that other processes have open."""
        return sum(usage.disk_usage(path) for path in self._siblings() if usage.in_use(path))

    @contextmanager
    def growth(self, need: int, capacity: int, reserve: int) -> Iterator[bool]:
        """Whether `need` more bytes fit into the root; nobody else grows inside the block.

        The root may hold `capacity` bytes, of which the index of this fingerprint gets
        `reserve`. If room is needed, our set-aside files go first, then fingerprints that
        nobody has open, the longest unopened first.
        """
        if not self._growing.acquire(timeout=GROWTH_WAIT):
            yield False
            return
        try:
            root_lock = FileLock(self.root / usage.ROOT_LOCK, GROWTH_WAIT)
        except DirectoryInUse as error:
            self._growing.release()
            log.warning("%s: no growth now: %s", self.path, error)
            yield False
            return
        except BaseException:
            self._growing.release()
            raise
        try:
            yield self._make_room(need, capacity, reserve)
        finally:
            root_lock.close()
            self._growing.release()

    def close(self) -> None:
        """Give the locks back. Idempotent. Close the tier and the index before."""
        locks, self._locks = self._locks, []
        for lock in locks:
            lock.close()

    def _siblings(self) -> list[Path]:
        found = usage.fingerprint_directories(self.root)
        return [path for path in found if path.name != self.path.name]

    def _make_room(self, need: int, capacity: int, reserve: int) -> bool:
        if self._used(reserve) + need <= capacity:
            return True
        for path in (*self.path.iterdir(), *self.path.glob("rank-*/*")):
            if LEFTOVER.fullmatch(path.name):
                log.info("removing %s", path)
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for sibling in self._siblings():
            if self._used(reserve) + need <= capacity:
                break
            if usage.reclaim(sibling):
                log.info("reclaimed %s, which nobody has open", sibling)
        return self._used(reserve) + need <= capacity

    def _used(self, reserve: int) -> int:
        own_index = usage.disk_usage(self.index_path)
        frame = sum(os.lstat(p).st_blocks * 512 for p in (self.root, self.root / usage.ROOT_LOCK))
        own = usage.disk_usage(self.path) - own_index + max(own_index, reserve)
        return frame + own + sum(usage.disk_usage(path) for path in self._siblings())

    def _mark(self, fingerprint: Fingerprint, block_tokens: int) -> None:
        marker = self.path / usage.MARKER
        if usage.read_marker(self.path) is not None:
            return
        text = json.dumps(
            {
                "tieredkv": 1,
                "digest": self.digest.hex(),
                "fingerprint": asdict(fingerprint),
                "block_tokens": block_tokens,
            },
            indent=2,
        )
        # ranks come together: each writes a file of its own, and the last one stays
        tmp = marker.with_name(f"{marker.name}.{os.getpid()}.tmp")
        with tmp.open("w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp, marker)
        sync_directory(self.path)
        sync_directory(self.root)

    def _remove_temporary(self, *, shared: bool) -> None:
        """Of our rank; `shared`: also of the whole directory, where one process may clean."""
        paths = [*self.path.iterdir()] if shared else []
        if self.rank is not None:
            paths += self.rank_path.iterdir()
        for path in paths:
            if TEMPORARY.fullmatch(path.name):
                path.unlink()
