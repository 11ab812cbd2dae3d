"""The control plane: what is where, what is pinned, what moves next. Pure state, no I/O.

`planner` has the plans, `ledger` takes outcomes, `room` decides what leaves, `residency` keeps
tree, slots and policies consistent.
"""

from __future__ import annotations

from tieredkv.planner.planner import Planner

__all__ = ["Planner"]
