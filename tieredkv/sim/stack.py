"""Blocks in order of last use, kept as stretches: what `curve` counts hits with."""

from __future__ import annotations

from array import array
from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from tieredkv.sim.request import TraceError

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class Stack:
    """Blocks in order of last use, and the positions at which they were hit."""

    def __init__(self) -> None:
        self.used: dict[int, int] = {}
        """Block -> its last use, counted from 1."""
        self._tree = [0]
        """Fenwick tree over the uses: how many blocks were used last by that one."""
        self.accesses = 0
        self._stretches = array("q")
        """Per stretch hit: blocks more recent than it, depth of its first block, its blocks."""
        self._blocks = array("q"), array("q")
        """Instead, where depths have gaps: position and depth of every block hit."""
        self._noted = array("q")
        """As `_stretches`, of blocks that are kept elsewhere."""

    def use(self, chain: list[int], depths: Integers | None, skip: int = 0) -> None:
        """A request for these blocks, root first; their `depths`, None for 0, 1, 2, ...

        The hits of the first `skip` are not counted here.
        """
        used, tree = self.used, self._tree
        known, end, start = len(used), len(chain), 0

        def age(block: int) -> int:
            return -used.get(block, 0)

        while start < end and (last := used.get(chain[start], 0)):
            # Along a chain the times of last use never rise, and unknown blocks come last.
            after = bisect_right(chain, -last, start, end, key=age)
            # More recent are all later stretches, and the part of this chain that has been
            # taken out of the tree already.
            position = known - _prefix(tree, last)
            if depths is None:
                self._stretches.extend((position, start, after - start))
            else:
                for index in range(max(start, skip), after):
                    self._blocks[0].append(position + index - start)
                    self._blocks[1].append(int(depths[index]))
            _add(tree, last, start - after)
            start = after
        now = len(tree)
        used.update(dict.fromkeys(chain, now))
        if len(used) - known != end - start:
            raise TraceError(
                f"request {now}: its block ids occurred before in another order; they must be "
                "prefix-chained: equal ids only after equal prefixes"
            )
        _append(tree, end)
        self.accesses += end - skip

    def note(self, last: int, depth: int, length: int) -> None:
        """A hit of `length` blocks from `depth` on, kept elsewhere and used last at `last`."""
        recent = len(self.used) - _prefix(self._tree, last)
        self._noted.extend((recent, depth, length))

    def hits(self, size: int) -> tuple[Floats, Floats]:
        """Hits, and hits weighted by depth + 1/2, of caches of 0, 1, ... `size` - 1 blocks."""
        if self._blocks[0]:
            position, depth = (np.asarray(values, np.int64) for values in self._blocks)
            return _count(position + 1, np.ones(len(depth)), depth + 0.5, size)
        position, depth, length = np.asarray(self._stretches, np.int64).reshape(-1, 3).T
        # Differences: a stretch adds 1 at capacities position + 1 ... position + n, and the
        # depths of its blocks are capacity + (depth - position - 1).
        starts, offset = position + 1, depth - position - 0.5
        edges = np.concatenate((starts, starts + length))
        sign = np.repeat((1.0, -1.0), len(starts))
        count = np.bincount(edges, sign, size + 1).cumsum()[:size]
        shift = np.bincount(edges, sign * np.tile(offset, 2), size + 1).cumsum()[:size]
        return count.cumsum(), (count * np.arange(size) + shift).cumsum()

    def noted(self, size: int) -> tuple[Floats, Floats]:
        """As `hits`, of what was noted."""
        position, depth, length = np.asarray(self._noted, np.int64).reshape(-1, 3).T
        return _count(position + 1, length, length * (depth + length / 2), size)


def _count(
    capacity: Integers, number: npt.ArrayLike, weight: npt.ArrayLike, size: int
) -> tuple[Floats, Floats]:
    """Cumulated `number` and `weight` of what hits from a `capacity` on."""
    return (
        np.bincount(capacity, number, size)[:size].cumsum(),
        np.bincount(capacity, weight, size)[:size].cumsum(),
    )


def _prefix(tree: list[int], index: int) -> int:
    total = 0
    while index:
        total += tree[index]
        index &= index - 1
    return total


def _add(tree: list[int], index: int, change: int) -> None:
    while index < len(tree):
        tree[index] += change
        index += index & -index


def _append(tree: list[int], value: int) -> None:
    index = len(tree)
    below, stop = index - 1, index & index - 1
    while below > stop:
        value += tree[below]
        below &= below - 1
    tree.append(value)
