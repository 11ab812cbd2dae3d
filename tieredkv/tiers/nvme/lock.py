"""flock, with an error that says who holds it."""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from pathlib import Path

from tieredkv.errors import DirectoryError, DirectoryInUse

POLL = 0.01

_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """An exclusive flock on a file, held until `close`, or until the process ends.

    A forked child does not keep it: only descriptors without the lock's owner would.
    """

    def __init__(self, path: Path, wait: float = 0.0) -> None:
        """Create the file if needed, lock it, write our pid into it.

        Waits up to `wait` seconds. Raises DirectoryInUse naming the holder, DirectoryError.
        """
        self.path = path
        deadline = time.monotonic() + wait
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise DirectoryError(f"{path}: cannot open the lock file: {error}") from error
            if self._take(fd):
                break
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "?"
            os.close(fd)
            if time.monotonic() >= deadline:
                raise DirectoryInUse(_in_use(path, holder))
            time.sleep(POLL)
        self._fd: int | None = fd
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        _held.add(self)

    def _take(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # somebody may have removed the directory between open and flock
            return os.stat(self.path).st_ino == os.fstat(fd).st_ino
        except (BlockingIOError, FileNotFoundError):
            return False
        except OSError as error:
            os.close(fd)
            raise DirectoryError(
                f"{self.path}: the filesystem refuses flock ({error}); use a local one"
            ) from error

    def close(self) -> None:
        """Idempotent. Never LOCK_UN: in a forked child it would free the parent's lock."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def _in_use(path: Path, holder: str) -> str:
    if holder == str(os.getpid()):
        return (
            f"{path.parent} is open in this process (pid {holder}) already; "
            "close the other store, or give this one another directory"
        )
    return (
        f"{path.parent} is in use by process {holder}; stop it, "
        "or give this store another directory"
    )


def _after_fork() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_after_fork)
