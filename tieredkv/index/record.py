"""Records of durable blocks: their bytes in the index, and pieces put together from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tieredkv.errors import UsageError

KEY_BYTES = 32
ROOT = bytes(KEY_BYTES)
"""The parent of a chain's first block."""

# "S32" compares like memcmp, the order of LMDB; numpy has no ordering for "V32".
RECORD = np.dtype(
    [
        ("parent", "S32"),
        ("generation", "<u8"),
        ("born", "<f8"),
        ("last", "<f8"),
        ("slot", "<u4"),
        ("depth", "<u4"),
        ("epoch", "<u4"),
        ("length", "<u4"),
    ]
)
"""The value of one block: 72 bytes, little-endian."""

ROW = np.dtype([("key", "S32"), *((name, RECORD[name]) for name in RECORD.names or ())])
"""A key followed by its value."""

Rows: TypeAlias = "npt.NDArray[np.void]"


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive blocks of one chain that share a generation.

    Not always a whole run of the prefix tree, nor always inside one: the parent of another
    piece may be in the middle of this one. Who replays pieces splits there.
    """

    keys: list[bytes]
    """32 bytes each, from the root downwards; at least one."""
    parent: bytes
    """Key of the block before `keys[0]`, `ROOT` if there is none."""
    slots: list[int]
    """One per key."""
    generation: int
    depth: int
    """Blocks from the root to `keys[0]`, without it."""
    born: float
    """Seconds: when the blocks were first stored."""
    last: float
    """Seconds: when they were last used."""


class Deletion(NamedTuple):
    """The end of one block in one slot. A later record of the key is another block's."""

    key: bytes
    generation: int
    slot: int
    reuse: bool = True
    """The slot may be used again once this is committed."""


@dataclass(slots=True)
class Assembly:
    """What `assemble` made of the stored rows."""

    pieces: list[Piece]
    """Parents before children."""
    dropped: list[bytes] = field(default_factory=list)
    """Keys that are in no piece."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Why, in numbers of blocks."""


def encode(piece: Piece, epoch: int, length: int) -> list[tuple[bytes, bytes]]:
    """Key and value of each block of the piece.

    Raises UsageError for a piece whose columns do not fit together.
    """
    n = len(piece.keys)
    links = b"".join((piece.parent, *piece.keys))
    if not n or len(piece.slots) != n or len(links) != KEY_BYTES * (n + 1):
        raise UsageError(
            f"a piece of {n} keys and {len(piece.slots)} slots: pass one slot per key, "
            f"at least one key, keys of {KEY_BYTES} bytes"
        )
    rows = np.empty(n, RECORD)
    rows["parent"] = np.frombuffer(links, "S32", n)
    rows["generation"] = piece.generation
    rows["born"] = piece.born
    rows["last"] = piece.last
    rows["slot"] = piece.slots
    rows["depth"] = np.arange(piece.depth, piece.depth + n)
    rows["epoch"] = epoch
    rows["length"] = length
    blob, size = rows.tobytes(), RECORD.itemsize
    values = (blob[i : i + size] for i in range(0, n * size, size))
    return list(zip(piece.keys, values, strict=True))


def names(value: bytes, deletion: Deletion) -> bool:
    """Is this the record that the deletion is about?"""
    row = np.frombuffer(value, RECORD, 1)[0]
    return bool(row["generation"] == deletion.generation and row["slot"] == deletion.slot)


def assemble(rows: Rows, slot_limit: int, epoch: int, length: int) -> Assembly:
    """Pieces of all rows that can be reached from the root.

    `rows` are sorted by key. A row is dropped if it has another epoch or length, a slot
    outside `range(slot_limit)`, a slot that another row claims with a higher generation, or
    if an ancestor is not there.
    """
    reasons: dict[str, int] = {}
    keep = np.ones(len(rows), bool)

    def drop(reason: str, good: npt.NDArray[np.bool_]) -> None:
        nonlocal keep
        bad = int(np.count_nonzero(keep & ~good))
        if bad:
            reasons[reason] = bad
            keep &= good

    drop("epoch", rows["epoch"] == epoch)
    drop("length", rows["length"] == length)
    drop("slot out of range", rows["slot"] < slot_limit)
    drop("slot claimed twice", _newest_of_slot(rows, keep))
    kept = rows if keep.all() else rows[keep]
    order = np.lexsort((kept["depth"], kept["generation"]))
    # as "V": numpy copies structured rows field by field, at a fifth of the speed
    chain: Rows = kept.view(f"V{ROW.itemsize}")[order].view(ROW)
    heads, owner = _heads(chain)
    reached = _reached(chain, heads, owner, _parents(kept, order, chain, heads))
    pieces = _pieces(chain, heads, reached)
    if len(reached) < len(heads):
        orphans = np.ones(len(heads), bool)
        orphans[reached] = False
        lost = np.zeros(len(rows), bool)
        lost[np.flatnonzero(keep)[order]] = orphans[owner]
        drop("parent missing", ~lost)
    return Assembly(pieces, _key_list(rows[~keep]), reasons)


def _newest_of_slot(rows: Rows, keep: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    newest = np.ones(len(rows), bool)
    among = np.flatnonzero(keep)
    taken = np.sort(rows["slot"][among])
    if not (taken[1:] == taken[:-1]).any():
        return newest
    order = among[np.lexsort((rows["generation"][among], rows["slot"][among]))]
    slots = rows["slot"][order]
    newest[order[:-1][slots[:-1] == slots[1:]]] = False
    return newest


def _heads(chain: Rows) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """First row of each piece, and the piece of each row."""
    first = np.ones(len(chain), bool)
    a, b = chain[:-1], chain[1:]
    first[1:] = ~(
        (a["generation"] == b["generation"])
        & (a["depth"].astype(np.int64) + 1 == b["depth"])
        & (a["key"] == b["parent"])
    )
    return np.flatnonzero(first), np.cumsum(first) - 1


def _parents(
    kept: Rows, order: npt.NDArray[np.intp], chain: Rows, heads: npt.NDArray[np.intp]
) -> npt.NDArray[np.intp]:
    """For each head the row of its parent, -1 for the root, -2 where there is none."""
    wanted = chain["parent"][heads]
    if not len(kept):
        return np.empty(0, np.intp)
    at = np.minimum(np.searchsorted(kept["key"], wanted), len(kept) - 1)
    row_of = np.empty(len(kept), np.intp)
    row_of[order] = np.arange(len(kept))
    row = row_of[at]
    depth = chain["depth"].astype(np.int64)
    fits = (kept["key"][at] == wanted) & (depth[row] + 1 == depth[heads])
    root = (wanted == np.bytes_(ROOT)) & (depth[heads] == 0)
    return np.where(root, -1, np.where(fits, row, -2))


def _reached(
    chain: Rows,
    heads: npt.NDArray[np.intp],
    owner: npt.NDArray[np.intp],
    parents: npt.NDArray[np.intp],
) -> list[int]:
    """Pieces with all their ancestors, parents first: a parent begins at a lower depth."""
    if not len(heads):
        return []
    above = np.where(parents >= 0, owner[np.maximum(parents, 0)], parents).tolist()
    good = [False] * len(heads)
    reached: list[int] = []
    for piece in np.argsort(chain["depth"][heads], kind="stable").tolist():
        parent = above[piece]
        if parent == -1 or (parent >= 0 and good[parent]):
            good[piece] = True
            reached.append(piece)
    return reached


def _pieces(chain: Rows, heads: npt.NDArray[np.intp], reached: Sequence[int]) -> list[Piece]:
    if not reached:
        return []
    keys, slots = _key_list(chain), chain["slot"].tolist()
    starts = heads.tolist()
    ends = [*starts[1:], len(keys)]
    parents = _key_list(chain[heads], "parent")
    generation, depth = chain["generation"][heads].tolist(), chain["depth"][heads].tolist()
    born = _times(chain["born"][heads])
    last = _times(np.maximum.reduceat(chain["last"], heads))
    return [
        Piece(
            keys[starts[p] : ends[p]],
            parents[p],
            slots[starts[p] : ends[p]],
            generation[p],
            depth[p],
            born[p],
            last[p],
        )
        for p in reached
    ]


def _key_list(rows: Rows, column: str = "key") -> list[bytes]:
    # as "V32": the "S32" of numpy would lose trailing zero bytes
    keys: list[Any] = np.ascontiguousarray(rows[column]).view("V32").tolist()
    return keys


def _times(values: npt.NDArray[Any]) -> list[float]:
    # a damaged time must not reach a ranking, where NaN breaks the order of everything
    times: list[float] = np.where(np.isfinite(values), values, 0.0).tolist()
    return times
