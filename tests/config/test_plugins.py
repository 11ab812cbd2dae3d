from __future__ import annotations

import json

import pytest

from tieredkv import config
from tieredkv.plugins import ADMISSIONS, POLICIES, TIERS, load_plugin
from tieredkv.suggest import nearest


@pytest.mark.usefixtures("plugins")
def test_loads_builtin_class_path_and_entry_point() -> None:
    builtin = {"dram": int, "twice": str}
    assert load_plugin(TIERS, "dram", builtin) is int
    assert load_plugin(TIERS, "json:JSONDecoder", builtin) is json.JSONDecoder
    assert load_plugin(TIERS, "json:decoder.JSONDecoder", builtin) is json.JSONDecoder
    assert load_plugin(POLICIES, "coin", builtin) is json.JSONEncoder
    assert load_plugin(ADMISSIONS, "picky", {}) is json.JSONEncoder
    # Two packages that agree are no ambiguity, and no package replaces a built-in.
    assert load_plugin(TIERS, "shelf", builtin) is json.JSONDecoder
    assert load_plugin(TIERS, "twice", builtin) is str


def test_policy_names_of_the_schema_are_the_shipped_ones() -> None:
    from tieredkv.eviction import BUILTIN

    assert set(config.BUILTIN_POLICIES) == set(BUILTIN)


def test_nearest() -> None:
    assert nearest("CAPACTY", ["capacity", "kind"]) == "capacity"
    assert nearest("zzz", ["abc"]) == "abc"
    assert nearest("x", []) is None
