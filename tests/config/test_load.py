"""Files, variables, precedence and the source of every value."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from pydantic import ByteSize

from tests.config.cases import OK
from tieredkv.config import Config, DramConfig, NvmeConfig, PluginTierConfig
from tieredkv.config_file import parse_yaml
from tieredkv.config_load import effective, parse, variable
from tieredkv.errors import CapacityError

DOCUMENT = {
    "block_tokens": 16,
    "tiers": [
        {"kind": "hbm", "capacity": "1 GiB"},
        {"kind": "dram", "capacity": 1 << 30, "name": "ram"},
        {"kind": "nvme", "path": "/x", "capacity": "2TiB", "write": "off", "min_free": 0},
    ],
    "eviction": {"policy": "arc"},
}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TIEREDKV_")]:
        monkeypatch.delenv(name)


def test_yaml_json_and_python_mean_the_same(tmp_path: Path) -> None:
    as_yaml, as_json = tmp_path / "c.yaml", tmp_path / "c.json"
    as_yaml.write_text(yaml.safe_dump(DOCUMENT))
    as_json.write_text(json.dumps(DOCUMENT, indent="\t"))
    expected = Config.model_validate(DOCUMENT)
    assert Config.load(as_yaml) == Config.load(str(as_json)) == expected
    assert [tier.label for tier in expected.tiers] == ["hbm", "ram", "nvme"]
    assert [tier.capacity for tier in expected.tiers] == [1 << 30, 1 << 30, 2 << 40]
    nvme = expected.tiers[2]
    assert isinstance(nvme, NvmeConfig)
    assert (nvme.path, nvme.write, nvme.min_free) == (Path("/x"), "off", 0)


def test_off_is_a_text_and_true_a_boolean() -> None:
    values = parse_yaml("[off, no, Yes, on, true, False, 0x10, 1e3]", "t")
    assert values == ["off", "no", "Yes", "on", True, False, 16, "1e3"]


def test_yaml_anchors_and_merge_keys_work() -> None:
    text = "x: &x {capacity: 1, pin: off}\ny: {<<: *x, kind: dram, pin: auto}"
    assert parse_yaml(text, "t")["y"] == {"capacity": 1, "kind": "dram", "pin": "auto"}


def test_file_named_by_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(OK)
    monkeypatch.setenv("TIEREDKV_CONFIG_FILE", str(path))
    monkeypatch.setenv("TIEREDKV_CRASHES", "3")
    monkeypatch.setenv("TIEREDKV_EVENTS", "7")
    assert Config.load() == Config.load(path)
    assert Config.load().events == 7


def test_variables_beat_the_file_and_create_sections() -> None:
    document = parse_yaml(OK, "t")
    before = json.dumps(document)
    loaded = parse(
        document,
        "file t.yaml",
        {
            "TIEREDKV_TIERS_0_CAPACITY": "3MiB",
            "TIEREDKV_TIERS_1_EVICTION_POLICY": "fifo",
            "TIEREDKV_MOVER_GET_DEADLINE": "1e-3",
            "TIEREDKV_PROMOTION_ENABLED": "false",
            "TIEREDKV_TIERS_1_WRITE": "off",
            "TIEREDKVX": "not ours",
            "PATH": "/bin",
        },
    )
    config = loaded.config
    assert config.tiers[0].capacity == 3 << 20
    assert config.tiers[1].eviction is not None
    assert config.tiers[1].eviction.policy == "fifo"
    assert config.mover.get_deadline == 0.001
    assert config.promotion.enabled is False
    assert isinstance(config.tiers[1], NvmeConfig)
    assert config.tiers[1].write == "off"
    assert json.dumps(document) == before


def test_variables_apply_to_python_models_as_well() -> None:
    document = {"tiers": [DramConfig(kind="dram", capacity=ByteSize(10))]}
    loaded = parse(document, environ={"TIEREDKV_TIERS_0_CAPACITY": "20"})
    assert loaded.config.tiers[0].capacity == 20
    assert document["tiers"][0].capacity == 10


def test_every_setting_can_be_set_by_its_variable() -> None:
    loaded = parse(DOCUMENT, "file t")
    kinds = 0
    for setting in effective(loaded):
        path = tuple(
            int(part) if part.isdigit() else part
            for part in setting.key.replace("[", ".").replace("]", "").split(".")
        )
        if path[-1] == "kind":
            kinds += 1
            continue
        if setting.value is None:
            continue
        text = str(int(setting.value)) if isinstance(setting.value, int) else str(setting.value)
        again = parse(DOCUMENT, "file t", {variable(path): text})
        row = next(row for row in effective(again) if row.key == setting.key)
        assert row.source == f"env {variable(path)}"
        assert row.value == setting.value
    assert kinds == 3


def test_sources() -> None:
    loaded = parse(
        DOCUMENT,
        "file t",
        {"TIEREDKV_MOVER_THREADS": "9", "TIEREDKV_TIERS_2_EVICTION_POLICY": "fifo"},
    )
    rows = {row.key: (row.value, row.source) for row in effective(loaded)}
    assert rows["block_tokens"] == (16, "file t")
    assert rows["mover.threads"] == (9, "env TIEREDKV_MOVER_THREADS")
    assert rows["mover.batch"] == (8 << 20, "default")
    assert rows["tiers[0].name"] == ("hbm", "kind")
    assert rows["tiers[1].name"] == ("ram", "file t")
    assert rows["tiers[0].eviction.policy"] == ("arc", "eviction.policy: file t")
    assert rows["tiers[2].eviction.policy"] == ("fifo", "env TIEREDKV_TIERS_2_EVICTION_POLICY")
    assert rows["tiers[2].eviction.seed"] == (0, "default")
    assert rows["tiers[2].path"] == ("/x", "file t")
    assert rows["tiers[2].min_free"] == (0, "file t")


@pytest.mark.usefixtures("plugins")
def test_plugin_tiers_by_entry_point_and_by_class() -> None:
    document = {
        "tiers": [
            {"kind": "my.module:Rack.Tier", "capacity": 5, "options": {"a": [1]}},
            {"kind": "shelf", "capacity": 6},
        ],
        "eviction": {"policy": "coin"},
    }
    loaded = parse(document, environ={"TIEREDKV_TIERS_1_OPTIONS": "{b: 2}"})
    rack, shelf = loaded.config.tiers
    assert isinstance(rack, PluginTierConfig)
    assert isinstance(shelf, PluginTierConfig)
    assert (rack.label, rack.options) == ("tier", {"a": [1]})
    assert (shelf.label, shelf.options) == ("shelf", {"b": 2})


@pytest.mark.usefixtures("plugins")
def test_admission_by_entry_point_and_by_class() -> None:
    for ref in ("picky", "my.module:Picky"):
        tier = {"kind": "nvme", "path": "/x", "capacity": 1, "admission": ref}
        (parsed,) = Config.model_validate({"tiers": [tier]}).tiers
        assert isinstance(parsed, NvmeConfig)
        assert parsed.admission == ref


def test_a_capacity_of_exactly_one_block_is_enough() -> None:
    document = {"tiers": [{"kind": "dram", "capacity": "1MiB"}], "block_bytes": "1MiB"}
    assert Config.model_validate(document).block_bytes == 1 << 20
    with pytest.raises(CapacityError):
        Config.model_validate({**document, "block_bytes": (1 << 20) + 1})


def test_configurations_are_frozen() -> None:
    config = Config.model_validate(DOCUMENT)
    with pytest.raises(ValueError, match="frozen"):
        config.block_tokens = 5  # type: ignore[misc]
