"""Which slots of a tier are free; slots in use by a move come back only when it has ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


class SlotPool:
    """Free slots of one tier.

    A slot is free, or owned by whoever took it until `give`. `hold` marks slots that a move
    is reading: given back meanwhile, they become free at the last `release`.
    Not thread-safe: the planner's lock guards it. Cost: O(slots named).
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """Slots that exist now; `shrink` lowers it."""
        self.expected = 0
        """Slots that will be given back once their eviction is committed."""
        self._fresh = 0
        self._free: list[int] = []
        self._held: dict[int, int] = {}
        self._doomed: set[int] = set()
        self._lost: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free) + max(0, self.limit - self._fresh)

    @property
    def used(self) -> int:
        """Slots that are taken, doomed or lost."""
        return self.limit - self.free

    @property
    def held(self) -> Mapping[int, int]:
        """Slots that moves are reading, and by how many."""
        return self._held

    @property
    def doomed(self) -> int:
        """Slots that become free when the moves reading them end."""
        return len(self._doomed)

    @property
    def lost(self) -> int:
        """Slots withdrawn for good: their content could not be trusted."""
        return len(self._lost)

    def take(self, count: int) -> list[int]:
        """Up to `count` free slots, in ascending order where the history allows."""
        reused = min(count, len(self._free))
        slots = self._free[len(self._free) - reused :]
        del self._free[len(self._free) - reused :]
        slots.reverse()
        fresh = max(0, min(count - reused, self.limit - self._fresh))
        slots.extend(range(self._fresh, self._fresh + fresh))
        self._fresh += fresh
        return slots

    def claim(self, slots: Iterable[int]) -> None:
        """Take these very slots: recovery, before any `take`."""
        taken = set(slots)
        self._fresh = max(taken, default=-1) + 1
        self._free = [slot for slot in range(self._fresh - 1, -1, -1) if slot not in taken]

    def give(self, slots: Sequence[int]) -> None:
        """Return slots. The order is kept, so that neighbours stay neighbours."""
        if not self._held and max(slots, default=0) < self.limit:
            self._free.extend(reversed(slots))
            return
        for slot in reversed(slots):
            if slot in self._held:
                self._doomed.add(slot)
            elif slot < self.limit:
                self._free.append(slot)

    def hold(self, slots: Iterable[int]) -> None:
        held = self._held
        for slot in slots:
            held[slot] = held.get(slot, 0) + 1

    def release(self, slots: Iterable[int]) -> None:
        held = self._held
        for slot in slots:
            left = held[slot] - 1
            if left:
                held[slot] = left
                continue
            del held[slot]
            if slot in self._doomed:
                self._doomed.remove(slot)
                self.give((slot,))

    def lose(self, slot: int) -> None:
        """Withdraw an owned slot instead of giving it back."""
        if slot < self.limit:
            self._lost.add(slot)

    def shrink(self, limit: int) -> None:
        """The medium has fewer slots than hoped; slots at and beyond `limit` are not handed out."""
        if limit < self.limit:
            self.limit = limit
            self._free = [slot for slot in self._free if slot < limit]
            self._lost = {slot for slot in self._lost if slot < limit}

    def check(self, owned: set[int]) -> list[str]:
        """Problems, given the slots that residents and moves own."""
        free = set(self._free)
        beyond = set(range(self._fresh, self.limit))
        problems = []
        if len(free) != len(self._free):
            problems.append("a slot is free twice")
        if owned & (free | beyond):
            problems.append(f"slots both owned and free: {sorted(owned & (free | beyond))[:8]}")
        known = owned | free | beyond | self._doomed | self._lost
        leaked = set(range(self.limit)) - known
        if leaked:
            problems.append(f"leaked slots: {sorted(leaked)[:8]}")
        return problems
