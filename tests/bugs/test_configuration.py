"""A08: a misspelt key stops the start, wherever it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bugs.world import FP, OK, chain, dram, put
from tieredkv import Config, ConfigError, TieredKVStore

GOOD: dict[str, Any] = {"block_tokens": 16, "tiers": [dram(8)]}


@pytest.mark.parametrize(
    ("document", "wrong", "nearest"),
    [
        ({**GOOD, "block_tokns": 16}, "block_tokns", "block_tokens"),
        ({**GOOD, "tiers": [{**dram(8), "capcity": 1}]}, "capcity", "capacity"),
        ({**GOOD, "mover": {"thread": 2}}, "thread", "threads"),
        ({**GOOD, "evictoin": {"policy": "lru"}}, "evictoin", "eviction"),
    ],
)
@pytest.mark.parametrize("how", ["yaml", "json", "python"])
def test_A08_unknown_keys_stop_the_start(
    document: dict[str, Any], wrong: str, nearest: str, how: str, tmp_path: Path
) -> None:
    file = tmp_path / f"cache.{how}"
    file.write_text(json.dumps(document))
    source = "python" if how == "python" else f"file {file}"
    with pytest.raises(ConfigError) as caught:
        Config.model_validate(document) if how == "python" else Config.load(file)
    assert str(caught.value).startswith(source)
    assert repr(wrong) in str(caught.value)
    assert f"nearest valid key: '{nearest}'" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("TIEREDKV_BLOCK_TOKNS", "TIEREDKV_BLOCK_TOKENS"),
        ("TIEREDKV_TIERS_0_CAPACTY", "TIEREDKV_TIERS_0_CAPACITY"),
    ],
)
def test_A08_unknown_variables_stop_the_start(
    name: str, nearest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cache.yaml"
    file.write_text(json.dumps(GOOD))
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=rf"env {name}.*{nearest}"):
        Config.load(file)
    monkeypatch.delenv(name)
    with TieredKVStore(Config.load(file), FP) as store:
        assert put(store, chain(2)) == [OK] * 2
