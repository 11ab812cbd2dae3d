"""Misuse of the public API is one typed error that names value and remedy, and no change."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import pytest

from tests.bugs.world import MISSING, OK, SIZE, content, dram, get, nvme, opened, put, resident
from tests.store.misuse import BLOCKS, CALLS, OTHER, STORED, Call
from tests.store.openings import OPENINGS, Opening, used
from tieredkv import ClosedError, Outcome, TieredKVError, TieredKVStore

TEXT = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")


def rows(section: str) -> list[list[str]]:
    body = TEXT.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\| (.*) \|$", body, flags=re.MULTILINE)[1:]
    return [re.split(r" \| ", line) for line in lines]


ROWS = {row[0]: row for section in ("Calls", "Starting") for row in rows(section)}


def judge(what: str, error: TieredKVError) -> None:
    """The error is the one that the documentation promises for this misuse."""
    _, kind, message, remedy = ROWS[what]
    assert type(error).__name__ == kind.strip("`")
    pattern = ".*".join(map(re.escape, message.strip("`").split("…")))
    assert re.fullmatch(pattern, str(error)), f"{error}\nis not: {message}"
    assert len(str(error)) < 500
    assert remedy


def threads() -> set[str]:
    """Names of the stores' threads that are alive."""
    return {t.name for t in threading.enumerate() if t.name.startswith("tieredkv")}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredKVStore]:
    with opened(dram(8), nvme(tmp_path)) as store:
        assert put(store, STORED) == [OK] * 4
        assert store.flush(10)
        yield store


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.what)
def test_a_wrong_call_is_one_error_and_changes_nothing(
    case: Call, store: TieredKVStore, tmp_path: Path
) -> None:
    before, stats = resident(store), store.stats()
    for number, act in enumerate(case.acts):
        if case.error is ClosedError and number:
            with opened(dram(8), nvme(tmp_path)) as again:
                fails(case, number, again, act)
            continue
        fails(case, number, store, act)
        if case.error is not ClosedError:
            assert store.check() == []
            assert resident(store) == before
            assert store.stats() == stats
    if case.error is not ClosedError:
        assert get(store, STORED) == [OK] * 4
        assert get(store, OTHER) == [MISSING] * 4
        assert put(store, OTHER) == [OK] * 4


def done(result: object, number: int) -> None:
    """Wait for a future; what a call returned without an error is a failure."""
    if isinstance(result, Future):
        result.result(10)
    pytest.fail(f"act {number} returned {result!r}")


def fails(
    case: Call, number: int, store: TieredKVStore, act: Callable[[TieredKVStore], object]
) -> None:
    with pytest.raises(TieredKVError) as caught:
        done(act(store), number)
    assert type(caught.value) is case.error
    judge(case.what, caught.value)


@pytest.mark.parametrize("case", OPENINGS, ids=lambda case: case.what)
def test_what_cannot_start_is_one_error_and_leaves_nothing_open(
    case: Opening, tmp_path: Path
) -> None:
    running = threads()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TieredKVError) as caught:
        case.act(tmp_path, patch)
    assert type(caught.value) is case.error
    judge(case.what, caught.value)
    assert threads() <= running, "threads are left"


def test_a_store_that_could_not_start_left_the_directory_as_it_was(tmp_path: Path) -> None:
    used(tmp_path)
    for case in OPENINGS:
        if "another size" in case.what or "open in this process" in case.what:
            with suppress(TieredKVError), pytest.MonkeyPatch.context() as patch:
                case.act(tmp_path, patch)
    with opened(nvme(tmp_path)) as store:
        assert get(store, STORED) == [OK] * 4


def test_the_documentation_has_a_row_for_every_case_and_no_other() -> None:
    cases = [case.what for case in CALLS] + [case.what for case in OPENINGS]
    assert len(cases) == len(set(cases))
    assert [row[0] for row in rows("Calls")] == [case.what for case in CALLS]
    assert [row[0] for row in rows("Starting")] == [case.what for case in OPENINGS]
    assert all(len(row) == 4 for row in ROWS.values())


def test_the_documented_tree_is_that_of_the_module() -> None:
    tree = TEXT.split("```\n")[1].split("```")[0]
    documented = set(re.findall(r"\b[A-Z]\w+(?:Error|InUse)\b", tree))
    classes = {TieredKVError.__name__}
    queue = [TieredKVError]
    while queue:
        below = [c for c in queue.pop().__subclasses__() if c.__module__ == "tieredkv.errors"]
        classes |= {c.__name__ for c in below}
        queue += below
    assert documented - {"ValueError"} == classes


def damaged_index(root: Path) -> None:
    (file,) = root.glob("*/index/data.mdb")
    file.write_bytes(b"garbage" * 1000)


def truncated_segment(root: Path) -> None:
    (file,) = root.glob("*/rank-0/seg-000000.kv")
    with file.open("r+b") as segment:
        segment.truncate(file.stat().st_size // 2)


def missing_segment(root: Path) -> None:
    (file,) = root.glob("*/rank-0/seg-000000.kv")
    file.unlink()


def damaged_block(root: Path) -> None:
    (file,) = root.glob("*/rank-0/seg-000000.kv")
    at = file.read_bytes().index(content(STORED[0]))
    with file.open("r+b") as segment:
        segment.seek(at)
        segment.write(bytes(SIZE))


def foreign_files(root: Path) -> None:
    (directory,) = (path for path in root.iterdir() if path.is_dir())
    for place in (root, directory, directory / "rank-0"):
        (place / "notes.txt").write_bytes(b"mine")


def unfinished_files(root: Path) -> None:
    (directory,) = (path for path in root.iterdir() if path.is_dir())
    (directory / "rank-0" / "seg-000001.kv.tmp").write_bytes(b"x" * SIZE)


DAMAGE: dict[str, tuple[Callable[[Path], None], list[Outcome], list[str]]] = {
    "damaged index": (damaged_index, [MISSING] * 4, ["*/index.corrupt-0"]),
    "truncated segment": (
        truncated_segment,
        [Outcome.CORRUPT] * 4,
        ["*/rank-0/seg-000000.kv.quarantine"],
    ),
    "missing segment": (missing_segment, [Outcome.CORRUPT] * 4, []),
    "damaged block": (damaged_block, [Outcome.CORRUPT, OK, OK, OK], []),
    "foreign files": (foreign_files, [OK] * 4, ["notes.txt", "*/notes.txt", "*/rank-0/notes.txt"]),
    "unfinished files": (unfinished_files, [OK] * 4, []),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_a_miss(what: str, tmp_path: Path) -> None:
    damage, outcomes, left = DAMAGE[what]
    used(tmp_path)
    damage(tmp_path)
    with opened(nvme(tmp_path), block_bytes=SIZE) as store:
        assert get(store, STORED) == outcomes
        for pattern in left:
            assert list(tmp_path.glob(pattern)), f"{pattern} is not there"
        assert not list(tmp_path.glob("*/rank-0/*.tmp"))
        if OK not in outcomes[:1]:
            assert store.lookup(STORED).blocks == 0
        assert store.put(STORED, BLOCKS) == [OK] * 4
    with opened(nvme(tmp_path)) as store:
        assert get(store, STORED) == [OK] * 4


def test_the_documentation_lists_every_kind_of_damage() -> None:
    assert [row[0] for row in rows("Damaged directories")] == list(DAMAGE)
