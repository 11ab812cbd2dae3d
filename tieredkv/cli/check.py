"""`tieredkv check`: verify an NVMe directory, record by record and byte by byte."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tieredkv.errors import DirectoryError
from tieredkv.executor import DaemonExecutor
from tieredkv.index.damage import DamagedIndex
from tieredkv.index.durable import DurableIndex
from tieredkv.index.record import Deletion, Piece
from tieredkv.tiers.nvme.directory import LEFTOVER, Directory
from tieredkv.tiers.nvme.segment import SLOT_MAGIC
from tieredkv.tiers.nvme.tier import NvmeTier
from tieredkv.tiers.nvme.usage import disk_usage, fingerprint_directories, read_marker
from tieredkv.types import Batch, Outcome

THREADS = 4
TIMEOUT = 60.0


@dataclass(slots=True)
class DirectoryReport:
    """What was found in one fingerprint directory."""

    path: str
    fingerprint: dict[str, Any]
    block_bytes: int | None = None
    bytes_on_disk: int = 0
    blocks: int = 0
    """Records that lead from the root to a slot."""
    verified: int = 0
    """Blocks whose header and bytes are right on every rank."""
    bad: dict[str, int] = field(default_factory=dict)
    """Blocks that are not, by what is wrong; `descendant`: only an ancestor is bad."""
    problems: list[str] = field(default_factory=list)
    leftovers: int = 0
    """Slots whose header has no record: evicted, or written before a crash. Harmless."""
    set_aside: list[str] = field(default_factory=list)
    """Files that an earlier start found damaged. Removed when room is needed."""
    repaired: bool = False

    @property
    def good(self) -> bool:
        return not self.bad and not self.problems


@dataclass(slots=True)
class Report:
    """All fingerprint directories that were asked for."""

    directories: list[DirectoryReport]

    @property
    def ok(self) -> bool:
        """Nothing is wrong, or it has been repaired."""
        return all(report.good or report.repaired for report in self.directories)


def check_directory(path: Path, repair: bool = False) -> Report:
    """Verify a fingerprint directory, or all of them in a root.

    Reads every stored byte. With `repair` the records of bad blocks and of their
    descendants are deleted, and a damaged index is set aside; bytes are never changed.
    Raises DirectoryInUse if a process has one open, DirectoryError if there is none.
    """
    if not path.is_dir():
        raise DirectoryError(f"{path} is not a directory; name an NVMe path or its root")
    path = path.resolve()
    found = [path] if read_marker(path) is not None else fingerprint_directories(path)
    if not found:
        raise DirectoryError(f"{path} holds no fingerprint directory; name the nvme tier's path")
    return Report([_check(directory, repair) for directory in found])


def check(
    directory: Annotated[Path, typer.Argument(help="The nvme tier's path, or one fingerprint.")],
    repair: Annotated[
        bool, typer.Option("--repair", help="Delete the records of bad blocks.")
    ] = False,
    output: Annotated[Literal["table", "json"], typer.Option("--format")] = "table",
) -> None:
    """Verify every stored block. Exit code 1 if something is wrong and was not repaired."""
    report = check_directory(directory, repair)
    if output == "json":
        directories = [{**asdict(d), "good": d.good} for d in report.directories]
        typer.echo(json.dumps({"ok": report.ok, "directories": directories}))
    else:
        _print_table(report)
    if not report.ok:
        raise typer.Exit(1)


def _check(path: Path, repair: bool) -> DirectoryReport:
    marker = read_marker(path) or {}
    report = DirectoryReport(str(path), marker.get("fingerprint", {}))
    report.bytes_on_disk = disk_usage(path)
    files = (*path.iterdir(), *path.glob("rank-*/*"))
    report.set_aside = sorted(str(p) for p in files if LEFTOVER.fullmatch(p.name))
    with ExitStack() as stack:
        directory = Directory.attach(path, _ranks(path)[0])
        stack.callback(directory.close)
        index = _open_index(directory, repair, report)
        if index is None:
            return report
        stack.callback(index.close, TIMEOUT)
        report.block_bytes = index.block_bytes
        if index.block_bytes is None:
            return report
        tiers = [stack.enter_context(_tier(directory, index.block_bytes))]
        for rank in _ranks(path)[1:]:
            other = Directory(path, directory.digest, rank, index=False)
            stack.callback(other.close)
            tiers.append(stack.enter_context(_tier(other, index.block_bytes)))
        _verify(index, tiers, repair, report)
    return report


def _ranks(path: Path) -> list[int]:
    names = (p.name.removeprefix("rank-") for p in path.glob("rank-*"))
    return sorted(int(name) for name in names if name.isdigit()) or [0]


def _open_index(directory: Directory, repair: bool, report: DirectoryReport) -> DurableIndex | None:
    executor = DaemonExecutor(1, "tieredkv-check")
    try:
        index = DurableIndex(directory.index_path, executor, keep_damaged=not repair)
    except DirectoryError as error:
        report.problems.append(str(error))
        return None
    if index.moved_to is not None:
        report.problems.append(f"the index was damaged; it is now {index.moved_to}")
        report.repaired = True
    report.problems += [] if index.moved_to else index.check()
    return index


@contextmanager
def _tier(directory: Directory, block_bytes: int) -> Iterator[NvmeTier]:
    tier = NvmeTier(directory, f"rank-{directory.rank}", block_bytes, None, min_free=0)
    try:
        yield tier
    finally:
        tier.close()


def _verify(
    index: DurableIndex, tiers: list[NvmeTier], repair: bool, report: DirectoryReport
) -> None:
    for tier in tiers:
        report.problems += [f"{name}: {why}" for name, why in tier.segments.bad.items()]
    # A slot behind the last segment has lost its bytes, but its record is no orphan yet.
    try:
        pieces = index.load(1 << 32, prune=repair)
    except DamagedIndex:
        return  # index.check() has said so
    report.blocks = sum(len(piece.keys) for piece in pieces)
    with ThreadPoolExecutor(THREADS) as pool:
        verdicts = list(pool.map(lambda piece: _outcomes(tiers, piece, index.epoch), pieces))
    bad = _bad_blocks(pieces, verdicts)
    report.bad = dict(Counter(bad.values()))
    report.verified = report.blocks - len(bad)
    report.leftovers = _leftovers(tiers, pieces)
    if repair and not report.good:
        answers: list[bool] = []
        records = [
            Deletion(key, piece.generation, slot)
            for piece in pieces
            for key, slot in zip(piece.keys, piece.slots, strict=True)
            if key in bad
        ]
        index.submit([], records, answers.append)
        report.repaired = index.flush(TIMEOUT) and answers == [True]


def _outcomes(tiers: list[NvmeTier], piece: Piece, epoch: int) -> list[Outcome]:
    """The worst outcome of each block over all ranks."""
    batch = Batch(piece.slots, piece.keys, [piece.generation] * len(piece.keys), epoch)
    per_rank = [tier.verify(batch) for tier in tiers]
    return [
        next((outcome for outcome in column if outcome is not Outcome.OK), Outcome.OK)
        for column in zip(*per_rank, strict=True)
    ]


def _bad_blocks(pieces: list[Piece], verdicts: list[list[Outcome]]) -> dict[bytes, str]:
    """Bad keys and why; pieces come parents first."""
    bad: dict[bytes, str] = {}
    for piece, outcomes in zip(pieces, verdicts, strict=True):
        broken = piece.parent in bad
        for key, outcome in zip(piece.keys, outcomes, strict=True):
            if outcome is not Outcome.OK:
                bad[key] = str(outcome)
            elif broken:
                bad[key] = "descendant"
            broken = broken or key in bad
    return bad


def _leftovers(tiers: list[NvmeTier], pieces: Iterable[Piece]) -> int:
    indexed = {slot for piece in pieces for slot in piece.slots}
    count = 0
    for tier in tiers:
        for number, segment in tier.segments.all().items():
            first = number * segment.geometry.table_slots
            used = (segment.headers()["magic"] == SLOT_MAGIC).nonzero()[0].tolist()
            count += sum(first + slot not in indexed for slot in used)
    return count


def _print_table(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 1000  # nothing is folded in a pipe
    table = Table("directory", "blocks", "verified", "bad", "leftovers", "bytes", "state", box=None)
    for found in report.directories:
        state = "good" if found.good else "repaired" if found.repaired else "bad"
        numbers = (found.blocks, found.verified, sum(found.bad.values()), found.leftovers)
        table.add_row(found.path, *map(str, numbers), str(found.bytes_on_disk), state)
    console.print(table)
    for found in report.directories:
        for reason, count in found.bad.items():
            console.print(f"{found.path}: {count} blocks {reason}")
        for problem in (*found.problems, *(f"set aside: {path}" for path in found.set_aside)):
            console.print(f"{found.path}: {problem}")
