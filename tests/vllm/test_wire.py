"""What ranks report, and how it adds up. No engine."""

from __future__ import annotations

import itertools

import pytest

from tieredkv.connector.wire import Hello, Report, WorkerMetadata, worst
from tieredkv.types import Outcome

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
