"""Runs checks beside each other, each in a child process with a deadline.

A check can hang in the kernel, spin in a driver, or die with the library that it loads: only
from a process of its own can one walk away then. The children are forked before this process
has a thread, so they start at once and inherit what is loaded.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import NoReturn

from tieredkv.doctor.finding import Check, Finding, State, warning
from tieredkv.errors import TieredKVError

GRACE = 0.5
"""Seconds between asking a child to end, so that it removes its files, and killing it."""


def examine(checks: Sequence[Check]) -> list[Finding]:
    """What they find, in their order. Takes as long as the largest deadline, and twice `GRACE`.

    A check that hangs, crashes or raises is a finding as well; what it had found before stays.
    """
    children: list[_Child] = []
    try:
        for check in checks:
            children.append(_Child(check))
        return [finding for child in children for finding in child.findings()]
    finally:
        _end(children)


class _Child:
    """One check under way."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._deadline = time.monotonic() + check.deadline
        self._status: int | None = None
        self._pipe, write = os.pipe()
        try:
            self._pid = os.fork()
        except OSError as error:
            os.close(self._pipe)
            os.close(write)
            raise TieredKVError(f"no process for a check: {error.strerror}; end some") from error
        if self._pid == 0:
            _serve(check, write)
        os.close(write)

    def findings(self) -> Iterator[Finding]:
        """Of the check, and one of its end unless that was in order."""
        text, ended = self._read()
        for line in text.splitlines(keepends=True):
            if line.endswith(b"\n"):  # the last one may be cut off
                row = json.loads(line)
                yield Finding(row["check"], State(row["state"]), row["found"], row["remedy"])
        trouble = self._trouble() if ended else f"no answer within {self._check.deadline:g} s"
        if trouble:
            yield Finding(self._check.name, self._check.stuck, trouble, self._check.remedy)

    def send(self, number: signal.Signals) -> None:
        """A signal, if it has not ended."""
        if not self.reap(0):
            os.kill(self._pid, number)

    def reap(self, deadline: float) -> bool:
        """Wait for its end until then, by the monotonic clock; False if it has not come."""
        while self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._status = status
            elif time.monotonic() >= deadline:
                return False
            else:
                time.sleep(0.005)
        return True

    def close(self) -> None:
        os.close(self._pipe)

    def _read(self) -> tuple[bytes, bool]:
        """What the child has written, and whether that was all."""
        text = b""
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        while poll.poll(1000 * max(0.0, self._deadline - time.monotonic())):
            piece = os.read(self._pipe, 1 << 16)
            if not piece:
                return text, True
            text += piece
        return text, False

    def _trouble(self) -> str | None:
        if not self.reap(self._deadline) or self._status is None:
            return "its process does not end"
        code = os.waitstatus_to_exitcode(self._status)
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with code {code}" if code else None


def _end(children: Sequence[_Child]) -> None:
    """All at once: who hangs in the kernel is left behind."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for child in children:
            child.send(number)
        deadline = time.monotonic() + GRACE
        for child in children:
            child.reap(deadline)
    for child in children:
        child.close()


def _serve(check: Check, pipe: int) -> NoReturn:
    """The child: findings as lines of JSON into the pipe. Never returns into our caller."""
    code = 1
    try:
        # Should our parent die, nobody else would end a child that spins in a library.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, check.deadline + 2 * GRACE)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        null = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):  # libraries chatter
            os.dup2(null, standard)
        for finding in _caught(check):
            os.write(pipe, json.dumps(asdict(finding)).encode() + b"\n")
        code = 0
    finally:
        os._exit(code)


def _caught(check: Check) -> Iterator[Finding]:
    try:
        yield from check.run()
    except Exception as error:
        what = f"could not be checked: {type(error).__name__}: {error}"
        yield warning(check.name, found=what, remedy="look at it by hand")
