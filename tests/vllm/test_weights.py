"""Which weights a model has: told by its files, wherever they are, and without reading them all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.vllm.identity_world import caches, configure, settings
from tieredkv.connector import weights
from tieredkv.connector.identity import fingerprint, weights_identity
from tieredkv.errors import ConfigError


def load(path: Path | str, **fields: Any) -> Any:
    """The parts of a VllmConfig that say where weights are."""
    model = {"model": str(path), "revision": None, "seed": 0, "model_weights": ""}
    config = {"load_format": "auto", "download_dir": None}
    for name in fields.keys() & config.keys():
        config[name] = fields.pop(name)
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**model, **fields}),
        load_config=SimpleNamespace(**config),
        speculative_config=None,
    )


def test_a_change_of_any_tensor_is_seen(tmp_path: Path) -> None:
    """Of small ones as well, in a file far larger than what is read of it."""
    file = tmp_path / "model.safetensors"
    tensors = {f"layer{i:02}": torch.zeros(256) for i in range(1, 40)}
    tensors |= {"layer00": torch.zeros(2 << 20), "layer40": torch.zeros(2 << 20)}
    save_file(tensors, file)
    size = file.stat().st_size
    found = {weights_identity(load(tmp_path), None)}
    for name in tensors:
        save_file({**tensors, name: tensors[name] + 1}, file)
        assert file.stat().st_size == size
        found.add(weights_identity(load(tmp_path), None))
    assert len(found) == 1 + len(tensors)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".gguf", ".safetensors"])
def test_names_sizes_headers_and_content_of_other_files_count(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a{suffix}"
    content = bytearray(os.urandom(3 << 20))
    found = set()

    def note() -> None:
        file.write_bytes(content)
        found.add(weights_identity(load(tmp_path), None))

    note()
    content[5000] ^= 1
    note()
    for i in range(0, len(content), 64 << 10):
        content[i : i + (16 << 10)] = bytes(16 << 10)
        note()
    content.append(0)
    note()
    file.rename(tmp_path / f"b{suffix}")
    found.add(weights_identity(load(tmp_path), None))
    file.write_bytes(content)
    found.add(weights_identity(load(tmp_path), None))
    assert len(found) == 1 + 1 + 48 + 1 + 1 + 1


def test_other_files_and_the_load_format_of_the_same_file(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(bytes(1 << 20))
    zeros = weights_identity(load(tmp_path), None)
    file.write_bytes(bytes((1 << 20) + 1))
    assert weights_identity(load(tmp_path), None) != zeros
    file.write_bytes(b"weights")
    before = weights_identity(load(tmp_path), None)
    (tmp_path / "notes.txt").write_text("more")
    assert weights_identity(load(tmp_path), None) == before
    assert weights_identity(load(file), None) == before
    assert weights_identity(load(tmp_path, load_format="pt"), None) != before


def test_reading_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file of 1 GiB, and one whose header has more tensors than there are samples."""
    with (tmp_path / "a.bin").open("wb") as file:
        file.truncate(1 << 30)
    many = {f"t{i}": torch.full((4096,), float(i)) for i in range(1000)}
    save_file(many, tmp_path / "b.safetensors")
    read: list[int] = []

    def pread(fd: int, size: int, at: int) -> bytes:
        read.append(size)
        return real(fd, size, at)

    real = os.pread
    monkeypatch.setattr(os, "pread", pread)
    weights_identity(load(tmp_path), None)
    assert sum(read) < 2 * (weights.SAMPLES * weights.SAMPLE_BYTES + (128 << 10))


def test_a_snapshot_of_the_hub_is_found(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--org--tiny"
    shutil.copytree(model, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    local = weights_identity(load(model), None)
    assert weights_identity(load("org/tiny", download_dir=str(tmp_path)), None) == local
    with pytest.raises(ConfigError, match=r"org/tiny.*set connector\.weights_id"):
        weights_identity(load("org/tiny"), None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert weights_identity(load("org/tiny"), None) == local
    assert weights_identity(load("org/tiny", revision=commit), None) == local
    with pytest.raises(ConfigError):
        weights_identity(load("org/tiny", revision="other"), None)
    hub = load("org/tiny").model_config
    assert weights.config_files(hub) == (model / "config.json").read_bytes()
    config = configure(model)
    before = fingerprint(config, caches(config), settings())
    config.model_config.model = "org/tiny"
    assert fingerprint(config, caches(config), settings()) == before


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("no/such-model", {}),
        ("s3://bucket/model", {}),
        ("local", {}),  # a folder without weights
        ("full", {"load_format": "tensorizer"}),
        ("full", {"model_weights": "s3://bucket/model"}),
    ],
)
def test_unknown_weights_need_a_name(tmp_path: Path, name: str, fields: dict[str, Any]) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "config.json").write_text("{}")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.bin").write_bytes(b"weights")
    where = str(tmp_path / name) if (tmp_path / name).exists() else name
    with pytest.raises(ConfigError, match=r"set connector\.weights_id") as error:
        weights_identity(load(where, **fields), None)
    assert where in str(error.value)
    assert weights_identity(load(where, **fields), "v1") == "v1"
