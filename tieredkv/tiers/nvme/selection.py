"""Which engine reads and writes a directory, and why."""

from __future__ import annotations

import errno
import logging
import mmap
import os
from pathlib import Path
from typing import NamedTuple

from tieredkv.errors import ConfigError, DirectoryError
from tieredkv.tiers.nvme import gds, gds_probe
from tieredkv.tiers.nvme.engines import PAGE, DirectEngine, Engine, PortableEngine

log = logging.getLogger(__name__)

REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)
COMPAT = "KVIKIO_COMPAT_MODE"


class Selection(NamedTuple):
    """An engine and why it was chosen."""

    engine: Engine
    reason: str


def select(kind: str, directory: Path) -> Selection:
    """The engine that `kind` (auto, gds, direct, portable) means for files in `directory`.

    `auto` tries O_DIRECT once, with real I/O, and falls back with one warning; where kvikio,
    a GPU and GPUDirect Storage work, it is `gds`. Raises DirectoryError if `direct` or `gds`
    is demanded and O_DIRECT refused, or the directory takes no file; ConfigError if `gds` is
    demanded without what it needs. Takes a minute where the probe of GPUDirect Storage hangs.
    """
    if kind == "portable":
        return Selection(PortableEngine(), "configured")
    direct = DirectEngine()
    refusal = _try(direct, directory)
    if refusal is not None and kind == "auto":
        log.warning("%s refuses O_DIRECT (%s): buffered I/O, slower", directory, refusal)
        return Selection(PortableEngine(), f"O_DIRECT refused: {refusal}")
    if refusal is not None:
        raise DirectoryError(
            f"{directory}: the filesystem refuses O_DIRECT ({refusal}); use engine: auto"
        )
    if kind == "direct":
        return Selection(direct, "configured")
    if kind == "gds":
        return _demanded(directory)
    return _offered(directory) or Selection(direct, "O_DIRECT works")


def _demanded(directory: Path) -> Selection:
    """kvikio, by GPUDirect Storage or else by copies."""
    gds.load()  # the reason is better than what a probe would say
    why = _gds_refusal(directory)
    engine = gds.GdsEngine("gds" if why is None else "compat")
    refusal = _try(engine, directory)
    if refusal is not None:
        raise DirectoryError(f"{directory}: kvikio refuses it ({refusal}); use engine: auto")
    if why is None:
        return Selection(engine, "configured")
    log.warning("%s: no GPUDirect Storage (%s): copies through host memory", directory, why)
    return Selection(engine, f"no GPUDirect Storage: {why}")


def _offered(directory: Path) -> Selection | None:
    """kvikio by GPUDirect Storage, None where that does not work."""
    if gds.missing() is not None:
        return None
    why = _gds_refusal(directory)
    if why is None:
        try:
            engine = gds.GdsEngine("gds")
            why = _try(engine, directory)
        except (ConfigError, DirectoryError) as error:
            why = str(error)
    if why is None:
        return Selection(engine, "GPUDirect Storage works")
    log.info("%s: no GPUDirect Storage: %s", directory, why)
    return None


def _gds_refusal(directory: Path) -> str | None:
    if (mode := os.environ.get(COMPAT, "").upper()) in ("ON", "TRUE", "YES", "1"):
        return f"{COMPAT}={mode}"
    try:
        return gds_probe.refusal(directory)
    except OSError as error:
        raise _unusable(directory, error) from error


def _try(engine: Engine, directory: Path) -> str | None:
    """Why the engine's I/O is refused here, or None. Raises DirectoryError for other troubles."""
    try:
        return _probe(engine, directory / "probe.tmp")
    except OSError as error:
        raise _unusable(directory, error) from error


def _unusable(directory: Path, error: OSError) -> DirectoryError:
    return DirectoryError(f"{directory}: cannot write a test page: {error}")


def _probe(engine: Engine, path: Path) -> str | None:
    """Write and read one page; the refusal, or None. Raises OSError for other troubles."""
    page = mmap.mmap(-1, PAGE)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        file = engine.open(path)
        try:
            view = [memoryview(page)]
            if file.pwrite(view, 0) != PAGE or file.pread(view, 0) != PAGE:
                return "short transfer"
        finally:
            file.close()
    except OSError as error:
        if error.errno in REFUSED:
            return os.strerror(error.errno)
        raise
    finally:
        path.unlink(missing_ok=True)
    return None
