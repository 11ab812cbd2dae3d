"""Least frequently used."""

from __future__ import annotations

from tieredkv.eviction.base import Access, RankedPolicy


class LfuPolicy(RankedPolicy):
    """The run with the fewest uses of itself and its descendants goes first; of equals, the
    least recently used one. Counts end when the run leaves the hierarchy, and never decay.

    Mattson, Gecsei, Slutz, Traiger: Evaluation techniques for storage hierarchies. IBM
    Systems Journal 9(2), 1970.
    """

    def rank(self, access: Access) -> tuple[int, float]:
        return access.hits, access.last
