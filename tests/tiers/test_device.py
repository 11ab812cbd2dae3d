"""What is asked of CUDA, in which order; and the device of host memory that tests copies."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.nvme.world import opened
from tests.pretender import pretend
from tieredkv import device
from tieredkv.buffers import view_blocks
from tieredkv.device import (
    CudaDevice,
    carry_out,
    current_device,
    host_tensor,
    on_device,
    page_lock,
    page_unlock,
    streams_of,
)
from tieredkv.testing import LateDevice
from tieredkv.testing.tier_suite import batch, content
from tieredkv.tiers.dram import DramTier
from tieredkv.tiers.hbm import HbmTier
from tieredkv.types import Outcome

SIZE = 8192
CUDA = torch.cuda.is_available()


class FakeCuda:
    """Streams and events that write down what is asked of them, and on which device."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.streams: list[FakeStream] = []
        self.current = FakeStream(self, "engine", 1)
        self.number = 0
        self.registered: dict[int, tuple[int, int, str]] = {}
        self.code = 0

    def Stream(self, where: int) -> FakeStream:
        self.streams.append(FakeStream(self, f"side {len(self.streams)}", where))
        return self.streams[-1]

    def Event(self, *, blocking: bool) -> str:
        return "a blocking event" if blocking else "a spinning event"

    def current_stream(self, where: int) -> FakeStream:
        return self.current

    @contextmanager
    def device(self, number: int | None) -> Iterator[None]:
        before, self.number = self.number, self.number if number is None else number
        try:
            yield
        finally:
            self.number = before

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        # as torch: what was current of the device that was current, and that device with it
        before, self.current = self.current, stream
        device, self.number = self.number, stream.where
        try:
            yield
        finally:
            self.current = before
            self.number = device
            self.log.append(f"device {device} is current")

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return self.number

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.registered[address] = nbytes, self.number, threading.current_thread().name
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        assert self.registered.pop(address)[1] == self.number
        return self.code


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str, where: int) -> None:
        self.cuda, self.name, self.where = cuda, name, where
        self.trouble: BaseException | None = None

    def record_event(self, event: str) -> FakeStream:
        self.cuda.log.append(f"{self.name} records {event}")
        return self

    def synchronize(self) -> None:
        """Of the stream, or of the event behind it."""
        self.cuda.log.append(f"{self.name} is waited for")
        if self.trouble is not None:
            trouble, self.trouble = self.trouble, None
            raise trouble


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = SimpleNamespace(cuda=FakeCuda(), Tensor=torch.Tensor)
    monkeypatch.setattr(device, "_torch", lambda: fake)
    monkeypatch.setattr(device, "loaded_torch", lambda: fake)
    return fake.cuda


def test_copies_run_on_the_stream_of_their_way(cuda: FakeCuda) -> None:
    found = CudaDevice(1)
    event: Any = found.mark()
    assert event.name == "engine"
    cuda.log.clear()

    def copy() -> None:
        cuda.log.append(f"copy on {cuda.current.name}, device {cuda.number}")

    carry_out(found, "out", copy)
    assert cuda.log == [
        "copy on side 1, device 1",
        "side 1 records a blocking event",
        "device 1 is current",  # and not 0, where a thread begins: it may never have been used
        "side 1 is waited for",
    ]
    assert (cuda.number, cuda.current.name) == (0, "engine")
    cuda.log.clear()
    found.run("in", copy)
    found.run("check", copy)
    assert cuda.log[0] == "copy on side 0, device 1"
    assert cuda.log[3] == "copy on side 2, device 1"


@pytest.mark.parametrize("trouble", [ValueError, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("late", [False, True])
def test_nothing_runs_any_more_once_an_error_is_out(
    cuda: FakeCuda, trouble: type[BaseException], late: bool
) -> None:
    """The first copies of what fails half-way may have been queued, and Ctrl-C ends the wait."""

    def work() -> None:
        if not late:
            raise trouble("half-way")

    found = CudaDevice(1)
    if late:
        cuda.streams[0].trouble = trouble("while waiting")
    cuda.log.clear()
    with pytest.raises(trouble):
        carry_out(found, "in", work)
    assert cuda.log[-1] == "side 0 is waited for"
    assert cuda.log.count("side 0 is waited for") == 1 + late
    assert (cuda.number, cuda.current.name) == (0, "engine")


def test_page_locking(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    """In the context of the device at hand, and where no kernel finds the error of a failure."""
    assert page_lock(4096, 100, None)
    assert page_lock(8192, 200, 3)
    assert {k: v[:2] for k, v in cuda.registered.items()} == {4096: (100, 0), 8192: (200, 3)}
    assert threading.current_thread().name not in {v[2] for v in cuda.registered.values()}
    assert cuda.number == 0
    page_unlock(4096, None)
    page_unlock(8192, 3)
    assert cuda.registered == {}
    cuda.code = 2
    assert not page_lock(8192, 100, None)
    assert "error 2" in caplog.text


def test_a_context_that_cannot_be_had_is_no_page_lock(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(number: object) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(cuda, "device", fail)
    assert not page_lock(4096, 100, 0)
    assert "out of memory" in caplog.text


def test_torch_that_another_thread_still_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    half = ModuleType("torch")
    half.__spec__ = ModuleSpec("torch", None)
    half.__spec__._initializing = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", half)
    assert not on_device(bytearray(8))
    assert current_device() is None
    assert view_blocks([bytearray(8)], 1, writable=True).ready is None


@pytest.mark.skipif(CUDA, reason="a CUDA device is present")
def test_without_a_device() -> None:
    assert streams_of(torch.device("cpu")) is None
    assert not page_lock(4096, 100, None)
    assert current_device() is None
    assert not host_tensor(3, torch.int64, torch.device("cpu")).is_pinned()


@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_events_of_cuda_pass_when_copies_have_been_made() -> None:
    found = streams_of(torch.device("cuda"))
    assert found is streams_of(torch.device("cuda", torch.cuda.current_device()))
    assert found is not None
    source = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8).pin_memory()
    there, back = torch.empty_like(source, device="cuda"), torch.zeros_like(source).pin_memory()
    found.mark().synchronize()
    event = found.run("in", lambda: there.copy_(source, non_blocking=True))
    event.synchronize()
    assert event.query()
    carry_out(found, "out", lambda: back.copy_(there, non_blocking=True))
    assert torch.equal(source, back)


NEEDS_CUDA = pytest.mark.skipif(not CUDA, reason="no CUDA device")


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("dram", "late"),
        ("hbm", "late"),
        pytest.param("dram", "cuda", marks=NEEDS_CUDA),
        pytest.param("hbm", "cuda", marks=NEEDS_CUDA),
        pytest.param("nvme", "cuda", marks=NEEDS_CUDA),  # without one: tests/nvme/gds_tests.py
    ],
)
def test_tiers_take_memory_of_a_device(
    kind: str, place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        if place == "late":
            late = stack.enter_context(LateDevice(0.001))
            monkeypatch.setattr("tieredkv.device.streams_of", lambda _: late)
            monkeypatch.setattr("tieredkv.tiers.hbm.streams_of", lambda _: late)
        tier: Any
        if kind == "nvme":
            tier = stack.enter_context(opened(tmp_path, SIZE, engine="auto"))
            if not tier.device:
                pytest.skip("no GPUDirect Storage here")
        elif kind == "dram":
            tier = DramTier("dram", 16 * SIZE, SIZE)
        else:
            tier = HbmTier("hbm", 16 * SIZE, SIZE, "cpu" if place == "late" else place)
        stack.callback(tier.close)
        slots = [5, 1, 2, 9]
        blocks = [
            torch.frombuffer(bytearray(content(s, 1, SIZE)), dtype=torch.uint8) for s in slots
        ]
        wrap = pretend if place == "late" else (lambda tensor: tensor.cuda())
        there, back = map(wrap, blocks), [wrap(torch.zeros_like(block)) for block in blocks]
        assert tier.write(batch(slots), list(there)) == [Outcome.OK] * 4
        assert tier.read(batch(slots), back) == [Outcome.OK] * 4
        assert [bytes(plain(tensor)) for tensor in back] == [bytes(plain(b)) for b in blocks]
        host = np.zeros((4, SIZE), np.uint8)
        assert tier.read(batch(slots), host) == [Outcome.OK] * 4
        assert [row.tobytes() for row in host] == [bytes(plain(block)) for block in blocks]


def plain(tensor: torch.Tensor) -> Any:
    return tensor.as_subclass(torch.Tensor).cpu().numpy()


def test_what_is_late_is_in_order_and_apart_from_other_streams() -> None:
    seen: list[str] = []
    go_on = threading.Event()
    with LateDevice(0.001) as late:
        late.compute.queue(lambda: go_on.wait(20) and seen.append("computed"))
        mark = late.mark()
        late.run("in", lambda: seen.append("in"))
        late.drain("in")
        assert seen == ["in"]
        assert not mark.query()
        go_on.set()
        mark.synchronize()
        assert seen == ["in", "computed"]
    with LateDevice(0.0) as late:
        failed = late.run("in", lambda: [][0])
        with pytest.raises(RuntimeError, match="list index out of range"):
            failed.synchronize()
        carry_out(late, "in", lambda: seen.append("after"))
    assert seen[-1] == "after"
