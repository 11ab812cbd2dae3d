"""Changes on their way into the index: queued, taken together, answered one by one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tieredkv.index.record import Deletion, Piece

log = logging.getLogger(__name__)


class Change(NamedTuple):
    """Puts, then deletions, and who wants to know."""

    puts: Sequence[Piece]
    deletes: Sequence[Deletion]
    done: Callable[[bool], None]


class PendingChanges:
    """A queue whose entries count until they have been answered. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: list[Change] = []
        self._job_waits = False
        self._unanswered = 0

    def add(self, change: Change) -> bool:
        """Queue it; True if a job must be started that will `take` it."""
        with self._changed:
            self._queue.append(change)
            self._unanswered += 1
            start, self._job_waits = not self._job_waits, True
        return start

    def job_runs(self) -> None:
        """The job is about to `take`: what is added from now on needs another one."""
        with self._changed:
            self._job_waits = False

    def take(self) -> list[Change]:
        """Everything queued; the caller owes the answer."""
        with self._changed:
            changes, self._queue = self._queue, []
        return changes

    def answer(self, changes: Sequence[Change], ok: bool) -> None:
        """Call `done` of each."""
        for change in changes:
            try:
                change.done(ok)
            except Exception:  # one caller's bug is not the others'
                log.exception("a callback of the index failed")
        with self._changed:
            self._unanswered -= len(changes)
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Until all have been answered; False at the deadline."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unanswered, timeout)
