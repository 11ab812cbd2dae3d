"""The values of a diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial


class State(StrEnum):
    """How bad it is: only a problem keeps a store from starting or from working as configured."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the diagnosis."""

    check: str
    state: State
    found: str
    remedy: str = ""
    """Empty where the state is ok."""


ok = partial(Finding, state=State.OK)
note = partial(Finding, state=State.NOTE)
warning = partial(Finding, state=State.WARNING)
problem = partial(Finding, state=State.PROBLEM)


@dataclass(frozen=True, slots=True)
class Check:
    """Something to look at, and what it means if looking does not end."""

    name: str
    run: Callable[[], Iterable[Finding]]
    """Called in a process of its own, which it may hang or crash; nothing else sees what it
    changes there."""
    deadline: float = 5.0
    """Seconds."""
    stuck: State = State.PROBLEM
    """Of a check that passes its deadline or crashes."""
    remedy: str = "look for a mount, a device or a driver that hangs (dmesg)"
    """Of the same."""


def size(count: int) -> str:
    """`1610612736` -> `1.5 GiB`."""
    for unit, shift in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if abs(count) >= 1 << shift:
            return f"{count / (1 << shift):.1f} {unit}"
    return f"{count} bytes"
