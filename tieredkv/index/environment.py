"""LMDB, as the durable index uses it. The only module that imports lmdb.

Every write transaction is synced before it returns. Never `writemap` (a full disk would be
a SIGBUS), never `sync=False` or `metasync=False` (a lost deletion would revive an old key
over the new bytes of its slot).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from tieredkv.errors import DirectoryError
from tieredkv.index.damage import DamagedIndex, damage

T = TypeVar("T")
SPARE = 64 << 10
DAMAGED = (lmdb.CorruptedError, lmdb.InvalidError, lmdb.VersionMismatchError)


class TransactionFailed(DirectoryError):
    """A transaction could not be committed; the stored state is as before."""


class Transaction:
    """What may be done inside one transaction."""

    def __init__(self, txn: Any, blocks: Any, meta: Any) -> None:
        self._txn, self._blocks, self._meta = txn, blocks, meta

    def get_meta(self, name: bytes) -> int | None:
        value = self._txn.get(name, db=self._meta)
        return None if value is None else int.from_bytes(value, "little")

    def put_meta(self, name: bytes, value: int) -> None:
        self._txn.put(name, value.to_bytes(8, "little"), db=self._meta)

    def get_bytes(self, name: bytes) -> bytes | None:
        """Metadata that is no number."""
        value = self._txn.get(name, db=self._meta)
        return None if value is None else bytes(value)

    def put_bytes(self, name: bytes, value: bytes) -> None:
        self._txn.put(name, value, db=self._meta)

    def put(self, records: Iterable[tuple[bytes, bytes]]) -> None:
        with self._txn.cursor(self._blocks) as cursor:
            cursor.putmulti(records)

    def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._txn.delete(key, db=self._blocks)

    def delete_if(self, key: bytes, condition: Callable[[bytes], bool]) -> None:
        """Delete the record of `key` if its value satisfies the condition."""
        value = self._txn.get(key, db=self._blocks)
        if value is not None and condition(value):
            self._txn.delete(key, db=self._blocks)

    def drop_all(self) -> None:
        """Delete all records, not the metadata."""
        self._txn.drop(self._blocks, delete=False)

    def scan(self, record_bytes: int) -> bytes:
        """All keys and values, back to back, in the order of the keys."""
        entries = self._txn.stat(self._blocks)["entries"]
        with self._txn.cursor(self._blocks) as cursor:
            blob = b"".join(chain.from_iterable(cursor))
        if len(blob) != entries * record_bytes:
            raise DamagedIndex(f"{entries} records in {len(blob)} bytes")
        return blob


class Environment:
    """One open LMDB environment. Thread-safe: one transaction at a time."""

    def __init__(self, path: Path, map_size: int, map_limit: int, timeout: float) -> None:
        """Open or create. Raises DamagedIndex, or DirectoryError if it cannot be opened.

        `timeout` in seconds bounds the wait for another thread's transaction.
        """
        self._path = path
        self._map_size, self._map_limit = map_size, map_limit
        self._timeout = timeout
        self._lock = threading.Lock()
        if reason := damage(path):
            raise DamagedIndex(reason)
        try:
            path.mkdir(exist_ok=True)
            self._env = lmdb.open(str(path), map_size=map_size, max_dbs=2, max_readers=16)
        except DAMAGED as error:
            raise DamagedIndex(str(error)) from error
        except (lmdb.Error, OSError) as error:
            raise DirectoryError(f"{path}: cannot open the index: {error}") from error
        try:
            self._blocks = self._env.open_db(b"blocks")
            self._meta = self._env.open_db(b"meta")
            self._map_size = self._grown_to(map_size)
        except lmdb.Error as error:
            self._env.close()
            if isinstance(error, DAMAGED):
                raise DamagedIndex(str(error)) from error
            raise DirectoryError(f"{path}: cannot open the index: {error}") from error

    def write(self, work: Callable[[Transaction], T], forgets: bool = False) -> T:
        """Run `work` in one synced transaction; it may be run again, see `_run`.

        `forgets`: it only deletes, which must work in a full file too (pages are copied
        before they are changed), so it may exceed the limit. Raises TransactionFailed,
        DamagedIndex; an exception of `work` aborts the transaction.
        """
        return self._run(work, True, forgets)

    def read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` on a snapshot. Raises DamagedIndex, TransactionFailed."""
        return self._run(work, False)

    @property
    def map_limit(self) -> int:
        """Bytes that the data file may grow to."""
        return self._map_limit

    def set_map_limit(self, n: int) -> None:
        """Bound the data file to `n` bytes, or to little more than it has already."""
        self._acquire()
        try:
            self._map_limit = n
            self._map_size = self._grown_to(min(self._map_size, n))
        finally:
            self._lock.release()

    def close(self, timeout: float) -> bool:
        """False if a transaction still runs at the deadline; then it stays open."""
        if not self._lock.acquire(timeout=max(0.001, timeout)):
            return False
        try:
            self._env.close()
        finally:
            self._lock.release()
        return True

    def _grown_to(self, n: int) -> int:
        """Set the map to `n` bytes, or where more is in use, to what deletions need."""
        size = n if n >= self._used() else 2 * self._used() + SPARE
        self._env.set_mapsize(size)
        return size

    def _used(self) -> int:
        return int((self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"])

    def _acquire(self) -> None:
        if not self._lock.acquire(timeout=self._timeout):
            raise TransactionFailed(
                f"{self._path}: a transaction has been running for {self._timeout} s; "
                "look at the disk"
            )

    def _run(self, work: Callable[[Transaction], T], write: bool, forgets: bool = False) -> T:
        """Causes that can be cured are cured once each, and the transaction repeated."""
        self._acquire()
        cured: set[type[Exception]] = set()
        try:
            while True:
                try:
                    with self._env.begin(write=write) as txn:
                        return work(Transaction(txn, self._blocks, self._meta))
                except (lmdb.MapFullError, lmdb.MapResizedError, lmdb.ReadersFullError) as error:
                    if type(error) in cured or not self._cure(error, forgets):
                        raise
                    cured.add(type(error))
        except DAMAGED as error:
            raise DamagedIndex(f"{self._path}: {error}") from error
        except (lmdb.Error, OSError) as error:
            raise TransactionFailed(f"{self._path}: transaction failed: {error}") from error
        finally:
            self._lock.release()

    def _cure(self, error: Exception, forgets: bool) -> bool:
        if isinstance(error, lmdb.ReadersFullError):
            self._env.reader_check()  # frees the places of dead processes
        elif isinstance(error, lmdb.MapResizedError):
            self._env.set_mapsize(0)  # another process has grown it
        elif forgets:
            self._map_size = self._grown_to(2 * self._used() + SPARE)
        elif self._map_size < self._map_limit:
            self._map_size = self._grown_to(self._map_limit)
        else:
            return False
        return True
