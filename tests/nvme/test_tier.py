"""The NVMe tier: its contract, alignment, corruption, faults of the medium."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from tests.nvme.world import (
    ENGINE,
    FP,
    MIB,
    batch,
    content,
    flip,
    get,
    key_of,
    opened,
    put,
    segment_file,
    sources,
)
from tieredkv.buffers import RevocableViews
from tieredkv.errors import BlockSizeError, CapacityError, ClosedError, DirectoryError, UsageError
from tieredkv.testing import TierSuite
from tieredkv.tiers.base import Tier
from tieredkv.tiers.nvme.directory import Directory
from tieredkv.tiers.nvme.engines import DirectEngine, Engine, File, PortableEngine
from tieredkv.tiers.nvme.gds import GdsEngine
from tieredkv.tiers.nvme.tier import NvmeTier
from tieredkv.types import Batch, Outcome

OK, CORRUPT, FAILED, BUSY = Outcome.OK, Outcome.CORRUPT, Outcome.FAILED, Outcome.BUSY


class TestDirect(TierSuite):
    engine: Literal["auto", "gds", "direct", "portable"] = "direct"
    segment = 96 << 10  # several segments

    @pytest.fixture(autouse=True)
    def directories(self) -> Iterator[None]:
        self.open_directories: list[Directory] = []
        yield
        for directory in self.open_directories:
            directory.close()

    def make(self, tmp_path: Path) -> Tier:
        directory = Directory.open(tmp_path / "root", FP, 16)
        self.open_directories.append(directory)
        return NvmeTier(
            directory,
            "nvme",
            self.block_bytes,
            MIB,
            min_free=0,
            engine=self.engine,
            segment=self.segment,
        )

    def reopen(self, tier: Tier, tmp_path: Path) -> Tier:
        tier.close()
        self.open_directories.pop().close()
        return self.make(tmp_path)


class TestDirectUnaligned(TestDirect):
    block_bytes = 4095


class TestPortable(TestDirect):
    engine = "portable"


class TestPortableUnaligned(TestDirect):
    engine = "portable"
    block_bytes = 1536


class Hooked:
    """A direct engine, or `gds`, whose calls a test can intercept: `hook(number, do, args)`."""

    name = "hooked"

    def __init__(self, alignment: int = 4096) -> None:
        self.alignment = alignment
        self.on: dict[str, Callable[[int, Callable[[], Any], tuple[Any, ...]], Any]] = {}
        self.calls: dict[str, int] = {"pwrite": 0, "pread": 0, "sync": 0, "open": 0}
        direct = GdsEngine("compat") if ENGINE == "gds" else DirectEngine()
        self.inner: Engine = PortableEngine() if alignment == 1 else direct

    def call(self, name: str, do: Callable[..., Any], *args: Any) -> Any:
        self.calls[name] += 1
        hook = self.on.get(name)
        return do(*args) if hook is None else hook(self.calls[name], lambda: do(*args), args)

    def open(self, path: Path) -> File:
        return HookedFile(self, self.call("open", self.inner.open, path))

    def close(self) -> None:
        self.inner.close()


class HookedFile:
    def __init__(self, engine: Hooked, inner: File) -> None:
        self.engine, self.inner = engine, inner

    def pwrite(self, buffers: Sequence[Any], offset: int) -> int:
        return int(self.engine.call("pwrite", self.inner.pwrite, buffers, offset))

    def pread(self, buffers: Sequence[Any], offset: int) -> int:
        return int(self.engine.call("pread", self.inner.pread, buffers, offset))

    def sync(self) -> None:
        self.engine.call("sync", self.inner.sync)

    def close(self) -> None:
        self.inner.close()


def fail(code: int) -> Callable[..., Any]:
    def hook(number: int, do: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        raise OSError(code, os.strerror(code))

    return hook


@pytest.mark.parametrize("engine", dict.fromkeys(["direct", "portable", ENGINE]))
@pytest.mark.parametrize("size", [4096, 4095, 1536, 1])
def test_a13_any_size_and_alignment(tmp_path: Path, engine: Any, size: int) -> None:
    with opened(tmp_path, size, engine=engine) as tier:
        memory = np.empty(9 * size + 1, np.uint8)
        stack = memory[1:].reshape(9, size)  # not aligned to anything
        b = batch(range(9))
        for row, source in zip(stack, sources(b, size), strict=True):
            row[:] = np.frombuffer(source, np.uint8)
        assert tier.write(b, stack) == [OK] * 9
        back = np.zeros(9 * size + 3, np.uint8)[3:].reshape(9, size)
        assert tier.read(b, back) == [OK] * 9
        assert (back == stack).all()


def test_padding_on_disk_is_zero(tmp_path: Path) -> None:
    with opened(tmp_path, 5000) as tier:
        put(tier, [0, 1])
        offset = tier.segments.geometry.offset(1)
        data = segment_file(tmp_path).read_bytes()[offset : offset + 8192]
    assert data[:5000] == content(key_of(1), 1, 5000)
    assert data[5000:] == bytes(3192)


def test_a13_refused_direct_io_falls_back_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for moment in ("open", "pwrite"):
        target = DirectEngine if moment == "open" else "tieredkv.tiers.nvme.engines.DirectFile"
        with monkeypatch.context() as patch:

            def refuse(*_: object) -> int:
                raise OSError(errno.EINVAL, "Invalid argument")

            patch.setattr(target, moment, refuse) if moment == "open" else patch.setattr(
                f"{target}.{moment}", refuse
            )
            caplog.clear()
            with opened(tmp_path / moment, engine="auto") as tier:
                put(tier, range(20))
                assert get(tier, range(20)) == [OK] * 20
                assert tier.mode == "portable"
                assert "refused" in tier.mode_reason
                assert tier.health() is None
            warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
            assert len(warnings) == 1
            with (
                pytest.raises(DirectoryError, match="use engine: auto"),
                opened(tmp_path / moment, engine="direct"),
            ):
                pass


def test_a13_tmpfs(tmp_path: Path) -> None:
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        for engine in ("auto", "portable"):
            with opened(Path(shm) / engine, engine=engine) as tier:
                put(tier, range(8))
                assert get(tier, range(8)) == [OK] * 8


def test_short_transfers_are_continued(tmp_path: Path) -> None:
    def short(number: int, do: Callable[[], Any], args: tuple[Any, ...]) -> int:
        buffers, offset = args
        joined = sum(len(buffer) for buffer in buffers)
        if joined <= 4096:
            return int(do())
        part = memoryview(buffers[0])[:4096] if len(buffers[0]) > 4096 else buffers[0]
        file = files[0]
        return int(getattr(file, name)([part], offset))

    for name in ("pwrite", "pread"):
        engine = Hooked()
        with opened(tmp_path / name, 3 * 4096, engine=engine) as tier:
            put(tier, [0])
            files = [tier.segments.all()[0].file.inner]  # type: ignore[attr-defined]
            engine.on[name] = short
            put(tier, range(6))
            assert get(tier, range(6)) == [OK] * 6
            assert engine.calls[name] > 6


def test_no_progress_is_an_error(tmp_path: Path) -> None:
    engine = Hooked()
    with opened(tmp_path, engine=engine) as tier:
        put(tier, range(4))
        engine.on["pwrite"] = lambda n, do, args: 0
        assert tier.write(batch([0]), sources(batch([0]), 4096)) == [FAILED]
        assert "stores fail" in (tier.health() or "")
        engine.on.clear()
        engine.on["pread"] = lambda n, do, args: 0
        assert get(tier, [1]) == [CORRUPT]
        engine.on.clear()
        put(tier, [0])
        assert tier.health() is None


@pytest.mark.parametrize("call", ["pwrite", "sync"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_write_errors_are_outcomes(tmp_path: Path, call: str, code: int) -> None:
    engine = Hooked()
    with opened(tmp_path, engine=engine) as tier:
        put(tier, [0, 1, 2])
        engine.on[call] = fail(code)
        b = batch([1, 5])
        assert tier.write(b, sources(b, 4096)) == [FAILED, FAILED]
        assert tier.counters["write_failed"] == 2
        assert os.strerror(code) in (tier.health() or "")
        engine.on.clear()
        assert get(tier, [0, 2]) == [OK, OK]


def test_one_bad_block_leaves_its_neighbours_alone(tmp_path: Path) -> None:
    engine = Hooked()
    with opened(tmp_path, engine=engine) as tier:
        put(tier, range(8))
        bad = tier.segments.geometry.offset(3)

        def hook(number: int, do: Callable[[], Any], args: tuple[Any, ...]) -> Any:
            buffers, offset = args
            if offset <= bad < offset + sum(len(buffer) for buffer in buffers):
                raise OSError(errno.EIO, "Input/output error")
            return do()

        engine.on["pread"] = engine.on["pwrite"] = hook
        assert get(tier, range(8)) == [OK] * 3 + [FAILED] + [OK] * 4
        b = batch(range(8), 2)
        assert tier.write(b, sources(b, 4096)) == [OK] * 3 + [FAILED] + [OK] * 4
        assert get(tier, [2, 4], 2) == [OK, OK]


def test_a_failed_sync_fails_everyone_who_may_be_meant(tmp_path: Path) -> None:
    """The kernel reports a lost write-back once, to whoever syncs first."""
    engine = Hooked()
    began, go = threading.Event(), threading.Event()

    def hook(number: int, do: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        if number == first:
            began.set()
            assert go.wait(10)
            return do()
        if number == first + 1:
            raise OSError(errno.EIO, "Input/output error")
        return do()

    with opened(tmp_path, engine=engine) as tier, ThreadPoolExecutor(4) as pool:
        put(tier, [0])
        first = engine.calls["sync"] + 1
        engine.on["sync"] = hook

        def write(slot: int) -> Outcome:
            return tier.write(batch([slot]), sources(batch([slot]), 4096))[0]

        leader = pool.submit(write, 1)
        assert began.wait(10)
        before = engine.calls["pwrite"]
        followers = [pool.submit(write, slot) for slot in (2, 3, 4)]
        for _ in range(1000):
            if engine.calls["pwrite"] == before + 6:
                break
            threading.Event().wait(0.005)
        threading.Event().wait(0.05)
        go.set()
        assert leader.result(10) is OK
        assert [f.result(10) for f in followers] == [FAILED] * 3
        assert engine.calls["sync"] == first + 1  # one sync for three


def test_one_sync_per_segment_and_write_call(tmp_path: Path) -> None:
    engine = Hooked()
    with opened(tmp_path, engine=engine, segment=64 << 10) as tier:
        put(tier, range(40))
        engine.calls.update(sync=0, pwrite=0)
        put(tier, range(40), 2)
        segments = -(-40 // tier.segments.geometry.table_slots)
        assert engine.calls["sync"] == segments
        assert engine.calls["pwrite"] <= 2 * segments  # payloads, headers


@pytest.mark.parametrize("what", ["payload", "key", "checksum", "zero", "truncate", "swap"])
def test_a11_damage_is_never_returned(tmp_path: Path, what: str) -> None:
    with opened(tmp_path, segment=64 << 10) as tier:
        put(tier, range(40))
        geometry = tier.segments.geometry
    path, other = segment_file(tmp_path), segment_file(tmp_path, 1)
    hit = [2]
    if what == "payload":
        flip(path, geometry.offset(2) + 17)
    elif what == "key":
        flip(path, 4096 + 2 * 64 + 8)
    elif what == "checksum":
        flip(path, 4096 + 2 * 64 + 57)
    elif what == "zero":
        with path.open("r+b") as file:
            file.seek(geometry.offset(2))
            file.write(bytes(4096))
    else:
        hit = list(range(geometry.table_slots))
        if what == "truncate":
            os.truncate(path, geometry.offset(2) + 100)
        else:
            hit = list(range(2 * geometry.table_slots))
            third = path.with_name("x")
            os.rename(path, third), os.rename(other, path), os.rename(third, other)
    with opened(tmp_path, segment=64 << 10) as tier:
        expected = [CORRUPT if slot in hit else OK for slot in range(40)]
        assert get(tier, range(40)) == expected
        assert tier.verify(batch(range(40))) == expected
        assert tier.counters["read_corrupt"] == 2 * len(hit)
        if what in ("truncate", "swap"):
            assert path.name in tier.segments.bad
            assert path.with_name(path.name + ".quarantine").exists()
        put(tier, hit, 3)
        assert get(tier, hit, 3) == [OK] * len(hit)


def test_a11_truncated_while_open(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        put(tier, range(8))
        os.truncate(segment_file(tmp_path), tier.segments.geometry.offset(4) + 100)
        assert get(tier, range(8)) == [OK] * 4 + [CORRUPT] * 4


def test_missing_segment(tmp_path: Path) -> None:
    with opened(tmp_path, segment=64 << 10) as tier:
        put(tier, range(40))
        n = tier.segments.geometry.table_slots
    segment_file(tmp_path, 1).unlink()
    with opened(tmp_path, segment=64 << 10) as tier:
        assert get(tier, range(40)) == [OK] * n + [CORRUPT] * n + [OK] * (40 - 2 * n)


def test_reads_check_key_generation_and_epoch(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        put(tier, [0], generation=7)
        target = [memoryview(bytearray(4096))]
        good = Batch([0], [key_of(0)], [7], 1)
        assert tier.read(good, target) == [OK]
        for wrong in (
            Batch([0], [key_of(1)], [7], 1),
            Batch([0], [key_of(0)], [8], 1),
            Batch([0], [key_of(0)], [7], 2),
            Batch([1], [key_of(0)], [7], 1),
            Batch([tier.slots + 5], [key_of(0)], [7], 1),
        ):
            assert tier.read(wrong, target) == [CORRUPT]


def test_a05_another_layout_is_another_directory(tmp_path: Path) -> None:
    from dataclasses import replace

    with opened(tmp_path) as tier:
        put(tier, range(8))
        old = segment_file(tmp_path)
    with opened(tmp_path, fp=replace(FP, layout="Y")) as tier:
        assert get(tier, range(8)) == [CORRUPT] * 8
        # even if the file ends up there, its bytes are not taken for ours
        target = tier.segments._path(0)
    old.rename(target)
    with opened(tmp_path, fp=replace(FP, layout="Y")) as tier:
        assert get(tier, range(8)) == [CORRUPT] * 8
        assert "another place" in tier.segments.bad[target.name]


def test_views_released_at_a_deadline_are_busy(tmp_path: Path) -> None:
    for size in (4096, 4095):
        with opened(tmp_path / str(size), size) as tier:
            put(tier, range(4))
            memory = np.zeros((4, size), np.uint8)
            views = RevocableViews(memory)
            views[1].release()
            b = batch(range(4))
            assert tier.read(b, views) == [OK, BUSY, OK, OK]
            assert tier.write(b, views)[1] is BUSY
            assert views.revoke() == 0  # nothing of ours is left behind
            assert tier.read(b, views) == [BUSY] * 4


def test_a_view_released_between_transfer_and_check(tmp_path: Path) -> None:
    engine = Hooked()
    with opened(tmp_path, engine=engine) as tier:
        put(tier, [0])
        view = memoryview(bytearray(4096))

        def hook(number: int, do: Callable[[], Any], args: tuple[Any, ...]) -> Any:
            result = do()
            view.release()
            return result

        engine.on["pread"] = hook
        assert tier.read(batch([0]), [view]) == [BUSY]


def test_misuse_raises(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        b = batch([0])
        with pytest.raises(BlockSizeError):
            tier.write(b, [memoryview(bytes(100))])
        with pytest.raises(UsageError):
            tier.write(b, [])
        with pytest.raises(UsageError):
            tier.write(batch([-1]), [memoryview(bytes(4096))])
    with pytest.raises(ClosedError):
        tier.read(b, [memoryview(bytearray(4096))])
    with pytest.raises(CapacityError, match="raise it"), opened(tmp_path / "small", capacity=4096):
        pass


def test_a_forked_child_touches_nothing(tmp_path: Path) -> None:
    for engine in ("direct", "portable", ENGINE):
        with opened(tmp_path / engine, engine=engine) as tier:
            put(tier, [0])
            pid = os.fork()
            if not pid:
                b = batch([0], 2)
                good = tier.write(b, sources(b, 4096)) == [FAILED] and get(tier, [0]) == [FAILED]
                os._exit(0 if good else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert get(tier, [0]) == [OK]
