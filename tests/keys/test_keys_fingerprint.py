"""Fingerprints: everything that changes the bytes changes the name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredkv.errors import UsageError
from tieredkv.keys import fingerprint_digest
from tieredkv.types import Fingerprint

BASE = Fingerprint("m", "w1", "bf16", "kv-separate", (2, 1))
HOSTILE = [
    "",
    ".",
    "..",
    "../x",
    "a/../../x",
    "/etc/passwd",
    "\\\\server\\share",
    "a\x00b",
    "x" * 300,
    "con",
    "CON",
    "é",
    "e\u0301",
    "\ud800",
    "模型",
    " ",
    "a ",
    "a.",
    "~",
    "*",
]
fingerprints = st.builds(
    Fingerprint,
    model=st.text("ab/", max_size=3),
    weights=st.text("ab/", max_size=3),
    dtype=st.text("ab/", max_size=3),
    layout=st.text("ab/", max_size=3),
    world=st.tuples(st.integers(1, 12), st.integers(1, 12)),
)


def test_golden_fingerprint_never_changes() -> None:
    assert fingerprint_digest(BASE, 256).hex() == (
        "d2fe20f37ec7fba03d07589fe4147612dffbf8528bf55b75432eadb4a267c60d"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"model": "m2"},
        {"weights": "w2"},  # A06: weights updated in place
        {"dtype": "fp16"},
        {"layout": "kv-packed"},  # A05: another layout of the same size
        {"world": (1, 2)},
        {"world": (2, 2)},
        {"world": (21, 1)},
    ],
)
def test_a05_a06_every_field_counts(change: dict[str, Any]) -> None:
    changed = dataclasses.replace(BASE, **change)
    assert fingerprint_digest(changed, 256) != fingerprint_digest(BASE, 256)


def test_the_block_size_counts() -> None:
    assert len({fingerprint_digest(BASE, size) for size in (1, 16, 161, 256)}) == 4


@given(fingerprints, fingerprints, st.integers(1, 3), st.integers(1, 3))
def test_injective(first: Fingerprint, second: Fingerprint, size: int, other: int) -> None:
    same = (first, size) == (second, other)
    assert (fingerprint_digest(first, size) == fingerprint_digest(second, other)) == same


def test_a07_hostile_names_stay_inside_and_apart(tmp_path: Path) -> None:
    names = [
        fingerprint_digest(dataclasses.replace(BASE, **change), 256).hex()
        for name in ("model", "weights", "dtype", "layout")
        for value in HOSTILE
        for change in [dict[str, Any]({name: value})]
    ]
    assert len({name.lower() for name in names}) == len(names)
    for name in names:
        assert len(name) == 64
        assert set(name) <= set("0123456789abcdef")
        assert (tmp_path / name).resolve().parent == tmp_path.resolve()
        (tmp_path / name).mkdir()


@pytest.mark.parametrize(
    "change",
    [
        {"model": None},
        {"model": b"m"},
        {"weights": 3},
        {"dtype": None},
        {"layout": ["x"]},
        {"world": (0, 1)},
        {"world": (1, -1)},
        {"world": (1,)},
        {"world": (1, 1, 1)},
        {"world": [1, 1]},
        {"world": (1.0, 1)},
        {"world": (True, 1)},
        {"world": 8},
        {"world": None},
    ],
)
def test_wrong_fields_are_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"fingerprint.{next(iter(change))}"):
        fingerprint_digest(dataclasses.replace(BASE, **change), 256).hex()


@pytest.mark.parametrize("size", [0, -1, 1.5, None, True])
def test_block_tokens_are_checked(size: Any) -> None:
    with pytest.raises(UsageError, match="block_tokens"):
        fingerprint_digest(BASE, size)
