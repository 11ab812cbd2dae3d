"""Request traces: one request per line, read as a stream, and what is in them.

Four line formats are understood, told apart line by line (docs/simulator.md has the fields):

- ours: ``ts`` (s), ``session``, ``turn`` (1-based), ``input_length``, ``output_length``
  (tokens), ``block_size`` (tokens), ``hash_ids``, ``category`` and optionally ``think``,
  ``service`` (s), ``stop``, ``model``, ``parent``;
- Mooncake FAST25: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``, with
  512-token blocks and no sessions; those are reconstructed by prefix extension;
- Qwen-Bailian: ``chat_id``, ``parent_chat_id``, ``timestamp`` (s), ``input_length``,
  ``output_length``, ``type``, ``turn``, ``hash_ids``, with 16-token blocks;
- LMCache's lookup-hash log: ``timestamp`` (s), ``model_name``, ``chunk_size``, ``seq_len``,
  ``chunk_hashes``, with sessions as for Mooncake.

``hash_ids`` name the full blocks of the input. They are prefix-chained: equal ids mean equal
content after an equal prefix. Files may be plain, ``.gz`` or (with `zstandard`) ``.zst``.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tieredkv.sim.formats import MooncakeEncoder, Parser, TraceFormat, WrittenFormat, to_json
from tieredkv.sim.request import Request, TraceError

__all__ = [
    "Request",
    "TraceError",
    "TraceFormat",
    "TraceStats",
    "WrittenFormat",
    "read_trace",
    "stats",
    "to_json",
    "trace_format",
    "write_trace",
]

GZIP_MAGIC, ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True, slots=True)
class _Source:
    """An opened trace file."""

    lines: Iterable[str]
    position: Callable[[], int]
    """Bytes of the file consumed so far."""
    damage: tuple[type[Exception], ...]
    """What reading a damaged file raises."""


def read_trace(
    path: Path | str, on_bytes: Callable[[int], None] | None = None
) -> Iterator[Request]:
    """Yield the requests of a file; memory is bounded by one line (formats of others: by
    the sessions, Qwen-Bailian by the chats).

    `on_bytes` is told, now and then, how many bytes of the file have been consumed. Raises
    TraceError for the first line that is not a request, goes back in time, or changes the
    block size.
    """
    path = Path(path)
    parse = Parser(str(path))
    with _open(path) as source:
        number = 0
        try:
            for line in source.lines:
                number += 1
                if line.strip():
                    yield parse(line, number)
                if on_bytes is not None and number % 64 == 0:
                    on_bytes(source.position())
        except source.damage as error:
            raise TraceError(
                f"{path}:{number + 1}: cannot read on: {error}; the file is damaged or cut off, "
                "fetch it again"
            ) from error


def trace_format(path: Path | str) -> TraceFormat:
    """The format of the first line; TraceError if it has none of the four."""
    path = Path(path)
    parse = Parser(str(path))
    with _open(path) as source:
        try:
            line = next((line for line in source.lines if line.strip()), "")
        except source.damage as error:
            raise TraceError(f"{path}: cannot read: {error}; fetch it again") from error
    return parse.format(line, 1)


@contextmanager
def _open(path: Path) -> Iterator[_Source]:
    damage: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, UnicodeDecodeError)
    try:
        raw = path.open("rb")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}; name an existing trace file") from error
    with raw:
        magic = raw.read(4)
        raw.seek(0)
        stream: Any = raw
        if magic.startswith(GZIP_MAGIC):
            stream = gzip.GzipFile(fileobj=raw)
        elif magic == ZSTD_MAGIC:
            zstandard = _zstandard(path)
            damage += (zstandard.ZstdError,)
            stream = io.BufferedReader(_ZstdFile(raw, zstandard))
        yield _Source(io.TextIOWrapper(stream, encoding="utf-8"), raw.tell, damage)


class _ZstdFile(io.RawIOBase):
    """Decompressed bytes of all frames. Unlike the library's own reader it does not take a
    cut-off file for a complete one."""

    def __init__(self, raw: IO[bytes], zstandard: Any) -> None:
        self._raw = raw
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._frame.unused_data if self._frame and self._frame.eof else b""
            data = data or self._raw.read(1 << 16)
            if not data:
                if self._frame and not self._frame.eof:
                    raise EOFError("compressed file ended before the end-of-stream marker")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._decompressor.decompressobj()
            self._ready = memoryview(self._frame.decompress(data))
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise TraceError(f"{path}: zstd-compressed; install `zstandard` or use .gz") from error
    return zstandard


def write_trace(
    path: Path | str, requests: Iterable[Request], format: WrittenFormat = "tieredkv"
) -> int:
    """Write requests, compressed by the name's suffix (.gz, .zst); the number written.

    The file appears complete or not at all, and equal requests give equal bytes. In the
    Mooncake format blocks are renumbered, and sessions and all optional fields are lost.
    """
    path = Path(path)
    encode = to_json if format == "tieredkv" else MooncakeEncoder()
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    count = 0
    try:
        with partial.open("wb") as raw, _compressed(path, raw) as out:
            for request in requests:
                out.write(encode(request).encode() + b"\n")
                count += 1
        partial.replace(path)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}; choose a writable place") from error
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()
    return count


@contextmanager
def _compressed(path: Path, raw: IO[bytes]) -> Iterator[Any]:
    if path.suffix == ".gz":
        with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0, compresslevel=6) as out:
            yield out
    elif path.suffix == ".zst":
        with _zstandard(path).ZstdCompressor().stream_writer(raw, closefd=False) as out:
            yield out
    else:
        yield raw


@dataclass(frozen=True, slots=True)
class TraceStats:
    """What a trace holds. Gaps run from start to start within a session, in seconds.

    `*_p50_p90_p99` are three percentiles; (0, 0, 0) when there is nothing to rank.
    """

    requests: int
    sessions: int
    duration: float
    """Seconds from the first to the last arrival."""
    block_size: int
    input_tokens: int
    output_tokens: int
    hit_tokens: int
    """Tokens of full blocks that an infinite cache already holds."""
    hit_share: float
    """`hit_tokens` / `input_tokens`: the potential of any cache."""
    unique_blocks: int
    once_share: float
    """Share of the unique blocks that exactly one request names."""
    peak_live_blocks: int
    """Largest number of blocks between their first and last use at one time; blocks used
    at one time only do not count."""
    turns_p50_p90_p99: tuple[float, float, float]
    gap_p50_p90_p99: tuple[float, float, float]


def stats(requests: Iterable[Request]) -> TraceStats:
    """Measure a trace in one pass.

    Memory is bounded by the unique blocks and the sessions, plus 8 bytes per request.
    """
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    repeated: set[int] = set()
    turns: dict[str, int] = {}
    seen_at: dict[str, float] = {}
    gaps = array("d")
    count = tokens_in = tokens_out = hit = block_size = 0
    start = end = 0.0
    for r in requests:
        start = r.ts if count == 0 else start
        end, block_size = r.ts, r.block_size
        count += 1
        tokens_in += r.input_length
        tokens_out += r.output_length
        old = [block for block in r.hash_ids if block in first]
        hit += len(old) * r.block_size
        repeated.update(old)
        last.update(dict.fromkeys(r.hash_ids, r.ts))
        if len(old) < len(r.hash_ids):
            for block in r.hash_ids:
                first.setdefault(block, r.ts)
        turns[r.session] = turns.get(r.session, 0) + 1
        if r.session in seen_at:
            gaps.append(r.ts - seen_at[r.session])
        seen_at[r.session] = r.ts
    return TraceStats(
        requests=count,
        sessions=len(turns),
        duration=end - start,
        block_size=block_size,
        input_tokens=tokens_in,
        output_tokens=tokens_out,
        hit_tokens=hit,
        hit_share=hit / tokens_in if tokens_in else 0.0,
        unique_blocks=len(first),
        once_share=1 - len(repeated) / len(first) if first else 0.0,
        peak_live_blocks=_peak_live(first, last),
        turns_p50_p90_p99=_percentiles(np.fromiter(turns.values(), float)),
        gap_p50_p90_p99=_percentiles(np.asarray(gaps)),
    )


def _peak_live(first: dict[int, float], last: dict[int, float]) -> int:
    born = np.fromiter(first.values(), float, len(first))
    died = np.fromiter((last[block] for block in first), float, len(first))
    lives = died > born
    if not lives.any():
        return 0
    born, died = np.sort(born[lives]), np.sort(died[lives])
    ended = np.searchsorted(died, born, side="left")
    return int((np.arange(1, len(born) + 1) - ended).max())


def _percentiles(values: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    if not len(values):
        return 0.0, 0.0, 0.0
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return float(p50), float(p90), float(p99)
