"""Tests of `gds` that need kvikio and a driver; `test_gds.py` runs them in a process with both.

The driver may be one that knows no device: then kvikio takes every pointer for host memory.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.nvme import test_tier
from tests.nvme.world import FP, MIB, batch, flip, get, opened, put, segment_file, sources
from tests.pretender import pretend
from tieredkv.connector.paged import PagedBlocks, PagedCache
from tieredkv.errors import BlockSizeError, DirectoryError, UsageError
from tieredkv.staging import Ring
from tieredkv.testing import LateDevice
from tieredkv.tiers.base import Tier
from tieredkv.tiers.hbm import HbmTier
from tieredkv.tiers.nvme import gds
from tieredkv.tiers.nvme.checksum import Checksums
from tieredkv.tiers.nvme.directory import Directory
from tieredkv.tiers.nvme.gds import THREADS, GdsEngine
from tieredkv.tiers.nvme.segment import identity
from tieredkv.tiers.nvme.tier import NvmeTier
from tieredkv.transfer import Transfer
from tieredkv.types import Batch, Move, Outcome

PAGE = 4096


class TestGds(test_tier.TestDirect):
    engine = "gds"


class TestGdsUnaligned(test_tier.TestDirect):
    engine = "gds"
    block_bytes = 4095


class TestGdsLarge(test_tier.TestDirect):
    """Several tasks of kvikio for a block, several blocks for a call."""

    engine = "gds"
    block_bytes = gds.TASK + PAGE
    segment = 8 << 20
    blocks = 16

    def make(self, tmp_path: Path) -> Tier:
        directory = Directory.open(tmp_path / "root", FP, 16)
        self.open_directories.append(directory)
        options: Any = {"min_free": 0, "engine": self.engine, "segment": self.segment}
        return NvmeTier(directory, "nvme", self.block_bytes, 20 << 20, **options)


class Device:
    """What torch's tensors of a GPU offer, over host memory."""

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return dict(self.array.__array_interface__)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, part: slice) -> Device:
        return Device(self.array[part])


def pages(n: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).integers(0, 256, n * PAGE, np.uint8)


@pytest.fixture
def engine() -> Iterator[GdsEngine]:
    engine = GdsEngine("compat")
    yield engine
    engine.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(1024 * PAGE))
    return path


def test_the_mode_and_its_reason_are_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, engine="gds") as tier:
        assert (tier.mode, tier.mode_reason) == (
            "compat",
            "no GPUDirect Storage: KVIKIO_COMPAT_MODE=ON",
        )
        assert [r.levelname for r in caplog.records if "GPUDirect" in r.message] == ["WARNING"]
    monkeypatch.setenv("KVIKIO_COMPAT_MODE", "AUTO")
    with opened(tmp_path, engine="gds") as tier:  # the probe has been run
        assert tier.mode == "compat"
        assert "no GPUDirect Storage: " in tier.mode_reason
        assert "KVIKIO" not in tier.mode_reason
        put(tier, [0])
    with opened(tmp_path, engine="auto") as tier:
        assert (tier.mode, tier.mode_reason) == ("direct", "O_DIRECT works")
        assert get(tier, [0]) == [Outcome.OK]


def test_a_filesystem_without_direct_io_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("tieredkv.tiers.nvme.engines.DirectFile.pwrite", refuse)
    with pytest.raises(DirectoryError, match="use engine: auto"), opened(tmp_path, engine="gds"):
        pass


def test_threads_and_direct_io_are_on(engine: GdsEngine, path: Path) -> None:
    import kvikio
    import kvikio.defaults

    mode = kvikio.defaults.get("compat_mode")
    file = engine.open(path)
    assert kvikio.defaults.get("compat_mode") == mode  # the process's own is back
    assert kvikio.defaults.get("num_threads") >= THREADS
    assert kvikio.defaults.get("auto_direct_io_read")
    assert kvikio.defaults.get("auto_direct_io_write")
    assert file._file.is_direct_io_supported()  # type: ignore[attr-defined]
    file.close()


@pytest.mark.parametrize("sizes", [[1], [1, 2, 1], [300], [256, 700], [256] * 3])
@pytest.mark.parametrize("kind", ["array", "view", "device"])
def test_bytes_go_there_and_back(
    engine: GdsEngine, path: Path, sizes: list[int], kind: str
) -> None:
    wrap: Any = {"array": lambda a: a, "view": memoryview, "device": Device}[kind]
    file = engine.open(path)
    written = [pages(n, i) for i, n in enumerate(sizes)]
    total = sum(sizes) * PAGE
    assert file.pwrite([wrap(a) for a in written], 3 * PAGE) == total
    file.sync()
    assert path.read_bytes()[3 * PAGE : 3 * PAGE + total] == b"".join(a.tobytes() for a in written)
    back = [np.zeros_like(a) for a in written]
    assert file.pread([wrap(a) for a in back], 3 * PAGE) == total
    assert all((a == b).all() for a, b in zip(written, back, strict=True))
    file.close()


def test_reads_end_with_the_last_whole_page(engine: GdsEngine, path: Path) -> None:
    file = engine.open(path)
    target = pages(4)
    assert file.pread([target], 1022 * PAGE) == 2 * PAGE
    assert file.pread([target[:PAGE], target[PAGE:]], 1022 * PAGE) == 2 * PAGE
    assert file.pread([target], 1024 * PAGE) == 0
    assert file.pread([target], 4096 * PAGE) == 0
    os.truncate(path, 1023 * PAGE + 100)
    assert file.pread([target], 1022 * PAGE) == PAGE
    file.close()


def test_errors_have_their_numbers(engine: GdsEngine, path: Path) -> None:
    file = engine.open(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PAGE, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            file.pwrite([pages(1), pages(1)], 2 * PAGE)
        assert caught.value.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    file._file.close()  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="not permitted") as caught:
        file.pwrite([pages(1)], 0)
    assert caught.value.errno == errno.EBADF
    file.close()
    for name, code in (("nothing", errno.ENOENT), (".", errno.EISDIR)):
        with pytest.raises(OSError) as caught:  # noqa: PT011
            engine.open(path.parent / name)
        assert caught.value.errno == code


@pytest.mark.parametrize("spare", range(3))
def test_no_descriptors_are_left(engine: GdsEngine, path: Path, spare: int) -> None:
    """A file takes three; whichever of them is lacking, none stays open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = os.listdir("/proc/self/fd")
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files") as caught:
            engine.open(path)
        assert caught.value.errno == errno.EMFILE
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert os.listdir("/proc/self/fd") == before
    engine.open(path).close()


def test_close_twice(engine: GdsEngine, path: Path) -> None:
    file = engine.open(path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        file.close()
        assert len(os.listdir("/proc/self/fd")) == before - 3
        engine.close()


def test_a_forked_child_gets_errors(engine: GdsEngine, path: Path) -> None:
    file = engine.open(path)
    assert file.pwrite([pages(1)], 0) == PAGE  # kvikio's threads run
    pid = os.fork()
    if not pid:
        failed = 0
        for call in (
            lambda: file.pwrite([pages(1)], 0),
            lambda: file.pread([pages(1)], 0),
            file.sync,
            lambda: engine.open(path),
        ):
            try:
                call()
            except OSError as error:
                failed += "fork" in str(error)
        file.close()
        engine.close()
        os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
    assert file.pread([pages(1)], 0) == PAGE
    file.close()


def test_registration_is_nothing_to_copies(
    engine: GdsEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(engine._kvikio, "memory_register", calls.append)
    monkeypatch.setattr(engine._kvikio, "memory_deregister", calls.append)
    engine.register(Device(pages(1)))
    engine.close()
    assert calls == []


def test_one_call_moves_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = gds.GdsFile._transfer

    def count(self: Any, call: str, buffers: Any, offset: int, room: int) -> int:
        calls.append(len(buffers))
        return real(self, call, buffers, offset, room)

    monkeypatch.setattr(gds.GdsFile, "_transfer", count)
    size = 1 << 20
    with opened(tmp_path, size, 24 << 20, engine="gds", segment=24 << 20) as tier:
        memory = np.empty((9, size + PAGE), np.uint8)
        aligned = [row[-row.ctypes.data % PAGE :][:size] for row in memory]
        b = batch(range(9))
        for row, source in zip(aligned, sources(b, size), strict=True):
            row[:] = np.frombuffer(source, np.uint8)
        calls.clear()
        assert tier.write(b, aligned) == [Outcome.OK] * 9
        assert calls[-2:] == [9, 1]  # payloads, headers
        assert get(tier, range(9)) == [Outcome.OK] * 9


@contextmanager
def taking(*args: Any, **kw: Any) -> Iterator[NvmeTier]:
    """`opened`, with a tier that takes device memory: kvikio can in this mode too. The device is
    late with what it computes."""
    with (
        opened(*args, **kw) as tier,
        LateDevice(0.001) as late,
        pytest.MonkeyPatch.context() as patch,
    ):
        assert not tier.device
        tier._engine.device = True  # type: ignore[attr-defined]
        patch.setattr("tieredkv.device.streams_of", lambda _: late)
        yield tier


def device_rows(blocks: Any) -> list[Any]:
    return [pretend(torch.frombuffer(bytearray(block), dtype=torch.uint8)) for block in blocks]


def host(rows: Any) -> list[bytes]:
    return [bytes(row.as_subclass(torch.Tensor).numpy()) for row in rows]


@pytest.mark.parametrize("size", [PAGE, 5 * PAGE, gds.CALL + PAGE])
def test_device_memory_goes_there_and_back(tmp_path: Path, size: int) -> None:
    slots = [0, 1, 2, 5]
    b = batch(slots)
    blocks = sources(b, size)
    room = 8 * (size + PAGE) + MIB
    with taking(tmp_path, size, room, engine="gds", segment=room) as tier:
        assert tier.device
        assert tier.write(b, device_rows(blocks)) == [Outcome.OK] * 4
        targets = device_rows([bytes(size)] * 4)
        assert tier.read(b, targets) == [Outcome.OK] * 4
        assert host(targets) == [bytes(block) for block in blocks]
        put(tier, [1], 2)  # by the host
        assert get(tier, [0, 2, 5]) == [Outcome.OK] * 3  # into the host's memory
        two = batch([0, 1], 2)
        targets = device_rows([bytes(size)] * 2)
        assert tier.read(two, targets) == [Outcome.CORRUPT, Outcome.OK]
        assert host(targets)[1] == sources(two, size)[1]
    with opened(tmp_path, size, room, engine="direct", segment=room) as tier:
        assert get(tier, [0, 2, 5]) == [Outcome.OK] * 3
        assert get(tier, [1], 2) == [Outcome.OK]
        assert not tier.device


@pytest.mark.parametrize("other", [0, 2, 3])
def test_a_flipped_kind_does_not_switch_verification_off(tmp_path: Path, other: int) -> None:
    with opened(tmp_path) as tier:
        put(tier, [0, 1])
    with segment_file(tmp_path).open("r+b") as file:
        file.seek(PAGE + 6)
        file.write(other.to_bytes(2, "little"))
    with opened(tmp_path) as tier:
        assert get(tier, [0, 1]) == [Outcome.CORRUPT, Outcome.OK]


def test_what_a_device_reads_has_a_checksum_that_it_knows(tmp_path: Path) -> None:
    """Written by whomever; and a version that knows only kind 1 refuses it."""
    with taking(tmp_path) as tier:
        assert tier.write(batch([0]), device_rows(sources(batch([0]), PAGE))) == [Outcome.OK]
        put(tier, [1])
        segment = tier.segments.get(0)
        assert segment is not None
        assert segment.headers()["kind"][:2].tolist() == [2, 2]
        assert segment.checksum(0, identity(batch([0]).keys[0], 1, 1, PAGE, 1)) is None
        sums = Checksums(tier._directory.digest[:8], PAGE)
        for slot, block in enumerate(sources(batch([0, 1]), PAGE)):
            assert segment.headers()["checksum"][slot] == sums.of(2, block)


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("where", [0, 1, 4095])
def test_a_flipped_bit_is_found_by_the_device(tmp_path: Path, slot: int, where: int) -> None:
    with taking(tmp_path) as tier:
        assert tier.write(batch([0]), device_rows(sources(batch([0]), PAGE))) == [Outcome.OK]
        put(tier, [1])
        offset = tier.segments.geometry.offset(slot)
    flip(segment_file(tmp_path), offset + where)
    with taking(tmp_path) as tier:
        targets = device_rows([bytes(PAGE)] * 2)
        wanted = [Outcome.OK] * 2
        wanted[slot] = Outcome.CORRUPT
        assert tier.read(batch([0, 1]), targets) == wanted
        assert get(tier, [0, 1]) == wanted


def test_blocks_with_a_checksum_of_the_hosts_come_through_the_host(tmp_path: Path) -> None:
    with opened(tmp_path, engine="direct") as tier:
        put(tier, range(4))
        offset = tier.segments.geometry.offset(2)
    flip(segment_file(tmp_path), offset + 7)
    with taking(tmp_path, engine="gds") as tier:
        assert tier.write(batch([4]), device_rows(sources(batch([4]), PAGE))) == [Outcome.OK]
        b = batch([4, 0, 1, 2, 3, 5])
        targets = device_rows([bytes(PAGE)] * 6)
        wanted = [Outcome.OK] * 6
        wanted[3] = wanted[5] = Outcome.CORRUPT
        assert tier.read(b, targets) == wanted
        expected = sources(b, PAGE)
        for i in (0, 1, 2, 4):
            assert host(targets)[i] == expected[i]


def test_a_device_that_fails_says_nothing_about_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with opened(tmp_path, engine="direct") as tier:
        put(tier, [0])
    with taking(tmp_path, engine="gds") as tier:
        b = batch([1, 2])
        assert tier.write(b, device_rows(sources(b, PAGE))) == [Outcome.OK] * 2
        monkeypatch.setattr("tieredkv.tiers.nvme.checksum.on_stream", fail)
        assert tier.read(b, device_rows([bytes(PAGE)] * 2)) == [Outcome.BUSY] * 2
        assert tier.write(b, device_rows(sources(b, PAGE))) == [Outcome.BUSY] * 2
        assert "illegal memory access" in str(tier.last_error)
        assert get(tier, [1, 2]) == [Outcome.OK] * 2
        monkeypatch.setattr("tieredkv.tiers.nvme.payloads.copy_blocks", fail)
        assert tier.read(batch([0]), device_rows([bytes(PAGE)])) == [Outcome.BUSY]


def test_device_memory_that_cannot_be_used(tmp_path: Path) -> None:
    b = batch([0, 1])
    good = device_rows([bytes(PAGE)] * 2)
    with taking(tmp_path / "gds") as tier:
        halves, gaps = torch.zeros(PAGE // 2, dtype=torch.int16), torch.zeros(2 * PAGE)[::2]
        for bad in map(pretend, (halves, gaps, torch.zeros((1, PAGE), dtype=torch.uint8))):
            with pytest.raises(UsageError, match="vector of uint8"):
                tier.write(b, [good[0], bad])
        with pytest.raises(BlockSizeError):
            tier.read(b, [good[0], good[1][:100]])
        with pytest.raises(UsageError, match="no host memory"):
            tier.write(b, [good[0], memoryview(bytes(PAGE))])
    for engine, size in (("direct", PAGE), ("portable", PAGE), ("gds", PAGE - 1)):
        with opened(tmp_path / engine, size, engine=engine) as tier:
            assert not tier.device
            with pytest.raises(UsageError, match="engine gds"):
                tier.write(b, device_rows([bytes(size)] * 2))


@pytest.mark.parametrize("layers_first", [False, True])
def test_engine_blocks_reach_the_disk_through_memory_of_the_device_alone(
    tmp_path: Path, layers_first: bool
) -> None:
    """From the blocks of an engine, on streams that run late, to a segment file and back."""
    memory = torch.randint(0, 256, (2, 12, 2 * PAGE), dtype=torch.uint8)
    tensors = list(memory) if layers_first else list(memory.view(12, 2, 2 * PAGE).unbind(1))
    with (
        LateDevice() as device,
        taking(tmp_path, 8 * PAGE, 24 * MIB, engine="gds") as tier,
    ):
        cache = PagedCache(tensors, 12, 2, batch=2 * 8 * PAGE, users=2, streams=device)
        staging: Any = cache.staging
        staging.add_device(torch.device("cpu"))
        parts = pretend(staging.memory).split(cache.part)
        staging._parts = Ring(iter(parts).__next__, 2)
        staging._host = None  # nobody may ask for it
        move = Move(0, 1, [b"%032d" % i for i in range(3)], [1] * 3, [0, 1, 2])
        before = memory.clone()
        saved = PagedBlocks(cache, [[0, 7], [3, 4], [9, 1]], cache.fence())
        move.src_slots, move.dst_slots = [0, 1, 2], [4, 2, 9]
        assert run_move(move, [saved, tier], cache) == [Outcome.OK] * 3
        segment = tier.segments.get(0)
        assert segment is not None
        assert segment.headers()["kind"][[4, 2, 9]].tolist() == [2, 2, 2]  # by the device
        memory.zero_()
        loaded = PagedBlocks(cache, [[2, 5], [-1, 8], [11, 6]], cache.fence())
        move.src, move.dst, move.src_slots, move.dst_slots = 1, 0, move.dst_slots, [0, 1, 2]
        assert run_move(move, [loaded, tier], cache) == [Outcome.OK] * 3
    block = 0 if not layers_first else 1
    was, now = (m.view(12, 2, -1) if not layers_first else m for m in (before, memory))
    came = {2: 0, 5: 7, 8: 4, 11: 9, 6: 1}
    for number in range(12):
        found = now.select(block, number)
        assert (
            torch.equal(found, was.select(block, came[number]))
            if number in came
            else (not found.any())
        )


def run_move(move: Move, tiers: list[Any], cache: PagedCache) -> list[Outcome]:
    transfer = Transfer(move, tiers, None, cache.part, lambda _: None, cache.staging)
    transfer.run_all()
    assert transfer.read == transfer.write
    return transfer.write


def test_slots_of_hbm_reach_the_disk_without_a_copy(tmp_path: Path) -> None:
    with LateDevice() as device, taking(tmp_path, 2 * PAGE, engine="gds") as disk:
        hbm = HbmTier("hbm", 16 * PAGE, 2 * PAGE, "cpu", device)
        hbm.tensor = pretend(hbm.tensor)
        keys, slots = [b"%032d" % i for i in range(4)], [5, 1, 2, 7]
        b = Batch(slots, keys, [1] * 4)
        blocks = sources(batch(range(4)), 2 * PAGE)
        assert hbm.write(b, blocks) == [Outcome.OK] * 4
        down = Move(0, 1, keys, [1] * 4, [0, 1, 2, 3], slots, [3, 4, 0, 9])
        up = Move(1, 0, keys, [1] * 4, [0, 1, 2, 3], [3, 4, 0, 9], [0, 3, 4, 6])
        for move in (down, up):  # there is no staging memory that they could use
            transfer = Transfer(move, [hbm, disk], None, 4, lambda _: None)
            transfer.run_all()
            assert transfer.write == [Outcome.OK] * 4
        back = [bytearray(2 * PAGE) for _ in keys]
        b = Batch([0, 3, 4, 6], keys, [1] * 4)
        assert hbm.read(b, [memoryview(row) for row in back]) == [Outcome.OK] * 4
        assert back == [bytearray(block) for block in blocks]


@pytest.mark.parametrize("size", [4095, 4092])
def test_a_kind_that_blocks_of_this_size_cannot_have_is_no_revoked_buffer(
    tmp_path: Path, size: int
) -> None:
    with opened(tmp_path, size) as tier:
        put(tier, [0])
    with segment_file(tmp_path).open("r+b") as file:
        file.seek(PAGE + 6)
        file.write(b"\2")
    with opened(tmp_path, size) as tier:
        assert get(tier, [0]) == [Outcome.CORRUPT]
