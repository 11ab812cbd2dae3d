"""Greedy-dual-size with frequency."""

from __future__ import annotations

from tieredkv.eviction.base import Access, Kind, RankedPolicy

BALANCE = 128.0
"""Depth in blocks at which attention to the context costs as much to recompute as the rest of
the model. With 4 d flops per token, layer and token of context against 2 per parameter: 53,000
tokens for a 70 B model with d = 8192 and 80 layers, about 100 blocks of 512."""


class GdsfPolicy(RankedPolicy):
    """The run with the lowest L + uses x cost / size goes first. L is the priority of the last
    run that was evicted, so that what is not used any more ages.

    Cherkasova: Improving WWW proxies performance with greedy-dual-size-frequency caching
    policy. HP Laboratories HPL-98-69, 1998.

    Differences to the paper: leaves only; cost / size is what it takes to recompute the run's
    bytes, per block: 1 + d / `BALANCE` at depth d, because a block attends to all before it;
    uses include those of descendants. A run that is a leaf again
    gets the priority of a new use. Runs whose session has ended go before all others and do
    not raise L.
    """

    def __init__(self, capacity: int, block_bytes: int, seed: int = 0) -> None:
        """`capacity` of the tier in bytes. Nothing here is random."""
        super().__init__(capacity, block_bytes, seed)
        self._inflation = 0.0

    def rank(self, access: Access) -> tuple[float, float]:
        """(priority, last use in s): of equals the least recently used goes first."""
        before = self._place.get(access.run)
        if access.kind is Kind.SESSION and before is not None and before[0]:
            return before[1][0], access.last
        middle = access.depth - access.blocks / 2
        return self._inflation + (1 + access.hits) * (1 + middle / BALANCE), access.last

    def forget(self, run: int, evicted: bool) -> None:
        place = self._place.get(run)
        if evicted and place is not None and place[0]:
            self._inflation = max(self._inflation, place[1][0])
        super().forget(run, evicted)
