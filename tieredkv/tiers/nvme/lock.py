"""flock on files, with errors that say who holds it and what to do."""

from __future__ import annotations

import errno
import fcntl
import os
import time
import weakref
from pathlib import Path

from tieredkv.errors import DirectoryError, DirectoryInUse

POLL = 0.01
REMEDIES = {
    errno.EMFILE: "raise the limit of open files (ulimit -n), or use larger segments",
    errno.ENFILE: "raise fs.file-max",
    errno.EACCES: "give this user write permission, or choose another path",
    errno.EPERM: "give this user write permission, or choose another path",
    errno.EROFS: "mount the filesystem writable, or choose another path",
    errno.ENOTDIR: "choose a path that is a directory",
    errno.EEXIST: "choose a path that is a directory",
    errno.ENOSPC: "free space on the filesystem",
}

_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def refused(path: Path, error: OSError) -> DirectoryError:
    """The error to raise for a directory that cannot be used because of `error`."""
    remedy = REMEDIES.get(error.errno or 0, "check the filesystem")
    return DirectoryError(f"{path}: {error.strerror or error}; {remedy}")


class FileLock:
    """An exclusive flock on a file, held until `close` or the end of the process.

    A forked child gives its copy of the descriptor up, so that it cannot keep the lock
    longer than its parent.
    """

    def __init__(self, path: Path, wait: float = 0.0) -> None:
        """Create the file if needed, lock it, write our pid into it.

        Waits up to `wait` seconds. Raises DirectoryInUse naming the holder, DirectoryError.
        """
        self.path = path
        self._fd: int | None = None
        self._pid = os.getpid()
        deadline = time.monotonic() + wait
        try:
            while (fd := _try(path)) is None:
                if time.monotonic() >= deadline:
                    raise DirectoryInUse(_in_use(path))
                time.sleep(POLL)
            self._fd = fd
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            self.close()
            raise refused(path, error) from error
        _held.add(self)

    def close(self) -> None:
        """Idempotent. In a forked child it leaves the parent's lock alone; in the parent it
        frees the lock even while a child that was just forked still has the descriptor."""
        fd, self._fd = self._fd, None
        if fd is not None:
            if os.getpid() == self._pid:
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def is_free(path: Path) -> bool:
    """Whether nobody holds the lock; changes nothing."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _try(path: Path) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino == os.fstat(fd).st_ino:
            return fd
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    # the directory was reclaimed between open and flock, and is there again
    os.close(fd)
    return None


def _in_use(path: Path) -> str:
    holder = path.read_bytes()[:32].decode("ascii", "replace").strip() or "unknown"
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
