"""What users may pass as blocks, and taking buffers away from late workers."""

from __future__ import annotations

import array
import os
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredkv.buffers import RevocableViews, view_blocks
from tieredkv.errors import BlockSizeError, UsageError
from tieredkv.tiers.dram import DramTier
from tieredkv.types import Batch, Outcome

SIZE = 256
DTYPES = [torch.uint8, torch.bool, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64]


def rows(blocks: Any) -> list[bytes]:
    return [bytes(block) for block in blocks.buffers]


def payload(count: int) -> list[bytes]:
    return [bytes([i]) * SIZE for i in range(1, count + 1)]


@pytest.mark.parametrize(
    "wrap",
    [
        bytes,
        bytearray,
        memoryview,
        lambda b: memoryview(b).cast("d"),
        lambda b: memoryview(b).cast("B", (4, SIZE // 4)),
        lambda b: array.array("i", b),
        lambda b: np.frombuffer(b, np.float16).reshape(2, -1),
        lambda b: np.frombuffer(b, np.dtype("u4,f4")),
        lambda b: torch.frombuffer(bytearray(b), dtype=torch.bfloat16),
        lambda b: torch.frombuffer(bytearray(b), dtype=torch.float32).view(8, 8).requires_grad_(),
    ],
)
def test_one_buffer_per_block(wrap: Any) -> None:
    blocks = view_blocks([wrap(b) for b in payload(3)], 3, writable=False)
    assert (len(blocks), blocks.block_bytes) == (3, SIZE)
    assert rows(blocks) == payload(3)


@pytest.mark.parametrize(
    "stack",
    [
        b"".join(payload(4)),
        bytearray(b"".join(payload(4))),
        memoryview(b"".join(payload(4))).cast("B", (4, SIZE)),
        np.frombuffer(b"".join(payload(4)), np.uint8).reshape(4, -1),
        np.frombuffer(b"".join(payload(4)), np.float32).reshape(4, 2, -1),
        np.frombuffer(b"".join(payload(4)), np.uint8).reshape(16, -1),
        torch.frombuffer(bytearray(b"".join(payload(4))), dtype=torch.bfloat16).view(4, 2, -1),
    ],
    ids=["bytes", "bytearray", "2-D memoryview", "u8", "f32", "token-major", "bf16 tensor"],
)
def test_one_stack(stack: Any) -> None:
    blocks = view_blocks(stack, 4, writable=False)
    assert isinstance(blocks.buffers, np.ndarray)
    assert blocks.buffers.shape == (4, SIZE)
    assert rows(blocks) == payload(4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stacked", [True, False])
def test_tensors_are_filled_in_place(dtype: torch.dtype, stacked: bool) -> None:
    out = torch.zeros((3, 4, 16), dtype=dtype)
    blocks = view_blocks(out if stacked else list(out), 3, writable=True)
    for i, buffer in enumerate(blocks.buffers):
        buffer[:] = np.full(blocks.block_bytes, i % 2, np.uint8)
    expected = [bytes([i % 2]) * blocks.block_bytes for i in range(3)]
    assert [bytes(t.view(torch.uint8).numpy()) for t in out] == expected


@pytest.mark.parametrize("make", [bytearray, lambda n: np.zeros(n, np.uint8)])
def test_host_buffers_are_filled_in_place(make: Any) -> None:
    out = [make(SIZE) for _ in range(2)]
    for buffer in view_blocks(out, 2, writable=True).buffers:
        buffer[:] = np.full(SIZE, 7, np.uint8)
    assert all(bytes(b) == b"\7" * SIZE for b in out)


def test_no_blocks() -> None:
    for nothing in ([], (), b"", np.empty((0, 16), np.uint8)):
        blocks = view_blocks(nothing, 0, writable=False)
        assert (len(blocks), blocks.block_bytes) == (0, 0)


def test_one_block_may_have_any_shape() -> None:
    assert view_blocks(np.zeros((3, 5), np.uint8), 1, writable=False).block_bytes == 15


@pytest.mark.parametrize(
    ("buffers", "count", "names"),
    [
        ([b"ab"], 2, "1 buffers for 2 keys"),
        ([b"ab", b"abc"], 2, "block 1 has 3 bytes"),
        ([b"", b""], 2, "0 bytes"),
        (b"", 1, "0 bytes"),
        (b"abc", 2, "3 bytes"),
        (b"abc", 0, "0 blocks"),
        (np.zeros((5, 4096), np.uint8), 4, "(5, 4096)"),
        (torch.zeros((5, 4096)), 4, "(5, 4096)"),
    ],
)
def test_wrong_sizes(buffers: Any, count: int, names: str) -> None:
    with pytest.raises(BlockSizeError) as error:
        view_blocks(buffers, count, writable=False)
    assert names in str(error.value)


@pytest.mark.parametrize(
    ("buffers", "count", "names"),
    [
        ([b"ok", np.zeros((4, 4), np.uint8)[:, :2]], 2, "block 1"),
        (np.zeros((4, 4), np.uint8).T, 4, "the stack"),
        ([memoryview(bytes(8))[::2]], 1, "contiguous"),
        (torch.zeros(4, 4).T, 4, "contiguous"),
        (torch.zeros((4, 4), device="meta"), 4, "dense"),
        ([3, 4], 2, "block 0 is a int"),
        (["text"], 1, "block 0 is a str"),
        ("text", 4, "str"),
        (7, 1, "int"),
        (iter([b"ab"]), 1, "iterator"),
        (np.array([None, None]), 2, "Python objects"),
    ],
)
def test_unusable_buffers(buffers: Any, count: int, names: str) -> None:
    with pytest.raises(UsageError) as error:
        view_blocks(buffers, count, writable=False)
    assert names in str(error.value)


@pytest.mark.parametrize(
    "buffer", [bytes(8), memoryview(bytes(8)), np.frombuffer(bytes(8), np.uint8)]
)
def test_read_only_targets_are_refused(buffer: Any) -> None:
    for buffers in (buffer, [buffer]):
        with pytest.raises(UsageError, match="read-only"):
            view_blocks(buffers, 1, writable=True)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 64), st.booleans(), st.data())
def test_any_stack_round_trips_through_a_tier(
    count: int, size: int, listed: bool, data: st.DataObject
) -> None:
    raw = data.draw(st.binary(min_size=count * size, max_size=count * size))
    slots = data.draw(st.permutations(range(8)))[:count]
    tier = DramTier("dram", 8 * size, size, pin="off")
    batch = Batch(slots, [b"k"] * count, [1] * count)
    source: Any = [raw[i * size : (i + 1) * size] for i in range(count)] if listed else raw
    out = bytearray(count * size)
    written = tier.write(batch, view_blocks(source, count, writable=False).buffers)
    read = tier.read(batch, view_blocks(out, count, writable=True).buffers)
    tier.close()
    assert written == read == [Outcome.OK] * count
    assert bytes(out) == raw


def test_cost_per_block() -> None:
    stack = np.zeros((4096, 64), np.uint8)
    listed = [memoryview(row) for row in stack]

    def best(buffers: Any) -> float:
        times = []
        for _ in range(7):
            begin = time.perf_counter()
            view_blocks(buffers, 4096, writable=False)
            times.append(time.perf_counter() - begin)
        return min(times)

    assert best(listed) / 4096 < 4e-6  # 0.6 us on a quiet machine
    assert best(stack) < best(listed) / 50


@pytest.mark.parametrize("kind", ["list of bytearray", "list of arrays", "stack"])
def test_revoked_views_cannot_be_used(kind: str) -> None:
    memory = np.zeros((3, SIZE), np.uint8)
    out = {
        "list of bytearray": [bytearray(SIZE) for _ in range(3)],
        "list of arrays": list(memory),
        "stack": memory,
    }[kind]
    views = RevocableViews(view_blocks(out, 3, writable=True).buffers)
    views[1][:2] = b"hi"
    assert bytes(out[1][:2]) == b"hi"
    assert views.revoke() == 0
    for view in views:
        with pytest.raises(ValueError, match="released"):
            view[:2] = b"no"
    assert views.revoke() == 0


@pytest.mark.parametrize("derive", [lambda v: v[4:], lambda v: np.frombuffer(v, np.uint8)])
def test_derived_views_count_as_in_use(derive: Any) -> None:
    out = [bytearray(SIZE) for _ in range(3)]
    views = RevocableViews(view_blocks(out, 3, writable=True).buffers)
    late = [derive(views[1])]
    assert views.revoke() == 1
    assert views.revoke() == 1
    late.clear()
    assert views.revoke() == 0


@pytest.mark.parametrize("derive", [lambda v: v, lambda v: v[: SIZE // 2]], ids=["whole", "slice"])
def test_a_view_inside_a_system_call_counts_as_in_use(derive: Any) -> None:
    reader, writer = os.pipe()
    out = [bytearray(SIZE) for _ in range(2)]
    views = RevocableViews(view_blocks(out, 2, writable=True).buffers)
    worker = threading.Thread(target=lambda: os.readv(reader, [derive(views[0])]), daemon=True)
    worker.start()
    assert _wait_asleep(worker)
    assert views.revoke() == 1
    os.write(writer, b"x" * SIZE)
    worker.join(10)
    assert views.revoke() == 0
    assert out[1] == bytearray(SIZE)
    os.close(reader)
    os.close(writer)


def _wait_asleep(thread: threading.Thread) -> bool:
    """True once the kernel has seen the thread sleep five times in a row."""
    asleep = 0
    for _ in range(1000):
        time.sleep(0.01)
        with open(f"/proc/self/task/{thread.native_id}/stat") as stat:
            state = stat.read().rpartition(")")[2].split()[0]
        asleep = asleep + 1 if state == "S" else 0
        if asleep == 5:
            return True
    return False


def test_read_only_sources_are_revocable() -> None:
    views = RevocableViews(view_blocks([b"ab", b"cd"], 2, writable=False).buffers)
    assert bytes(views[0]) == b"ab"
    assert views[0].readonly
    assert views.revoke() == 0
