"""What a delay model has learned, as bytes that outlive the process.

| offset | size | field |
|---|---|---|
| 0 | 8 | magic `TKVDELAY` |
| 8 | 4 | format, 1 |
| 12 | 4 | CRC-32 of the rest |
| 16 | | the rest, as zlib writes it: a line of JSON, then little-endian 32-bit floats |

The JSON has `bins` and `phases` (what the floats mean), `mass`, `time`, `classes` (their paths,
wider ones first) and `factors` (feature and value). The floats are per class the events and the
exposure of each bin, then per factor and phase the events and the expected events.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tieredkv.errors import FormatError

MAGIC = b"TKVDELAY"
FORMAT = 1
HEAD = len(MAGIC) + 8
CLASSES = 96
"""Classes kept, those with most observations: bounds the bytes."""
TEXT = 256
"""Characters of a name; classes with longer ones are left out."""
LARGEST = 1 << 24
"""Bytes of a state that was written by us, before compression."""

Floats = npt.NDArray[np.float64]
Path = tuple[Hashable, ...]
"""Texts and None."""


@dataclass(frozen=True, slots=True)
class State:
    """Statistics, detached from the model."""

    scale: tuple[int, float, int]
    """(bins, upper edge of the first in seconds, phases): must be the reader's own."""
    mass: float
    time: float | None
    """When they were last decayed."""
    classes: dict[Path, tuple[Floats, Floats]]
    """Path -> (events, exposure) by bin; every path after those that it begins with."""
    factors: dict[tuple[str, int], Floats]
    """(feature, value) -> [phase, (events, expected)]."""


def encode(state: State) -> bytes:
    """At most some 100 KB; the smallest classes are left out where there are too many."""
    known = {
        path: counts
        for path, counts in state.classes.items()
        if all(len(str(name)) <= TEXT for name in path)
    }
    chosen = set(sorted(known, key=lambda path: -float(known[path][1].sum()))[:CLASSES])
    heaviest = [p for p in known if all(p[:depth] in chosen for depth in range(len(p) + 1))]
    header = {
        "scale": state.scale,
        "mass": state.mass,
        "time": state.time,
        "classes": heaviest,
        "factors": list(state.factors),
    }
    arrays = [counts for path in heaviest for counts in known[path]]
    arrays += [counts.ravel() for counts in state.factors.values()]
    floats = np.concatenate(arrays).astype("<f4").tobytes()
    body = zlib.compress(json.dumps(header).encode() + b"\n" + floats, 1)
    return MAGIC + FORMAT.to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body


def decode(data: bytes, scale: tuple[int, float, int]) -> State:
    """Raises FormatError for anything but the bytes of `encode` with this scale."""
    if data[: len(MAGIC)] != MAGIC:
        raise FormatError(f"{len(data)} bytes that are no statistics of delays")
    version = int.from_bytes(data[8:12], "little")
    if version != FORMAT:
        raise FormatError(f"statistics of delays in format {version}, this version reads {FORMAT}")
    body = data[HEAD:]
    if zlib.crc32(body) != int.from_bytes(data[12:HEAD], "little"):
        raise FormatError("statistics of delays are damaged")
    try:
        return _parse(zlib.decompressobj().decompress(body, LARGEST), scale)
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise FormatError(f"statistics of delays cannot be read: {error}") from error


def _parse(text: bytes, scale: tuple[int, float, int]) -> State:
    line, _, floats = text.partition(b"\n")
    header: dict[str, Any] = json.loads(line)
    if tuple(header["scale"]) != scale:
        raise ValueError(f"bins and phases are {header['scale']}, not {list(scale)}")
    values = np.frombuffer(floats, "<f4").astype(np.float64)
    bins, _, phases = scale
    paths = [tuple(path) for path in header["classes"]]
    if any(path and path[:-1] not in paths[:at] for at, path in enumerate(paths)):
        raise ValueError("a class comes before its wider one")
    names = [(str(name), int(value)) for name, value in header["factors"]]
    edge = 2 * bins * len(paths)
    if len(values) != edge + 2 * phases * len(names) or not np.isfinite(values).all():
        raise ValueError(f"{len(values)} counts of {len(paths)} classes, {len(names)} factors")
    counts = values[:edge].reshape(len(paths), 2, bins)
    factors = values[edge:].reshape(len(names), phases, 2)
    time = header["time"]
    return State(
        scale,
        float(header["mass"]),
        None if time is None else float(time),
        {
            path: (events.copy(), exposure.copy())
            for path, (events, exposure) in zip(paths, counts, strict=True)
        },
        dict(zip(names, factors, strict=True)),
    )
