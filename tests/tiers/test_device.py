"""What is asked of CUDA, in which order; and the device of host memory that tests copies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.nvme.world import opened
from tests.pretender import pretend
from tieredkv import device
from tieredkv.device import (
    CudaDevice,
    current_device,
    host_tensor,
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
    """Streams and events that write down what is asked of them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "engine"
        self.streams = 0
        self.number = 0
        self.registered: dict[int, tuple[int, int]] = {}
        self.code = 0

    class _Stream:
        def __init__(self, cuda: FakeCuda, name: str) -> None:
            self.cuda, self.name = cuda, name

        def wait_event(self, event: Any) -> None:
            self.cuda.log.append(f"{self.name} waits for {event}")

        def record_event(self, event: Any) -> str:
            self.cuda.log.append(f"{self.name} records {event}")
            return f"event of {self.name}"

        def synchronize(self) -> None:
            self.cuda.log.append(f"{self.name} is waited for")

    def Stream(self, where: Any) -> FakeCuda._Stream:
        self.streams += 1
        return self._Stream(self, f"side {self.streams}")

    def Event(self, *, blocking: bool) -> str:
        return "a blocking event" if blocking else "a spinning event"

    def current_stream(self, where: Any) -> FakeCuda._Stream:
        return self._Stream(self, self.current)

    @contextmanager
    def stream(self, stream: FakeCuda._Stream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    @contextmanager
    def device(self, number: int | None) -> Iterator[None]:
        before, self.number = self.number, self.number if number is None else number
        yield
        self.number = before

    def is_available(self) -> bool:
        return True

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.registered[address] = nbytes, self.number
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return self.code


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    class Torch:
        cuda = FakeCuda()

    monkeypatch.setattr(device, "_torch", lambda: Torch)
    return Torch.cuda


def test_copies_run_on_the_stream_of_their_way_behind_what_they_wait_for(cuda: FakeCuda) -> None:
    found = CudaDevice("cuda:0")
    cuda.log.clear()
    event: Any = found.run("out", lambda: cuda.log.append(f"copy on {cuda.current}"), found.mark())
    assert cuda.log == [
        "engine records a blocking event",
        "side 2 waits for event of engine",
        "copy on side 2",
        "side 2 records a blocking event",
    ]
    assert event == "event of side 2"
    cuda.log.clear()
    found.run("in", lambda: cuda.log.append(f"copy on {cuda.current}"))
    assert cuda.log == ["copy on side 1", "side 1 records a blocking event"]
    assert cuda.current == "engine"


def test_nothing_runs_any_more_once_an_error_is_out(cuda: FakeCuda) -> None:
    """The first copies of what fails half-way may have been queued."""

    def work() -> None:
        raise ValueError("a buffer was too short")

    found = CudaDevice("cuda:0")
    cuda.log.clear()
    with pytest.raises(ValueError, match="too short"):
        found.run("in", work)
    assert cuda.log == ["side 1 is waited for"]


def test_page_locking(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    assert page_lock(4096, 100, None)
    assert page_lock(8192, 200, 3)  # not on device 0, where other threads begin
    assert cuda.registered == {4096: (100, 0), 8192: (200, 3)}
    assert cuda.number == 0
    page_unlock(4096, None)
    page_unlock(8192, 3)
    assert cuda.registered == {}
    cuda.code = 2
    assert not page_lock(8192, 100, None)
    assert "error 2" in caplog.text


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
    event = found.run("in", lambda: there.copy_(source, non_blocking=True))
    found.run("out", lambda: back.copy_(there, non_blocking=True), event).synchronize()
    assert event.query()
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


def test_what_is_late_is_in_order_and_waits_for_its_event() -> None:
    seen: list[str] = []
    go_on = threading.Event()
    with LateDevice(0.001) as late:
        late.compute.queue(lambda: go_on.wait(20) and seen.append("computed"))
        mark = late.mark()
        out = late.run("out", lambda: seen.append("out"), mark)
        inward = late.run("in", lambda: seen.append("in"))
        inward.synchronize()
        assert seen == ["in"]
        assert not mark.query()
        assert not out.query()
        go_on.set()
        out.synchronize()
        assert seen == ["in", "computed", "out"]
    with LateDevice(0.0) as late:
        failed = late.run("in", lambda: [][0])
        after = late.run("in", lambda: None, failed)
        for event in (failed, after):  # what comes behind an error is lost as well
            with pytest.raises(RuntimeError, match="list index out of range"):
                event.synchronize()
