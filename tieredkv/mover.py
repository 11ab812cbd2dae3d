"""The mover: runs transfers on threads, in bounded queues, loads before stores."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from tieredkv.executor import Executor
from tieredkv.transfer import Transfer


class Lane:
    """A queue of jobs bounded in bytes. Thread-safe through the mover's lock."""

    def __init__(self, limit: int, *, store: bool, far: bool) -> None:
        self.limit, self.store, self.far = limit, store, far
        self.bytes = 0
        """Queued and running."""
        self.jobs: deque[tuple[Callable[[], None], int]] = deque()

    def accepts(self, nbytes: int) -> bool:
        # a job larger than the limit may pass alone, or it could never run
        return not self.bytes or self.bytes + nbytes <= self.limit


class Mover:
    """Runs jobs on an executor: all queued loads before the next store. Stores leave one thread
    to loads, so that a device that hangs in writes can still be read; what goes to other machines
    leaves half of them to the rest."""

    def __init__(self, executor: Executor, threads: int, load_limit: int, store_limit: int) -> None:
        self._executor = executor
        self._threads = threads
        self._store_threads, self._far_threads = max(1, threads - 1), max(1, threads // 2)
        self._storing = self._reaching = 0
        """Jobs that run: stores, and those to other machines."""
        self._lock = threading.Condition()
        self._lanes = [
            Lane(store_limit if store else load_limit, store=store, far=far)
            for store in (False, True)
            for far in (False, True)
        ]
        """What comes first runs first, as far as it may."""
        self._late: set[Transfer] = set()
        self._closed = False

    def start(self, transfer: Transfer, block_bytes: int, *, load: bool) -> bool:
        """Queue all parts; False, and nothing queued, if the queue is full or all threads that
        could run them hang in transfers that have expired."""
        jobs = [
            ((lambda lo=lo, hi=hi: transfer.run(lo, hi)), (hi - lo) * block_bytes)
            for lo, hi in transfer.parts
        ]
        transfer.queued = self._enqueue(self._lane(load, transfer.far), jobs)
        return transfer.queued

    def submit(self, job: Callable[[], None], nbytes: int, *, load: bool) -> bool:
        """Queue one job of the caller's; False if the queue is full. It must not raise."""
        return self._enqueue(self._lane(load, False), [(job, nbytes)])

    def late(self, transfer: Transfer) -> None:
        """Its caller has gone, but a part may hang in a system call: count it until it ends."""
        with self._lock:
            self._late = {t for t in self._late if t.running}
            if transfer.running:
                self._late.add(transfer)

    @property
    def quarantined(self) -> int:
        """Transfers that outlived their deadline and still hold slots and buffers."""
        with self._lock:
            self._late = {t for t in self._late if t.running}
            return len(self._late)

    @property
    def backlog(self) -> int:
        """Jobs that wait for a thread."""
        return sum(len(lane.jobs) for lane in self._lanes)

    @property
    def queued_bytes(self) -> tuple[int, int]:
        """(loads, stores), queued and running."""
        loads = sum(lane.bytes for lane in self._lanes if not lane.store)
        return loads, sum(lane.bytes for lane in self._lanes) - loads

    def close(self, timeout: float) -> bool:
        """Refuse new jobs, let the queued ones end; False if some still run at the deadline."""
        deadline = time.monotonic() + timeout
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: not any(lane.bytes for lane in self._lanes), timeout)
        return self._executor.close(max(0.0, deadline - time.monotonic()))

    def _lane(self, load: bool, far: bool) -> Lane:
        return next(lane for lane in self._lanes if (lane.store, lane.far) == (not load, far))

    def _enqueue(self, lane: Lane, jobs: Sequence[tuple[Callable[[], None], int]]) -> bool:
        nbytes = sum(size for _, size in jobs)
        with self._lock:
            if self._closed or not lane.accepts(nbytes):
                return False
            self._late = {t for t in self._late if t.running}
            hanging = sum(transfer.active for transfer in self._late)
            if hanging >= (self._store_threads if lane.store else self._threads):
                return False
            lane.bytes += nbytes
            lane.jobs.extend(jobs)
        for _ in jobs:
            self._executor.submit(self._next)
        return True

    def _next(self) -> None:
        """Run a job. After one of a kind that may not take all threads go on: others may have
        found too many of them running."""
        while self._run_one():
            continue

    def _run_one(self) -> bool:
        with self._lock:
            lane = next((lane for lane in self._lanes if lane.jobs and self._may_run(lane)), None)
            if lane is None:
                return False
            self._storing += lane.store
            self._reaching += lane.far
            job, nbytes = lane.jobs.popleft()
        try:
            job()
        finally:
            with self._lock:
                lane.bytes -= nbytes
                self._storing -= lane.store
                self._reaching -= lane.far
                self._lock.notify_all()
        return lane.store or lane.far

    def _may_run(self, lane: Lane) -> bool:
        if lane.store and self._storing >= self._store_threads:
            return False
        return not (lane.far and self._reaching >= self._far_threads)
