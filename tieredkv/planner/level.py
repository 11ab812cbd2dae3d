"""A tier's slots and its policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tieredkv.errors import CapacityError
from tieredkv.eviction.base import EvictionPolicy
from tieredkv.index.slots import SlotPool


@dataclass(slots=True)
class Level:
    """One tier as the planner sees it."""

    name: str
    policy: EvictionPolicy
    slots: int
    durable: bool = False
    accepts: bool = True
    """False: nothing is written to it any more (write policy `off`, a pool that is down)."""
    shared: bool = False
    """Other processes see what is in it, and it is to have everything."""
    expect: Callable[[bytes], None] = field(init=False)
    """Tells the policy which block is about to come, if it wants to know."""
    pool: SlotPool = field(init=False)
    writing: dict[bytes, int] = field(default_factory=dict)
    """Blocks whose copy is being written: key -> generation."""

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise CapacityError(
                f"tier {self.name!r} has no room for a single block: raise its capacity"
            )
        self.pool = SlotPool(self.slots)
        self.expect = getattr(self.policy, "expect", lambda key: None)
