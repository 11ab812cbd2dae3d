"""What recording one turn costs as its context grows: it must not grow with it.

A turn is 256 new blocks of 16 tokens behind a context of 1 Ki to 1 Mi tokens. `planner` is
the bookkeeping alone, `store` a whole `TieredKVStore.put` of tiny blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benches.common import Result, absolute, compare, seconds
from benches.world import ControlPlane, random_keys
from tieredkv.config import Config
from tieredkv.store import TieredKVStore
from tieredkv.types import Fingerprint, Outcome

BLOCK = 16
TURN = 256
TINY = 64
"""Bytes per block: the bytes are not the subject."""


@dataclass(frozen=True, slots=True)
class Size:
    contexts: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 17, 1 << 20)
    """In tokens."""
    samples: int = 31


FULL = Size()
Put = Callable[[Sequence[bytes], int], float]
"""Seconds that a put of `keys[start:]` takes."""


def run(size: Size = FULL) -> Iterator[Result]:
    slots = sum(size.contexts) // BLOCK + TURN * size.samples * 8 * len(size.contexts)
    world = ControlPlane(slots)
    yield from _rows("planner", world.put, size)
    config = Config.model_validate(
        {"block_bytes": TINY, "tiers": [{"kind": "dram", "capacity": slots * TINY}]}
    )
    with TieredKVStore(config, Fingerprint("bench")) as store:

        def put(keys: Sequence[bytes], start: int) -> float:
            blocks = bytes((len(keys) - start) * TINY)
            outcomes: list[Outcome] = []
            taken = seconds(lambda: outcomes.extend(store.put(keys, blocks, start)))
            if set(outcomes) != {Outcome.OK}:
                raise RuntimeError(f"put: {set(outcomes)}")
            return taken

        yield from _rows("store", put, size)


def _rows(label: str, put: Put, size: Size) -> Iterator[Result]:
    turns = {tokens: _turn(put, tokens // BLOCK) for tokens in size.contexts}
    bar = 2.0 if label == "planner" else None
    for tokens, turn in turns.items():
        turn()
        samples = [turn() for _ in range(size.samples)]
        yield absolute(f"control.{label}.turn.{_name(tokens)}", "us/block", samples, bar=bar)
    shortest, longest = min(turns), max(turns)
    yield compare(
        f"control.{label}.turn.{_name(longest)}/{_name(shortest)}",
        "us/block",
        turns[longest],
        turns[shortest],
        bar=1.5,
        higher_is_better=False,
        pairs=size.samples,
    )


def _turn(put: Put, context: int) -> Callable[[], float]:
    """A turn behind a context that is stored now; each call is another branch."""
    base = random_keys(context)
    put(base, 0)

    def turn() -> float:
        keys = base + random_keys(TURN)
        return put(keys, context) / TURN * 1e6

    return turn


def _name(tokens: int) -> str:
    return f"{tokens >> 20}Mi" if tokens >= 1 << 20 else f"{tokens >> 10}Ki"
