"""Making room: which copies leave a tier, and which are copied down before they may.

A copy is *clean* when dropping it loses nothing that anybody wants: the next tier of memory
has a copy (the last one of memory: any tier has), or no lower tier would take the block and
nothing hangs on it. Clean victims leave at once; the others are copied down first, and only
`force` drops them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from tieredkv.eviction.base import Admission, Kind
from tieredkv.index.prefix_tree import ABSENT, Run
from tieredkv.planner.plans import TokenBucket
from tieredkv.planner.residency import Residency
from tieredkv.types import Move

SCAN = 16  # runs that one background write-back looks at: bounds the time under the lock
QUEUE = 1 << 16  # runs that wait for the write budget; of more, the oldest wait for a use
RESERVE = 16  # of memory's blocks, the share that is kept ready to leave it is one in so many


def leaf_on_path(run: Run | None, tier: int) -> Run | None:
    """The deepest run on the chain up to `run` that has blocks in `tier`."""
    while run is not None and not run.count[tier]:
        run = run.parent
    return run


class Room:
    """Evictions and demotions of a `Residency`. Moves that it wants are left in `moves`."""

    def __init__(
        self,
        residency: Residency,
        admission: Admission | None,
        low: int,
        budget: TokenBucket | None = None,
    ) -> None:
        """`low`: free slots that the durable tier keeps ready, so that puts need not wait for
        the commit of an eviction. `budget`: blocks that may be written to it; None: no limit."""
        self.res = residency
        self.tiers = range(len(residency.levels))
        self.admission = admission
        self.late = bool(getattr(admission, "late", False))
        """Is nothing to be written before it is about to leave memory?"""
        self._ahead = 0
        """Of how many evictions from memory that was last seen to."""
        self.low = low
        self.moves: list[Move] = []
        self.evicted = [0] * len(residency.levels)
        """Copies that left each tier to make room."""
        self.forgotten = 0
        """Blocks whose last copy was evicted."""
        self.refused = 0
        """Runs that the durable tier should have got and could not take."""
        self.budget = TokenBucket(0.0) if budget is None else budget
        self.over_budget = 0
        """Blocks that the budget turned down; again each time they are tried again."""
        self._postponed: deque[int] = deque(maxlen=QUEUE)
        """Runs declined for the budget, oldest first; some have been used or have gone since."""

    def make(
        self, tier: int, blocks: int, now: float, *protect: Run | None, force: bool = False
    ) -> int:
        """Evict until `blocks` slots are free; how many of them are. Never evicts `protect`.

        What a put into a durable first tier may not write for the budget is no room either."""
        pool = self.res.levels[tier].pool
        if tier == self.res.durable == 0:
            blocks = self.budget.available(blocks, now)

        def free(run: Run) -> int:
            if run in protect:
                return 0
            return self._unheld(run, tier, self._evictable(run, tier, wanted, now, force))

        # One run at a time: when it has gone, its parent may be the next.
        while (wanted := min(blocks, pool.limit) - pool.free - pool.expected) > 0:
            victims = self.res.victims(tier, 1, now, lambda run: run.count[tier] - free(run))
            count = free(victims[0][0]) if victims else 0
            if not count:
                break
            self._evict(victims[0][0], tier, count, now)
        return min(blocks, pool.free)

    def stays(self, run: Run, tier: int) -> bool:
        """Is the run complete in another tier, whatever is evicted from this one?"""
        return any(run.full(other) for other in self.tiers if other != tier)

    def ahead(self, now: float) -> None:
        """Keep the durable tier's watermark."""
        tier = self.res.durable
        if tier is not None and self.res.levels[tier].accepts:
            pool = self.res.levels[tier].pool
            low = min(self.low, pool.limit // 16)
            if pool.free + pool.expected < low:
                self.make(tier, 2 * low, now)

    def demote(self, tier: int, blocks: int, now: float, protect: Run | None = None) -> None:
        """Want the coldest dirty copies of `tier` copied one level down, up to `blocks`; room
        below is not made from the chain that `protect` ends."""
        lower = self._below(tier)
        if lower is None:
            return
        leaf = leaf_on_path(protect, tier)

        def keep(run: Run) -> int:
            return run.count[tier] if run is leaf or not run.visible else self._pinned(run, tier)

        for run, count in self.res.victims(tier, blocks, now, keep):
            if lower != self.res.durable:
                self._copy_down(run, tier, lower, count, now, protect)
            elif self._wanted(run, now):
                self._write_or_decline(run, now, max(blocks, self.low), protect)

    def write_back(self, now: float, blocks: int) -> None:
        """Want the oldest blocks that the durable tier lacks written, up to about `blocks`.

        Once the budget is spent, all that still waits is declined until there is some again.
        """
        if not self._affords(now):
            self._postpone(now)
        oldest = self._oldest()
        for _ in range(SCAN):
            run_id = next(oldest, None) if blocks > 0 and self._affords(now) else None
            if run_id is None:
                return
            run = self.res.tree.runs[run_id]
            if self.admitted(run, now):
                blocks -= self._write_or_decline(run, now, blocks)
            else:
                self.decline(run)

    def write_ahead(self, now: float, blocks: int) -> None:
        """Want what leaves memory next written, coldest first, up to about `blocks`.

        Nothing of a turn that is being served: when that ends, more is known. O(1) per eviction.
        """
        durable = self.res.durable
        if not durable:
            return  # nothing is above it
        tier, pool = durable - 1, self.res.levels[durable - 1].pool
        reserve = max(1, pool.limit // RESERVE)
        enough = pool.free + pool.expected >= reserve or self.evicted[tier] < self._ahead
        if enough or self.res.levels[durable].writing:
            return

        def keep(run: Run) -> int:
            used = any(s.busy(now) for s in self.res.visitors.latest(run, tier))
            return run.count[tier] if used or not run.visible else self._pinned(run, tier)

        for run, _ in self.res.victims(tier, reserve, now, keep):
            if blocks <= 0:
                return
            if self._wanted(run, now):
                blocks -= self._write_or_decline(run, now, blocks)
        self._ahead = self.evicted[tier] + reserve // 4

    def _oldest(self) -> Iterator[int]:
        """Runs that the durable tier lacks, first those that have waited for the budget."""
        while self._postponed:
            run = self._postponed.popleft()
            if run in self.res.declined and run not in self.res.unwanted:
                self.res.declined.remove(run)
                self.res.dirty[run] = None
                yield run
        yield from list(islice(self.res.dirty, SCAN))

    def _postpone(self, now: float) -> None:
        """Decline what waits, so that neither an eviction nor a flush waits for the budget."""
        tier = self.res.durable
        assert tier is not None
        for run_id in list(islice(self.res.dirty, 64 * SCAN)):
            run = self.res.tree.runs[run_id]
            begun = run.count[tier] + run.busy[tier]
            if begun == len(run.keys):
                continue  # all of it is on its way
            self.decline(run)
            if run_id in self.res.declined and self.admitted(run, now):
                # chains that are begun are finished first
                (self._postponed.appendleft if begun else self._postponed.append)(run_id)
                self.over_budget += len(run.keys) - begun

    def decline(self, run: Run) -> None:
        """Do not try to write this run again until it is used."""
        self.res.dirty.pop(run.id, None)
        if self.res.lacks(run):
            self.res.declined.add(run.id)

    def _write_or_decline(
        self, run: Run, now: float, limit: int, protect: Run | None = None
    ) -> int:
        """Blocks on their way. A run that is turned down must not wait in memory for a write:
        nothing could be evicted below it."""
        wrote = self.write_chain(run, now, limit, protect)
        if wrote == 0:
            self.refused += 1
            self.decline(run)
        return max(0, wrote)

    def write_chain(self, run: Run, now: float, limit: int, protect: Run | None = None) -> int:
        """Want `run` written to the durable tier, its missing ancestors first.

        Returns the blocks on their way; 0 if admission, the budget or a full tier turns the run
        down, -1 if an earlier write of the chain has to end first. One move comes from one
        source tier, so a chain may take several calls.
        """
        tier = self.res.durable
        assert tier is not None
        path: list[Run] = []
        node: Run | None = run
        while node is not None and node.count[tier] < len(node.keys):
            if node.busy[tier]:
                return -1
            if node is not run and self.res.unwanted.get(node.id, -1.0) >= run.last:
                return 0
            path.append(node)
            node = node.parent
        if not path or not self.admitted(run, now):
            return 0
        anchor = leaf_on_path(path[-1], tier)
        blocks = min(limit, sum(len(r.keys) - r.count[tier] for r in path))
        blocks = self.budget.available(blocks, now)
        if not blocks:
            return 0
        blocks = self.make(tier, blocks, now, anchor, leaf_on_path(protect, tier))
        if not blocks:
            return -1 if self.res.levels[tier].pool.expected else 0
        return self.issue(islice(self._missing(path, tier), blocks), tier)

    # -- one block at a time --------------------------------------------------------------

    def _missing(self, path: list[Run], tier: int) -> Iterator[tuple[Run, int, int]]:
        """(run, offset, source tier), root first, as long as the source stays the same."""
        chosen = None
        for run in reversed(path):
            for offset in range(run.count[tier], len(run.keys)):
                source = next(
                    (t for t in range(tier - 1, -1, -1) if self._slot(run, offset, t) != ABSENT),
                    None,
                )
                if source is None or chosen not in (None, source):
                    return
                chosen = source
                yield run, offset, source

    def issue(self, blocks: Iterator[tuple[Run, int, int]], dst: int) -> int:
        """Queue one move of these blocks; all have the same source."""
        chosen = list(blocks)
        if not chosen:
            return 0
        src = chosen[0][2]
        level = self.res.levels[dst]
        move = Move(
            src,
            dst,
            [run.keys[offset] for run, offset, _ in chosen],
            [run.generation for run, _, _ in chosen],
            [run.start + offset for run, offset, _ in chosen],
            [self._slot(run, offset, src) for run, offset, _ in chosen],
            level.pool.take(len(chosen)),
        )
        self.res.levels[src].pool.hold(move.src_slots)
        for run, offset, _ in chosen:
            self.res.reserve(run, dst, run.keys[offset : offset + 1])
        self.moves.append(move)
        self.spend(dst, len(chosen))
        return len(chosen)

    def spend(self, tier: int, blocks: int) -> None:
        """So many blocks are being written to `tier`. What then fails has been spent as well:
        some of its bytes may have reached the medium."""
        if tier == self.res.durable:
            self.budget.spend(blocks)

    def _affords(self, now: float) -> bool:
        """Does the budget allow anything to be written to the durable tier?"""
        return self.budget.available(1, now) > 0

    def _copy_down(
        self, run: Run, tier: int, lower: int, count: int, now: float, protect: Run | None
    ) -> None:
        writing = self.res.levels[lower].writing
        tail = [
            offset
            for offset in islice(run.tail(tier), count)
            if self._slot(run, offset, lower) == ABSENT and run.keys[offset] not in writing
        ]
        got = self.make(lower, len(tail), now, leaf_on_path(protect, lower))
        if got < len(tail):
            self.demote(lower, len(tail) - got, now, protect)
        self.issue(((run, offset, tier) for offset in reversed(tail[:got])), lower)

    def _slot(self, run: Run, offset: int, tier: int) -> int:
        slots = run.slots[tier]
        return ABSENT if slots is None else slots[offset]

    def _evictable(self, run: Run, tier: int, wanted: int, now: float, force: bool) -> int:
        """Blocks at the run's tail in `tier` that may be dropped now, at most `wanted`."""
        if not run.visible or (run.busy[tier] and tier == self.res.durable):
            return 0
        pinned = max(0, max(run.pins.values()) - run.start) if run.pins else 0
        below = None if force else self._memory_below(tier)
        if run.full(tier):
            free = min(wanted, len(run.keys) - pinned)
            if below is not None and not run.count[below]:
                return 0
            if any(run.full(t) for t in self.tiers if t != tier and below in (None, t)):
                return free
            if run.only(tier):
                return 0 if run.children or (not force and self._refuge(run, tier, now)) else free
        return self._evictable_slowly(run, tier, wanted, pinned, now, force)

    def _evictable_slowly(
        self, run: Run, tier: int, wanted: int, pinned: int, now: float, force: bool
    ) -> int:
        """Block by block: some have other copies and some do not."""
        edge = len(run.keys)  # blocks from here on will have left the hierarchy
        below = None if force else self._memory_below(tier)
        refuge: bool | None = None if not force else False
        free = 0
        for offset in run.tail(tier):
            if free == wanted or offset < pinned:
                break
            if below is not None and self._slot(run, offset, below) == ABSENT:
                break
            if run.copies(offset) == 1:
                if run.children or offset != edge - 1:
                    break
                if refuge is None:
                    refuge = self._refuge(run, tier, now)
                if refuge:
                    break
                edge = offset
            free += 1
        return free

    def _unheld(self, run: Run, tier: int, count: int) -> int:
        """How many of the last `count` copies no move is reading: the slots of the others would
        come back only when those moves end, so evicting them costs blocks and makes no room."""
        pool, slots = self.res.levels[tier].pool, run.slots[tier]
        if not pool.held or slots is None:
            return count
        tail = islice(run.tail(tier), count)
        return next((n for n, offset in enumerate(tail) if slots[offset] in pool.held), count)

    def _below(self, tier: int) -> int | None:
        """The next tier that takes anything."""
        return next((t for t in self.tiers[tier + 1 :] if self.res.levels[t].accepts), None)

    def _memory_below(self, tier: int) -> int | None:
        """The same if it is one of memory: what leaves `tier` goes there first."""
        lower = self._below(tier)
        return None if lower == self.res.durable else lower

    def _refuge(self, run: Run, tier: int, now: float) -> bool:
        """Would a lower tier take the run's blocks?"""
        lower = self._below(tier)
        if lower is None or lower != self.res.durable:
            return lower is not None
        return self._wanted(run, now)

    def _wanted(self, run: Run, now: float) -> bool:
        """Does the durable tier want the run's blocks, and may it have them?"""
        turned_down = run.id in self.res.declined or run.id in self.res.unwanted
        return not turned_down and self._affords(now) and self.admitted(run, now)

    def admitted(self, run: Run, now: float) -> bool:
        if self.admission is None:
            return True
        blocks = len(run.keys) - (
            run.count[self.res.durable] if self.res.durable is not None else 0
        )
        return self.admission.admit(
            self.res.access(run, blocks, Kind.RESIZE, self.res.expected(run)), now
        )

    def _pinned(self, run: Run, tier: int) -> int:
        if not run.pins:
            return 0
        kept = max(run.pins.values()) - run.start
        return sum(offset < kept for offset in run.tail(tier))

    def _evict(self, run: Run, tier: int, count: int, now: float) -> None:
        offsets = list(islice(run.tail(tier), count))[::-1]
        self.evicted[tier] += count
        last_copies = run.only(tier)
        self.res.remove(run, offsets, tier, evicted=now)
        edge = offsets[0] if last_copies else len(run.keys)
        while edge and not run.copies(edge - 1):
            edge -= 1
        if edge < len(run.keys) and not run.children:
            self.forgotten += self.res.drop(run, edge)
