"""First in, first out."""

from __future__ import annotations

from tieredkv.eviction.base import Access, RankedPolicy


class FifoPolicy(RankedPolicy):
    """The leaf run that was stored first goes first, used or not.

    Only leaves can go, so a chain in use keeps its old head for as long as it grows.

    Belady: A study of replacement algorithms for a virtual-storage computer. IBM Systems
    Journal 5(2), 1966.
    """

    def rank(self, access: Access) -> float:
        return access.born
