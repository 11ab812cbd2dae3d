"""The store without bytes: the real planner and the real control flow on a virtual clock.

`Lab` is the core of a store whose tiers answer OK at once and whose index commits at once. What
it keeps, moves and evicts is therefore what production decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from tieredkv.buffers import Blocks
from tieredkv.build import build_planner
from tieredkv.config import Config
from tieredkv.core import Core
from tieredkv.engine import Parts
from tieredkv.index.record import Deletion, Piece
from tieredkv.metrics import Metrics
from tieredkv.mover import Mover
from tieredkv.tiers.base import BlockBuffers
from tieredkv.types import Batch, Match, Move, Outcome, Turn

FOREVER = 1e9  # seconds


class NullTier:
    """Slots without a medium."""

    def __init__(self, name: str, slots: int, block_bytes: int, durable: bool) -> None:
        self.name, self.slots, self.block_bytes = name, slots, block_bytes
        self.inline, self.durable = True, durable

    def write(self, batch: Batch, sources: BlockBuffers) -> list[Outcome]:
        return [Outcome.OK] * len(batch)

    read = write

    def views(self, slots: Sequence[int]) -> Any:
        return slots  # never looked at

    def close(self) -> None:
        pass


class _Inline:
    """Runs at once."""

    def submit(self, fn: Callable[[], None]) -> None:
        fn()

    def close(self, timeout: float) -> bool:
        return True


class _Index:
    """Commits at once, keeps nothing."""

    def submit(
        self, puts: list[Piece], deletes: list[Deletion], done: Callable[[bool], None]
    ) -> None:
        done(True)


class _Core(Core):
    """Counts where blocks go."""

    flows: dict[tuple[int | None, int | None], int]
    fresh: list[Move] | None = None
    """Moves that the one being run has caused; None while none is."""

    def _start(self, moves: Sequence[Move]) -> bool:
        """One after the other, with what each causes before the next: by a list, since chains
        of causes are longer than Python's stack."""
        if self.fresh is not None:
            self.fresh.extend(moves)
            return bool(moves)
        waiting = list(reversed(moves))
        try:
            while waiting:
                self.fresh = []
                super()._start([waiting.pop()])
                waiting.extend(reversed(self.fresh))
        finally:
            self.fresh = None
        return bool(moves)

    def _await_end(self, seen: int, deadline: float) -> bool:
        """What can end has ended by now; a wait for more would be in vain."""
        return self._ends != seen

    def _heard(self, move: Move, read: Sequence[Outcome], write: Sequence[Outcome]) -> None:
        way = move.src, move.dst
        self.flows[way] = self.flows.get(way, 0) + len(move)


class Lab:
    """A hierarchy at time `now`. Not thread-safe."""

    def __init__(self, config: Config, slots: Sequence[int], block_bytes: int) -> None:
        """`slots`: blocks of each tier of `config`, whose capacities in bytes do not count."""
        self.now = 0.0
        tiers = [
            NullTier(spec.label, count, block_bytes, spec.kind == "nvme")
            for spec, count in zip(config.tiers, slots, strict=True)
        ]
        self.tiers = tiers
        planner = build_planner(config, tiers, None, block_bytes)
        metrics = Metrics(config.block_tokens, lambda: None)  # type: ignore[arg-type, return-value]
        limits = config.mover.model_copy(update={"room_wait": FOREVER})
        mover = Mover(_Inline(), 1, limits.load_queue, limits.store_queue)
        parts = Parts(tiers, planner, block_bytes)  # type: ignore[arg-type]
        self.core = _Core(parts, mover, limits, _Index(), metrics, lambda: self.now)  # type: ignore[arg-type]
        self.core.flows = {}
        self.planner = planner
        self._promote = config.promotion.enabled

    @property
    def moved(self) -> dict[tuple[int | None, int | None], int]:
        """Blocks moved so far by (source tier, target tier); None is the caller."""
        return self.core.flows

    def lookup(self, keys: Sequence[bytes]) -> Match:
        return self.planner.match(keys)

    def get(self, keys: Sequence[bytes]) -> None:
        """A request reads the chain."""
        self.core.get(keys, _blocks(len(keys)), 0, float("inf"), self._promote)

    def put(self, keys: Sequence[bytes], start: int, turn: Turn | None) -> list[Outcome]:
        """A request stores `keys[start:]`; outcome per block."""
        return self.core.put(keys, _blocks(len(keys) - start), start, turn)


def _blocks(count: int) -> Blocks:
    """So many that have no bytes."""
    return Blocks(cast(Any, range(count)), 0)
