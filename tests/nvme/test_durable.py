"""The durable index: pieces, ordering, epochs, damage."""

from __future__ import annotations

import errno
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.nvme.world import key_of
from tieredkv.errors import ClosedError, DirectoryError, DirectoryInUse, FormatError, UsageError
from tieredkv.executor import DaemonExecutor
from tieredkv.index.durable import DurableIndex
from tieredkv.index.record import ROOT, ROW, Deletion, Piece, assemble, encode
from tieredkv.testing import StepExecutor


class World:
    """An index whose commits the test steps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.executor = StepExecutor()
        self.answers: list[tuple[str, bool]] = []
        self.records: dict[bytes, Deletion] = {}
        self.index = self.open()
        self.index.set_block_bytes(4096)

    def open(self, **kw: Any) -> DurableIndex:
        self.index = DurableIndex(self.path, self.executor, **kw)
        return self.index

    def reopen(self, **kw: Any) -> DurableIndex:
        self.index.close(1.0)
        return self.open(**kw)

    def submit(self, puts: list[Piece], deletes: list[bytes] = [], name: str = "") -> None:  # noqa: B006
        for put in puts:
            for key, slot in zip(put.keys, put.slots, strict=True):
                self.records[key] = Deletion(key, put.generation, slot)
        named = [self.records[key] for key in deletes]
        self.index.submit(puts, named, lambda ok: self.answers.append((name, ok)))

    def commit(self, puts: list[Piece], deletes: list[bytes] = []) -> bool:  # noqa: B006
        self.answers.clear()
        self.submit(puts, deletes)
        self.executor.run_all()
        return self.answers == [("", True)]

    def keys(self) -> set[bytes]:
        return {key for piece in self.index.load(1 << 32) for key in piece.keys}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "index")
    yield world
    world.index.close(1.0)


def piece(first: int, count: int, parent: bytes = ROOT, depth: int = 0, **kw: Any) -> Piece:
    numbers = range(first, first + count)
    values = {"generation": first + 1, "born": 1.5, "last": 2.5, **kw}
    slots = values.pop("slots", list(numbers))
    return Piece([key_of(n) for n in numbers], parent, slots, depth=depth, **values)


def test_what_is_committed_comes_back(world: World) -> None:
    a = piece(0, 5)
    b = piece(5, 3, a.keys[-1], 5)
    c = piece(8, 4, a.keys[1], 2)  # its parent is in the middle of a
    assert world.commit([c, b, a])
    world.reopen()
    found = world.index.load(100)
    assert sorted(found, key=lambda p: p.slots) == [a, b, c]
    assert found[0] == a
    assert world.index.check() == []
    assert world.index.block_bytes == 4096


def test_pieces_of_one_generation_are_merged(world: World) -> None:
    a = piece(0, 3, generation=9)
    b = piece(3, 2, a.keys[-1], 3, generation=9, last=7.0)
    assert world.commit([a])
    assert world.commit([b])
    assert world.index.load(100) == [Piece(a.keys + b.keys, ROOT, [0, 1, 2, 3, 4], 9, 0, 1.5, 7.0)]


def test_a_put_replaces_and_touches(world: World) -> None:
    assert world.commit([piece(0, 3)])
    tail = Piece([key_of(2)], key_of(1), [2], 1, 2, 1.5, 99.0)
    assert world.commit([tail])
    (found,) = world.index.load(100)
    assert found.last == 99.0
    assert found.keys == [key_of(n) for n in range(3)]


@pytest.mark.parametrize("old", [{"generation": 1}, {"slots": [8, 9]}])
def test_a_late_deletion_spares_what_came_after(old: dict[str, Any], world: World) -> None:
    newer = piece(0, 2, generation=2)
    before = piece(0, 2, **{"generation": 2, **old})
    assert world.commit([before])
    late = [Deletion(before.keys[i], before.generation, before.slots[i]) for i in (0, 1)]
    world.index.submit([newer], late[1:], lambda ok: None)
    world.index.submit([], late[:1], lambda ok: None)
    world.executor.run_all()
    assert world.index.load(10) == [newer]
    assert world.commit([], [])
    world.index.submit([], [Deletion(newer.keys[1], 2, newer.slots[1])], lambda ok: None)
    world.executor.run_all()
    assert world.keys() == {newer.keys[0]}


def test_keys_and_parents_with_zero_bytes(world: World) -> None:
    keys = [b"\x01" + bytes(31), b"\x02" * 31 + b"\0", b"\0" * 31 + b"\x01"]
    assert world.commit([Piece(keys, ROOT, [0, 1, 2], 1, 0, 0.0, 0.0)])
    assert world.index.load(10)[0].keys == keys


def test_changes_keep_their_order_in_one_transaction(world: World) -> None:
    commits = world.index.commits
    world.submit([piece(0, 1)], name="put")
    world.submit([], [key_of(0)], name="delete")
    world.submit([piece(0, 1), piece(1, 1)], [key_of(1)], name="again")
    world.submit([], [key_of(1)], name="delete 1")
    assert world.answers == []
    assert world.executor.pending == 1
    world.executor.run_all()
    assert world.answers == [(n, True) for n in ("put", "delete", "again", "delete 1")]
    assert world.index.commits == commits + 1
    assert world.keys() == {key_of(0)}


def test_boot_differs_and_epoch_stays(world: World) -> None:
    boots, epoch = [world.index.boot], world.index.epoch
    for _ in range(3):
        world.reopen()
        boots.append(world.index.boot)
        assert world.index.epoch == epoch
    assert boots == sorted(set(boots))


def test_a_new_epoch_drops_everything(world: World) -> None:
    world.commit([piece(0, 5)])
    old = world.index.epoch
    world.submit([piece(5, 1)], name="queued")
    assert world.index.new_epoch() == old + 1 == world.index.epoch
    assert world.answers[1:] == []  # never inside the call
    world.executor.run_all()
    assert world.answers[-1] == ("queued", False)
    assert world.keys() == set()
    assert world.commit([piece(6, 1)])
    assert world.reopen().epoch == old + 1
    assert world.keys() == {key_of(6)}


def test_a_volatile_epoch_ends_with_the_next_opening(world: World) -> None:
    old = world.index.new_epoch(until_reopened=True)
    assert world.commit([piece(0, 5)])
    assert world.reopen().epoch == old + 1
    assert world.keys() == set()
    assert world.commit([piece(6, 1)])
    assert world.reopen().epoch == old + 1
    assert world.keys() == {key_of(6)}


def test_an_ordinary_reset_ends_a_volatile_epoch(world: World) -> None:
    world.index.new_epoch(until_reopened=True)
    old = world.index.new_epoch()
    assert world.commit([piece(0, 1)])
    assert world.reopen().epoch == old
    assert world.keys() == {key_of(0)}


def test_what_load_drops(world: World) -> None:
    a = piece(0, 3)
    assert world.commit(
        [
            a,
            piece(10, 2, key_of(999), 4),  # orphans
            piece(20, 2, a.keys[2], 7),  # a depth that does not fit
            piece(30, 1, slots=[5000]),
            piece(31, 2, key_of(30), 1),  # its parent is out of range
            piece(40, 1, slots=[60], generation=5),
            piece(50, 1, slots=[60], generation=6),
            piece(51, 1, key_of(40), 1, slots=[61]),
        ]
    )
    assert len(world.index.check()) == 2
    kept = {key for p in world.index.load(1000) for key in p.keys}
    assert kept == {*a.keys, key_of(50)}
    assert world.index.dropped == {
        "slot out of range": 1,
        "slot claimed twice": 1,
        "parent missing": 7,
    }
    assert world.keys() == kept  # gone from the disk as well
    assert world.index.dropped == {}
    assert world.index.check() == []


def test_damaged_times_are_harmless(world: World) -> None:
    world.commit([piece(0, 1, born=float("nan"), last=float("inf"))])
    (found,) = world.index.load(10)
    assert (found.born, found.last) == (0.0, 0.0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_assembly_against_a_plain_model(data: st.DataObject) -> None:
    """Random trees with random holes: exactly the rows with all ancestors survive."""
    n = data.draw(st.integers(0, 40))
    parents = [data.draw(st.integers(-1, i - 1)) for i in range(n)]
    generations = [data.draw(st.integers(1, 6)) for _ in range(n)]
    present = [data.draw(st.booleans()) or data.draw(st.booleans()) for _ in range(n)]
    depth: list[int] = []
    alive: list[bool] = []
    records: list[tuple[bytes, bytes]] = []
    for i, up in enumerate(parents):
        depth.append(0 if up < 0 else depth[up] + 1)
        alive.append(present[i] and (up < 0 or alive[up]))
        above = ROOT if up < 0 else key_of(up)
        p = Piece([key_of(i)], above, [i], generations[i], depth[i], 0.0, float(i))
        if present[i]:
            records += encode(p, 1, 8)
    rows = np.frombuffer(b"".join(k + v for k, v in sorted(records)), ROW)
    found = assemble(rows, n, 1, 8)
    seen: set[bytes] = set()
    for p in found.pieces:
        for i, key in enumerate(p.keys):
            number = p.slots[i]
            assert key == key_of(number)
            assert p.depth + i == depth[number]
            assert p.generation == generations[number]
            above = p.parent if i == 0 else p.keys[i - 1]
            up = parents[number]
            assert above == (ROOT if up < 0 else key_of(up))
            assert up < 0 or above in seen
            seen.add(key)
    assert seen == {key_of(i) for i in range(n) if alive[i]}
    assert set(found.dropped) == {key_of(i) for i in range(n) if present[i] and not alive[i]}


def test_a_full_map_grows_once_and_then_fails(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.reopen(map_size=128 << 10, map_limit=256 << 10)
    stored, first = 0, 0
    with caplog.at_level(logging.ERROR):
        while world.commit([piece(first, 100)]):
            stored, first = stored + 100, first + 100
        assert not world.commit([piece(first, 100)])
    assert stored >= 300
    assert world.index.failures == 2
    assert len(caplog.records) == 1  # one line for the streak
    assert os.path.getsize(world.path / "data.mdb") <= 256 << 10
    assert len(world.keys()) == stored  # nothing of the failed transaction
    assert world.commit([], [key_of(n) for n in range(50)])  # a full index can still forget
    assert world.index.last_error is None
    assert world.index.new_epoch()


def test_a_limit_below_the_data_does_not_lock_up(world: World) -> None:
    world.commit([piece(0, 5000)])
    world.reopen(map_size=64 << 10, map_limit=64 << 10)
    world.index.set_map_limit(64 << 10)
    assert world.commit([], [key_of(n) for n in range(4000, 5000)])
    assert world.index.new_epoch()


class Failing:
    """Stands in for an environment whose transactions fail."""

    def __init__(self, env: Any, errors: list[Exception]) -> None:
        self.env, self.errors = env, errors
        self.sizes: list[int] = []
        self.checked = 0

    def begin(self, **kw: Any) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        return self.env.begin(**kw)

    def set_mapsize(self, n: int) -> None:
        self.sizes.append(n)
        self.env.set_mapsize(n)

    def reader_check(self) -> int:
        self.checked += 1
        return int(self.env.reader_check())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)


def test_errors_of_transactions(world: World) -> None:
    environment = world.index._env
    fake = Failing(environment._env, [])
    environment._env = fake
    fake.errors = [lmdb.MapResizedError("resized")]
    assert world.commit([piece(0, 1)])
    assert fake.sizes[-1] == 0
    fake.errors = [lmdb.ReadersFullError("full")]
    assert world.keys() == {key_of(0)}
    assert fake.checked == 1
    for error in (lmdb.DiskError("disk"), OSError(errno.EIO, "io"), lmdb.MapResizedError("x")):
        fake.errors = [error, error]
        assert not world.commit([piece(1, 1)])
        fake.errors = []
    assert world.index.failures == 3
    assert world.keys() == {key_of(0)}
    fake.errors = [lmdb.DiskError("disk")]
    epoch = world.index.epoch
    with pytest.raises(DirectoryError):
        world.index.new_epoch()
    assert world.index.epoch == epoch
    assert world.keys() == {key_of(0)}


def test_a_malformed_piece_fails_alone_in_time(world: World) -> None:
    with pytest.raises(UsageError):
        encode(Piece([b"short"], ROOT, [0], 1, 0, 0.0, 0.0), 1, 8)
    world.submit([Piece([b"short"], ROOT, [0], 1, 0, 0.0, 0.0)], name="bad")
    world.executor.run_all()
    assert world.answers == [("bad", False)]
    assert world.commit([piece(0, 1)])


def test_a_callback_that_raises_does_not_stop_the_others(world: World) -> None:
    def broken(ok: bool) -> None:
        raise ValueError("bug")

    world.index.submit([piece(0, 1)], [], broken)
    world.submit([piece(1, 1)], name="next")
    world.executor.run_all()
    assert world.answers == [("next", True)]
    assert world.index.flush(0)


def test_flush_and_close_have_deadlines(world: World) -> None:
    world.submit([piece(0, 1)], name="late")
    assert not world.index.flush(0.01)
    started = time.monotonic()
    assert not world.index.close(0.05)
    assert time.monotonic() - started < 5
    assert world.answers == [("late", False)]
    assert world.index.close(1.0)
    with pytest.raises(ClosedError):
        world.submit([])
    with pytest.raises(ClosedError):
        world.index.load(1)
    world.open()
    assert world.keys() == set()


def test_a_hung_transaction_does_not_hang_close(tmp_path: Path) -> None:
    executor = DaemonExecutor(1, "test")
    index = DurableIndex(tmp_path / "index", executor, timeout=0.1)
    index.set_block_bytes(8)
    entered, go = threading.Event(), threading.Event()
    write = index._env.write

    def hang(work: Any, forgets: bool) -> Any:
        def slow(txn: Any) -> Any:
            entered.set()
            assert go.wait(20)
            return work(txn)

        return write(slow, forgets)

    index._env.write = hang  # type: ignore[method-assign]
    answers: list[bool] = []
    index.submit([piece(0, 1)], [], answers.append)
    assert entered.wait(10)
    with pytest.raises(DirectoryError, match="hangs"):
        index.new_epoch()
    assert not index.close(0.05)
    go.set()
    assert index.flush(10)
    assert answers == [True]
    assert executor.close(10)


def test_commits_from_many_threads(tmp_path: Path) -> None:
    executor = DaemonExecutor(1, "test")
    index = DurableIndex(tmp_path / "index", executor)
    index.set_block_bytes(8)
    lock, good = threading.Lock(), []

    def done(ok: bool) -> None:
        with lock:
            good.append(ok)

    def work(worker: int) -> None:
        for n in range(50):
            index.submit([piece(worker * 1000 + n, 1)], [], done)

    threads = [threading.Thread(target=work, args=(w,)) for w in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert index.flush(20)
    assert good == [True] * 200
    assert index.commits < 200  # grouped
    assert sum(len(p.keys) for p in index.load(10_000)) == 200
    assert index.close(10)
    assert executor.close(10)


def test_one_opening_per_path(world: World, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(world.path)
    for path in (world.path, tmp_path / "link"):
        with pytest.raises(DirectoryInUse):
            DurableIndex(path, world.executor)


def test_format_and_block_size(world: World) -> None:
    world.index.set_block_bytes(4096)
    with pytest.raises(FormatError, match="4096"):
        world.index.set_block_bytes(8192)
    world.index._env.write(lambda txn: txn.put_meta(b"format", 99))
    with pytest.raises(FormatError, match="99"):
        world.reopen()
    env = lmdb.open(str(world.path), max_dbs=2)  # it was closed again
    env.close()


def test_a_forked_child_is_refused(world: World) -> None:
    pid = os.fork()
    if not pid:
        try:
            world.submit([piece(0, 1)])
        except ClosedError:
            os._exit(0 if world.index.close(1.0) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert world.commit([piece(0, 1)])
    assert world.keys() == {key_of(0)}


@pytest.mark.parametrize("damage", ["truncate", "garbage", "meta", "empty tail"])
def test_damage_is_set_aside(world: World, damage: str) -> None:
    for n in range(20):
        world.commit([piece(n * 50, 50)])
    epoch, boot = world.index.epoch, world.index.boot
    world.index.close(1.0)
    data = world.path / "data.mdb"
    size = data.stat().st_size
    if damage == "truncate":
        os.truncate(data, size // 2)
    elif damage == "empty tail":
        os.truncate(data, 2 * 4096)
    else:
        with data.open("r+b") as file:
            file.write(os.urandom(size if damage == "garbage" else 8192))
    with pytest.raises(DirectoryError, match=r"damaged|truncated|meta"):
        world.open(keep_damaged=True)
    assert data.exists()
    index = world.open()
    assert index.moved_to == world.path.with_name("index.corrupt-0")
    assert index.moved_to.exists()
    assert index.load(100) == []
    # numbers of the lost index are not given out again
    assert index.boot > boot + 60
    assert index.epoch > epoch
    assert world.commit([piece(0, 1)])
    os.truncate(data, 5000)
    world.reopen()
    assert world.index.moved_to == world.path.with_name("index.corrupt-1")


def test_random_damage_never_ends_the_process(tmp_path: Path) -> None:
    """In another process: whatever a byte says, the answer is pieces or a cold start."""
    script = """
import sys
from pathlib import Path
from tieredkv.index.durable import DurableIndex
from tieredkv.testing import StepExecutor
index = DurableIndex(Path(sys.argv[1]), StepExecutor())
print(sum(len(p.keys) for p in index.load(10_000)), index.check())
"""
    world = World(tmp_path / "index")
    world.commit([piece(0, 500)])
    world.index.close(1.0)
    data = world.path / "data.mdb"
    good = data.read_bytes()
    rng = random.Random(4)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    for _ in range(5):
        data.write_bytes(good[: rng.randrange(8192, len(good))])
        command = [sys.executable, "-c", script, str(world.path)]
        run = subprocess.run(command, env=env, capture_output=True, timeout=60)
        assert run.returncode == 0, run.stderr.decode()


def test_a_short_file_that_lacks_only_free_pages_is_kept(tmp_path: Path) -> None:
    """LMDB does not write pages that one transaction allocates and frees."""
    world = World(tmp_path / "index")
    for n in range(100):
        world.submit([piece(n * 1000, 500)])
        world.submit([], [key_of(n * 1000 + i) for i in range(20, 500)])
        world.executor.run_all()
        info, page = world.index._env._env.info(), 4096
        if (world.path / "data.mdb").stat().st_size < (info["last_pgno"] + 1) * page:
            break
    else:
        pytest.fail("this LMDB writes all pages: the case is not reached")
    keys = world.keys()
    world.reopen()
    assert world.index.moved_to is None
    assert world.keys() == keys
    world.index.close(1.0)
