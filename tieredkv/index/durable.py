"""The durable index: which block is in which NVMe slot, committed before anybody relies on it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from tieredkv.errors import ClosedError, DirectoryError, DirectoryInUse, FormatError
from tieredkv.executor import Executor
from tieredkv.index.changes import Change, PendingChanges
from tieredkv.index.damage import DamagedIndex, set_aside
from tieredkv.index.environment import Environment, Transaction, TransactionFailed
from tieredkv.index.record import ROW, Assembly, Deletion, Piece, assemble, encode, names

log = logging.getLogger(__name__)

FORMAT = 1
BOOT_BITS = 24  # a generation has 64 bits: boot << 40 | counter
STATISTICS = b"delays"
KEEP_EVERY = 600.0  # seconds between two writes of the statistics
SHARE = 16  # they may take one in so many bytes of what the index may grow to

_open_paths: set[str] = set()
_open_lock = threading.Lock()


class DurableIndex:
    """Records of durable blocks. Thread-safe.

    `submit` queues changes; a job on `executor` (one thread) commits all of them in one
    synced transaction. Callers bound the queue: a put occupies a slot until it is answered.
    `done` runs on the executor's thread, never inside `submit` or `new_epoch`, so callers may
    hold their own lock there. `flush` and `close` wait for it: call them without that lock.
    """

    def __init__(
        self,
        path: Path,
        executor: Executor,
        *,
        map_size: int = 64 << 20,
        map_limit: int | None = None,
        timeout: float = 30.0,
        keep_damaged: bool = False,
    ) -> None:
        """Open or create the environment in directory `path`; its parent must exist.

        `map_size` bytes bound the data file; when full it grows once, to `map_limit`
        (default twice as much). `timeout` bounds the synchronous calls, in seconds. A
        damaged index is renamed to `<name>.corrupt-<n>` and a new one begins, or with
        `keep_damaged` DirectoryError is raised.

        Raises DirectoryInUse if this process has it open, FormatError for another format
        version, DirectoryError if it cannot be opened.
        """
        self.path = path
        self.commits = 0
        self.failures = 0
        self.last_error: str | None = None
        """Text of the last failed transaction, None after a good one."""
        self.moved_to: Path | None = None
        """Where a damaged predecessor is, if there was one."""
        self.dropped: dict[str, int] = {}
        """Blocks that `load` dropped, by reason."""
        self.learned: Callable[[], bytes] | None = None
        """Gives what else is to be kept: asked after a commit, at most every ten minutes, and
        by `close`, on the executor's thread and without any lock of the index."""
        self._kept = time.monotonic()
        self._last_words = threading.Event()
        self._limits = (map_size, map_size * 2 if map_limit is None else map_limit, timeout)
        self._executor = executor
        self._epoch = self._boot = 0
        self._block_bytes: int | None = None
        self._pid = os.getpid()
        self._closed = False
        self._changes = PendingChanges()
        self._order = threading.Lock()  # held from taking the queue to the commit
        self._real_path = os.path.realpath(path)
        with _open_lock:
            if self._real_path in _open_paths:
                raise DirectoryInUse(
                    f"{path}: this process has the index open already; close the other store"
                )
            _open_paths.add(self._real_path)
        try:
            self._open(keep_damaged)
        except BaseException:
            _open_paths.discard(self._real_path)
            raise

    @property
    def epoch(self) -> int:
        """Counts `new_epoch`; records of other epochs do not exist."""
        return self._epoch

    @property
    def boot(self) -> int:
        """Differs from that of every earlier opening; below 2**24."""
        return self._boot

    @property
    def block_bytes(self) -> int | None:
        """Bytes per block of the store that wrote the directory, None before the first."""
        return self._block_bytes

    def set_block_bytes(self, n: int) -> None:
        """Fix the block size, durably. Raises FormatError if it is another one already."""
        if self._block_bytes == n:
            return
        if self._block_bytes is not None:
            raise FormatError(
                f"{self.path} holds blocks of {self._block_bytes} bytes, not {n}; "
                "use another directory, or remove this one"
            )
        self._check_open()
        self._write(lambda txn: txn.put_meta(b"block_bytes", n))
        self._block_bytes = n

    def set_map_limit(self, n: int) -> None:
        """Bound the data file to `n` bytes, what the tier reserves for the index."""
        self._check_open()
        self._env.set_map_limit(n)

    def load(self, slot_limit: int, prune: bool = True) -> list[Piece]:
        """All blocks that can be reached from the root, parents before children.

        Rows of one generation whose links and depths match make one piece, even if the
        parent of another piece is in the middle of it: who replays them splits there.
        Dropped, with `prune` also from the index: other epochs, slots outside
        `range(slot_limit)`, all but the highest generation of a slot, and orphans.
        """
        self._check_open()
        try:
            found = self._assemble(slot_limit)
        except DamagedIndex as error:
            if not prune:
                raise
            log.warning("index %s cannot be read (%s); starting cold", self.path, error)
            self._env.close(self._limits[-1])
            self._replace()
            return []
        if found.dropped and prune:
            log.warning("index %s: dropped blocks: %s", self.path, found.reasons)
            self._write(lambda txn: txn.delete(found.dropped), forgets=True)
        self.dropped = found.reasons
        return found.pieces

    def submit(
        self,
        puts: Sequence[Piece],
        deletes: Sequence[Deletion],
        done: Callable[[bool], None],
    ) -> None:
        """Queue puts and then deletions; `done(True)` once they would survive a power loss.

        A deletion names generation and slot: another record of the same key stays.

        Never blocks. Changes are applied in the order of the calls. `done(False)` means
        that nothing of the transaction was applied. A put replaces the record of its key.
        Raises ClosedError after `close` and in a forked child.
        """
        self._check_open()
        if self._changes.add(Change(puts, deletes, done)):
            self._executor.submit(self._commit)

    def new_epoch(self, *, until_reopened: bool = False) -> int:
        """Drop all records and commit the next epoch, before returning it. `until_reopened`: the
        next opening begins another one, whatever is stored until then.

        What was queued before is answered `done(False)`, or was committed before. Raises
        DirectoryError if that cannot be made durable; then the old epoch goes on.
        """
        self._check_open()
        if not self._order.acquire(timeout=self._limits[-1]):
            raise TransactionFailed(f"{self.path}: a transaction hangs; look at the disk")
        try:
            stale = self._changes.take()
            if stale:
                self._executor.submit(lambda: self._changes.answer(stale, False))
            epoch = self._epoch + 1

            def reset(txn: Transaction) -> None:
                txn.drop_all()
                txn.put_meta(b"epoch", epoch)
                txn.put_meta(b"volatile", int(until_reopened))

            self._write(reset, forgets=True)
            self._epoch = epoch
        finally:
            self._order.release()
        return epoch

    def flush(self, timeout: float) -> bool:
        """Wait until everything submitted has been answered; False at the deadline."""
        return self._changes.wait(timeout)

    def statistics(self) -> bytes | None:
        """What `learned` gave last, perhaps to an earlier process; None if nothing can be read."""
        self._check_open()
        try:
            return self._env.read(lambda txn: txn.get_bytes(STATISTICS))
        except DirectoryError as error:
            log.warning("index %s: the statistics cannot be read: %s", self.path, error)
            return None

    def close(self, timeout: float) -> bool:
        """Refuse new changes, wait for the queued ones, keep what was learned, close. Idempotent.

        False if something was still queued or running at the deadline: what is queued is
        answered `done(False)`, and a transaction that hangs keeps the environment open.
        """
        deadline = time.monotonic() + timeout
        if self._closed or os.getpid() != self._pid:
            return True
        self._closed = True
        clean = self.flush(timeout)
        self._changes.answer(self._changes.take(), False)
        if clean and self.learned is not None:
            self._executor.submit(self._keep)
            self._last_words.wait(max(0.0, deadline - time.monotonic()))
        if not self._env.close(deadline - time.monotonic()):
            log.error("index %s: a transaction hangs; the index stays open", self.path)
            return False
        _open_paths.discard(self._real_path)
        return clean

    def check(self) -> list[str]:
        """Violations of the invariants of the stored records; reads all, changes nothing."""
        self._check_open()
        try:
            reasons = self._assemble(1 << 32).reasons
        except DamagedIndex as error:
            return [f"index cannot be read: {error}"]
        return [f"{count} blocks: {reason}" for reason, count in reasons.items()]

    def _open(self, keep_damaged: bool) -> None:
        try:
            self._start()
        except DamagedIndex as error:
            if keep_damaged:
                raise
            log.warning("index %s is damaged (%s); starting cold", self.path, error)
            self._replace()

    def _replace(self) -> None:
        self.moved_to = set_aside(self.path)
        self._start()

    def _start(self) -> None:
        known_block_bytes = self._block_bytes

        def start(txn: Transaction) -> None:
            version = txn.get_meta(b"format")
            if version not in (None, FORMAT):
                raise FormatError(
                    f"{self.path} has index format {version}, this version reads {FORMAT}; "
                    "use the version that wrote it, or remove the directory"
                )
            # Skip the numbers that a lost index may have given out.
            skip = int.from_bytes(os.urandom(2), "little") + 1 if self.moved_to else 0
            self._boot = (txn.get_meta(b"boot") or skip << 6) + 1
            self._epoch = txn.get_meta(b"epoch") or skip + 1
            if txn.get_meta(b"volatile"):
                log.info("index %s: dropping what was stored after a reset", self.path)
                self._epoch += 1
                txn.drop_all()
                txn.put_meta(b"volatile", 0)
            self._block_bytes = txn.get_meta(b"block_bytes") or known_block_bytes
            if self._boot >> BOOT_BITS:
                raise FormatError(f"{self.path}: opened too often; remove the directory")
            txn.put_meta(b"format", FORMAT)
            txn.put_meta(b"boot", self._boot)
            txn.put_meta(b"epoch", self._epoch)
            if self._block_bytes is not None:
                txn.put_meta(b"block_bytes", self._block_bytes)

        self._env = Environment(self.path, *self._limits)
        try:
            self._env.write(start)
        except BaseException:
            self._env.close(self._limits[-1])
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"index {self.path} is closed")
        if os.getpid() != self._pid:
            raise ClosedError(f"index {self.path} belongs to process {self._pid}, its parent")

    def _write(self, work: Callable[[Transaction], None], forgets: bool = False) -> None:
        try:
            self._env.write(work, forgets)
        except Exception as error:
            self.failures += 1
            if self.last_error is None:
                log.error("index %s: transaction failed: %s", self.path, error)
            self.last_error = str(error)
            raise
        self.commits += 1
        self.last_error = None

    def _commit(self) -> None:
        """The job: everything queued, in one transaction."""
        with self._order:
            self._changes.job_runs()
            changes = self._changes.take()
            ok = bool(changes) and self._apply(changes)
        self._changes.answer(changes, ok)
        if self.learned is not None and time.monotonic() - self._kept >= KEEP_EVERY:
            self._keep()

    def _keep(self) -> None:
        """Store what was learned. It is no loss if that fails: it is not counted either."""
        self._kept = time.monotonic()
        assert self.learned is not None
        try:
            value = self.learned()
            if len(value) > self._env.map_limit // SHARE:
                log.info("index %s: no room for %d bytes of statistics", self.path, len(value))
                return
            self._env.write(lambda txn: txn.put_bytes(STATISTICS, value))
        except Exception as error:
            log.warning("index %s: the statistics were not stored: %s", self.path, error)
        finally:
            if self._closed:
                self._last_words.set()

    def _apply(self, changes: Sequence[Change]) -> bool:
        def work(txn: Transaction) -> None:
            for change in changes:
                for piece in change.puts:
                    txn.put(encode(piece, self._epoch, self._block_bytes or 0))
                for deletion in change.deletes:
                    txn.delete_if(deletion.key, partial(names, deletion=deletion))

        try:
            self._write(work, forgets=not any(change.puts for change in changes))
        except Exception:  # counted and logged; the callers are told
            return False
        return True

    def _assemble(self, slot_limit: int) -> Assembly:
        blob = self._env.read(lambda txn: txn.scan(ROW.itemsize))
        return assemble(np.frombuffer(blob, ROW), slot_limit, self._epoch, self._block_bytes or 0)
