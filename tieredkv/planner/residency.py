"""Who is where: the tree, each tier's slots and policy, kept consistent with each other.

Every change of a copy goes through `install` and `remove`, which keep counts, leaf status,
policies, slot pools and events in step. Decisions are the planner's.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from itertools import islice

from tieredkv.events import EventKind, EventLog
from tieredkv.eviction.base import Access, Kind, SessionState
from tieredkv.index.prefix_tree import ABSENT, PrefixTree, Run
from tieredkv.index.record import Deletion
from tieredkv.planner.level import Level
from tieredkv.planner.pins import Pins
from tieredkv.planner.visitors import Visitors

SEARCH = 256  # runs that one question about a subtree looks at


class Residency:
    """Residency of all blocks in all tiers. Not thread-safe."""

    def __init__(self, levels: Sequence[Level], block_bytes: int, events: EventLog | None) -> None:
        self.levels = list(levels)
        self.block_bytes = block_bytes
        self.tree = PrefixTree(len(levels))
        self.pins = Pins(self.tree)
        self.visitors = Visitors(len(levels), self._attended)
        self.events = events
        self.durable = next((t for t, level in enumerate(levels) if level.durable), None)
        self.shared = next((t for t, level in enumerate(levels) if level.shared), None)
        self.unshared: dict[int, None] = {}
        """Visible runs that the shared tier may lack, oldest first."""
        self.withdrawn: list[bytes] = []
        """Blocks that have left the shared tier since `take_withdrawn`."""
        self.dirty: dict[int, None] = {}
        """Visible runs with blocks that were never written to the durable tier, oldest first."""
        self.declined: set[int] = set()
        """Those of them that admission or a full tier turned down, until they are hit."""
        self.unwanted: dict[int, float] = {}
        """Runs that the durable tier has evicted blocks of, until they are hit."""
        self.deleted: list[Deletion] = []
        """Durable copies removed since `take_deleted`."""

    # -- copies ---------------------------------------------------------------------------

    def reserve(self, run: Run, tier: int, keys: Sequence[bytes]) -> None:
        """Copies of these blocks of `run` are being written to `tier`."""
        was = run.present(tier)
        run.busy[tier] += len(keys)
        self.levels[tier].writing.update(dict.fromkeys(keys, run.generation))
        self._presence(run, tier, was)

    def written(self, key: bytes, generation: int, tier: int) -> Run | None:
        """The run whose block a write that has just ended was for; None if it is gone by now."""
        if self.levels[tier].writing.get(key) != generation:
            return None
        return self.tree.find(key)

    def unreserve(self, run: Run, key: bytes, tier: int) -> None:
        """The write of this block came to nothing."""
        del self.levels[tier].writing[key]
        was = run.present(tier)
        run.busy[tier] -= 1
        self._presence(run, tier, was)

    def install(
        self,
        run: Run,
        offset: int,
        tier: int,
        slots: Sequence[int],
        *,
        reserved: bool = True,
        leaf: bool = True,
    ) -> None:
        """Blocks from `offset` on have readable copies in these slots. O(blocks).

        They had none in this tier before; `reserved`: announced by `reserve`. `leaf` False: a
        child is about to follow.
        """
        level, keys = self.levels[tier], run.keys[offset : offset + len(slots)]
        mine = run.slots[tier]
        if mine is None:
            mine = run.slots[tier] = array("i", [ABSENT]) * len(run.keys)
        was, fresh = run.present(tier), not run.count[tier]
        mine[offset : offset + len(slots)] = array("i", slots)
        run.count[tier] += len(slots)
        run.recount()
        if reserved:
            run.busy[tier] -= len(slots)
            for key in keys:
                del level.writing[key]
        self._presence(run, tier, was)
        if leaf and not run.kids[tier]:
            self._record(run, tier, Kind.INSERT if fresh else Kind.RESIZE)
        if self.events is not None:
            self.events.add(EventKind.STORED, level.name, keys)
        if tier == self.durable and run.count[tier] == len(run.keys):
            self._clean(run)

    def remove(
        self,
        run: Run,
        offsets: Sequence[int],
        tier: int,
        *,
        lose: bool = False,
        evicted: float | None = None,
    ) -> None:
        """Take these copies (ascending offsets) out of the tier. Their slots return to the pool,
        or wait in `deleted` for the commit that a durable tier needs; `lose` withdraws them.
        `evicted`: the tier does not want them back."""
        level, mine = self.levels[tier], run.slots[tier]
        assert mine is not None
        was, first, count = run.present(tier), offsets[0], len(offsets)
        if offsets[-1] - first == count - 1:
            slots = mine[first : first + count].tolist()
            mine[first : first + count] = array("i", [ABSENT]) * count
            keys = run.keys[first : first + count]
        else:
            slots = [mine[offset] for offset in offsets]
            keys = tuple(run.keys[offset] for offset in offsets)
            for offset in offsets:
                mine[offset] = ABSENT
        run.count[tier] -= count
        run.recount()
        if not run.count[tier]:
            run.slots[tier] = None
            level.policy.forget(run.id, True)
        elif not run.kids[tier]:
            self._record(run, tier, Kind.RESIZE)
        if lose:
            for slot in slots:
                level.pool.lose(slot)
        if level.durable:
            self.deleted.extend(
                Deletion(key, run.generation, slot, not lose)
                for key, slot in zip(keys, slots, strict=True)
            )
            level.pool.expected += 0 if lose else len(slots)
            if evicted is not None:
                self.unwanted[run.id] = evicted
                self.dirty.pop(run.id, None)  # or what is written of it would be evicted again
            elif run.visible and level.accepts and run.id not in self.dirty:
                self.declined.add(run.id)
        elif not lose:
            level.pool.give(slots)
        self._presence(run, tier, was)
        if tier == self.shared:
            self.withdrawn.extend(keys)
        if self.events is not None:
            self.events.add(EventKind.REMOVED, level.name, keys)

    def accept_shared(self, accepts: bool) -> None:
        """May blocks be put into the shared tier now?"""
        assert self.shared is not None
        self.levels[self.shared].accepts = accepts

    def take_withdrawn(self) -> list[bytes]:
        withdrawn, self.withdrawn = self.withdrawn, []
        return withdrawn

    def take_deleted(self) -> list[Deletion]:
        deleted, self.deleted = self.deleted, []
        return deleted

    # -- structure ------------------------------------------------------------------------

    def split(self, run: Run, offset: int) -> Run:
        """Cut before block `offset`; the head, which `run` now hangs on."""
        before = [run.present(t) for t in range(len(self.levels))]
        head = self.tree.split(run, offset)
        for tier, level in enumerate(self.levels):
            if run.busy[tier]:
                head.busy[tier] = sum(key in level.writing for key in head.keys)
                run.busy[tier] -= head.busy[tier]
            head.kids[tier] = int(run.present(tier))
            if head.parent is not None:
                head.parent.kids[tier] += int(head.present(tier)) - int(before[tier])
            if head.count[tier] and not run.count[tier]:
                level.policy.forget(run.id, False)
            elif run.count[tier] and not run.kids[tier]:
                self._record(run, tier, Kind.RESIZE)
            self._leaf_again(head, tier)
            if head.parent is not None and before[tier] and not head.present(tier):
                self._leaf_again(head.parent, tier)
            if not run.count[tier]:
                run.slots[tier] = None
            if not head.count[tier]:
                head.slots[tier] = None
            if before[tier] and not run.present(tier):
                self.visitors.left(run, tier)
        if run.id in self.unwanted:
            self.unwanted[head.id] = self.unwanted[run.id]
        if run.id in self.dirty:
            self.dirty[head.id] = None
        elif run.id in self.declined:
            self.declined.add(head.id)
        for part in (head, run):
            if self.durable is not None and part.count[self.durable] == len(part.keys):
                self._clean(part)
        return head

    def drop(self, run: Run, offset: int, lose: tuple[int, int] | None = None) -> int:
        """Forget the blocks from `offset` on with all their descendants; how many.

        They are invisible at once; slots that moves are using come back when those end.
        `lose` names (tier, offset) of a slot not to be used again.
        """
        dropped = 0
        for child in reversed(self.tree.descendants(run)):
            dropped += self._drop_tail(child, 0, None)
        return dropped + self._drop_tail(run, offset, lose)

    def _drop_tail(self, run: Run, offset: int, lose: tuple[int, int] | None) -> int:
        for tier, level in enumerate(self.levels):
            tail = list(run.tail(tier, offset))
            if lose is not None and lose[0] == tier and lose[1] in tail:
                tail.remove(lose[1])
                self.remove(run, [lose[1]], tier, lose=True)
            if tail:
                self.remove(run, tail[::-1], tier)
            if run.busy[tier]:
                was = run.present(tier)
                for key in run.keys[offset:]:
                    if level.writing.pop(key, None) is not None:
                        run.busy[tier] -= 1
                self._presence(run, tier, was)
        dropped = len(run.keys) - offset
        self.pins.retreat(run, offset)
        if not offset:
            self.unshared.pop(run.id, None)
            self.visitors.dropped(run)
        self.tree.cut(run, offset)
        if not offset or (self.durable is not None and run.count[self.durable] == offset):
            self._clean(run)
        return dropped

    def reveal(self, run: Run) -> None:
        """Make a fully stored run visible, and its stored descendants with it."""
        queue = [run]
        while queue:
            run = queue.pop()
            if run.visible or (run.parent is not None and not run.parent.visible):
                continue
            blocks = len(run.keys)
            if max(run.count) < blocks and not all(run.copies(i) for i in range(blocks)):
                continue
            run.visible = True
            if self.lacks(run):
                self.dirty[run.id] = None
            if self.shared and not run.full(self.shared):
                self.unshared[run.id] = None
            queue.extend((run.children or {}).values())

    # -- recency and victims --------------------------------------------------------------

    def touch(self, run: Run, now: float, kind: Kind = Kind.HIT, blocks: int | None = None) -> None:
        """A request used `run` as its deepest (HIT), or nobody will extend it (END). `blocks`:
        from the root, if it was not used to its end.

        Each tier's nearest leaf on the path is told; of an end only if no session is expected.
        """
        if kind is Kind.HIT:
            run.last = max(run.last, now)
            if blocks is None or blocks == run.end:
                run.whole = run.last
            run.hits += 1
            self.unwanted.pop(run.id, None)
            if run.id in self.declined:
                self.declined.remove(run.id)
                self.dirty[run.id] = None
        for tier in range(len(self.levels)):
            node: Run | None = run
            while node is not None and not node.count[tier]:
                node = node.parent
            if node is not None and not node.kids[tier]:
                node.last = max(node.last, run.last)
                if kind is Kind.HIT or not self.visitors.seen(node, tier):
                    self._record(node, tier, kind)

    def attend(self, session: SessionState, now: float) -> None:
        """The session's state has changed, with a use of its blocks."""
        for tier, run in self.visitors.runs(session):
            run.last = run.whole = max(run.last, now)
            self._attended(run, tier)

    def victims(
        self, tier: int, blocks: int, now: float, keep: Callable[[Run], int]
    ) -> list[tuple[Run, int]]:
        """(run, blocks to trim from its tail in `tier`), worst first.

        `keep(run)`: how many of its blocks in the tier must stay.
        """
        size, runs = self.block_bytes, self.tree.runs
        chosen = self.levels[tier].policy.victims(
            blocks * size, now, lambda run_id: keep(runs[run_id]) * size
        )
        return [(runs[victim.run], victim.nbytes // size) for victim in chosen]

    # -- leaf bookkeeping -----------------------------------------------------------------

    def _presence(self, run: Run, tier: int, was: bool) -> None:
        """Tell the parent when the run's first copy came to the tier or its last one left."""
        now, parent = run.present(tier), run.parent
        if now == was:
            return
        if now:
            self.visitors.arrived(run, tier)
        else:
            self.visitors.left(run, tier)
        if parent is None:
            return
        if now:
            parent.kids[tier] += 1
            if parent.kids[tier] == 1 and parent.count[tier]:
                self.levels[tier].policy.forget(parent.id, False)
            return
        parent.kids[tier] -= 1
        parent.last = max(parent.last, run.last)
        parent.hits = max(parent.hits, run.hits)
        self._leaf_again(parent, tier)

    def want(self, run: Run) -> None:
        """Have the run written to the durable tier, whatever was decided before."""
        if self.lacks(run):
            self.declined.discard(run.id)
            self.unwanted.pop(run.id, None)
            self.dirty[run.id] = None

    def lacks(self, run: Run) -> bool:
        """Has the run blocks for a durable tier that takes any?"""
        tier = self.durable
        return tier is not None and self.levels[tier].accepts and not run.full(tier)

    def _clean(self, run: Run) -> None:
        self.dirty.pop(run.id, None)
        self.declined.discard(run.id)
        self.unwanted.pop(run.id, None)

    def _leaf_again(self, run: Run, tier: int) -> None:
        if run.count[tier] and not run.kids[tier]:
            self._record(run, tier, Kind.END if self._deserted(run, tier) else Kind.LEAF)

    def _deserted(self, run: Run, tier: int) -> bool:
        """The session that wrote it is over, and no other is expected."""
        writer = None if run.turn is None else run.turn.session
        over = writer is not None and writer in self.visitors.over
        return over and not self.visitors.seen(run, tier)

    def _attended(self, run: Run, tier: int) -> None:
        if run.count[tier] and not run.kids[tier]:
            self._record(run, tier, Kind.SESSION)

    def access(
        self, run: Run, blocks: int, kind: Kind, sessions: Collection[SessionState]
    ) -> Access:
        """The run as a policy or an admission should see it, with so many blocks."""
        return Access(
            kind, run.id, run.keys[-1], blocks, blocks * self.block_bytes, run.end,
            run.born, run.last, run.hits, run.turn, run.keys[0], sessions,
        )  # fmt: skip

    def expected(self, run: Run) -> list[SessionState]:
        """Sessions whose chain goes through the run, as far as a short search finds them."""
        found: list[SessionState] = []
        queue, left = [run], SEARCH
        while queue and left > len(found):
            node = queue.pop()
            left -= 1
            found.extend(islice(self.visitors.standing(node), SEARCH))
            queue.extend(islice((node.children or {}).values(), SEARCH))
        return found

    def _record(self, run: Run, tier: int, kind: Kind) -> None:
        access = self.access(run, run.count[tier], kind, self.visitors.latest(run, tier))
        self.levels[tier].policy.record(access)
