"""What ranks report, and how it adds up. No engine."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest
import torch

from tieredkv.connector.layout import PagedBlocks, PagedCache
from tieredkv.connector.wire import Hello, Report, WorkerMetadata, worst
from tieredkv.errors import UsageError
from tieredkv.types import Batch, Outcome

OK, BUSY, MISSING = Outcome.OK, Outcome.BUSY, Outcome.MISSING
FAILED, CORRUPT = Outcome.FAILED, Outcome.CORRUPT


def test_a_block_is_as_bad_as_on_its_worst_rank() -> None:
    for one, other in itertools.product(Outcome, Outcome):
        (both,) = worst([one], [other])
        assert both in (one, other)
        assert (both is OK) == (one is other is OK)
        assert worst([other], [one]) == [both]
    with pytest.raises(ValueError, match="zip"):
        worst([OK], [OK, OK])


def test_reports_add_up_in_any_order() -> None:
    told = [
        WorkerMetadata({1: Report([OK, OK], [OK, OK])}, [Hello(8, [], 1)], {7: 1}, {3}, [4, 9]),
        WorkerMetadata({1: Report([OK, CORRUPT], [OK, CORRUPT]), 2: Report([], [BUSY])}),
        WorkerMetadata(
            {1: Report([FAILED, OK], [FAILED, OK])}, [Hello(9, [], 2)], {7: 1}, {5}, [5, 3]
        ),
    ]
    for order in itertools.permutations(told):
        total = order[0]
        for other in order[1:]:
            total = total.aggregate(other)
        one = total.reports[1]
        assert (one.read, one.write) == ([FAILED, CORRUPT],) * 2
        assert (one.ranks, one.holding) == (3, 3)
        assert total.reports[2].ranks == 1
        assert total.late == {3, 5}
        assert {hello.chunk_bytes for hello in total.hellos} == {8, 9}
        assert total.released == {7: 2}
        assert total.slots == [4, 3]
    assert told[1].slots is None


def cache(blocks: int = 6) -> tuple[Any, list[torch.Tensor]]:
    """Two layers, each with keys and values apart, and three engine blocks to a chunk."""
    drawn = torch.Generator().manual_seed(3)
    tensors = [torch.randn(2, blocks, 4, 8, generator=drawn) for _ in range(2)]
    return PagedCache(tensors, blocks, 3), tensors


def batch(*slots: int) -> Batch:
    return Batch(list(slots), [b""] * len(slots), [0] * len(slots))


def test_a_chunk_comes_back_into_other_blocks_and_nothing_else_changes() -> None:
    """A22: blocks that are not wanted are left alone at both ends."""
    paged, tensors = cache()
    chunk = np.zeros(paged.chunk_bytes, np.uint8)
    paged.gather([5, 0, 3], chunk)
    for wanted in ([1, 2, 4], [-1, 2, 4], [1, 2, -1], [-1, 2, -1]):
        before = [t.clone() for t in tensors]
        paged.scatter(wanted, chunk)
        for old, new in zip(before, tensors, strict=True):
            for block in range(6):
                source = dict(zip(wanted, [5, 0, 3], strict=True)).get(block, block)
                assert torch.equal(new[:, block], old[:, source])
            new.copy_(old)


def test_no_copy_begins_after_blocks_were_taken_away() -> None:
    paged, tensors = cache()
    blocks = PagedBlocks(paged, [[1, 2, 4]], None)
    before = [t.clone() for t in tensors]
    assert blocks.revoke()
    rows = [np.full(paged.chunk_bytes, 7, np.uint8)]
    assert blocks.write(batch(0), rows) == [BUSY]
    assert blocks.read(batch(0), rows) == [BUSY]
    assert (rows[0] == 7).all()
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


def test_blocks_are_not_given_up_under_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    paged, _ = cache()
    blocks = PagedBlocks(paged, [[1, 2, 4]], None)
    inside, go_on = threading.Event(), threading.Event()
    scatter = paged.scatter

    def slow(*args: Any) -> None:
        inside.set()
        assert go_on.wait(20)
        scatter(*args)

    monkeypatch.setattr(paged, "scatter", slow)
    found: list[Outcome] = []
    chunk = np.zeros(paged.chunk_bytes, np.uint8)
    thread = threading.Thread(target=lambda: found.extend(blocks.write(batch(0), [chunk])))
    thread.start()
    assert inside.wait(20)
    assert not blocks.revoke()
    go_on.set()
    thread.join(20)
    assert blocks.revoke()
    assert found == [OK]


def test_a_copy_that_raises_ends() -> None:
    paged, _ = cache()
    blocks = PagedBlocks(paged, [[1, 2, 4]], None)
    with pytest.raises(ValueError):  # noqa: PT011  numpy's own words
        blocks.write(batch(0), [np.zeros(3, np.uint8)])
    assert blocks.revoke()


def test_tensors_that_are_not_understood_are_refused() -> None:
    with pytest.raises(UsageError, match="no dimension of 6"):
        PagedCache([torch.zeros(5, 4)], 6, 1)
    with pytest.raises(UsageError, match="scatters"):
        PagedCache([torch.zeros(6, 4, 8)[:, :, ::2]], 6, 1)
