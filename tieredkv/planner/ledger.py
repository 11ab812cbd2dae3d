"""The ledger: what became of moves, and what the durable index has to know about it.

Copies are readable as soon as their bytes are written. What a durable tier holds is also
*acknowledged* once its record is committed: `drain` hands out records in an order in which
a block never precedes its ancestors, `committed` takes the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from tieredkv.events import EventKind
from tieredkv.index.prefix_tree import ABSENT, Run
from tieredkv.index.record import ROOT, Piece
from tieredkv.planner.check import violations
from tieredkv.planner.plans import Effects, IndexOp, Ticket
from tieredkv.planner.residency import Residency
from tieredkv.planner.room import Room
from tieredkv.planner.sharing import adopt
from tieredkv.types import Move, Outcome


class Ledger:
    """Takes outcomes, keeps residency true to them. Not thread-safe."""

    def __init__(self, residency: Residency, room: Room, boot: int, epoch: int) -> None:
        """`boot`: how often the durable index was opened, so that generations never repeat;
        `epoch`: how often it was reset. 0 without one."""
        self.res = residency
        self.room = room
        self.epoch = epoch
        self._generation = boot << 40
        self._pieces: list[Piece] = []
        self._tickets: dict[int, Ticket] = {}
        self._next_ticket = 1
        self.corrupt = 0
        """Blocks whose stored bytes failed verification."""

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
            # deepest first: an ancestor's loss would give the descendants' bad slots back as good
            for i in range(len(read) - 1, -1, -1):
                outcome = read[i]
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
        failed: dict[int, Run] = {}
        stale = tier == self.res.durable and move.epoch != self.epoch  # cleared meanwhile
        at, total = 0, len(move)
        while at < total:
            run = self.res.written(move.keys[at], move.generations[at], tier)
            good = write[at] is Outcome.OK and not stale
            if run is None or not good or not self._closed(run, move.depths[at], tier):
                if run is not None:
                    self.res.unreserve(run, move.keys[at], tier)
                    touched[run.id] = run
                    if tier and tier == self.res.shared and run.visible:
                        self.res.unshared[run.id] = None  # to be tried again
                    if tier == self.res.durable and write[at] is Outcome.FAILED:
                        self.room.refused += 1
                        failed[run.id] = run
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
        for run in failed.values():  # or the write-back would spin on a dead disk
            for node in (run, *self.res.tree.descendants(run)):
                self.room.decline(node)
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
        if tier == self.res.shared and run.visible:
            self.res.unshared[run.id] = None

    def _lose_durable(self, run: Run, offset: int, tier: int) -> None:
        """Take everything after a lost durable block out of that tier."""
        below = self.res.tree.descendants(run)
        for node, first in [(child, 0) for child in reversed(below)] + [(run, offset)]:
            tail = list(node.tail(tier, first))
            if tail:
                self.res.remove(node, tail[::-1], tier)
        self._drop_bare([run, *below])

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
        return Effects(moves, IndexOp(ticket, puts, deleted))

    @property
    def last_ticket(self) -> int:
        """Of the latest index change that `drain` handed out; they are answered in order."""
        return self._next_ticket - 1

    def begin_flush(self) -> tuple[int, int]:
        """Try again what was turned down; (refusals so far, latest generation)."""
        self.res.dirty.update(dict.fromkeys(sorted(self.res.declined)))
        self.res.declined.clear()
        return self.room.refused, self._generation

    def writes(self, tier: int, upto: int) -> bool:
        """Does any block up to this generation wait for the durable tier, or for its write?"""
        runs = self.res.tree.runs
        return any(runs[run].generation <= upto for run in self.res.dirty) or any(
            generation <= upto for generation in self.res.levels[tier].writing.values()
        )

    def durable(self, key: bytes) -> bool | None:
        """True if the durable tier has the block, False if it is on its way, None if not."""
        run, tier = self.res.tree.find(key), self.res.durable
        if run is None or tier is None:
            return None
        slots = run.slots[tier]
        if slots is not None and slots[run.keys.index(key)] != ABSENT:
            return True
        coming = not run.visible or run.busy[tier] or run.id in self.res.dirty
        return False if coming else None

    def lacking(self, upto: int, now: float) -> bool:
        """Does any run up to this generation lack durable blocks that admission wants?"""
        runs = (self.res.tree.runs[run] for run in self.res.declined)
        return any(r.generation <= upto and self.room.admitted(r, now) for r in runs)

    def committed(self, ticket: int, ok: bool, now: float) -> None:
        """The index change is on disk (`ok`) or failed and left the disk as it was."""
        entry = self._tickets.pop(ticket)
        tier = self.res.durable
        assert tier is not None
        if entry.epoch != self.epoch:
            return  # a reset came first: it took all records and returned all slots
        pool = self.res.levels[tier].pool
        if ok:
            slots = [deletion.slot for deletion in entry.deletes if deletion.reuse]
            pool.expected -= len(slots)
            pool.give(slots)
        else:
            self.res.deleted.extend(entry.deletes)  # their records live on: so must their slots
            self.room.refused += len(entry.puts)
            for piece in entry.puts:
                for key, slot in zip(piece.keys, piece.slots, strict=True):
                    self.lose(key, piece.generation, tier, slot, withdraw=False)
        self.room.ahead(now)

    def recover(self, pieces: Sequence[Piece]) -> int:
        """Adopt what a durable index held, parents before children; blocks adopted."""
        tier = self.res.durable
        assert tier is not None
        assert not self.res.tree.runs
        self.res.levels[tier].pool.claim(slot for piece in pieces for slot in piece.slots)
        followed = {piece.parent for piece in pieces}
        for piece in pieces:
            parent = None if piece.parent == ROOT else self.res.tree.find(piece.parent)
            if parent is not None and piece.depth < parent.end:
                parent = self.res.split(parent, piece.depth - parent.start)
            run = self.res.tree.append(parent, piece.keys, piece.generation, piece.born, None)
            run.last = run.whole = piece.last
            run.visible = True
            leaf = piece.keys[-1] not in followed  # others would be ranked only to be forgotten
            self.res.install(run, 0, tier, piece.slots, reserved=False, leaf=leaf)
        return self.res.tree.blocks

    def adopt(self, keys: Sequence[bytes], now: float) -> int:
        """The shared tier has this chain, as others have stored it; how many of its blocks are
        new here."""
        known, run = self.res.tree.match(keys, visible=False)
        if known == len(keys) or (run is not None and not run.visible):
            return 0
        if run is not None and known < run.end:
            run = self.res.split(run, known - run.start)
        self._generation += 1
        return adopt(self.res, self.room, run, keys[known:], now, self._generation)

    def disown(self) -> None:
        """The shared tier may have lost everything: what only it has is forgotten, and what
        others have as well is to be copied there anew."""
        tier = self.res.shared
        assert tier is not None
        self._clear_tier(tier)
        self.res.take_withdrawn()
        runs = self.res.tree.runs.values()
        self.res.unshared = {run.id: None for run in runs if tier and run.visible}

    # -- removal --------------------------------------------------------------------------

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forget these blocks and all their descendants; how many."""
        dropped = 0
        for key in keys:
            run = self.res.tree.find(key)
            if run is not None:
                dropped += self.res.drop(run, run.keys.index(key))
                self._settle(run)  # perhaps only what went was still being written
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
            gone = self.res.take_deleted()
            for ticket in self._tickets.values():
                if ticket.epoch == self.epoch:  # the others' slots came back with their reset
                    gone += ticket.deletes
            pool.give([deletion.slot for deletion in gone if deletion.reuse])
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
        self._drop_bare(runs)

    def _drop_bare(self, runs: Sequence[Run]) -> None:
        """Forget what has lost its last copy; of runs under way their end decides."""
        for run in runs:
            if run.id not in self.res.tree.runs:
                continue
            if not run.visible:
                self._settle(run)
                continue
            bare = next((i for i in range(len(run.keys)) if not run.copies(i)), None)
            if bare is not None:
                self.res.drop(run, bare)

    # -- invariants -----------------------------------------------------------------------

    def check(self, moving: Sequence[Move]) -> list[str]:
        """Violated invariants, given the moves that have not finished; empty when sound."""
        problems = violations(self.res)
        for tier, level in enumerate(self.res.levels):
            owned = [
                s for r in self.res.tree.runs.values() for s in (r.slots[tier] or ()) if s >= 0
            ]
            owned += [slot for move in moving if move.dst == tier for slot in move.dst_slots]
            if level.durable:
                waiting = list(self.res.deleted)
                waiting += [
                    d for t in self._tickets.values() if t.epoch == self.epoch for d in t.deletes
                ]
                slots = [deletion.slot for deletion in waiting if deletion.reuse]
                if len(slots) != level.pool.expected:
                    problems.append(
                        f"{level.name} expects {level.pool.expected} slots, not {len(slots)}"
                    )
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
