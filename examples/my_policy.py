"""An eviction policy of one's own: who waits for a tool is expected back before who waits for a
person, so that a turn which ended in a tool call counts as used `GRACE` seconds later.

    PYTHONPATH=. tieredkv simulate generate:agentic --policy lru,examples.my_policy:MyPolicy
"""

from __future__ import annotations

from tieredkv.eviction.base import Access, RankedPolicy, SessionState

GRACE = 120.0
TOOL = {"tool_use", "tool_calls"}


class MyPolicy(RankedPolicy):
    """`RankedPolicy` does the rest: it keeps the runs sorted and lets the lowest rank go first,
    finished sessions before all others. It is told again when a turn ends."""

    def rank(self, access: Access) -> float:
        """Seconds on the planner's clock."""
        return access.last + (GRACE if any(map(_by_tool, access.sessions)) else 0.0)


def _by_tool(session: SessionState) -> bool:
    return session.finish_reason in TOOL
