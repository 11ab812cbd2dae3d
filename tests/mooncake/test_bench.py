"""The bench of the pool runs, on a size that says nothing: so that it cannot rot."""

from __future__ import annotations

import math

from benches import __main__ as cli
from benches import mooncake
from tests.mooncake.pool import MIB


def test_each_figure_is_compared_with_memcpy_and_with_the_library() -> None:
    size = mooncake.Size(batches=((MIB, (1, 4)),), volume=4 * MIB, repetitions=2)
    found = {result.metric: result for result in mooncake.run(size)}
    assert found.keys() == {
        f"mooncake.{place}.{way}.1MiB.x{batch}{reference}"
        for place in ("local", "remote")
        for way in ("put", "get")
        for batch in (1, 4)
        for reference in ("", ".bare", ".checked")
    }
    for metric, result in found.items():
        assert math.isfinite(result.value), metric
        assert result.value > 0, metric
        assert (result.reference or 0) > 0, metric
        assert (result.ok is None) == (not metric.endswith(".bare")), metric


def test_it_is_one_of_the_benches() -> None:
    assert "mooncake" in cli.names()
