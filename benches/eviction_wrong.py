"""Statistics that are wrong on purpose: what the guard of `delay` is for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace

from tieredkv.eviction.base import SessionState
from tieredkv.eviction.delay_model import DelayModel
from tieredkv.eviction.delay_table import BINS, Table

KINDS = ("reversed", "permuted", "swapped")
"""In age; in age at random, each class in its own order; each class has another one's."""

Twist = Callable[[Table, SessionState], Table]


@contextmanager
def wrong(kind: str) -> Iterator[None]:
    """Inside, every `DelayModel` of this process, and of processes forked from it, learns as
    ever and answers wrongly. Not for several threads."""
    table, completed = DelayModel.table, DelayModel.completed
    groups: dict[int, None] = {}

    def learns(self: DelayModel, session: SessionState, now: float) -> None:
        completed(self, session, now)
        groups[session.group] = None

    def swapped(self: DelayModel, session: SessionState) -> Table:
        known = list(groups)
        own = session.group
        if own in groups:
            session.group = known[(known.index(own) + 1) % len(known)]
        try:
            return table(self, session)
        finally:
            session.group = own

    def twisted(self: DelayModel, session: SessionState) -> Table:
        return _reordered(table(self, session), _order(kind, session.group))

    setattr(DelayModel, "completed", learns)  # noqa: B010  (mypy)
    setattr(DelayModel, "table", swapped if kind == "swapped" else twisted)  # noqa: B010
    try:
        yield
    finally:
        setattr(DelayModel, "completed", completed)  # noqa: B010
        setattr(DelayModel, "table", table)  # noqa: B010


_orders: dict[tuple[str, int], list[int]] = {}


def _order(kind: str, group: int) -> list[int]:
    order = _orders.get((kind, group))
    if order is None:
        order = list(reversed(range(BINS)))
        if kind == "permuted":
            random.Random(group).shuffle(order)
        _orders[kind, group] = order
    return order


def _reordered(table: Table, order: list[int]) -> Table:
    columns = {field.name: getattr(table, field.name) for field in fields(table)}
    return replace(table, **{name: [col[at] for at in order] for name, col in columns.items()})
