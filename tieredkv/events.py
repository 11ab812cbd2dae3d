"""Residency events: which blocks entered and left which tier, for cache-aware routers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum


class EventKind(StrEnum):
    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"
    """All blocks left the tier."""
    LOST = "lost"
    """Older events were dropped because nobody took them: rebuild from the store."""


@dataclass(frozen=True, slots=True)
class Event:
    """One change of one tier; a replay in order ends with exactly its resident set."""

    kind: EventKind
    tier: str
    keys: tuple[bytes, ...] = ()


class EventLog:
    """A bounded queue of events. Not thread-safe: the planner's lock guards it."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._events: deque[Event] = deque()

    def add(self, kind: EventKind, tier: str, keys: tuple[bytes, ...] = ()) -> None:
        if len(self._events) >= self._capacity:
            self._events.clear()
            self._events.append(Event(EventKind.LOST, ""))
        self._events.append(Event(kind, tier, keys))

    def take(self) -> list[Event]:
        """All events since the last call, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events
