"""Streams and events of a device, as far as copies need them, and page-locked host memory.

Side streams, one for each way, run beside whatever computes there. Nothing waits for a device as
a whole: who needs a copy to be done waits for the event behind it. Nor does a side stream wait for
another stream, because what others have queued behind would wait with it: who has to read what is
still being computed waits for its event first.

torch is imported where a device is used: it takes seconds that other machines need not pay.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)

Way: TypeAlias = Literal["in", "out", "check"]
"""Copies into the device's tensors, copies out of them, and checksums."""
WAYS: tuple[Way, ...] = ("in", "out", "check")
Buffers: TypeAlias = "Sequence[Any] | npt.NDArray[np.uint8]"


class Event(Protocol):
    """A point in what a stream has to do. Thread-safe."""

    def query(self) -> bool:
        """Has everything before it been done?"""
        ...

    def synchronize(self) -> None:
        """Wait until it has. Raises RuntimeError if something before it failed."""
        ...


class Device(Protocol):
    """The streams of one device. Thread-safe.

    `tieredkv.testing.LateDevice` is one of host memory, on which everything happens late.
    """

    def mark(self) -> Event:
        """The point behind all that is queued on the calling thread's current stream."""
        ...

    def run(self, way: Way, work: Callable[[], object]) -> Event:
        """Queue what `work` asks of the device; the event that ends it. `carry_out` waits as well.

        `work` runs in this call or later, and does nothing but operations on tensors, with
        `non_blocking=True` where they cross to the host. Until the event nobody may touch what
        they read and write. Where this raises, some of it may be queued: see `drain`.
        """
        ...

    def drain(self, way: Way) -> None:
        """Wait until all that is queued there has been done. Raises RuntimeError."""
        ...


class CudaDevice:
    """Streams of a CUDA device; implements `Device`."""

    def __init__(self, device: Any) -> None:
        """`device`: a torch device with an index."""
        self._cuda = _torch().cuda
        self._device = device
        self._streams = {way: self._cuda.Stream(device) for way in WAYS}

    def mark(self) -> Event:
        return self._record(self._cuda.current_stream(self._device))

    def run(self, way: Way, work: Callable[[], object]) -> Event:
        stream = self._streams[way]
        # the device first: leaving a stream alone makes a new thread's device 0 current, which
        # costs memory there
        with self._cuda.device(self._device), self._cuda.stream(stream):
            work()
            return self._record(stream)

    def drain(self, way: Way) -> None:
        self._streams[way].synchronize()

    def _record(self, stream: Any) -> Event:
        # one that is waited for asleep: a thread that spins takes the GIL's turn and a core
        event: Event = stream.record_event(self._cuda.Event(blocking=True))
        return event


def streams_of(device: Any) -> Device | None:
    """The streams of a torch device; None for host memory, whose copies need none."""
    if device.type != "cuda":
        return None
    index = device.index
    return _cuda_device(_torch().cuda.current_device() if index is None else index)


@functools.cache
def _cuda_device(index: int) -> CudaDevice:
    return CudaDevice(_torch().device("cuda", index))


def on_device(buffer: object) -> bool:
    """Is it a torch tensor of a CUDA device?"""
    torch = loaded_torch()
    return torch is not None and isinstance(buffer, torch.Tensor) and bool(buffer.is_cuda)


def loaded_torch() -> Any:
    """torch if it has been imported, to the end: another thread may be at it."""
    torch = sys.modules.get("torch")
    spec = getattr(torch, "__spec__", None)
    return None if getattr(spec, "_initializing", False) else torch


def as_tensor(buffer: Any) -> Any:
    """A buffer as a torch tensor (read-only ones are copied, of which torch would warn)."""
    torch = _torch()
    if isinstance(buffer, torch.Tensor):
        return buffer
    array = np.frombuffer(buffer, np.uint8) if isinstance(buffer, memoryview) else buffer
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def copy_pairs(way: Way, pairs: Iterable[tuple[Any, Any]]) -> None:
    """Copy between tensors of a device and others, of the host or of it: `work` of a `Device`."""
    with _torch().inference_mode():  # tensors that were made in it refuse to be changed elsewhere
        for device, other in pairs:
            if way == "in":
                device.copy_(other, non_blocking=True)
            else:
                other.copy_(device, non_blocking=True)


def carry_out(streams: Device, way: Way, work: Callable[[], object]) -> None:
    """Have `work` done, and wait for the end: also where something is raised, an interrupt
    included, nothing of it runs any more.

    Raises RuntimeError if the device fails.
    """
    try:
        streams.run(way, work).synchronize()
    except BaseException:
        with suppress(RuntimeError):
            streams.drain(way)
        raise


def on_stream(way: Way, device: Any, work: Callable[[], object]) -> None:
    """`carry_out` on a torch device."""
    streams = streams_of(device)
    assert streams is not None
    carry_out(streams, way, work)


def copy_blocks(way: Way, device: Buffers, host: Buffers) -> None:
    """Copy between tensors of a device and as many buffers of the host, and wait for the end.

    Raises RuntimeError if the device fails.
    """
    pairs = list(zip(device, map(as_tensor, host), strict=True))
    on_stream(way, device[0].device, functools.partial(copy_pairs, way, pairs))


def mark_caller(tensor: Any) -> Event:
    """The point behind all that is queued on the calling thread's current stream of the tensor's
    device."""
    streams = streams_of(tensor.device)
    assert streams is not None
    return streams.mark()


def device_tensor(shape: Sequence[int], dtype: Any, device: Any, streams: Device | None) -> Any:
    """An empty tensor that side streams may use at once: its memory may have been another's, in
    which kernels of the current stream still work. Raises RuntimeError if there is no room."""
    tensor = _torch().empty(tuple(shape), dtype=dtype, device=device)
    if streams is not None:
        streams.mark().synchronize()
    return tensor


def cuda_present() -> bool:
    """True if torch can use a CUDA device. Imports torch only where a driver is loaded."""
    if "torch" not in sys.modules and not (
        os.path.exists("/dev/nvidiactl") and importlib.util.find_spec("torch")
    ):
        return False
    return bool(_torch().cuda.is_available())


def current_device() -> int | None:
    """The CUDA device of the calling thread; None as long as the process uses none.

    To be handed to what runs on other threads: those begin with device 0, and would take
    memory of it for nothing.
    """
    torch = loaded_torch()
    if torch is None or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.current_device())


def page_lock(address: int, nbytes: int, device: int | None) -> bool:
    """Lock host memory for copies to and from CUDA devices, in the context of one of them;
    False where there is none, or where it fails, which is logged. Undo with `page_unlock` before
    the memory is freed."""
    return cuda_present() and _registration(
        device, lambda cudart: cudart.cudaHostRegister(address, nbytes, 0)
    )


def page_unlock(address: int, device: int | None) -> None:
    _registration(device, lambda cudart: cudart.cudaHostUnregister(address))


def _registration(device: int | None, call: Callable[[Any], Any]) -> bool:
    """On a thread of its own: CUDA remembers an error for the thread, and torch would find it
    behind the next kernel that the thread launches."""
    codes: list[int] = []

    def run() -> None:
        cuda = _torch().cuda
        try:
            with cuda.device(device):
                codes.append(int(call(cuda.cudart())))
        except RuntimeError as error:  # no context, for want of memory or after a fork
            log.warning("CUDA host memory registration: %s", error)

    thread = threading.Thread(target=run, name="tieredkv-page-lock", daemon=True)
    thread.start()
    thread.join()
    if codes and codes[0]:
        log.warning("CUDA host memory registration: error %d", codes[0])
    return codes == [0]


def host_tensor(count: int, dtype: Any, device: Any) -> Any:
    """A tensor of the CPU for copies to and from a torch device, page-locked if that is CUDA's."""
    torch = _torch()
    if device.type != "cuda":
        return torch.empty(count, dtype=dtype)
    with torch.cuda.device(device):
        return torch.empty(count, dtype=dtype, pin_memory=True)


def _torch() -> Any:
    return importlib.import_module("torch")
