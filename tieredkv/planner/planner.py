"""The planner: what is where, what is pinned, what moves next. Pure state.

Every method takes `now` where time matters; moves come out of the plans and of `drain`, and
their ends come back through `finish`. It touches no byte, no clock, no thread and no disk.
One lock of the caller's guards it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tieredkv.errors import UsageError
from tieredkv.eviction.base import DelayStatistics
from tieredkv.index.prefix_tree import ABSENT, Run
from tieredkv.index.record import Piece
from tieredkv.planner.ledger import Ledger
from tieredkv.planner.plans import PutPlan, TokenBucket
from tieredkv.planner.residency import Residency
from tieredkv.planner.room import Room, leaf_on_path
from tieredkv.planner.sessions import Sessions
from tieredkv.planner.shadow import Guard
from tieredkv.types import Match, Move, Turn


class Planner(Ledger):
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
        model: DelayStatistics | None = None,
        guards: Sequence[Guard] = (),
    ) -> None:
        """`boot`: how often the durable index was opened, so that generations never repeat.
        `through`: every put is written to the durable tier. `promotion_budget`: blocks per
        second, 0 for no limit. `model` learns when sessions come back, `guards` watch it."""
        super().__init__(residency, room, boot, epoch)
        self.pins = residency.pins
        self.through = through
        self.budget = TokenBucket(promotion_budget)
        self.sessions = Sessions(residency, model, list(guards))

    def recover(self, pieces: Sequence[Piece]) -> int:
        """Adopt what a durable index held, parents before children; blocks adopted. Where a
        chain ends somebody may come back: how long ago it was used is known."""
        found = super().recover(pieces)
        if self.sessions.model is not None:
            self.sessions.adopt([run for run in self.res.tree.runs.values() if not run.children])
        return found

    # -- lookup ---------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes]) -> Match:
        """The longest visible prefix. O(log n + runs on the path)."""
        blocks, run = self.res.tree.match(keys, visible=True)
        spans: list[tuple[int, int]] = []  # (tier, last block), deepest first
        tier: int | None = None
        while run is not None:
            if run.home != tier or tier == ABSENT:
                tier = run.home
                if tier != ABSENT:
                    spans.append((tier, run.end))
                else:
                    at = run.start
                    ends: list[tuple[int, int]] = []
                    for here, length in run.spans(0, min(blocks, run.end) - run.start):
                        at += length
                        ends.append((here, at))
                    spans.extend(reversed(ends))
                    tier = ends[0][0]
            run = run.parent
        return Match(blocks, self._named(spans, blocks))

    def _named(self, spans: list[tuple[int, int]], blocks: int) -> tuple[tuple[str, int], ...]:
        """From (tier, end) deepest first to (tier name, length) root first."""
        named: list[tuple[str, int]] = []
        begin = 0
        for tier, end in reversed(spans):
            end = min(end, blocks)
            name = self.res.levels[tier].name
            if named and named[-1][0] == name:
                named[-1] = (name, named[-1][1] + end - begin)
            else:
                named.append((name, end - begin))
            begin = end
        return tuple(named)

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
        if run is not None and start < known:
            _verify(keys, self._path(run, start, known))
        if start > known or known == len(keys):
            if run is not None and start <= known and not pending:
                self.res.touch(run, now, blocks=known)
                self.sessions.wrote(_first(keys, known), run, run, turn, now)
                if self.through:
                    self.res.want(run)
            return PutPlan(known, pending, [], 0)
        self.res.tree.check_new(keys[known:])
        if run is not None and known < run.end:  # first: only the part in use is protected
            run = self.res.split(run, known - run.start)
            self._settle(run)  # perhaps only the tail is still being written
            if run.id not in self.res.tree.runs:
                return self.plan_put(keys, start, turn, now, force=force)
            pending = not run.visible
        for level in self.res.levels:
            level.expect(keys[known])
        shares, wait = self._share(len(keys) - known, run, now, force)
        if run is not None and (run.id not in self.res.tree.runs or run.end != known):
            return self.plan_put(keys, start, turn, now, force=force)  # it took its own chain
        wanted = len(keys) - known - sum(count for _, count in shares)
        if wait:
            return PutPlan(known, pending, [], wanted, wait=True)
        placed = len(keys) - known - wanted
        if not placed:
            return PutPlan(known, pending, [], wanted)
        self._generation += 1
        child = self.res.tree.append(run, keys[known : known + placed], self._generation, now, turn)
        moves = self._place(child, shares)
        self.sessions.wrote(_first(keys, child.end), child, run, turn, now)
        return PutPlan(known, pending, moves, wanted)

    def _share(
        self, blocks: int, run: Run | None, now: float, force: bool
    ) -> tuple[list[tuple[int, int]], bool]:
        """((tier, free slots) for a put after `run`, whether waiting may bring more)."""
        durable = self.res.durable
        tiers = [t for t, level in enumerate(self.res.levels) if t != durable and level.accepts]
        tiers = [0] if durable == 0 else tiers
        shares, wanted = dict.fromkeys(tiers, 0), blocks
        for drop in (False, True):
            for tier in tiers:
                goal = shares[tier] + wanted
                leaf = leaf_on_path(run, tier)
                got = self.room.make(tier, goal, now, leaf, force=drop)
                while got < goal and leaf is not None and self.room.stays(leaf, tier):
                    before, got = got, self.room.make(tier, goal, now)  # the chain's own head
                    if got == before:
                        break
                    leaf = leaf_on_path(run, tier)
                wanted -= got - shares[tier]
                shares[tier] = got
                if got < min(goal, self.res.levels[tier].pool.limit) and not force and not drop:
                    self.room.demote(tier, goal - got, now, run)
                    if self._in_flight(tier):
                        return [], True
        return list(shares.items()), False

    def _place(self, run: Run, shares: list[tuple[int, int]]) -> list[Move]:
        moves, at = [], 0
        for tier, count in shares:
            keys = list(run.keys[at : at + count])
            if keys:
                self.res.reserve(run, tier, keys)
                self.room.spend(tier, count)
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
            or levels[tier].pool.doomed > 0
            or any(level.pool.expected for level in levels[tier:])
            or any(level.writing for level in levels[tier + 1 :])
        )

    # -- get ------------------------------------------------------------------------------

    def plan_get(self, keys: Sequence[bytes], start: int, now: float) -> tuple[int, list[Move]]:
        """(longest match, reads of `keys[start:match]`, one move per tier); counts as a use."""
        self.pins.expire(now)
        blocks, run = self.res.tree.match(keys, visible=True)
        if run is None or blocks <= start:
            return blocks, []
        path = self._path(run, start, blocks)
        _verify(keys, path)
        self.res.touch(run, now, blocks=blocks)
        self.sessions.used(run, blocks, now)
        moves: dict[int, Move] = {}
        for node, lo, hi in path:
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
            self.room.demote(tier, short, now, run)
        return short

    def plan_promote(
        self,
        keys: Sequence[bytes],
        wanted: Sequence[int],
        tier: int,
        now: float,
        held: Mapping[int, int] | None = None,
    ) -> list[Move]:
        """Copies of the blocks at `wanted` (ascending positions in `keys`) into `tier`.

        `held`: the caller has their bytes, of these generations by position; blocks stored anew
        since are left out. Only into room that costs nothing else, and within the budget; none
        where the tier accepts nothing.
        """
        if not self.res.levels[tier].accepts:
            return []
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
                fresh = held is None or held[position] == node.generation
                if fresh and node.fastest(offset) > tier and node.keys[offset] not in writing:
                    found.append((node, offset))
                position = next(positions, None)
        got = self.budget.available(len(found), now)
        got = self.budget.take(self.room.make(tier, got, now, leaf_on_path(run, tier)), now)
        slots = self.res.levels[tier].pool.take(got)
        for (node, offset), slot in zip(found[:got], slots, strict=True):
            source = node.fastest(offset) if held is None else None
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

    # -- pins, sessions, removal ----------------------------------------------------------

    def pin(self, keys: Sequence[bytes], ttl: float, now: float) -> tuple[int | None, int]:
        """(pin id, blocks pinned): keep the longest stored prefix for `ttl` seconds. O(log n)."""
        self.pins.expire(now)
        blocks, run = self.res.tree.match(keys, visible=True)
        if run is None:
            return None, 0
        return self.pins.add(run, blocks, now + ttl), blocks

    def hold(self, keys: Sequence[bytes], ttl: float, now: float) -> None:
        """Like `pin`, for the ttl of a turn; another turn that ends at the same block moves it."""
        blocks, run = self.res.tree.match(keys, visible=True)
        if run is not None:
            self.pins.hold(run, blocks, now + ttl)

    def session_of(self, keys: Sequence[bytes]) -> str | None:
        """The session whose next turn a request with this chain is, as far as the chain tells:
        it goes on from where that session's chain ends. O(log n)."""
        blocks, run = self.res.tree.match(keys, visible=False)
        return self.sessions.at(run) if run is not None and run.end == blocks else None

    def turn_began(self, session: str, now: float) -> None:
        """The session's next request is here."""
        self.sessions.began(session, now)

    def turn_ended(
        self,
        session: str,
        now: float,
        *,
        finish_reason: str | None = None,
        next_tool: str | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """The session's request is served; what ended it tells when the next one comes."""
        run = self.sessions.run(session)
        if run is not None:
            facts = {
                "finish_reason": finish_reason,
                "next_tool": next_tool,
                "output_tokens": output_tokens,
            }
            known = {name: fact for name, fact in facts.items() if fact is not None}
            run.turn = replace(run.turn or Turn(session), **known)  # type: ignore[arg-type]
        self.sessions.ended(session, now, finish_reason, next_tool, output_tokens)

    def queued(self, session: str, now: float) -> None:
        """The session's next request waits to be served."""
        self.sessions.queued(session, now)

    def end_session(self, session: str, now: float) -> None:
        """The session will not come back: its last run is the next to go."""
        self.sessions.finish(session, now)

    def abandon(self, keys: Sequence[bytes], now: float) -> None:
        """Nobody will extend this chain: what hangs on nothing else is the next to go."""
        blocks, run = self.res.tree.match(keys, visible=True)
        if run is not None and run.end == blocks:
            self.sessions.abandon(run, now)

    def fork(self, session: str, new: str, now: float) -> None:
        """A new session begins with this one's context."""
        self.sessions.fork(session, new, now)


def _first(keys: Sequence[bytes], count: int) -> Sequence[bytes]:
    return keys if count == len(keys) else keys[:count]


def _verify(keys: Sequence[bytes], path: Sequence[tuple[Run, int, int]]) -> None:
    """UsageError unless `keys` names the very blocks on the path. A match has compared only the
    last of them, and a key that is no ancestor of it must not get an ancestor's bytes."""
    for run, lo, hi in path:
        asked, stored = keys[run.start + lo : run.start + hi], run.keys[lo:hi]
        if tuple(asked) != stored:
            wrong = next(i for i, key in enumerate(stored) if asked[i] != key)
            raise UsageError(
                f"keys[{run.start + lo + wrong}] is not the block before keys"
                f"[{run.start + lo + wrong + 1}] as stored: pass the chain from its root, "
                "as chain_keys() returns it"
            )
