"""Keys against an independent reference, golden values and the laws of identity."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from array import array
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredkv.errors import UsageError
from tieredkv.keys import chain_keys

ROOT = Path(__file__).resolve().parents[2]
TOKENS = list(range(100))

small_tokens = st.lists(st.integers(0, 2) | st.integers(0, 2**32 - 1), max_size=24)
texts = st.none() | st.text("ab\x00é", max_size=3) | st.binary(max_size=3)
media_items = st.lists(
    st.tuples(st.integers(0, 24), st.text("ab", max_size=2) | st.binary(max_size=2))
    | st.tuples(st.integers(0, 24), st.integers(0, 9), st.text("ab", max_size=2)),
    max_size=4,
)
extras = st.fixed_dictionaries(
    {"lora": texts, "salt": texts, "tenant": texts, "media": media_items}
)


def field(value: Any) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, int):
        tag, raw = b"i", str(value).encode()
    elif isinstance(value, str):
        tag, raw = b"s", value.encode()
    else:
        tag, raw = b"b", value
    return tag + struct.pack("<Q", len(raw)) + raw


def sha(*fields: Any) -> bytes:
    return hashlib.sha256(b"".join(field(f) for f in fields)).digest()


def reference_keys(
    tokens: list[int], block: int, lora: Any, salt: Any, tenant: Any, media: Any
) -> list[bytes]:
    """Straight from the module's description, one whole hash per key."""
    stream = sha(b"tieredkv root", 1, block, lora, salt, tenant)
    keys: list[bytes] = []
    for number in range(len(tokens) // block):
        here = sorted(
            field(item[0]) + field(item[1] if len(item) == 3 else None) + field(item[-1])
            for item in media
            if item[0] // block == number
        )
        if here:
            before = hashlib.sha256(stream).digest()
            stream = sha(b"tieredkv media", before, b"".join(here))
        for token in tokens[number * block : (number + 1) * block]:
            stream += struct.pack("<I", token)
        keys.append(hashlib.sha256(stream).digest())
    return keys


def test_golden_keys_never_change() -> None:
    keys = chain_keys(TOKENS, 32)
    assert [key.hex() for key in keys] == [
        "9ba3dd53b78763167b054874c250c4407e74df74d1126bfb0e93b6a3f0a955ac",
        "0ec75a4155d0aca20148673801bb33f903fb0bbcf7d1a87f51f5767a51825fa3",
        "71b9c374ee477451320b4d4bef3b981b3c9d5e71c6496295c6f1c38acdde796d",
    ]
    full = chain_keys(
        TOKENS, 32, lora="a", salt=b"s", tenant="", media=[(40, 8, "img"), (70, b"\x01")]
    )
    assert [key.hex() for key in full] == [
        "e97c338bc9257654bd406a572bbc21c731ece73c8e4f86e725529095136170f4",
        "2c3e09826cbbd968eb60f1d40d171dc767fd73830313376f2f1ee882d45d4300",
        "d51adba711203a73315c8aead746c149a7ac5c22bdfcffff76618777726d4583",
    ]


@given(small_tokens, st.integers(1, 6), extras)
def test_equals_the_reference(tokens: list[int], block: int, extra: dict[str, Any]) -> None:
    assert chain_keys(tokens, block, **extra) == reference_keys(tokens, block, **extra)


@given(small_tokens, small_tokens, st.integers(1, 4), st.integers(1, 4), extras, extras)
@settings(max_examples=300)
def test_different_inputs_have_different_keys(
    tokens: list[int],
    others: list[int],
    block: int,
    other_block: int,
    extra: dict[str, Any],
    other_extra: dict[str, Any],
) -> None:
    def identity(tokens: list[int], block: int, extra: dict[str, Any]) -> Any:
        end = len(tokens) // block * block
        media = sorted(repr(item) for item in extra["media"] if item[0] < end)
        named = [repr(extra[name]) for name in ("lora", "salt", "tenant")]
        return tokens[:end], block, named, media

    first = chain_keys(tokens, block, **extra)
    second = chain_keys(others, other_block, **other_extra)
    if first and second:
        same = identity(tokens, block, extra) == identity(others, other_block, other_extra)
        assert (first[-1] == second[-1]) == same


@given(small_tokens, extras, st.integers(0, 23), st.integers(1, 2**32 - 1))
def test_changing_one_token_changes_its_block_and_all_later_ones(
    tokens: list[int], extra: dict[str, Any], at: int, delta: int
) -> None:
    changed = list(tokens)
    if at >= len(tokens):
        return
    changed[at] = (changed[at] + delta) % 2**32
    pairs = zip(chain_keys(tokens, 4, **extra), chain_keys(changed, 4, **extra), strict=True)
    assert [a == b for a, b in pairs] == [n < at // 4 for n in range(len(tokens) // 4)]


@given(small_tokens, small_tokens, st.integers(1, 5))
def test_a_key_depends_on_nothing_after_its_block(
    tokens: list[int], more: list[int], block: int
) -> None:
    keys = chain_keys(tokens, block)
    assert chain_keys(tokens + more, block)[: len(keys)] == keys


@pytest.mark.parametrize("name", ["lora", "salt", "tenant"])
def test_a02_a03_every_extra_separates(name: str) -> None:
    values: list[Any] = [None, "", b"", "a", b"a", "b", "ab", "é", "e\u0301", "n", "\x00", "\ud800"]
    keys = {chain_keys(TOKENS, 16, **{name: value})[-1] for value in values}
    assert len(keys) == len(values)


def test_fields_do_not_run_into_each_other() -> None:
    splits: list[dict[str, Any]] = [
        {"lora": "ab", "salt": "c"},
        {"lora": "a", "salt": "bc"},
        {"lora": "abc"},
        {"salt": "abc"},
        {"tenant": "abc"},
        {"lora": "abc", "salt": ""},
        {"media": [(0, "abc")]},
        {"media": [(0, "ab"), (0, "c")]},
        {"media": [(0, 1, "abc")]},
    ]
    assert len({chain_keys(TOKENS, 16, **split)[0] for split in splits}) == len(splits)


def test_a01_keys_are_equal_in_every_process() -> None:
    code = (
        "from tieredkv.keys import chain_keys;"
        "k = chain_keys(range(100), 16, lora='x', salt=b's', media=[(20, 'm')]);"
        "print(b''.join(k).hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("0", "1", "random")
    }
    here = chain_keys(range(100), 16, lora="x", salt=b"s", media=[(20, "m")])
    assert seen == {b"".join(here).hex()}


def test_a04_no_digest_is_truncated() -> None:
    digests = [n.to_bytes(32, "big") for n in range(66_000)]
    digests += [n.to_bytes(32, "little") for n in range(1, 66_001)]
    for shared in (2, 4, 6):
        rest = 32 - shared
        digests += [b"\xaa" * shared + n.to_bytes(rest, "big") for n in range(12_000)]
        digests += [n.to_bytes(rest, "big") + b"\xbb" * shared for n in range(12_000)]
    digests = list(dict.fromkeys(digests))
    assert len(digests) >= 200_000
    tokens = [7] * 4
    keys = {chain_keys(tokens, 4, media=[(1, digest)])[0] for digest in digests}
    assert len(keys) == len(digests)


def test_media_leaves_the_text_before_it_shared() -> None:
    plain = chain_keys(TOKENS, 10)
    image = chain_keys(TOKENS, 10, media=[(35, 20, "cat")])
    assert image[:3] == plain[:3]
    assert set(image[3:]).isdisjoint(plain)
    assert len(set(image)) == 10


def test_media_order_and_container_do_not_matter_but_count_and_place_do() -> None:
    items = [(35, "cat"), (35, "dog"), (4, b"x")]
    keys = chain_keys(TOKENS, 10, media=items)
    assert chain_keys(TOKENS, 10, media=reversed(items)) == keys
    assert chain_keys(TOKENS, 10, media=[list(item) for item in items]) == keys
    assert chain_keys(TOKENS, 10, media=[*items, (35, "cat")])[3:] != keys[3:]
    assert chain_keys(TOKENS, 10, media=[(36, "cat"), (35, "dog"), (4, b"x")])[3:] != keys[3:]


def test_media_behind_the_last_full_block_is_ignored() -> None:
    assert chain_keys(TOKENS, 30, media=[(90, "x"), (10**30, "y")]) == chain_keys(TOKENS, 30)


def test_every_kind_of_token_container_gives_the_same_keys() -> None:
    import torch

    values = [0, 1, 2**31, 2**32 - 1, *range(60)]
    wide = np.array(values, dtype=np.int64)
    strided = np.repeat(wide, 2)[::2]
    kinds: list[Any] = [
        tuple(values),
        deque(values),
        array("I", values),
        memoryview(array("I", values)),
        wide,
        wide.astype(np.uint64),
        wide.astype(np.uint32),
        wide.astype(">u4"),
        wide.astype(">i8"),
        strided,
        torch.tensor(values),
        list(wide),
        list(torch.tensor(values)),
    ]
    expected = chain_keys(values, 16)
    assert len(expected) == 4
    for tokens in kinds:
        assert chain_keys(tokens, 16) == expected, type(tokens)
    for dtype in (np.int8, np.uint8, np.int16, np.uint16, np.int32):
        assert chain_keys(np.arange(100, dtype=dtype), 16) == chain_keys(range(100), 16)


def test_tokens_without_a_full_block_have_no_keys() -> None:
    assert chain_keys([], 4) == []
    assert chain_keys([1, 2, 3], 4) == []
    assert chain_keys(np.array([], dtype=np.int64), 4) == []
    assert chain_keys([1, 2, 3], 2**62) == []


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, -1], r"token_ids\[1\] is -1.*padding"),
        ([0, 2**32], r"token_ids\[1\] is 4294967296.*padding"),
        ([0, 10**30], r"token_ids\[1\]"),
        ([0, 1.0], r"token_ids\[1\] is 1\.0.*integers"),
        ([0, "7"], r"token_ids\[1\] is '7'"),
        ([0, None], r"token_ids\[1\] is None"),
        ([[1, 2], [3]], r"token_ids\[0\]"),
        (np.array([5, -7, -1]), r"token_ids\[1\] is -7"),
        (np.array([5, 2**32]), r"token_ids\[1\] is 4294967296"),
        (np.array([2**63], dtype=np.uint64), r"token_ids\[0\]"),
        (np.array([-3], dtype=np.int8), r"token_ids\[0\] is -3"),
        (np.array([1.0]), "float64.*integer array"),
        (np.array([True]), "bool"),
        (np.array([1, 2], dtype=object), "object"),
        (np.zeros((2, 2), dtype=np.int64), r"shape \(2, 2\).*one dimension"),
        (np.int64(3), r"shape \(\)"),
        ("1234", "str.*sequence of integers"),
        (b"1234", "bytes.*sequence of integers"),
        (bytearray(4), "bytearray"),
        (iter([1, 2]), "pass a list"),
        ({1, 2}, "set"),
        (5, "int"),
        (None, "NoneType"),
    ],
)
def test_tokens_that_are_none_are_refused(tokens: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        chain_keys(tokens, 1)


def test_tensors_that_have_no_array_are_refused_with_the_remedy() -> None:
    import torch

    for tensor in (torch.ones(4, device="meta", dtype=torch.int64), torch.ones(4).bfloat16()):
        with pytest.raises(UsageError, match="CPU"):
            chain_keys(tensor, 1)
    with pytest.raises(UsageError, match="float32"):
        chain_keys(torch.ones(4), 1)


@pytest.mark.parametrize("block", [0, -1, 1.0, "4", None, True])
def test_block_tokens_must_be_positive_integers(block: Any) -> None:
    with pytest.raises(UsageError, match="block_tokens"):
        chain_keys([1, 2, 3, 4], block)


@pytest.mark.parametrize("value", [1, 1.5, ["a"], bytearray(b"a"), ("a",)])
@pytest.mark.parametrize("name", ["lora", "salt", "tenant"])
def test_extras_must_be_text(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{name} is .*str, bytes or None"):
        chain_keys([1], 1, **{name: value})


@pytest.mark.parametrize(
    "media",
    [
        [(-1, "x")],
        [(1, -1, "x")],
        [(1,)],
        [(1, 2, 3, "x")],
        [(1.0, "x")],
        [("1", "x")],
        [(1, None)],
        [(1, 2, 3)],
        ["ab"],
        [5],
        5,
        None,
        [(99, 1.5, "x")],
    ],
)
def test_media_must_be_well_formed(media: Any) -> None:
    with pytest.raises(UsageError, match="media"):
        chain_keys([1, 2], 1, media=media)
