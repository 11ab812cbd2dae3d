"""Identity: the key of every block, and the fingerprint that names directories.

A key is a SHA-256 digest and stands for all tokens up to its block's end and for every
extra. All encodings are tagged and length-prefixed, so no two inputs are encoded alike, and
nothing depends on the process (no Python `hash()`), so equal inputs have equal keys
everywhere. Changing any byte of an encoding requires a new `FORMAT_VERSION`.

    root seed = H("tieredkv root" + version + block_tokens + lora + salt + tenant)
    key[i]    = H(seed + block[0] + ... + block[i]), blocks as little-endian uint32
    new seed  = H("tieredkv media" + key[i-1] + items), taken before a block with media

Strings are compared as they are: no Unicode normalisation, and `"a"`, `b"a"`, `""` and None
are four different values.
"""

from __future__ import annotations

import operator
import os
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tieredkv.chain_hash import Memo, digest, encode
from tieredkv.errors import UsageError
from tieredkv.types import Fingerprint

FORMAT_VERSION = 1
"""Of the encodings in this module; part of every key and fingerprint."""
KEY_BYTES = 32

_MAX_TOKEN = 2**32 - 1
_MEMO = Memo(64 << 20)
os.register_at_fork(after_in_child=_MEMO.reset_lock)

Text = str | bytes | None


def chain_keys(
    token_ids: Sequence[int] | npt.NDArray[Any] | Any,
    block_tokens: int = 256,
    lora: Text = None,
    salt: Text = None,
    tenant: Text = None,
    media: Iterable[Sequence[Any]] = (),
) -> list[bytes]:
    """The 32-byte keys of all full blocks of `token_ids`, root first.

    `token_ids`: a sequence of integers, a one-dimensional integer array, or anything that
    converts to one (torch CPU tensor, `array.array`); values 0 <= t < 2**32. Tokens behind
    the last full block are checked but have no key.
    `media`: what tokens alone do not say, as `(offset, digest)` or `(offset, length,
    digest)`: `offset` (and `length`) in tokens, `digest` str or bytes that identifies the
    content. An item changes the keys from the block that contains `offset` onward and none
    before. Order is irrelevant; equal items count as often as they are given; items that
    begin behind the last full block are ignored.

    Raises UsageError for anything else. Thread-safe. The list is the caller's own. Recent
    chains are remembered (64 MiB), so a longer chain costs its new tokens only.
    """
    _check_block_tokens(block_tokens)
    tokens = _token_bytes(token_ids)
    width = 4 * block_tokens
    blocks = len(tokens) // width
    seed = digest(
        b"tieredkv root",
        *(FORMAT_VERSION, block_tokens),
        *(_text("lora", lora), _text("salt", salt), _text("tenant", tenant)),
    )
    return _MEMO.keys(seed, tokens[: blocks * width], width, _marks(media, block_tokens, blocks))


def fingerprint_digest(fp: Fingerprint, block_tokens: int) -> bytes:
    """32 bytes that differ whenever any field of `fp` or `block_tokens` differs.

    Raises UsageError if a field has the wrong type or a size is not positive.
    """
    _check_block_tokens(block_tokens)
    for name in ("model", "weights", "dtype", "layout"):
        if not isinstance(value := getattr(fp, name), str):
            raise UsageError(f"fingerprint.{name} is {value!r}: pass a str")
    world = fp.world
    if not (isinstance(world, tuple) and len(world) == 2 and all(map(_is_positive, world))):
        raise UsageError(
            f"fingerprint.world is {world!r}: pass two positive integers, "
            "(tensor parallel size, pipeline parallel size)"
        )
    return digest(
        b"tieredkv fingerprint",
        *(FORMAT_VERSION, block_tokens, *world),
        *(fp.model, fp.weights, fp.dtype, fp.layout),
    )


# --- checks ---------------------------------------------------------------------------


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_block_tokens(block_tokens: int) -> None:
    if not _is_positive(block_tokens):
        raise UsageError(f"block_tokens is {block_tokens!r}: pass a positive integer")


def _text(name: str, value: object) -> Text:
    if value is None or isinstance(value, str | bytes):
        return value
    raise UsageError(f"{name} is {value!r}: pass str, bytes or None")


# --- tokens ---------------------------------------------------------------------------


def _token_bytes(token_ids: Any) -> bytes:
    """The tokens as consecutive little-endian uint32."""
    if isinstance(token_ids, str | bytes | bytearray):
        raise UsageError(f"token_ids is {type(token_ids).__name__}: pass a sequence of integers")
    if isinstance(token_ids, list | tuple) or not _is_array(token_ids):
        return _from_sequence(token_ids)
    try:
        values = np.asarray(token_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"token_ids ({type(token_ids).__name__}) has no array on the CPU: "
            f"pass a list or a CPU array ({error})"
        ) from error
    return _from_array(values)


def _is_array(value: object) -> bool:
    if hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        return True
    return isinstance(value, array | memoryview)


def _from_sequence(tokens: Any) -> bytes:
    if not isinstance(tokens, Sequence):
        raise UsageError(
            f"token_ids is {type(tokens).__name__}: pass a list, tuple or integer array"
        )
    try:
        packed = array("I", tokens)
    except (TypeError, OverflowError) as error:
        raise UsageError(_first_bad(tokens)) from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _first_bad(tokens: Sequence[Any]) -> str:
    for index, token in enumerate(tokens):
        try:
            value = operator.index(token)
        except TypeError:
            return f"token_ids[{index}] is {token!r}: tokens are integers, convert it first"
        if not 0 <= value <= _MAX_TOKEN:
            return f"token_ids[{index}] is {value}: tokens are 0 <= t < 2**32; remove padding"
    return "token_ids changed while it was read: pass a copy"


def _from_array(values: npt.NDArray[Any]) -> bytes:
    if values.ndim != 1:
        raise UsageError(f"token_ids has shape {values.shape}: pass one dimension, one request")
    if values.dtype.kind not in "iu":
        raise UsageError(f"token_ids has dtype {values.dtype}: pass an integer array")
    bad = (values < 0) | (values > _MAX_TOKEN)
    if bad.any():
        index = int(bad.argmax())
        raise UsageError(
            f"token_ids[{index}] is {values[index]}: tokens are 0 <= t < 2**32; remove padding"
        )
    return values.astype("<u4", copy=False).tobytes()


# --- media ----------------------------------------------------------------------------


def _marks(media: Iterable[Sequence[Any]], block_tokens: int, blocks: int) -> dict[int, bytes]:
    items: dict[int, list[bytes]] = defaultdict(list)
    if not isinstance(media, Iterable):
        raise UsageError(f"media is {media!r}: pass a sequence of (offset, digest)")
    for position, item in enumerate(media):
        offset, encoded = _media_item(position, item)
        if offset // block_tokens < blocks:
            items[offset // block_tokens].append(encoded)
    return {block: b"".join(sorted(items[block])) for block in sorted(items)}


def _media_item(position: int, item: Any) -> tuple[int, bytes]:
    where = f"media[{position}] is {item!r}"
    if not isinstance(item, tuple | list) or len(item) not in (2, 3):
        raise UsageError(f"{where}: pass (offset, digest) or (offset, length, digest)")
    try:
        numbers = [operator.index(number) for number in item[:-1]]
    except TypeError as error:
        raise UsageError(f"{where}: offset and length are integers (tokens)") from error
    if min(numbers) < 0:
        raise UsageError(f"{where}: offset and length are not negative")
    if not isinstance(item[-1], str | bytes):
        raise UsageError(f"{where}: the digest is str or bytes")
    length = numbers[1] if len(numbers) == 2 else None
    return numbers[0], encode(numbers[0]) + encode(length) + encode(item[-1])
