"""The benches run, on sizes that say nothing: so that they cannot rot."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from benches import __main__ as cli
from benches import control, dram, gpu, index, nvme, recovery
from benches.common import Result

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIEREDKV_BENCH_DIR", str(tmp_path))


def judged(results: Iterator[Result]) -> dict[str, Result]:
    """All results by name, each with a finite figure and a verdict where there is a bar."""
    found = {}
    for result in results:
        assert math.isfinite(result.value), result.metric
        assert (result.ok is None) == (result.bar is None), result.metric
        assert result.metric not in found
        found[result.metric] = result
    return found


def test_index() -> None:
    size = index.Size(resident=2_048, chain=500, evictions=2_048, timed=8, samples=9, worlds=1)
    found = judged(index.run(size))
    for name in ("lookup", "pin+unpin", "store.lookup", "store.pin+unpin"):
        assert {f"index.{name}.1run", f"index.{name}.20run"} <= found.keys()
    assert {"index.insert+evict", "index.insert+evict.worst"} <= found.keys()
    assert {"index.memory.fresh", "index.memory.churned"} <= found.keys()
    beside = {f"index.{name}.vllm" for name in ("lookup", "load", "insert+evict")}
    assert beside & found.keys() == (beside if find_spec("vllm") else set())


def test_control() -> None:
    found = judged(control.run(control.Size(contexts=(1 << 10, 1 << 12), samples=3)))
    for label in ("planner", "store"):
        assert {f"control.{label}.turn.{c}" for c in ("1Ki", "4Ki", "4Ki/1Ki")} <= found.keys()


def test_dram() -> None:
    size = dram.Size((128 * KIB, MIB), MIB, 8 * MIB, 4 * MIB, 2 * MIB, pairs=2)
    found = judged(dram.run(size))
    assert {
        "dram.store.put.128KiB.overhead",
        "dram.store.get.single.1MiB.one_thread",
    } <= found.keys()
    assert all(result.value > 0 for name, result in found.items() if "overhead" not in name)


@pytest.mark.parametrize("tool", ["fio", "loop"])
def test_nvme(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if tool == "loop":
        monkeypatch.setattr("shutil.which", lambda name: None)
    elif shutil.which("fio") is None:
        assert "CI" not in os.environ, ".ci/run installs fio"
        pytest.skip("fio is not installed")
    size = nvme.Size(blocks=(64 * KIB,), volume=2 * MIB, call=256 * KIB, stores=2, pairs=2)
    found = judged(nvme.run(size))
    assert found.keys() == {"nvme.put.64KiB", "nvme.get.64KiB", "nvme.put.through.64KiB"}
    assert all(result.value > 0 and (result.reference or 0) > 0 for result in found.values())


def test_recovery_finds_every_block(tmp_path: Path) -> None:
    found = judged(recovery.run(recovery.Size(blocks=1_000, samples=2)))
    assert found.keys() == {"recovery.open"}
    assert not list(tmp_path.iterdir())


def test_all_means_every_bench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one() -> Iterator[Result]:
        yield Result("m", 1.0, "s", None, None, 2.0, True, 1, (1.0, 1.0))

    for name in cli.names():
        monkeypatch.setattr(f"benches.{name}.run", one)
    assert cli.main(["all", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["metric"] for line in lines] == ["m"] * len(cli.names())
    assert {"control", "dram", "index", "keys", "nvme", "recovery"} <= set(cli.names())


def test_gpu() -> None:
    size = gpu.Size(block=256 * KIB, blocks=8, layers=4, per_chunk=4, pairs=2)
    found = judged(gpu.run(size))
    moves = {
        f"gpu.{tier}.{layout}.{way}"
        for tier in ("dram", "nvme.direct")
        for layout in ("blocks", "layers")
        for way in ("save", "load")
    }
    assert moves | {"gpu.hbm.put", "gpu.hbm.get", "gpu.nh.host"} <= {
        m.removesuffix(".cpu") for m in found
    }


def test_what_gdsio_prints() -> None:
    text = (
        "IoType: READ XferType: GPUD Threads: 8 DataSetSize: 262144/262144(KiB) IOSize: 1024(KiB) "
        "Throughput: 6.250000 GiB/sec, Avg_Latency: 1250.1 usecs ops: 256 total_time 0.04 secs"
    )
    assert gpu.gdsio_rate(text) == pytest.approx(6.7109, rel=1e-4)
    with pytest.raises(ValueError, match="cannot open"):
        gpu.gdsio_rate("cannot open the file")
