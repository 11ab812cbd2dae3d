"""One row per way to misuse the public API: what was done, how, and what comes back."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bugs.world import FP, SIZE, blocks_of, chain, config, dram, nvme
from tieredkv import (
    BlockSizeError,
    CapacityError,
    ClosedError,
    ConfigError,
    DirectoryError,
    DirectoryInUse,
    FormatError,
    TieredKVError,
    TieredKVStore,
    Turn,
    UsageError,
    chain_keys,
)
from tieredkv.index.environment import Environment
from tieredkv.tiers.nvme.engines import DirectEngine

STORED = chain(4)
OTHER = chain(4, seed=1)
BLOCKS = blocks_of(STORED)
BUFFERS = [bytearray(SIZE) for _ in STORED]
Act = Callable[[Any], object]
"""Of a store, whose types are not to be checked here."""
Start = Callable[[Path, pytest.MonkeyPatch], object]


@dataclass(frozen=True)
class Call:
    """Calls on a store that holds STORED; each raises the same kind of error."""

    what: str
    error: type[TieredKVError]
    acts: tuple[Act, ...]


@dataclass(frozen=True)
class Opening:
    """A store that cannot be opened."""

    what: str
    error: type[TieredKVError]
    act: Start


def with_keys(keys: Any) -> tuple[Act, ...]:
    """Every call that takes a chain."""
    count = len(keys) if hasattr(keys, "__len__") else 1
    return (
        lambda s: s.put(keys, blocks_of([b""] * count)),
        lambda s: s.put_async(keys, blocks_of([b""] * count)),
        lambda s: s.get(keys, [bytearray(SIZE)] * count),
        lambda s: s.get_async(keys, [bytearray(SIZE)] * count),
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
    Call("a tensor without plain memory", UsageError, (lambda s: s.put(OTHER, meta()),)),
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
            lambda s: s.put(OTHER, BLOCKS, turn=Turn(category=5)),
            lambda s: s.session("a").turn_ended(reason=5),
            lambda s: s.session("a").turn_ended(next_tool=b"x"),
        ),
    ),
    Call(
        "a number in a turn that is no integer",
        UsageError,
        (
            lambda s: s.put(OTHER, BLOCKS, turn=Turn(priority="high")),
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


def opening(*specs: dict[str, Any], **more: Any) -> TieredKVStore:
    return TieredKVStore(config(*specs, **more), FP)


def first_put(*specs: dict[str, Any]) -> None:
    with opening(*specs) as store:
        store.put(OTHER, stack(4, 1 << 20))


def used(root: Path) -> None:
    with opening(nvme(root)) as store:
        store.put(STORED, BLOCKS)


def second_store(root: Path) -> None:
    with opening(nvme(root)):
        opening(nvme(root))


def no_directory(root: Path) -> None:
    (root / "file").write_bytes(b"mine")
    opening(nvme(root / "file"))


def not_allowed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    opening(nvme(root / "new"))


def linked(root: Path) -> None:
    used(root)
    (path,) = (p for p in root.iterdir() if p.is_dir())
    path.rename(root / "elsewhere")
    path.symlink_to(root / "elsewhere")
    opening(nvme(root))


def other_size(root: Path) -> None:
    used(root)
    opening(nvme(root), block_bytes=2 * SIZE)


def other_version(root: Path) -> None:
    used(root)
    (index,) = root.glob("*/index")
    environment = Environment(index, 1 << 26, 1 << 26, 5.0)
    environment.write(lambda txn: txn.put_meta(b"format", 99))
    environment.close(5.0)
    opening(nvme(root))


def no_direct_io(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: DirectEngine, path: Path) -> Any:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(DirectEngine, "open", refuse)
    opening(nvme(root, engine="direct"), block_bytes=SIZE)


def made(config: Any, fingerprint: Any = FP, **more: Any) -> None:
    TieredKVStore(config, fingerprint, **more)


OPENINGS = [
    Opening("`config` is no Config", ConfigError, lambda r, m: made({"tiers": []})),
    Opening(
        "`fingerprint` is no Fingerprint", UsageError, lambda r, m: made(config(dram(8)), "model")
    ),
    Opening(
        "a field of the fingerprint is no text",
        UsageError,
        lambda r, m: made(config(dram(8)), replace(FP, model=5)),
    ),
    Opening(
        "`world` is not two sizes",
        UsageError,
        lambda r, m: made(config(dram(8)), replace(FP, world=(0, 1))),
    ),
    Opening(
        "`clock` or `wrap_tier` cannot be called",
        UsageError,
        lambda r, m: made(config(dram(8)), clock=5),
    ),
    Opening(
        "a memory tier too small for one block", CapacityError, lambda r, m: first_put(dram(8))
    ),
    Opening(
        "an nvme tier too small for one block",
        CapacityError,
        lambda r, m: first_put(nvme(r, 1 << 20)),
    ),
    Opening(
        "more memory than there is",
        ConfigError,
        lambda r, m: opening({"kind": "dram", "capacity": 1 << 59}, block_bytes=1 << 40),
    ),
    Opening("the directory is open in this process", DirectoryInUse, lambda r, m: second_store(r)),
    Opening("`path` is no directory", DirectoryError, lambda r, m: no_directory(r)),
    Opening("`path` may not be written", DirectoryError, not_allowed),
    Opening("a model's directory is a symbolic link", DirectoryError, lambda r, m: linked(r)),
    Opening("`engine: direct` where O_DIRECT is refused", DirectoryError, no_direct_io),
    Opening("the directory holds blocks of another size", FormatError, lambda r, m: other_size(r)),
    Opening(
        "the directory is of another format version", FormatError, lambda r, m: other_version(r)
    ),
]


def threads() -> set[str]:
    """Names of the store's threads that are alive."""
    return {t.name for t in threading.enumerate() if t.name.startswith("tieredkv")}
