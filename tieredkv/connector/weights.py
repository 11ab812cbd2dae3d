"""A model's files on this host: its configuration as saved, and what its weights are.

Nothing is downloaded, and of each weight file at most a few MiB are read.
"""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

from tieredkv.chain_hash import digest
from tieredkv.errors import ConfigError

SAMPLES, SAMPLE_BYTES, HEADER_BYTES = 256, 4096, 8 << 20
"""Of a weight file: how many places are read, how much at each, the longest header."""

_WEIGHT_FILES = (".safetensors", ".bin", ".gguf", ".pt")
_CONFIG_FILES = ("config.json", "params.json")
_FROM_FOLDER = (
    *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt"),
    *("npcache", "gguf", "bitsandbytes", "sharded_state", "runai_streamer"),
    "runai_streamer_sharded",
)
"""Load formats that read the weights from the model's folder."""


def config_files(model: Any) -> bytes:
    """The configuration of a ModelConfig as it was saved; empty if it is not on this host."""
    name = getattr(model, "hf_config_path", None) or model.model
    folder = _folder(name, getattr(model, "_hf_config_revision", None) or model.revision)
    paths = [folder / file for file in _CONFIG_FILES] if folder is not None else []
    return b"\0".join(path.read_bytes() for path in paths if path.is_file())


def weight_files_identity(model: Any, load: Any) -> str:
    """A digest of the weights of a ModelConfig that a LoadConfig loads.

    Raises ConfigError if there are no such files on this host.
    """
    if load.load_format == "dummy":
        return f"dummy-{model.seed}"
    found = None
    # model_weights: an object store that vLLM streams from
    if load.load_format in _FROM_FOLDER and not getattr(model, "model_weights", ""):
        found = _folder(model.model, model.revision, load.download_dir)
    files = _weight_files(found) if found is not None else []
    if not files:
        raise ConfigError(
            f"the weight files of {model.model!r} (load_format {load.load_format!r}) cannot be "
            "found on this host, so their identity is unknown; set connector.weights_id to a "
            "text that you change with the weights"
        )
    parts: list[str | bytes | int] = [load.load_format]
    for file in files:
        parts += [file.name, *_content(file)]
    return f"sha256:{digest(b'tieredkv weights', *parts).hex()}"


def _folder(name: str, revision: str | None, cache_dir: str | None = None) -> Path | None:
    """A model's local path, or its snapshot in the cache of Hugging Face."""
    if Path(name).exists():
        return Path(name)
    try:
        # ignoring all files, it does not mind that a snapshot has only those that vLLM wants
        snapshot = import_module("huggingface_hub").snapshot_download(
            name, revision=revision, cache_dir=cache_dir, local_files_only=True, ignore_patterns="*"
        )
    except (OSError, ValueError):  # not there, or no name of a repository
        return None
    return Path(snapshot)


def _weight_files(found: Path) -> list[Path]:
    if found.is_file():
        return [found]
    return sorted(path for path in found.iterdir() if path.suffix in _WEIGHT_FILES)


def _content(path: Path) -> tuple[int, bytes]:
    """Size, and a digest of the header and of `SAMPLES` places."""
    with path.open("rb", buffering=0) as file:
        fd = file.fileno()
        size = os.fstat(fd).st_size
        header, places = _plan(fd, size)
        samples = [os.pread(fd, SAMPLE_BYTES, place) for place in places]
    return size, digest(b"tieredkv weight file", header, *samples)


def _plan(fd: int, size: int) -> tuple[bytes, list[int]]:
    """The file's header and where to sample it: the middle of each tensor, as far as known.

    Fine-tuning may change a few tensors only, and neither names nor sizes. What is left of
    the samples is spread over the file.
    """
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    header = os.pread(fd, length, 8) if length <= HEADER_BYTES else b""
    try:
        spans = [t["data_offsets"] for n, t in json.loads(header).items() if n != "__metadata__"]
        middles = sorted(8 + length + (start + end) // 2 for start, end in spans)
    except (ValueError, KeyError, TypeError, AttributeError):  # no safetensors
        header, middles = os.pread(fd, 64 << 10, 0), []
    if len(middles) > SAMPLES:
        return header, [middles[i * len(middles) // SAMPLES] for i in range(SAMPLES)]
    rest = SAMPLES - len(middles)
    last = max(0, size - SAMPLE_BYTES)
    return header, middles + [last * i // max(1, rest - 1) for i in range(rest)]
