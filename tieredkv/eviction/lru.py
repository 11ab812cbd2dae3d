"""Least recently used."""

from __future__ import annotations

from tieredkv.eviction.base import Access, RankedPolicy


class LruPolicy(RankedPolicy):
    """The run whose last use, or last use of a descendant, is longest ago goes first.

    Mattson, Gecsei, Slutz, Traiger: Evaluation techniques for storage hierarchies. IBM
    Systems Journal 9(2), 1970.
    """

    def rank(self, access: Access) -> float:
        return access.last
