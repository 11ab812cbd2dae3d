"""Pins: chains that must not leave the hierarchy for a while.

A pin sits on the deepest block of its chain: blocks leave after their descendants, so the
ancestors stay as well. When that block is deleted or lost, the pin moves to the deepest one
that is left. It ends when released, after its ttl, or with the last of its blocks, so that
none can leak.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from tieredkv.index.prefix_tree import PrefixTree, Run


@dataclass(frozen=True, slots=True)
class Pin:
    key: bytes
    """The deepest block."""
    depth: int
    """Blocks from the root that are kept."""
    expires: float


class Pins:
    """All pins of a tree. Not thread-safe. O(log pins) per change."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._pins: dict[int, Pin] = {}
        self._expiry: list[tuple[float, int]] = []
        self._next_id = 1
        self._turns: dict[bytes, int] = {}
        """Pins by `hold`: deepest block -> pin."""

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, run: Run, depth: int, expires: float) -> int:
        """Keep the first `depth` blocks of the chain through `run`; the pin's id."""
        pin = self._next_id
        self._next_id += 1
        heapq.heappush(self._expiry, (expires, pin))
        self._set(pin, run, depth, expires)
        return pin

    def _set(self, pin: int, run: Run, depth: int, expires: float) -> None:
        self._pins[pin] = Pin(run.keys[depth - run.start - 1], depth, expires)
        run.pins = run.pins or {}
        run.pins[pin] = depth

    def hold(self, run: Run, depth: int, expires: float) -> None:
        """Like `add`, but one pin per deepest block: a later call moves its end."""
        key = run.keys[depth - run.start - 1]
        earlier = self._turns.get(key)
        pin = self.add(run, depth, expires)
        if earlier is not None:
            self.release(earlier)
        self._turns[key] = pin

    def release(self, pin: int) -> None:
        """End a pin; one that has ended already is ignored."""
        entry = self._pins.pop(pin, None)
        if entry is None:
            return
        if self._turns.get(entry.key) == pin:
            del self._turns[entry.key]
        run = self._tree.find(entry.key)
        assert run is not None
        assert run.pins is not None
        del run.pins[pin]
        run.pins = run.pins or None

    def retreat(self, run: Run, offset: int) -> None:
        """The blocks of `run` from `offset` on are about to go: move the pins on them up.

        O(pins of the run).
        """
        left = run.start + offset
        home = run if offset else run.parent
        for pin, depth in list((run.pins or {}).items()):
            if depth <= left:
                continue
            entry = self._pins[pin]
            of_turn = self._turns.get(entry.key) == pin
            self.release(pin)
            if home is None:
                continue
            if of_turn:
                other = self._turns.get(home.keys[left - home.start - 1])
                ends = entry.expires if other is None else self._pins[other].expires
                self.hold(home, left, max(entry.expires, ends))
            else:
                self._set(pin, home, left, entry.expires)

    def expire(self, now: float) -> None:
        while self._expiry and self._expiry[0][0] <= now:
            self.release(heapq.heappop(self._expiry)[1])
        if len(self._expiry) > 2 * len(self._pins) + 64:  # released ones, far in the future
            self._expiry = [(pin.expires, i) for i, pin in self._pins.items()]
            heapq.heapify(self._expiry)

    def blocks(self) -> int:
        """Distinct blocks kept now. O(runs on the pinned chains)."""
        kept: dict[int, int] = {}
        for pin in self._pins.values():
            run: Run | None = self._tree.find(pin.key)
            depth = pin.depth
            while run is not None and kept.get(run.id, 0) < depth - run.start:
                kept[run.id] = depth - run.start
                depth = run.start
                run = run.parent
        return sum(kept.values())
