"""Is what the planner knows sound?"""

from __future__ import annotations

from collections.abc import Iterator

from tieredkv.index.prefix_tree import ABSENT
from tieredkv.planner.residency import Residency


def violations(residency: Residency) -> list[str]:
    """Violated invariants; empty when sound. Slots owned by moves are the ledger's.

    O(blocks). Takes no lock: the caller holds the planner's.
    """
    runs = residency.tree.runs
    problems = residency.tree.check() + residency.visitors.check(runs)
    for run in runs.values():
        for tier, level in enumerate(residency.levels):
            writing = sum(key in level.writing for key in run.keys)
            if writing != run.busy[tier]:
                problems.append(
                    f"run {run.id}: {run.busy[tier]} writes to {level.name}, not {writing}"
                )
        shown = run.parent is None or run.parent.visible
        if shown and not run.visible and not any(run.busy):
            problems.append(f"run {run.id} is hidden for ever")
    dirty, declined = residency.dirty.keys(), residency.declined
    stray = (dirty | declined | residency.unwanted.keys()) - runs.keys()
    if stray or dirty & declined:
        problems.append(f"dirty list names dead runs {sorted(stray)[:8]} or a run twice")
    if residency.durable is not None:
        problems += _not_closed(residency, residency.durable)
    return problems


def _not_closed(residency: Residency, tier: int) -> Iterator[str]:
    """A durable block's ancestors are durable."""
    for run in residency.tree.runs.values():
        slots = run.slots[tier]
        if slots is None:
            continue
        parent = run.parent
        if parent is not None and parent.count[tier] != len(parent.keys):
            yield f"run {run.id} is durable below blocks that are not"
        if ABSENT in slots[: run.count[tier]]:
            yield f"run {run.id} has a durable block after one that is not"
