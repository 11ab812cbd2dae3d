"""Loads: what a request may count on, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import takewhile

from tieredkv.config import Config
from tieredkv.connector.bandwidth import Bandwidth, Prefill, worth_loading
from tieredkv.connector.requests import Tracked
from tieredkv.connector.saves import NULL
from tieredkv.connector.shipping import Shipping
from tieredkv.connector.wire import Job, Load, Report
from tieredkv.types import Match, Move, Outcome

Copy = Callable[[Tracked, list[Move]], None]
"""Has moves out of a request's engine blocks executed."""


class Loads:
    """Loads of one engine. The engine's thread only."""

    def __init__(
        self,
        shipping: Shipping,
        config: Config,
        block_tokens: int,
        copy: Copy,
        prefill: Prefill,
    ) -> None:
        self._shipping = shipping
        self._chunk, self._block = config.block_tokens, block_tokens
        self._per_chunk = self._chunk // block_tokens
        self._wait = config.connector.load == "sync"
        self._promotes = config.promotion.enabled
        self._copy = copy
        self._prefill, self._bandwidth = prefill, Bandwidth()
        self._recomputes = config.connector.recompute == "auto"
        self._late: list[Move] = []
        """Loads that missed their deadline and have not ended."""

    def offer(self, match: Match, computed: int) -> tuple[int, int]:
        """(leading blocks of the match to load, those that could be loaded), where the engine
        has `computed` tokens. Tiers that a load hangs in, or that do not answer, are
        left out. O(spans)."""
        levels, shared = self._shipping.planner.res.levels, self._shipping.shared
        hanging = {levels[move.src].name for move in self._late if move.src is not None}
        if shared is not None and not shared.available:
            hanging.update(level.name for level in levels if level.shared)
        spans = list(takewhile(lambda span: span[0] not in hanging, match.spans))
        sound = sum(count for _, count in spans)
        if not self._recomputes:
            return sound, sound
        rate, seconds = self._prefill.rate, self._bandwidth.seconds
        return worth_loading(spans, self._chunk, computed, seconds, rate), sound

    def plan(self, tracked: Tracked, tokens: int) -> Load:
        """Load `tokens` beyond what the engine has into its blocks."""
        shipping, chunk = self._shipping, self._chunk
        first, last = tracked.computed // chunk, -(-(tracked.computed + tokens) // chunk)
        with shipping.lock:
            _, moves = shipping.planner.plan_get(tracked.keys[:last], first, shipping.clock())
            shipping.note(moves)
            names = [level.name for level in shipping.planner.res.levels]
        missing = set(range(first, last))
        jobs, tracked.hits = [], {}
        for move in moves:
            missing.difference_update(move.depths)
            blocks = [self._wanted(tracked, depth, tokens) for depth in move.depths]
            done = partial(self._ended, tracked, move)
            jobs.append(shipping.ship(move, blocks, tracked.request.request_id, done))
            assert move.src is not None
            self._bandwidth.begun(names[move.src])
            loaded = sum(block >= 0 for chunk in blocks for block in chunk)
            tracked.hits[names[move.src]] = loaded * self._block
        tracked.loading, tracked.saved = True, last
        lost = [b for d in sorted(missing) for b in self._wanted(tracked, d, tokens) if b >= 0]
        return Load(tracked.request.request_id, jobs, lost, self._wait)

    def _wanted(self, tracked: Tracked, depth: int, tokens: int) -> list[int]:
        """Engine blocks of the chunk; -1 for those that are not to be loaded."""
        start, per = depth * self._per_chunk, self._per_chunk
        lo = tracked.computed // self._block
        hi = -(-(tracked.computed + tokens) // self._block)
        return [tracked.blocks[i] if lo <= i < hi else -1 for i in range(start, start + per)]

    def _ended(self, tracked: Tracked, move: Move, report: Report) -> None:
        """A load has ended on all ranks."""
        assert move.src is not None
        tier, whole = self._shipping.planner.res.levels[move.src].name, set(report.read)
        seconds = report.seconds if whole == {Outcome.OK} else 0.0
        self._bandwidth.ended(tier, len(move), seconds)
        self._late = [late for late in self._late if late is not move]
        shipped = self._shipping.shipped.values()
        tracked.loading = any(s.request == tracked.request.request_id for s in shipped)
        outcomes = zip(move.depths, report.read, strict=True)
        bad = next((depth for depth, outcome in outcomes if outcome is not Outcome.OK), None)
        if bad is not None:
            tracked.forbid(bad)
        elif self._promotes and move.src:
            self._promote(tracked, move)

    def late(self, jobs: Iterable[int]) -> None:
        """These loads missed their deadline: their tier is not offered until they end."""
        for job in jobs:
            shipped = self._shipping.shipped.get(job)
            if shipped is not None:
                self._late.append(shipped.job.move)

    def _promote(self, tracked: Tracked, move: Move) -> None:
        """The blocks are in the engine now: copy them from there into a faster tier."""
        end = (move.depths[-1] + 1) * self._chunk
        if not (tracked.active and tracked.fresh) or tracked.request.num_computed_tokens < end:
            return  # it has ended, or been preempted: its blocks may be somebody else's
        with self._shipping.lock:
            moves = self._copies(tracked, dict(zip(move.depths, move.generations, strict=True)))
        self._shipping.drain()
        self._copy(tracked, moves)

    def recomputed(self, tracked: Tracked, first: int, last: int) -> None:
        """The engine has computed these chunks, though a tier had them: had they been loaded,
        those of slower tiers would be promoted as well."""
        per = self._per_chunk
        if not self._promotes or NULL in tracked.blocks[first * per : last * per]:
            return
        with self._shipping.lock:
            res, held = self._shipping.planner.res, {}
            for depth in range(first, last):
                run = res.tree.find(tracked.keys[depth])
                if run is None or not run.visible:
                    continue
                if run.fastest(depth - run.start) > 0:
                    held[depth] = run.generation
            moves = self._copies(tracked, held) if held else []
        self._shipping.drain()
        self._copy(tracked, moves)

    def _copies(self, tracked: Tracked, held: dict[int, int]) -> list[Move]:
        """Moves of chunks that the engine has, {depth: generation}, into a faster tier. The lock
        is held."""
        shipping = self._shipping
        planner, now = shipping.planner, shipping.clock()
        tier = planner.promotion_target(len(held))
        if tier is None:
            return []
        keys = tracked.keys[: max(held) + 1]
        planner.room_for(tier, len(held), keys, now)
        moves = planner.plan_promote(keys, sorted(held), tier, now, held)
        shipping.note(moves)
        return moves


def prefetch(shipping: Shipping, keys: Sequence[bytes]) -> list[Job]:
    """Bring the chain's durable blocks into memory while its request is queued."""
    with shipping.lock:
        planner, now = shipping.planner, shipping.clock()
        blocks = planner.match(keys).blocks
        tier = planner.promotion_target(blocks)
        if not blocks or tier is None or tier == planner.res.durable:
            return []
        planner.room_for(tier, blocks, keys, now)
        moves = planner.plan_promote(keys, range(blocks), tier, now)
        shipping.note(moves)
    shipping.drain()
    return [shipping.ship(move) for move in moves]
