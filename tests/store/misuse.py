"""One row per way to misuse the public API: what was done, how, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.bugs.world import SIZE, blocks_of, chain
from tests.pretender import pretend
from tieredkv import (
    BlockSizeError,
    ClosedError,
    TieredKVError,
    Turn,
    UsageError,
    chain_keys,
)

STORED = chain(4)
OTHER = chain(4, seed=1)
BLOCKS = blocks_of(STORED)
NUMBER: Any = 5
WORD: Any = "high"
BUFFERS = [bytearray(SIZE) for _ in STORED]
Act = Callable[[Any], object]
"""Of a store, whose types are not to be checked here."""


@dataclass(frozen=True)
class Call:
    """Calls on a store that holds STORED; each raises the same kind of error."""

    what: str
    error: type[TieredKVError]
    acts: tuple[Act, ...]


def with_keys(keys: Any) -> tuple[Act, ...]:
    """Every call that takes a chain."""
    count = len(keys) if hasattr(keys, "__len__") else 1
    return (
        lambda s: s.put(keys, blocks_of([b""] * count)),
        lambda s: s.put_async(keys, blocks_of([b""] * count)),
        lambda s: s.get(keys, [bytearray(SIZE) for _ in range(count)]),
        lambda s: s.get_async(keys, [bytearray(SIZE) for _ in range(count)]),
        lambda s: s.lookup(keys),
        lambda s: s.pin(keys),
        lambda s: s.prefetch(keys),
        lambda s: s.delete(keys),
        lambda s: s.session("a").resume(keys),
        lambda s: s.session("a").abandon(keys),
    )


def closed(act: Act) -> Act:
    def run(store: Any) -> object:
        store.close()
        return act(store)

    return run


def stack(*shape: int) -> Any:
    return np.zeros(shape, np.uint8)


def read_only() -> Any:
    array = stack(4, SIZE)
    array.flags.writeable = False
    return array


def meta() -> Any:
    import torch

    return [torch.empty(SIZE, dtype=torch.uint8, device="meta") for _ in STORED]


def mixed() -> list[Any]:
    import torch

    there = pretend(torch.zeros(SIZE, dtype=torch.uint8))
    return [there, *(bytearray(SIZE) for _ in OTHER[1:])]


KEYS = [
    Call(
        "`keys` is no list",
        UsageError,
        tuple(a for keys in ("k", b"k" * 32, None, {1: 2}, iter(STORED)) for a in with_keys(keys)),
    ),
    Call(
        "a key that is not 32 bytes, at either end",
        UsageError,
        (
            *(a for bad in ("k" * 32, 7, b"k" * 31, bytearray(32), None) for a in with_keys([bad])),
            lambda s: s.put([*STORED, "x"], [*BLOCKS, BLOCKS[0]]),
            lambda s: s.contains("k"),
            lambda s: s.contains(b"k"),
        ),
    ),
    Call(
        "a key that is not 32 bytes, met on the way",
        UsageError,
        (
            lambda s: s.lookup([STORED[0], 5, STORED[2]]),
            lambda s: s.get([STORED[0], "", STORED[2]], BUFFERS[:3]),
            lambda s: s.delete([STORED[0], b"", STORED[2]]),
        ),
    ),
    Call(
        "a chain that does not begin at its root",
        UsageError,
        (
            *with_keys(STORED[1:])[:7],
            *with_keys([STORED[0], STORED[2]])[:7],
            lambda s: s.session("a").abandon(STORED[2:]),
        ),
    ),
    Call(
        "a stored block after keys that are not its ancestors",
        UsageError,
        tuple(with_keys([OTHER[0], STORED[1]])[i] for i in (0, 2)),
    ),
    Call(
        "a put that names a key twice, or a stored block as a new one",
        UsageError,
        (
            with_keys([OTHER[0], OTHER[0]])[0],
            with_keys([*STORED, OTHER[0], OTHER[0]])[0],
            with_keys([OTHER[0], OTHER[1], STORED[1]])[0],
        ),
    ),
    Call(
        "`start` is no index into the keys",
        UsageError,
        tuple(
            act
            for start in (-1, 5, True, "1", 1.0, None)
            for act in (
                lambda s, start=start: s.put(STORED, BLOCKS, start=start),
                lambda s, start=start: s.get(STORED, BUFFERS, start=start),
                lambda s, start=start: s.put_async(STORED, BLOCKS, start),
                lambda s, start=start: s.get_async(STORED, BUFFERS, start),
            )
        ),
    ),
]

BUFFER = [
    Call(
        "not one buffer per key",
        BlockSizeError,
        (
            lambda s: s.put(OTHER, BLOCKS[:3]),
            lambda s: s.put(STORED, BLOCKS, start=1),
            lambda s: s.get(STORED, [*BUFFERS, bytearray(SIZE)]),
            lambda s: s.put_async(OTHER, []),
            lambda s: s.get_async(STORED, BUFFERS[:1]),
            lambda s: s.put([], BLOCKS),
        ),
    ),
    Call(
        "a stack that does not divide into the keys",
        BlockSizeError,
        (
            lambda s: s.put(OTHER, stack(3, SIZE)),
            lambda s: s.get(STORED, stack(4 * SIZE + 1)),
            lambda s: s.put(OTHER, b""),
            lambda s: s.put([], stack(4, SIZE)),
        ),
    ),
    Call(
        "blocks of several sizes",
        BlockSizeError,
        (
            lambda s: s.put(OTHER, [*BLOCKS[:3], b"x"]),
            lambda s: s.get(STORED, [*BUFFERS[:3], stack(2)]),
        ),
    ),
    Call(
        "blocks of another size than the store's",
        BlockSizeError,
        (
            lambda s: s.put(OTHER, stack(4, SIZE // 2)),
            lambda s: s.put(STORED, stack(4, SIZE + 1)),
            lambda s: s.put_async(OTHER, stack(4, 2 * SIZE)),
            lambda s: s.get(STORED, stack(4, SIZE - 1)),
            lambda s: s.get(OTHER, stack(4, 2 * SIZE)),
            lambda s: s.get_async(STORED, stack(4, 1)),
        ),
    ),
    Call(
        "`blocks` or `out` is no buffer and no list",
        UsageError,
        (lambda s: s.put(OTHER, 5), lambda s: s.get(STORED, "x"), lambda s: s.put(OTHER, None)),
    ),
    Call(
        "an entry of `blocks` or `out` is no buffer",
        UsageError,
        (lambda s: s.put(OTHER, [1, 2, 3, 4]), lambda s: s.get(STORED, [*BUFFERS[:3], None])),
    ),
    Call(
        "memory that is not contiguous",
        UsageError,
        (
            lambda s: s.put(OTHER, stack(SIZE, 4).T),
            lambda s: s.get(STORED, stack(4, 2 * SIZE)[:, ::2]),
            lambda s: s.get(STORED, [*BUFFERS[:3], stack(2 * SIZE)[::2]]),
        ),
    ),
    Call(
        "`out` that cannot be written",
        UsageError,
        (
            lambda s: s.get(STORED, read_only()),
            lambda s: s.get(STORED, BLOCKS),
            lambda s: s.get_async(STORED, memoryview(b"x" * 4 * SIZE)),
        ),
    ),
    Call(
        "buffers of `out` that overlap",
        UsageError,
        (
            lambda s: s.get(STORED, [bytearray(SIZE)] * len(STORED)),
            lambda s: s.get_async(STORED, [bytearray(SIZE)] * len(STORED)),
        ),
    ),
    Call("a tensor without plain memory", UsageError, (lambda s: s.put(OTHER, meta()),)),
    Call(
        "blocks in host memory and on a device in one call",
        UsageError,
        (
            lambda s: s.put(OTHER, mixed()),
            lambda s: s.get(OTHER, mixed()),
        ),
    ),
]

SECONDS = (-1, float("nan"), float("inf"), "1", True, 1e12)
VALUES = [
    Call(
        "`deadline` or `timeout` below 0 or no number",
        UsageError,
        tuple(
            act
            for value in SECONDS
            for act in (
                lambda s, value=value: s.get(STORED, BUFFERS, deadline=value),
                lambda s, value=value: s.get_async(STORED, BUFFERS, deadline=value),
                lambda s, value=value: s.flush(value),
                lambda s, value=value: s.close(value),
            )
        ),
    ),
    Call(
        "a `ttl` that is not above 0",
        UsageError,
        tuple(
            act
            for value in (0, *SECONDS)
            for act in (
                lambda s, value=value: s.pin(STORED, ttl=value),
                lambda s, value=value: s.put(OTHER, BLOCKS, turn=Turn(ttl=value)),
            )
        ),
    ),
    Call(
        "a tier that is not configured",
        UsageError,
        (lambda s: s.clear("hbm"), lambda s: s.clear(0), lambda s: s.clear(["dram"])),
    ),
    Call(
        "`turn` is neither a session nor a Turn",
        UsageError,
        (
            lambda s: s.put(OTHER, BLOCKS, turn=5),
            lambda s: s.put_async(OTHER, BLOCKS, turn={"session": "a"}),
        ),
    ),
    Call(
        "a session without a name",
        UsageError,
        (
            lambda s: s.session(""),
            lambda s: s.session(5),
            lambda s: s.session("a").fork(""),
            lambda s: s.put(OTHER, BLOCKS, turn=""),
            lambda s: s.put(OTHER, BLOCKS, turn=Turn(session="")),
        ),
    ),
    Call(
        "a fact about a turn that is no text",
        UsageError,
        (
            lambda s: s.put(OTHER, BLOCKS, turn=Turn(category=NUMBER)),
            lambda s: s.session("a").turn_ended(reason=5),
            lambda s: s.session("a").turn_ended(next_tool=b"x"),
        ),
    ),
    Call(
        "a number in a turn that is no integer",
        UsageError,
        (
            lambda s: s.put(OTHER, BLOCKS, turn=Turn(priority=WORD)),
            lambda s: s.put(OTHER, BLOCKS, turn=Turn(output_tokens=-1)),
            lambda s: s.session("a").turn_ended(output_tokens=1.5),
        ),
    ),
    Call(
        "tokens that are none",
        UsageError,
        (
            lambda s: chain_keys([1, -1], 1),
            lambda s: chain_keys([1.5], 1),
        ),
    ),
    Call(
        "`block_tokens` is not positive",
        UsageError,
        (lambda s: chain_keys([1], 0), lambda s: chain_keys([1], True)),
    ),
    Call(
        "any call after `close`",
        ClosedError,
        tuple(
            closed(act)
            for act in (
                *with_keys(STORED),
                lambda s: s.contains(STORED[0]),
                lambda s: s.session("a"),
                lambda s: s.clear(),
                lambda s: s.flush(1),
            )
        ),
    ),
]

CALLS = [*KEYS, *BUFFER, *VALUES]
