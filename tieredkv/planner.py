"""The planner: what is where, what is pinned, what moves next. Pure state.

Every method takes `now` where time matters; moves come out of the plans and of `drain`, and
their ends come back through `finish`. It touches no byte, no clock, no thread and no disk.
One lock of the caller's guards it.

Copies are readable as soon as their bytes are written. What a durable tier holds is also
*acknowledged* once its record is committed: `drain` hands out records in an order in which
a block never precedes its ancestors, `committed` takes the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cachetools import LRUCache

from tieredkv.eviction.base import Kind
from tieredkv.events import EventKind
from tieredkv.index.prefix_tree import ABSENT, Run
from tieredkv.index.record import Piece
from tieredkv.pins import Pins
from tieredkv.residency import Residency
from tieredkv.room import Room, leaf_on_path
from tieredkv.types import Match, Move, Outcome, Turn

ROOT = bytes(32)
SESSIONS = 1 << 16


@dataclass(frozen=True, slots=True)
class PutPlan:
    """What a put has to do. `keys[:known]` are stored already or on their way."""

    known: int
    pending: bool
    """The deepest known block is still being written by another put."""
    moves: list[Move]
    short: int
    """Blocks that got no slot; if `wait`, asking again later may find room."""
    wait: bool = False


@dataclass(slots=True)
class IndexOp:
    """One ordered change of the durable index."""

    ticket: int
    puts: list[Piece]
    deletes: list[tuple[bytes, int]]
    """(key, generation)"""


@dataclass(slots=True)
class Effects:
    """What the caller has to start after a planner call."""

    moves: list[Move] = field(default_factory=list)
    index: IndexOp | None = None


@dataclass(frozen=True, slots=True)
class Ticket:
    """An index change on its way: what was put, and (key, generation, slot) that was deleted."""

    epoch: int
    puts: list[Piece]
    deletes: list[tuple[bytes, int, int]]


class TokenBucket:
    """A rate limit of whole tokens per second with one second of burst; rate 0: no limit."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._tokens = rate
        self._last: float | None = None

    def available(self, wanted: int, now: float) -> int:
        """How many of `wanted` could go now."""
        if not self._rate:
            return wanted
        elapsed = 0.0 if self._last is None else max(0.0, now - self._last)
        self._last = now
        self._tokens = min(max(self._rate, 1.0), self._tokens + elapsed * self._rate)
        return min(wanted, int(self._tokens))

    def take(self, wanted: int, now: float) -> int:
        """Spend up to `wanted` tokens; how many."""
        granted = self.available(wanted, now)
        self._tokens -= granted if self._rate else 0
        return granted


class Planner:
    """Decisions on one hierarchy. Not thread-safe."""

    def __init__(
        self,
        residency: Residency,
        room: Room,
        *,
        boot: int = 0,
        epoch: int = 0,
        through: bool = False,
        promotion_budget: float = 0.0,
    ) -> None:
        """`boot`: how often the durable index was opened, so that generations never repeat.
        `through`: every put is written to the durable tier. `promotion_budget`: blocks per
        second, 0 for no limit."""
        self.res = residency
        self.room = room
        self.pins = Pins(residency.tree)
        self._tiers = range(len(residency.levels))
        self.epoch = epoch
        self.through = through
        self.budget = TokenBucket(promotion_budget)
        self._generation = boot << 40
        self._pieces: list[Piece] = []
        self._tickets: dict[int, Ticket] = {}
        self._next_ticket = 1
        self._sessions: LRUCache[str, bytes] = LRUCache(SESSIONS)
        self.corrupt = 0
        """Blocks whose stored bytes failed verification."""

    # -- lookup ---------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes]) -> Match:
        """The longest visible prefix. O(log n + runs on the path)."""
        blocks, run = self.res.tree.match(keys, visible=True)
        spans: list[tuple[int, int]] = []  # deepest first
        upto = blocks
        while run is not None:
            count, wanted = run.count, upto - run.start
            tier = next((t for t in self._tiers if count[t]), 0)
            if count[tier] == len(run.keys):
                here = ((tier, wanted),)
            else:
                here = tuple(run.spans(0, wanted))[::-1]
            for tier, length in here:
                if spans and spans[-1][0] == tier:
                    length += spans.pop()[1]
                spans.append((tier, length))
            upto, run = run.start, run.parent
        names = self.res.levels
        return Match(blocks, tuple((names[tier].name, length) for tier, length in spans[::-1]))

    def visible(self, key: bytes) -> bool | None:
        """True if stored, False if still being written, None if unknown."""
        run = self.res.tree.find(key)
        return None if run is None else run.visible

    # -- put ------------------------------------------------------------------------------

    def plan_put(
        self, keys: Sequence[bytes], start: int, turn: Turn | None, now: float, *, force: bool
    ) -> PutPlan:
        """Give the unknown blocks of `keys[start:]` slots in the fastest tiers with room.

        Without `force` nothing happens while a demotion could still make room. O(new blocks).
        """
        self.pins.expire(now)
        known, run = self.res.tree.match(keys, visible=False)
        pending = run is not None and not run.visible
        if start > known or known == len(keys):
            return PutPlan(known, pending, [], 0)
        shares, wait = self._share(len(keys) - known, run, now, force)
        wanted = len(keys) - known - sum(count for _, count in shares)
        if wait:
            return PutPlan(known, pending, [], wanted, wait=True)
        placed = len(keys) - known - wanted
        if not placed:
            return PutPlan(known, pending, [], wanted)
        if run is not None and known < run.end:
            run = self.res.split(run, known - run.start)
        self._generation += 1
        child = self.res.tree.append(run, keys[known : known + placed], self._generation, now, turn)
        moves = self._place(child, shares)
        if turn is not None and turn.session is not None:
            self._sessions[turn.session] = child.keys[-1]
        return PutPlan(known, pending, moves, wanted)

    def _share(
        self, blocks: int, run: Run | None, now: float, force: bool
    ) -> tuple[list[tuple[int, int]], bool]:
        """((tier, free slots) for a put after `run`, whether waiting may bring more)."""
        tiers = [t for t in range(len(self.res.levels)) if t != self.res.durable] or [0]
        shares, wanted = dict.fromkeys(tiers, 0), blocks
        for drop in (False, True):
            for tier in tiers:
                goal = shares[tier] + wanted
                leaf = leaf_on_path(run, tier)
                got = self.room.make(tier, goal, now, leaf, force=drop)
                wanted -= got - shares[tier]
                shares[tier] = got
                if got < min(goal, self.res.levels[tier].pool.limit) and not force and not drop:
                    self.room.demote(tier, goal - got, now, leaf)
                    if self._in_flight(tier):
                        return [], True
        return list(shares.items()), False

    def _place(self, run: Run, shares: list[tuple[int, int]]) -> list[Move]:
        moves, at = [], 0
        for tier, count in shares:
            keys = list(run.keys[at : at + count])
            if keys:
                self.res.reserve(run, tier, keys)
                slots = self.res.levels[tier].pool.take(count)
                depths = list(range(run.start + at, run.start + at + count))
                generations = [run.generation] * count
                moves.append(Move(None, tier, keys, generations, depths, [], slots, self.epoch))
            at += count
        return moves

    def _in_flight(self, tier: int) -> bool:
        """Is anything under way that will make room in `tier`?"""
        levels = self.res.levels
        return (
            bool(self.room.moves)
            or levels[tier].pool.expected > 0
            or any(level.writing for level in levels[tier + 1 :])
        )

    # -- get ------------------------------------------------------------------------------

    def plan_get(self, keys: Sequence[bytes], start: int, now: float) -> tuple[int, list[Move]]:
        """(longest match, reads of `keys[start:match]`, one move per tier); counts as a use."""
        self.pins.expire(now)
        blocks, run = self.res.tree.match(keys, visible=True)
        if run is None or blocks <= start:
            return blocks, []
        self.res.touch(run, now)
        moves: dict[int, Move] = {}
        for node, lo, hi in self._path(run, start, blocks):
            offset = lo
            for tier, count in node.spans(lo, hi):
                slots = node.slots[tier]
                assert slots is not None
                move = moves.get(tier)
                if move is None:
                    move = moves[tier] = Move(tier, None, [], [], [], epoch=self.epoch)
                move.keys.extend(node.keys[offset : offset + count])
                move.generations.extend([node.generation] * count)
                move.depths.extend(range(node.start + offset, node.start + offset + count))
                move.src_slots.extend(slots[offset : offset + count])
                offset += count
        for tier, move in moves.items():
            self.res.levels[tier].pool.hold(move.src_slots)
        return blocks, list(moves.values())

    def _path(self, run: Run, start: int, end: int) -> list[tuple[Run, int, int]]:
        """(run, first offset, last offset) of the blocks [start, end) of a chain, root first."""
        path = []
        node: Run | None = run
        while node is not None and node.end > start:
            path.append((node, max(0, start - node.start), min(end, node.end) - node.start))
            node = node.parent
        return path[::-1]

    # -- promotion ------------------------------------------------------------------------

    def promotion_target(self, blocks: int) -> int | None:
        """The tier that so many blocks are promoted to: the fastest that they do not swamp."""
        for tier, level in enumerate(self.res.levels):
            if tier != self.res.durable and level.accepts and blocks <= level.slots // 2:
                return tier
        return None

    def room_for(self, tier: int, blocks: int, keys: Sequence[bytes], now: float) -> int:
        """Evict or demote for a promotion; slots still missing."""
        blocks = min(blocks, self.budget.available(blocks, now))
        _, run = self.res.tree.match(keys, visible=True)
        leaf = leaf_on_path(run, tier)
        short = blocks - self.room.make(tier, blocks, now, leaf)
        if short and tier + 1 != self.res.durable:
            self.room.demote(tier, short, now, leaf)
        return short

    def plan_promote(
        self, keys: Sequence[bytes], wanted: Sequence[int], tier: int, now: float, *, read: bool
    ) -> list[Move]:
        """Copies of the blocks at `wanted` (ascending positions in `keys`) into `tier`.

        `read` False: the caller has the bytes. Only into room that costs nothing else, and
        within the budget.
        """
        blocks, run = self.res.tree.match(keys, visible=True)
        writing = self.res.levels[tier].writing
        moves: dict[int | None, Move] = {}
        found: list[tuple[Run, int]] = []
        by_run = self._path(run, 0, blocks) if run is not None else []
        positions = iter([w for w in wanted if w < blocks])
        position = next(positions, None)
        for node, _, _ in by_run:
            while position is not None and position < node.end:
                offset = position - node.start
                if node.fastest(offset) > tier and node.keys[offset] not in writing:
                    found.append((node, offset))
                position = next(positions, None)
        got = self.budget.take(len(found), now)
        got = self.room.make(tier, got, now, leaf_on_path(run, tier))
        slots = self.res.levels[tier].pool.take(got)
        for (node, offset), slot in zip(found[:got], slots, strict=True):
            source = node.fastest(offset) if read else None
            move = moves.get(source)
            if move is None:
                move = moves[source] = Move(source, tier, [], [], [], epoch=self.epoch)
            move.keys.append(node.keys[offset])
            move.generations.append(node.generation)
            move.depths.append(node.start + offset)
            move.dst_slots.append(slot)
            if source is not None:
                mine = node.slots[source]
                assert mine is not None
                move.src_slots.append(mine[offset])
            self.res.reserve(node, tier, node.keys[offset : offset + 1])
        for source, move in moves.items():
            if source is not None:
                self.res.levels[source].pool.hold(move.src_slots)
        return list(moves.values())

    # -- outcomes -------------------------------------------------------------------------

    def finish(
        self, move: Move, read: Sequence[Outcome], write: Sequence[Outcome], now: float
    ) -> None:
        """A move has really ended. `read` has an outcome per block if it had a source,
        `write` one per block if it had a destination."""
        if move.src is not None:
            self.res.levels[move.src].pool.release(move.src_slots)
        if move.dst is not None:
            self._finish_write(move, write)
        if move.src is not None:
            for i, outcome in enumerate(read):
                if outcome is not Outcome.OK and outcome is not Outcome.BUSY:
                    self.corrupt += outcome is Outcome.CORRUPT
                    self.lose(move.keys[i], move.generations[i], move.src, move.src_slots[i],
                              withdraw=outcome is Outcome.CORRUPT)  # fmt: skip
        self.room.ahead(now)

    def _finish_write(self, move: Move, write: Sequence[Outcome]) -> None:
        tier = move.dst
        assert tier is not None
        pool = self.res.levels[tier].pool
        touched: dict[int, Run] = {}
        stale = tier == self.res.durable and move.epoch != self.epoch  # cleared meanwhile
        at, total = 0, len(move)
        while at < total:
            run = self.res.written(move.keys[at], move.generations[at], tier)
            good = write[at] is Outcome.OK and not stale
            if run is None or not good or not self._closed(run, move.depths[at], tier):
                if run is not None:
                    self.res.unreserve(run, move.keys[at], tier)
                    touched[run.id] = run
                    if tier == self.res.durable and write[at] is Outcome.FAILED:
                        self.room.refused += 1
                        self.room.decline(run)  # or the write-back would spin on a dead disk
                pool.give(move.dst_slots[at : at + 1])
                at += 1
                continue
            first = at
            at += 1
            end = min(total, first + run.end - move.depths[first])
            if move.depths[end - 1] - move.depths[first] == end - 1 - first and good:
                at = _first_not_ok(write, first, end)
            touched[run.id] = run
            offset = move.depths[first] - run.start
            self.res.install(run, offset, tier, move.dst_slots[first:at])
            if tier == self.res.durable:
                self._log(run, offset, move.dst_slots[first:at])
        for run in touched.values():
            self._settle(run)

    def _settle(self, run: Run) -> None:
        """Once nothing is being written any more, what has no copy goes, the rest shows."""
        if run.id not in self.res.tree.runs or run.visible or any(run.busy):
            return
        blocks = len(run.keys)
        stored = blocks
        if max(run.count) < blocks:
            stored = next((i for i in range(blocks) if not run.copies(i)), blocks)
        if stored < blocks:
            self.res.drop(run, stored)
        if stored:
            self.res.reveal(run)

    def _closed(self, run: Run, depth: int, tier: int) -> bool:
        """May this block enter the tier? A durable tier must hold its predecessor."""
        if tier != self.res.durable or depth == 0:
            return True
        if depth > run.start:
            slots = run.slots[tier]
            return slots is not None and slots[depth - run.start - 1] != ABSENT
        return run.parent is not None and run.parent.count[tier] == len(run.parent.keys)

    def lose(self, key: bytes, generation: int, tier: int, slot: int, *, withdraw: bool) -> None:
        """A copy turned out unreadable: forget it, and what cannot stand without it."""
        run = self.res.tree.find(key)
        if run is None or run.generation != generation:
            return
        offset = run.keys.index(key)
        slots = run.slots[tier]
        if slots is None or slots[offset] != slot:
            return
        if run.copies(offset) == 1:
            self.res.drop(run, offset, lose=(tier, offset) if withdraw else None)
            return
        if tier == self.res.durable:
            self._lose_durable(run, offset + 1, tier)
        self.res.remove(run, [offset], tier, lose=withdraw)

    def _lose_durable(self, run: Run, offset: int, tier: int) -> None:
        """Take everything after a lost durable block out of that tier."""
        below = self.res.tree.descendants(run)
        for node, first in [(child, 0) for child in reversed(below)] + [(run, offset)]:
            tail = [i for i in node.tail(tier) if i >= first]
            if tail:
                self.res.remove(node, tail[::-1], tier)
        for node in [run, *below]:
            if node.id in self.res.tree.runs and node.visible:
                bare = next((i for i in range(len(node.keys)) if not node.copies(i)), None)
                if bare is not None:
                    self.res.drop(node, bare)

    def shrink(self, tier: int, slots: int) -> None:
        """The medium turned out smaller (disk full): hand out no slot at or beyond `slots`."""
        self.res.levels[tier].pool.shrink(slots)

    # -- the durable index ----------------------------------------------------------------

    def _log(self, run: Run, offset: int, slots: Sequence[int]) -> None:
        parent = run.keys[offset - 1] if offset else (run.parent.keys[-1] if run.parent else ROOT)
        keys = list(run.keys[offset : offset + len(slots)])
        self._pieces.append(
            Piece(keys, parent, list(slots), run.generation, run.start + offset, run.born, run.last)
        )

    def drain(self) -> Effects:
        """Moves to start and records to commit. Call it after every method that changes things,
        under the same lock, and submit the index change before that lock is released."""
        moves, self.room.moves = self.room.moves, []
        for move in moves:
            move.epoch = self.epoch
        deleted, puts = self.res.take_deleted(), self._pieces
        if not deleted and not puts:
            return Effects(moves)
        self._pieces = []
        ticket = self._next_ticket
        self._next_ticket += 1
        self._tickets[ticket] = Ticket(self.epoch, puts, deleted)
        deletes = [(key, generation) for key, generation, _ in deleted]
        return Effects(moves, IndexOp(ticket, puts, deletes))

    def begin_flush(self) -> int:
        """Try again what was turned down; the count of refusals so far."""
        self.res.dirty.update(dict.fromkeys(sorted(self.res.declined)))
        self.res.declined.clear()
        return self.room.refused

    def writes(self, tier: int) -> bool:
        """Is anything waiting to be written to the durable tier, or on its way?"""
        return bool(self.res.dirty or self.res.levels[tier].writing)

    def durable(self, key: bytes) -> bool | None:
        """True if the durable tier has the block, False if it may still come, None if not."""
        run, tier = self.res.tree.find(key), self.res.durable
        if run is None or tier is None:
            return None
        slots = run.slots[tier]
        if slots is not None and slots[run.keys.index(key)] != ABSENT:
            return True
        return None if run.id in self.res.declined else False

    def committed(self, ticket: int, ok: bool, now: float) -> None:
        """The index change is on disk (`ok`) or failed and left the disk as it was."""
        entry = self._tickets.pop(ticket)
        tier = self.res.durable
        assert tier is not None
        if entry.epoch != self.epoch:
            return  # a reset came first: it took all records and returned all slots
        pool = self.res.levels[tier].pool
        if ok:
            slots = [slot for _, _, slot in entry.deletes if slot != ABSENT]
            pool.expected -= len(slots)
            pool.give(slots)
        else:
            self.res.deleted.extend(entry.deletes)  # their records live on: so must their slots
            for piece in entry.puts:
                for key, slot in zip(piece.keys, piece.slots, strict=True):
                    self.lose(key, piece.generation, tier, slot, withdraw=False)
        self.room.ahead(now)

    def recover(self, pieces: Sequence[Piece]) -> int:
        """Adopt what a durable index held, parents before children; blocks adopted."""
        tier = self.res.durable
        assert tier is not None and not self.res.tree.runs
        self.res.levels[tier].pool.claim(slot for piece in pieces for slot in piece.slots)
        for piece in pieces:
            parent = None if piece.parent == ROOT else self.res.tree.find(piece.parent)
            if parent is not None and piece.depth < parent.end:
                parent = self.res.split(parent, piece.depth - parent.start)
            run = self.res.tree.append(parent, piece.keys, piece.generation, piece.born, None)
            run.last = piece.last
            run.visible = True
            self.res.install(run, 0, tier, piece.slots, reserved=False)
        return self.res.tree.blocks

    # -- pins, sessions, removal ----------------------------------------------------------

    def pin(self, keys: Sequence[bytes], ttl: float, now: float) -> tuple[int | None, int]:
        """(pin id, blocks pinned): keep the longest stored prefix for `ttl` seconds. O(log n)."""
        self.pins.expire(now)
        blocks, run = self.res.tree.match(keys, visible=True)
        if run is None:
            return None, 0
        return self.pins.add(run, blocks, now + ttl), blocks

    def session_run(self, session: str) -> Run | None:
        key = self._sessions.get(session)
        return None if key is None else self.res.tree.find(key)

    def turn_ended(self, session: str, **facts: object) -> None:
        """Attach what ended the turn to the run that the session wrote last."""
        run = self.session_run(session)
        if run is not None:
            run.turn = replace(run.turn or Turn(session), **facts)  # type: ignore[arg-type]

    def end_session(self, session: str, now: float) -> None:
        """The session will not come back: its last run is the next to go."""
        run = self.session_run(session)
        self._sessions.pop(session, None)
        if run is not None and not run.children:
            self.res.touch(run, now, Kind.END)

    def abandon(self, keys: Sequence[bytes], now: float) -> None:
        """Nobody will extend this chain: what hangs on nothing else is the next to go."""
        _, run = self.res.tree.match(keys, visible=True)
        if run is not None and not run.children:
            self.res.touch(run, now, Kind.END)

    def fork(self, session: str, new: str) -> None:
        key = self._sessions.get(session)
        if key is not None:
            self._sessions[new] = key

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forget these blocks and all their descendants; how many."""
        dropped = 0
        for key in keys:
            run = self.res.tree.find(key)
            if run is not None:
                dropped += self.res.drop(run, run.keys.index(key))
        return dropped

    def clear(self, tier: int | None, epoch: int | None) -> int:
        """Empty one tier, or all; blocks forgotten. With the durable tier, `epoch` is the new
        epoch that its index has committed."""
        before = self.res.tree.blocks
        durable = self.res.durable
        if tier is None:
            for root in [run for run in self.res.tree.runs.values() if run.parent is None]:
                self.res.drop(root, 0)
        else:
            self._clear_tier(tier)
        if durable is not None and tier in (None, durable):
            assert epoch is not None
            pool = self.res.levels[durable].pool
            gone = [d for d in self.res.take_deleted()]
            gone += [d for ticket in self._tickets.values() for d in ticket.deletes]
            pool.give([slot for _, _, slot in gone if slot != ABSENT])
            pool.expected = 0
            self.epoch, self._pieces = epoch, []
        if self.res.events is not None:
            for level in self.res.levels if tier is None else [self.res.levels[tier]]:
                self.res.events.add(EventKind.CLEARED, level.name)
        return before - self.res.tree.blocks

    def _clear_tier(self, tier: int) -> None:
        runs = sorted(self.res.tree.runs.values(), key=lambda run: run.start)
        for run in reversed(runs):
            tail = list(run.tail(tier))
            if tail:
                self.res.remove(run, tail[::-1], tier)
        for run in runs:
            if run.id in self.res.tree.runs and run.visible:
                bare = next((i for i in range(len(run.keys)) if not run.copies(i)), None)
                if bare is not None:
                    self.res.drop(run, bare)

    # -- invariants -----------------------------------------------------------------------

    def check(self, moving: Sequence[Move]) -> list[str]:
        """Violated invariants, given the moves that have not finished; empty when sound."""
        problems = self.res.check()
        for tier, level in enumerate(self.res.levels):
            owned = [s for r in self.res.tree.runs.values() for s in (r.slots[tier] or ()) if s >= 0]
            owned += [slot for move in moving if move.dst == tier for slot in move.dst_slots]
            if level.durable:
                waiting = list(self.res.deleted)
                waiting += [
                    d for t in self._tickets.values() if t.epoch == self.epoch for d in t.deletes
                ]
                slots = [slot for _, _, slot in waiting if slot != ABSENT]
                if len(slots) != level.pool.expected:
                    problems.append(f"{level.name} expects {level.pool.expected} slots, not {len(slots)}")
                owned += slots
            if len(set(owned)) != len(owned):
                problems.append(f"{level.name}: a slot has two owners")
            problems += [f"{level.name}: {p}" for p in level.pool.check(set(owned))]
        return problems


def _first_not_ok(outcomes: Sequence[Outcome], lo: int, hi: int) -> int:
    """Position of the first outcome in [lo, hi) that is not OK; `hi` if there is none."""
    part = outcomes[lo:hi]
    if part.count(Outcome.OK) == hi - lo:
        return hi
    return lo + next(i for i, outcome in enumerate(part) if outcome is not Outcome.OK)
