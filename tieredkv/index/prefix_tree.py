"""The prefix tree of runs: which block is where, and which block follows which.

A run is a piece of one key chain that was appended together. Children hang on the last
block of their parent; a request that diverges inside a run splits it there. One map from
block key to run gives residency, and because the set of blocks is prefix-closed, the
longest stored prefix of a chain is found by bisection.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from tieredkv.errors import UsageError
from tieredkv.types import Turn

ABSENT = -1
SHARDS = 256  # small dicts: one of 1e6 entries stalls for 70 ms when it rehashes


class Run:
    """Consecutive blocks of one chain. All lists are indexed by tier, fastest first."""

    __slots__ = (
        "born", "busy", "children", "count", "generation", "hits", "home", "id", "keys", "kids",
        "last", "parent", "pins", "slots", "start", "turn", "visible", "whole",
    )  # fmt: skip

    def __init__(
        self,
        run_id: int,
        parent: Run | None,
        keys: tuple[bytes, ...],
        generation: int,
        tiers: int,
        now: float,
        turn: Turn | None,
    ) -> None:
        self.id = run_id
        self.parent = parent
        self.children: dict[int, Run] | None = None
        self.keys = keys
        self.start = 0 if parent is None else parent.end
        """Blocks from the root before this run."""
        self.generation = generation
        self.slots: list[array[int] | None] = [None] * tiers
        """Slot of each block, ABSENT where the tier has no copy; None: no copy at all."""
        self.count = [0] * tiers
        """Blocks with a readable copy."""
        self.busy = [0] * tiers
        """Blocks whose copy is being written."""
        self.kids = [0] * tiers
        """Children with any block readable or being written."""
        self.home = ABSENT
        """The fastest tier of every block, if it is the same for all."""
        self.visible = False
        """All blocks of this run and of its ancestors have a copy."""
        self.born = now
        self.last = now
        self.whole = now
        """Last use of the run's last block; `last` is that of any of its blocks."""
        self.hits = 0
        self.turn = turn
        self.pins: dict[int, int] | None = None
        """Pin id -> blocks from the root that it keeps."""

    @property
    def end(self) -> int:
        return self.start + len(self.keys)

    def present(self, tier: int) -> bool:
        return self.count[tier] + self.busy[tier] > 0

    def copies(self, offset: int) -> int:
        """Number of tiers with a readable copy of the block."""
        return sum(slots is not None and slots[offset] != ABSENT for slots in self.slots)

    def recount(self) -> None:
        """Bring `home` up to date; to be called when counts or keys have changed."""
        self.home = ABSENT
        for tier, count in enumerate(self.count):
            if count:
                if count == len(self.keys):
                    self.home = tier
                return

    def full(self, tier: int) -> bool:
        """Every block has a readable copy in `tier`."""
        return self.count[tier] == len(self.keys)

    def only(self, tier: int) -> bool:
        """No block has a readable copy anywhere else."""
        return sum(self.count) == self.count[tier]

    def fastest(self, offset: int) -> int:
        """The fastest tier with a readable copy; the block must have one."""
        return next(t for t, slots in enumerate(self.slots) if slots and slots[offset] != ABSENT)

    def tail(self, tier: int, first: int = 0) -> Iterator[int]:
        """Offsets >= `first` of the blocks readable in `tier`, last first."""
        slots = self.slots[tier]
        if slots is None:
            return
        if self.count[tier] == len(slots):
            yield from range(len(slots) - 1, first - 1, -1)
            return
        for offset in range(len(slots) - 1, first - 1, -1):
            if slots[offset] != ABSENT:
                yield offset

    def spans(self, lo: int, hi: int) -> Iterator[tuple[int, int]]:
        """(fastest tier, blocks) over the offsets [lo, hi) of a visible run, run-length coded."""
        if self.home != ABSENT:
            yield self.home, hi - lo
            return
        first = next(t for t, n in enumerate(self.count) if n)
        tier, since = self.fastest(lo), lo
        for offset in range(lo + 1, hi):
            slots = self.slots[tier]
            if tier == first and slots and slots[offset] != ABSENT:
                continue
            here = self.fastest(offset)
            if here != tier:
                yield tier, offset - since
                tier, since = here, offset
        yield tier, hi - since


class PrefixTree:
    """The runs and the map from block key to run. Not thread-safe.

    It knows structure and residency; who may leave, and why, is decided above.
    """

    def __init__(self, tiers: int) -> None:
        self.tiers = tiers
        self.runs: dict[int, Run] = {}
        self.blocks = 0
        self._next_id = 1
        # Values are run ids, not runs: a dict of atoms is invisible to the garbage collector,
        # whose full passes would otherwise walk a million entries.
        self._shards: list[dict[bytes, int]] = [{} for _ in range(SHARDS)]
        self._added = 0
        self._next_shard = 0

    def find(self, key: bytes) -> Run | None:
        """The run that holds the block, visible or not. O(1)."""
        run_id = self._shards[key[0]].get(key)
        return None if run_id is None else self.runs[run_id]

    def match(self, keys: Sequence[bytes], *, visible: bool) -> tuple[int, Run | None]:
        """(n, run of block n-1): the longest known prefix. O(log n) probes.

        `visible` False counts blocks in flight as known too. UsageError if the keys are not
        a chain from the root.
        """
        shards, runs = self._shards, self.runs
        low, high, found = 0, len(keys), None
        while low < high:
            middle = (low + high) >> 1
            key = keys[middle]
            try:
                run_id = shards[key[0]].get(key)
            except (TypeError, IndexError):
                raise UsageError(
                    f"keys[{middle}] = {key!r:.80}: keys are 32 bytes each; "
                    "pass the list of chain_keys()"
                ) from None
            if run_id is not None and (not visible or runs[run_id].visible):
                low, found = middle + 1, runs[run_id]
            else:
                high = middle
        if found is not None:
            offset = low - 1 - found.start
            if not 0 <= offset < len(found.keys) or found.keys[offset] != keys[low - 1]:
                place = found.start + found.keys.index(keys[low - 1])
                raise UsageError(
                    f"keys[{low - 1}] is stored as block {place} of its chain: pass the chain "
                    "from its root, as chain_keys() returns it"
                )
        return low, found

    def check_new(self, keys: Sequence[bytes]) -> None:
        """UsageError if any of these blocks, which are to be appended, is stored already or
        named twice: then they are no chain. O(blocks)."""
        shards = self._shards
        if len(set(keys)) == len(keys) and not any(key in shards[key[0]] for key in keys):
            return
        first = next(i for i, k in enumerate(keys) if k in shards[k[0]] or k in keys[:i])
        raise UsageError(
            f"key {keys[first].hex()} is named twice, or stored below another block: pass the "
            "chain from its root, as chain_keys() returns it"
        )

    def append(
        self,
        parent: Run | None,
        keys: Sequence[bytes],
        generation: int,
        now: float,
        turn: Turn | None,
    ) -> Run:
        """A new run after the last block of `parent`; no copies yet, invisible. O(blocks)."""
        run = Run(self._next_id, parent, tuple(keys), generation, self.tiers, now, turn)
        self._next_id += 1
        self.runs[run.id] = run
        if parent is not None:
            if parent.children is None:
                parent.children = {}
            parent.children[run.id] = run
        self._map(run)
        self.blocks += len(run.keys)
        self._compact(len(run.keys))
        return run

    def split(self, run: Run, offset: int) -> Run:
        """Cut before block `offset`; returns the new head. `run` keeps id, tail and children.

        `busy` of both is left for the caller, who knows which blocks are in flight.
        """
        assert 0 < offset < len(run.keys)
        head = Run(
            self._next_id,
            run.parent,
            run.keys[:offset],
            run.generation,
            self.tiers,
            run.born,
            run.turn,
        )
        self._next_id += 1
        head.visible, head.last, head.hits = run.visible, run.last, run.hits
        head.whole, run.last = run.last, run.whole
        self.runs[head.id] = head
        if run.parent is not None and run.parent.children is not None:
            del run.parent.children[run.id]
            run.parent.children[head.id] = head
        head.children = {run.id: run}
        run.parent = head
        run.keys = run.keys[offset:]
        run.start += offset
        for tier, slots in enumerate(run.slots):
            if slots is not None:
                head.slots[tier], run.slots[tier] = slots[:offset], slots[offset:]
                head.count[tier] = offset - slots[:offset].count(ABSENT)
                run.count[tier] -= head.count[tier]
        head.recount()
        run.recount()
        if run.pins:
            head.pins = {pin: depth for pin, depth in run.pins.items() if depth <= head.end} or None
            run.pins = {pin: depth for pin, depth in run.pins.items() if depth > head.end} or None
        self._map(head)
        return head

    def cut(self, run: Run, offset: int) -> None:
        """Forget the blocks from `offset` on. They have no copies and no children by now."""
        shards = self._shards
        for key in run.keys[offset:]:
            del shards[key[0]][key]
        self.blocks -= len(run.keys) - offset
        run.keys = run.keys[:offset]
        for tier, slots in enumerate(run.slots):
            if slots is not None:
                run.slots[tier] = slots[:offset] if run.count[tier] else None
        run.recount()
        if not offset:
            del self.runs[run.id]
            if run.parent is not None and run.parent.children is not None:
                del run.parent.children[run.id]
                run.parent.children = run.parent.children or None

    def descendants(self, run: Run) -> list[Run]:
        """All runs below, parents before children."""
        found: list[Run] = []
        queue = [run]
        while queue:
            children = queue.pop().children
            if children:
                found.extend(children.values())
                queue.extend(children.values())
        return found

    def check(self) -> list[str]:
        """Violated invariants of structure, visibility and counts; empty when sound. O(blocks)."""
        problems = []
        total = 0
        for run in self.runs.values():
            total += len(run.keys)
            name = f"run {run.id}"
            if not run.keys:
                problems.append(f"{name} is empty")
            if any(self.find(key) is not run for key in run.keys):
                problems.append(f"{name} has blocks that the map does not know")
            parent = run.parent
            if parent is not None and (
                self.runs.get(parent.id) is not parent
                or not parent.children
                or parent.children.get(run.id) is not run
                or parent.end != run.start
            ):
                problems.append(f"{name} is not linked to its parent")
            if run.visible and parent is not None and not parent.visible:
                problems.append(f"{name} is visible below an invisible parent")
            if run.visible and not all(run.copies(i) for i in range(len(run.keys))):
                problems.append(f"{name} is visible with a block that has no copy")
            home = run.home
            run.recount()
            if home != run.home:
                problems.append(f"{name} misses its home tier")
            for tier in range(self.tiers):
                if run.count[tier] != sum(1 for _ in run.tail(tier)):
                    problems.append(f"{name} miscounts tier {tier}")
                kids = sum(child.present(tier) for child in (run.children or {}).values())
                if run.kids[tier] != kids:
                    problems.append(
                        f"{name} counts {run.kids[tier]} children in tier {tier}, not {kids}"
                    )
        if total != self.blocks or total != sum(map(len, self._shards)):
            problems.append(f"{total} blocks in runs, {self.blocks} counted")
        return problems

    def _compact(self, added: int) -> None:
        """Rebuild one shard from time to time: a dict that sees deletions grows to three times
        what it holds, one that is copied in time does not. A shard's turn comes after it has
        taken about a quarter of its size in new blocks."""
        self._added += added
        interval = max(self.blocks // (4 * SHARDS), SHARDS)
        while self._added >= interval:
            self._added -= interval
            self._shards[self._next_shard] = dict(self._shards[self._next_shard])
            self._next_shard = (self._next_shard + 1) % SHARDS

    def _map(self, run: Run) -> None:
        shards, run_id = self._shards, run.id
        for key in run.keys:
            shards[key[0]][key] = run_id
