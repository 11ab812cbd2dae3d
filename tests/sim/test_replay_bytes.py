"""The replay's own eyes: contents must betray every way in which a store can lie."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest

from tieredkv.errors import UsageError
from tieredkv.sim.generate import generate
from tieredkv.sim.replay_bytes import Contents, Replay, trace_keys
from tieredkv.sim.trace import Request, stats
from tieredkv.types import Match, Outcome, Turn

BLOCK = 256
Harm = Callable[["DictStore", list[bytes], Any], None]


class DictStore:
    """The least a store can be; `harm` may damage what `get` has returned."""

    def __init__(self, harm: Harm | None = None) -> None:
        self.data: dict[bytes, bytes] = {}
        self.harm = harm
        self.turns: list[Turn] = []

    def lookup(self, keys: list[bytes]) -> Match:
        blocks = next((i for i, key in enumerate(keys) if key not in self.data), len(keys))
        return Match(blocks, (("dict", blocks),) if blocks else ())

    def pin(self, keys: list[bytes]) -> AbstractContextManager[None]:
        return nullcontext()

    def get(self, keys: list[bytes], out: Any) -> list[Outcome]:
        for key, row in zip(keys, out, strict=True):
            row[:] = np.frombuffer(self.data[key], np.uint8)
        if self.harm is not None:
            self.harm(self, keys, out)
        return [Outcome.OK] * len(keys)

    def put(self, keys: list[bytes], blocks: Any, start: int, turn: Turn) -> list[Outcome]:
        self.turns.append(turn)
        for key, row in zip(keys[start:], blocks, strict=True):
            self.data[key] = row.tobytes()
        return [Outcome.OK] * len(blocks)


def swap(store: DictStore, keys: list[bytes], out: Any) -> None:
    if len(keys) > 1:
        out[[0, 1]] = out[[1, 0]]


def shift(store: DictStore, keys: list[bytes], out: Any) -> None:
    out[-1] = np.roll(out[-1], 8)


def flip(store: DictStore, keys: list[bytes], out: Any) -> None:
    out[-1][-1] ^= 0x80


def tear(store: DictStore, keys: list[bytes], out: Any) -> None:
    other = np.frombuffer(next(v for k, v in store.data.items() if k != keys[-1]), np.uint8)
    out[-1][BLOCK // 2 :] = other[BLOCK // 2 :]


def stale(store: DictStore, keys: list[bytes], out: Any) -> None:
    out[-1] = np.frombuffer(next(v for k, v in store.data.items() if k != keys[-1]), np.uint8)


def zero(store: DictStore, keys: list[bytes], out: Any) -> None:
    out[0] = 0


class Lazy(DictStore):
    """Says OK and writes nothing: the caller's buffer may hold the right bytes by chance."""

    def get(self, keys: list[bytes], out: Any) -> list[Outcome]:
        return [Outcome.OK] * len(keys)


class Honest(DictStore):
    """Cannot return its third block, and says so."""

    def get(self, keys: list[bytes], out: Any) -> list[Outcome]:
        outcomes = super().get(keys, out)
        if len(keys) > 2:
            out[2] = 0
            outcomes[2] = Outcome.CORRUPT
        return outcomes


def replay(store: Any, requests: list[Request]) -> Replay:
    run = Replay(store, Contents(BLOCK))
    run.run(requests)
    return run


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return generate("card942", sessions=6, seed=2, block_size=2048)


def test_perfect_store_hits_the_potential(requests: list[Request]) -> None:
    store = DictStore()
    done: list[None] = []
    tally = Replay(store, Contents(BLOCK)).run(requests, lambda: done.append(None))  # type: ignore[arg-type]
    figures = stats(requests)
    assert tally.hit_tokens == tally.potential_tokens == figures.hit_tokens
    assert tally.input_tokens == figures.input_tokens
    assert tally.requests == len(requests) == len(done)
    assert tally.verification_errors == 0
    assert len(store.data) == figures.unique_blocks
    assert tally.put_outcomes == {Outcome.OK: figures.unique_blocks}
    assert len(tally.seconds["lookup"]) == len(requests)
    assert {t.session for t in store.turns} == {r.session for r in requests}


@pytest.mark.parametrize("harm", [swap, shift, flip, tear, stale, zero])
def test_every_lie_is_counted(requests: list[Request], harm: Harm) -> None:
    tally = replay(DictStore(harm), requests).tally
    assert tally.verification_errors > 0
    assert tally.hit_tokens < tally.potential_tokens


def test_a_read_that_writes_nothing_is_a_lie(requests: list[Request]) -> None:
    tally = replay(Lazy(), requests).tally
    assert tally.verification_errors == stats(requests).hit_tokens // 2048
    assert tally.hit_tokens == 0


def test_an_honest_failure_is_a_shorter_hit_and_no_error(requests: list[Request]) -> None:
    tally = replay(Honest(), requests).tally
    assert tally.verification_errors == 0
    assert tally.get_outcomes[Outcome.CORRUPT] > 0
    expected = sum(min(2, r.input_length // 2048) for r in requests)
    assert 0 < tally.hit_tokens <= 2048 * expected


def test_single_bit_anywhere_shows() -> None:
    contents = Contents(64, seed=1)
    keys = trace_keys([1, 2])
    blocks, scratch = np.empty((2, 8), np.uint64), np.empty((2, 8), np.uint64)
    contents.fill(keys, blocks)
    assert contents.wrong(keys, blocks, scratch) == []
    flat = blocks.view(np.uint8).reshape(-1)
    for bit in range(flat.size * 8):
        flat[bit // 8] ^= 1 << bit % 8
        assert contents.wrong(keys, blocks, scratch) == [bit // 512]
        flat[bit // 8] ^= 1 << bit % 8


def test_keys_are_chained_and_take_any_id() -> None:
    big = (1 << 64) - 1
    keys = trace_keys([0, big, 7])
    assert trace_keys([0, big]) == keys[:2]
    assert len({*keys, *trace_keys([1, big, 7]), trace_keys([7])[0]}) == 7


@pytest.mark.parametrize("size", [0, 4, 12])
def test_odd_block_sizes_are_refused(size: int) -> None:
    with pytest.raises(UsageError, match=f"block_bytes is {size}"):
        Contents(size)
