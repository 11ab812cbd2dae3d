"""`tieredkv doctor` as a user calls it, on real directories, ports and files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tieredkv.cli.app import app
from tieredkv.config import Config, MooncakeConfig, NvmeConfig
from tieredkv.doctor import diagnose, disk, pool, system
from tieredkv.doctor.examine import examine
from tieredkv.doctor.finding import Check, Finding, State, ok
from tieredkv.tiers.mooncake.child import free_port
from tieredkv.tiers.nvme.directory import Directory
from tieredkv.tiers.nvme.engines import DirectEngine
from tieredkv.types import Fingerprint

MIB = 1 << 20


def run(*args: str, code: int = 0, **env: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TIEREDKV_", "MC_"))}
    done = subprocess.run(
        [sys.executable, "-m", "tieredkv.cli.app", "doctor", *args],
        env={**clean, "NO_COLOR": "1", **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def rows(*args: str, code: int = 0, **env: str) -> dict[str, dict[str, str]]:
    """By check; of several rows of a check the last."""
    answer = json.loads(run(*args, "--format", "json", code=code, **env))
    assert answer.keys() == {"ok", "findings"}
    assert answer["ok"] == (code == 0)
    for row in answer["findings"]:
        assert row.keys() == {"check", "state", "found", "remedy"}
        assert row["state"] in {"ok", "note", "warning", "problem"}
        assert row["found"]
        assert bool(row["remedy"]) == (row["state"] != "ok"), row
    return {row["check"]: row for row in answer["findings"]}


def states(findings: Iterable[Finding]) -> dict[str, State]:
    return {finding.check: finding.state for finding in findings}


def nvme(path: Path, **keys: Any) -> NvmeConfig:
    keys = {"capacity": 64 * MIB, "min_free": 0, **keys}
    (tier,) = Config(tiers=[{"kind": "nvme", "path": path, **keys}]).tiers  # type: ignore[arg-type]
    assert isinstance(tier, NvmeConfig)
    return tier


def mooncake(**keys: Any) -> MooncakeConfig:
    keys = {"master": f"127.0.0.1:{free_port()}", **keys}
    (tier,) = Config(tiers=[{"kind": "mooncake", **keys}]).tiers  # type: ignore[arg-type]
    assert isinstance(tier, MooncakeConfig)
    return tier


def last(findings: Iterable[Finding], check: str) -> Finding:
    return next(row for row in reversed(list(findings)) if row.check == check)


# The command


def test_without_a_configuration_the_machine_alone_is_looked_at() -> None:
    found = rows()
    assert found["configuration"]["state"] == "note"
    assert found["python"]["found"].endswith(sys.executable)
    assert {"kernel", "tieredkv", "torch", "gpu", "memory", "open files"} <= found.keys()
    assert not any(name.startswith("nvme") for name in found)


def test_a_good_configuration(tmp_path: Path) -> None:
    file, path = tmp_path / "c.yaml", tmp_path / "new" / "kv"
    file.write_text(
        "tiers: [{kind: dram, capacity: 1MiB},"
        f" {{kind: nvme, path: {path}, capacity: 2MiB, min_free: 0}}]"
    )
    found = rows(str(file))
    assert found["configuration"]["found"] == f"{file}: dram 1.0 MiB, nvme 2.0 MiB"
    assert f"to be created in {tmp_path}" in found["nvme path"]["found"]
    assert found["nvme space"]["state"] == "ok"
    assert found["memory"]["found"].endswith("the tiers take 1.0 MiB")
    assert list(tmp_path.iterdir()) == [file], "something was left"
    assert rows(TIEREDKV_CONFIG_FILE=str(file)).keys() == found.keys()


def test_the_table_names_check_state_finding_and_remedy(tmp_path: Path) -> None:
    lines = run(str(tmp_path / "no.yaml"), code=1).splitlines()
    assert lines[0].split() == ["check", "state", "found", "remedy"]
    assert lines[1].split(maxsplit=2)[:2] == ["configuration", "problem"]
    assert lines[1].rstrip().endswith("check the path")
    assert "1 problem" in lines[-1]


def test_each_mistake_in_a_configuration_is_a_problem(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("tiers: [{kind: dram, capacty: 1}]\nevents: -1")
    answer = json.loads(run(str(file), "--format", "json", code=1))
    mistakes = [row for row in answer["findings"] if row["check"] == "configuration"]
    assert [row["state"] for row in mistakes] == ["problem"] * 3
    assert any(row["remedy"].startswith("nearest valid key: 'capacity'") for row in mistakes)
    assert all(row["remedy"] and row["found"].startswith(f"file {file}: ") for row in mistakes)


def test_variables(tmp_path: Path) -> None:
    unknown = rows(code=1, TIEREDKV_PIN_TTLL="1", TIEREDKV_PIN_TTL="1", TIEREDKV_TIERS_0_PATH="x")
    assert unknown["environment"]["state"] == "ok", "that of other software"
    answer = json.loads(run("--format", "json", code=1, TIEREDKV_PIN_TTLL="1"))
    (row,) = [row for row in answer["findings"] if "TIEREDKV_PIN_TTLL" in row["found"]]
    assert row["state"] == "problem"
    assert row["remedy"].endswith("TIEREDKV_PIN_TTL")
    slow = rows(MOONCAKE_STORE_CHECKSUM="1")["environment"]
    assert (slow["state"], slow["found"]) == ("warning", "MOONCAKE_STORE_CHECKSUM=1")
    assert rows(MOONCAKE_STORE_CHECKSUM="0")["environment"]["state"] == "ok"
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"tiers": [{"kind": "dram", "capacity": 1}]}))
    found = rows(str(file), code=1, TIEREDKV_TIERS_0_PATH="x")["configuration"]
    assert found["found"].startswith("env TIEREDKV_TIERS_0_PATH")


@pytest.mark.parametrize("args", [("--format", "xml"), ("--nope",), ("a", "b")])
def test_wrong_usage_exits_2(args: tuple[str, ...]) -> None:
    assert run(*args, code=2) == "", "nothing that could be taken for findings"


def test_a_check_that_hangs_is_a_problem_and_the_others_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks = [
        Check("stuck", lambda: time.sleep(60) or [], 0.3),
        Check("good", lambda: [ok("good", found="it is")]),
    ]
    monkeypatch.setattr(diagnose, "checks", lambda config: iter(checks))
    result = CliRunner().invoke(app, ["doctor", "--format", "json"])
    assert result.exit_code == 1
    found = {row["check"]: row for row in json.loads(result.stdout)["findings"]}
    assert found["stuck"]["found"] == "no answer within 0.3 s"
    assert found["good"] == {"check": "good", "state": "ok", "found": "it is", "remedy": ""}


# An nvme tier's directory


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_path_that_is_a_file(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    row = last(disk.disk(nvme(tmp_path / place)), "nvme access")
    assert row.state is State.PROBLEM
    assert row.remedy == "choose a path that is a directory"
    assert (tmp_path / "file").read_text() == "mine"


def test_a_path_that_cannot_be_written() -> None:
    row = last(disk.disk(nvme(Path("/sys/kernel/kv"))), "nvme access")
    assert row.state is State.PROBLEM
    assert "choose another path" in row.remedy


def test_a_directory_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)

    def look() -> Iterator[Finding]:
        if os.geteuid() == 0:
            os.setuid(65534)
        yield from disk.disk(nvme(tmp_path / "closed" / "kv"))

    found = {row.check: row for row in examine([Check("look", look)])}
    assert "could not be checked" not in str(found)
    assert "Permission denied" in found["nvme access"].found
    assert found["nvme access"].state is State.PROBLEM
    assert "nvme use" not in found, "nobody knows"


def test_a_test_page_harms_no_file_and_stays_nowhere(tmp_path: Path) -> None:
    (tmp_path / "probe.tmp").write_text("mine")
    assert last(disk.disk(nvme(tmp_path)), "nvme access").state in (State.OK, State.WARNING)
    assert [path.name for path in tmp_path.iterdir()] == ["probe.tmp"]
    assert (tmp_path / "probe.tmp").read_text() == "mine"


@pytest.mark.parametrize(
    ("engine", "state"),
    [("auto", State.WARNING), ("direct", State.PROBLEM), ("portable", State.OK)],
)
def test_a_filesystem_that_refuses_o_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, state: State
) -> None:
    def refuse(self: DirectEngine, path: Path) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(DirectEngine, "open", refuse)
    row = last(disk.disk(nvme(tmp_path, engine=engine)), "nvme access")
    assert row.state is state
    assert row.found.startswith("the filesystem refuses" if engine == "direct" else "portable: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("asked", "got", "state"),
    [("auto", "gds", State.OK), ("gds", "gds", State.OK), ("gds", "compat", State.WARNING)],
)
def test_gpudirect_storage_in_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, got: str, state: State
) -> None:
    engine = SimpleNamespace(name=got, close=lambda: None)
    chosen = (engine, "no GPUDirect Storage: no nvidia-fs")
    monkeypatch.setattr("tieredkv.tiers.nvme.selection.select", lambda kind, path: chosen)
    row = last(disk.disk(nvme(tmp_path, engine=asked)), "nvme access")
    assert (row.state, row.found) == (state, f"{got}: no GPUDirect Storage: no nvidia-fs")
    assert "O_DIRECT" not in row.remedy


def test_space(tmp_path: Path) -> None:
    stat = os.statvfs(tmp_path)
    free = stat.f_bavail * stat.f_frsize
    fits = last(disk.disk(nvme(tmp_path)), "nvme space")
    assert fits.state is State.OK
    partly = last(disk.disk(nvme(tmp_path, capacity=free * 2)), "nvme space")
    assert partly.state is State.WARNING
    assert "stops growing at" in partly.remedy
    none = last(disk.disk(nvme(tmp_path, min_free=free * 2)), "nvme space")
    assert none.state is State.PROBLEM


@pytest.mark.parametrize("below", ["", "dp0"])
def test_who_uses_a_directory_is_told_without_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    assert "no model" in last(disk.disk(nvme(tmp_path)), "nvme use").found
    directory = Directory.open(tmp_path / below, Fingerprint(model="m"), 16)
    flock = fcntl.flock

    def only_unlock(fd: int, how: int) -> None:
        assert how == fcntl.LOCK_UN, "a lock was taken"
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", only_unlock)
    used = last(disk.disk(nvme(tmp_path)), "nvme use")
    assert used.state is State.NOTE
    assert f"in use by process {os.getpid()} " in used.found
    directory.close()
    free = last(disk.disk(nvme(tmp_path)), "nvme use")
    assert (free.state, free.found) == (State.OK, "1 models' directories, none in use")


def test_the_filesystem_of_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mountinfo").write_text(
        "22 1 0:1 / / rw - ext4 /dev/root rw\n"
        "23 22 0:2 / /mnt/a\\040b rw shared:1 - tmpfs none rw\n"
        "24 22 0:3 / /mnt rw - xfs /dev/nvme0n1 rw\n"
    )
    monkeypatch.setattr(system, "PROC", tmp_path)
    assert disk.mount_of(Path("/mnt/kv")) == ("xfs", "/dev/nvme0n1")
    assert disk.mount_of(Path("/mntx")) == ("ext4", "/dev/root")
    assert disk.mount_of(Path("/mnt/a b/kv")) == ("tmpfs", "none")


@pytest.mark.parametrize(("rotational", "state"), [("0", State.OK), ("1", State.NOTE)])
def test_a_partition_of_a_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rotational: str, state: State
) -> None:
    number = tmp_path.stat().st_dev
    drive = tmp_path / "devices" / "sdx"
    (drive / "sdx1").mkdir(parents=True)
    (drive / "queue").mkdir()
    (drive / "queue" / "rotational").write_text(f"{rotational}\n")
    link = tmp_path / f"dev/block/{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(drive / "sdx1")
    monkeypatch.setattr(system, "SYS", tmp_path)
    row = last(disk.disk(nvme(tmp_path)), "nvme device")
    assert (row.state, row.found.split()[0].rstrip(",")) == (state, "sdx")


# A mooncake tier


@contextmanager
def metrics(used: int, total: int) -> Iterator[str]:
    """A server that speaks like a master's metrics."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = f"master_allocated_bytes {used}\nmaster_total_capacity_bytes {total}\n"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_nobody_listens(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    dead = f"127.0.0.1:{free_port()}"
    file.write_text(f"tiers: [{{kind: mooncake, master: '{dead}', metrics: '{dead}'}}]")
    found = rows(str(file), code=1)
    assert found["mooncake master"]["state"] == "problem"
    assert dead in found["mooncake master"]["found"]
    assert found["mooncake metrics"]["state"] == "problem"
    assert "mooncake library" in found


def test_a_capacity_makes_metrics_dispensable() -> None:
    dead = f"127.0.0.1:{free_port()}"
    assert states(pool.master(mooncake(metrics=dead)))["mooncake metrics"] is State.PROBLEM
    given = mooncake(metrics=dead, capacity=MIB)
    assert states(pool.master(given))["mooncake metrics"] is State.WARNING


@pytest.mark.parametrize(
    ("total", "capacity", "state"),
    [
        (4 * MIB, 0, State.OK),
        (4 * MIB, 5 * MIB, State.WARNING),
        (0, 0, State.PROBLEM),
        (0, MIB, State.WARNING),
    ],
)
def test_a_master_that_answers(total: int, capacity: int, state: State) -> None:
    with metrics(MIB, total) as address, socket.create_server(("127.0.0.1", 0)) as listener:
        master = f"127.0.0.1:{listener.getsockname()[1]}"
        found = list(pool.master(mooncake(master=master, metrics=address, capacity=capacity)))
    assert states(found) == {"mooncake master": State.OK, "mooncake metrics": state}
    assert "1.0 MiB of" in last(found, "mooncake metrics").found


def test_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    (row,) = pool.library(mooncake())
    assert row.state is State.PROBLEM
    assert "apt-get install libibverbs1" in row.remedy
    assert "pip install 'tieredkv[mooncake]'" in row.remedy


def test_rdma_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "SYS", tmp_path)
    monkeypatch.setenv("MC_FORCE_HCA", "1")
    wants = {"protocol": "rdma", "devices": "mlx5_0, mlx5_1"}
    assert list(pool.rdma(mooncake())) == [], "nothing of it over TCP"
    assert states(pool.rdma(mooncake(protocol="rdma"))) == {"mooncake rdma": State.PROBLEM}
    for name in ("mlx5_0", "mlx5_1"):
        port = tmp_path / "class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text("1: DOWN\n")
    assert "no port" in last(pool.rdma(mooncake(**wants)), "mooncake rdma").found
    (port / "state").write_text("4: ACTIVE\n")
    assert states(pool.rdma(mooncake(**wants))) == {"mooncake rdma": State.OK}
    missing = mooncake(protocol="rdma", devices="mlx5_2")
    assert states(pool.rdma(missing)) == {"mooncake rdma": State.PROBLEM}
    monkeypatch.delenv("MC_FORCE_HCA")
    unforced = last(pool.rdma(mooncake(**wants)), "mooncake rdma")
    assert (unforced.state, unforced.found) == (State.WARNING, "MC_FORCE_HCA is not 1")
