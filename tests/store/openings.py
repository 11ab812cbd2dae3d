"""One row per store that cannot be opened: what is wrong, how, and what comes back."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.bugs.world import FP, SIZE, config, dram, nvme
from tests.store.misuse import BLOCKS, NUMBER, OTHER, STORED, stack
from tieredkv import (
    CapacityError,
    ConfigError,
    DirectoryError,
    DirectoryInUse,
    FormatError,
    TieredKVError,
    TieredKVStore,
    UsageError,
)
from tieredkv.index.environment import Environment
from tieredkv.tiers.nvme.engines import DirectEngine

Start = Callable[[Path, pytest.MonkeyPatch], object]


@dataclass(frozen=True)
class Opening:
    """A store that cannot be opened."""

    what: str
    error: type[TieredKVError]
    act: Start


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


def no_kvikio(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    opening(nvme(root, engine="gds"), block_bytes=SIZE)


def no_driver(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("tieredkv.tiers.nvme.gds.DRIVER", "libno-such-driver.so.1")
    opening(nvme(root, engine="gds"), block_bytes=SIZE)


def made(config: Any, fingerprint: Any = FP, **more: Any) -> None:
    TieredKVStore(config, fingerprint, **more)


DRAM = config(dram(8))
HUGE = {"kind": "dram", "capacity": 1 << 59}
OPENINGS = [
    Opening("`config` is no Config", ConfigError, lambda r, m: made({"tiers": []})),
    Opening("`fingerprint` is no Fingerprint", UsageError, lambda r, m: made(DRAM, "model")),
    Opening(
        "a field of the fingerprint is no text",
        UsageError,
        lambda r, m: made(DRAM, replace(FP, model=NUMBER)),
    ),
    Opening(
        "`world` is not two sizes",
        UsageError,
        lambda r, m: made(DRAM, replace(FP, world=(0, 1))),
    ),
    Opening(
        "`clock` or `wrap_tier` cannot be called",
        UsageError,
        lambda r, m: made(DRAM, clock=5),
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
        lambda r, m: opening(HUGE, block_bytes=1 << 40),
    ),
    Opening("the directory is open in this process", DirectoryInUse, lambda r, m: second_store(r)),
    Opening("`path` is no directory", DirectoryError, lambda r, m: no_directory(r)),
    Opening("`path` may not be written", DirectoryError, not_allowed),
    Opening("a model's directory is a symbolic link", DirectoryError, lambda r, m: linked(r)),
    Opening("`engine: direct` or `gds` where O_DIRECT is refused", DirectoryError, no_direct_io),
    Opening("`engine: gds` without kvikio", ConfigError, no_kvikio),
    Opening("`engine: gds` without a CUDA driver", ConfigError, no_driver),
    Opening("the directory holds blocks of another size", FormatError, lambda r, m: other_size(r)),
    Opening(
        "the directory is of another format version", FormatError, lambda r, m: other_version(r)
    ),
]
