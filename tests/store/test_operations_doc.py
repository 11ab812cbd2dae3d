"""docs/operations.md names exactly the metrics and the log lines that there are."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest

from tieredkv import Config, Fingerprint, Outcome, TieredKVStore, chain_keys

DOC = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


def test_metrics_and_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    config = Config.model_validate(
        {"block_tokens": 16, "tiers": [{"kind": "dram", "capacity": "1MiB"}]}
    )
    keys = chain_keys(range(64), block_tokens=16)
    with (
        caplog.at_level(logging.INFO, "tieredkv.metrics"),
        TieredKVStore(config, Fingerprint("m")) as store,
    ):
        assert store.put(keys, np.zeros((4, 64), np.uint8)) == [Outcome.OK] * 4
        assert store.get(keys, np.zeros((4, 64), np.uint8)) == [Outcome.OK] * 4
        samples = {
            metric.name: {label for sample in metric.samples for label in sample.labels} - {"le"}
            for metric in store.metrics.registry.collect()
        }
    rows = re.findall(r"^\| `(tieredkv:\w+)` \| ([\w, ]*) ?\|", DOC, re.MULTILINE)
    documented = {name: set(filter(None, re.split(r"[, ]+", labels))) for name, labels in rows}
    assert documented == samples
    lines = re.findall(r"^(?:stored|total) .*$", DOC, re.MULTILINE)
    shape = [re.sub(r"\d+(\.\d+)?", "N", line) for line in lines]
    logged = [re.sub(r"\d+(\.\d+)?", "N", record.getMessage()) for record in caplog.records]
    assert [logged[0], logged[1].replace("(dram N)", "(dram N, nvme N)")] == shape
