"""The processes of a pool on one machine, and the command that runs them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import yaml

from tests.mooncake.pool import (
    CLIENT_TTL,
    LOCALHOST,
    MIB,
    SIZE,
    Master,
    Owner,
    await_capacity,
    await_true,
    keeps_bytes,
    make_master,
    require,
)
from tieredkv.config import Config, MooncakeConfig
from tieredkv.doctor import pool as doctor
from tieredkv.doctor.finding import State
from tieredkv.errors import ConfigError, TieredKVError, UsageError
from tieredkv.tiers.mooncake import child
from tieredkv.tiers.mooncake.processes import free_port

ROOT = Path(__file__).parents[2]
PROGRAMS = {"mooncake_master", "mooncake_client"}


@contextmanager
def listening() -> Iterator[int]:
    """A port that somebody else has."""
    with socket.socket() as other:
        other.bind((LOCALHOST, 0))
        other.listen()
        yield other.getsockname()[1]


def running(pid: int) -> bool:
    """Neither gone nor a zombie, which nobody here may be there to collect."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# Master and owner


def test_a_master_is_ready_when_it_serves_and_stops_by_itself() -> None:
    master = make_master()
    master.start()
    master.ready()
    assert master.is_ready()
    assert master.capacity() == 0
    with pytest.raises(KeyError):
        master.metric("no_such_metric")
    master.stop()
    assert not master.alive
    assert master.returncode == 0, "it was killed"
    with pytest.raises(OSError, match="refused"):
        master.capacity()


def test_the_doctor_on_a_pool(master: Master, owner: Owner) -> None:
    metrics = f"{master.host}:{master.metrics_port}"
    spec = MooncakeConfig(kind="mooncake", master=master.address, metrics=metrics)
    library, port, usage = *doctor.library(spec), *doctor.master(spec)
    assert {library.state, port.state, usage.state} == {State.OK}
    assert usage.found == f"{metrics}: 0 bytes of 64.0 MiB in use"


def test_the_capacity_of_owners_adds_up_and_they_keep_bytes(master: Master, owner: Owner) -> None:
    keeps_bytes(master.address)
    with Owner(master.address, 16 * MIB + 1):
        await_capacity(master, SIZE + 16 * MIB + 1)
        keeps_bytes(master.address)
    await_capacity(master, SIZE, CLIENT_TTL + 8)
    assert owner.alive


def test_a_killed_master_comes_back_at_its_port_and_its_owner_finds_it(
    master: Master, owner: Owner
) -> None:
    before = master.pid, master.address
    master.kill()
    assert master.returncode == -signal.SIGKILL
    with pytest.raises(TieredKVError, match="mooncake_master ended with -9"):
        master.ready()
    master.restart()
    assert master.address == before[1]
    assert master.pid != before[0]
    await_capacity(master, SIZE)
    keeps_bytes(master.address)
    assert owner.alive


def test_a_running_master_restarts(master: Master) -> None:
    before = master.pid
    master.restart()
    assert master.is_ready()
    assert master.pid != before
    assert not running(before)


def test_a_frozen_master_is_alive_but_not_ready(master: Master) -> None:
    master.freeze()
    assert master.alive
    assert not master.is_ready()
    with pytest.raises(TieredKVError, match=r"not ready after 0.1 s; .*master.log ends: I.*master"):
        master.ready(0.1)
    with pytest.raises(OSError, match="timed out"):
        master.capacity()
    master.thaw()
    master.ready()


def test_a_frozen_owner_is_forgotten_and_found_again(master: Master, owner: Owner) -> None:
    owner.freeze()
    assert await_capacity(master, 0, CLIENT_TTL + 8) > CLIENT_TTL / 2
    owner.thaw()
    await_capacity(master, SIZE)


def test_a_killed_owner_starts_again(master: Master, owner: Owner) -> None:
    owner.kill()
    assert owner.returncode == -signal.SIGKILL
    owner.restart()
    # The master counts the dead one until its time is over.
    await_capacity(master, 2 * SIZE)
    await_capacity(master, SIZE, CLIENT_TTL + 8)
    keeps_bytes(master.address)


def test_what_is_frozen_is_stopped_all_the_same(master: Master) -> None:
    with Owner(master.address, SIZE) as owner:
        owner.freeze()
        owner.stop()
        assert not owner.alive
    owner.kill()  # once more
    with make_master() as frozen:  # it handles SIGTERM, and cannot
        frozen.freeze()
        start = time.monotonic()
        frozen.stop(0.5)
        assert 0.5 <= time.monotonic() - start < 5
        assert frozen.returncode == -signal.SIGKILL


def test_calls_in_the_wrong_order() -> None:
    master = make_master()
    assert not master.alive
    master.stop()  # nothing to stop
    for call in (lambda: master.pid, master.ready, master.freeze):
        with pytest.raises(UsageError, match="never started"):
            call()
    with master, pytest.raises(UsageError, match="is running"):
        master.start()


def test_a_taken_port_is_named(master: Master) -> None:
    with listening() as port:
        for process in (
            Master(port),
            Master(metrics_port=port),
            Owner(master.address, SIZE, port),
        ):
            with pytest.raises(ConfigError, match=rf"port {port} of .* in use"):
                process.start()
            assert not process.alive


@pytest.mark.parametrize("size", [0, 16 * MIB - 1, 1 << 60])
def test_a_wrong_size_is_named(size: int) -> None:
    with pytest.raises(ConfigError, match=rf"{size:,} bytes.*16 MiB"):
        Owner(f"{LOCALHOST}:1", size)


def test_the_log_says_why_an_owner_did_not_start(tmp_path: Path) -> None:
    dead = f"{LOCALHOST}:{free_port()}"
    owner = Owner(dead, SIZE, log=tmp_path / "owner.log")
    with pytest.raises(TieredKVError, match=r"ended with -6; .*Failed to setup client"), owner:
        pytest.fail("an owner without a master is ready")
    nowhere = Owner(dead, SIZE, log=tmp_path / "no" / "owner.log")
    with pytest.raises(ConfigError, match=r"log .*/no/owner.log: No such file"):
        nowhere.start()


def test_a_missing_package_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match=r"mooncake_master is not in .*pip install 'tieredkv"):
        make_master().start()


def test_a_missing_shared_library_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Away from its package the program does not find what it is linked with."""
    moved = shutil.copy(child.binary("mooncake_client"), tmp_path)
    monkeypatch.setattr(child, "binary", lambda name: moved)
    owner = Owner(f"{LOCALHOST}:1", SIZE, log=tmp_path / "log")
    words = r"shared library; .*cannot open shared object file.*: apt-get install libibverbs1"
    with pytest.raises(ConfigError, match=words), owner:
        pytest.fail("it is ready")


def test_no_child_outlives_a_killed_parent(master: Master) -> None:
    code = (
        "import sys\n"
        "from tieredkv.tiers.mooncake.processes import Owner\n"
        f"owners = [Owner({master.address!r}, {SIZE}) for _ in range(2)]\n"
        "for owner in owners:\n"
        "    owner.start()\n"
        "    owner.ready()\n"
        "owners[1].freeze()\n"
        "print(*(owner.pid for owner in owners), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(running, pids))
        parent.kill()
    await_true("the owners are dead", lambda: not any(map(running, pids)))


def test_the_units_of_the_documentation_run(tmp_path: Path) -> None:
    """Their programs and options, with addresses and a size for one machine."""
    port, metrics, own = free_port(), free_port(), free_port()
    local = {
        "/opt/tieredkv/bin/": f"{Path(sys.executable).parent}/",
        "50051": str(port),
        "9003": str(metrics),
        "50052": str(own),
        "10.0.0.1": LOCALHOST,
        "10.0.0.2": LOCALHOST,
        "68719476736": str(SIZE),
    }
    lines = re.findall(
        r"^ExecStart=(.*)", (ROOT / "docs" / "mooncake.md").read_text(), re.MULTILINE
    )
    asked = Master(port, metrics)  # never started; asks the real one
    with ExitStack() as stack, (tmp_path / "log").open("ab") as log:
        for line, ready in zip(lines, (0, SIZE), strict=True):
            for there, here in local.items():
                assert there in "".join(lines)
                line = line.replace(there, here)
            child = subprocess.Popen(shlex.split(line), stdout=log, stderr=log)
            stack.callback(child.wait, 10)
            stack.callback(child.kill)
            await_capacity(asked, ready, 20)
            assert child.poll() is None
        keeps_bytes(asked.address)


# tieredkv pool


class Command:
    """`tieredkv pool` and what it prints."""

    def __init__(self, popen: subprocess.Popen[bytes], output: Path, port: int, metrics: int):
        self.popen = popen
        self.output = output
        self.master = Master(port, metrics)  # never started; asks the real one

    @property
    def text(self) -> str:
        return self.output.read_text()

    def children(self) -> dict[int, str]:
        """Pid and name of all that it has started and that runs."""
        found = {}
        for one in psutil.Process(self.popen.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if one.status() != psutil.STATUS_ZOMBIE:
                    found[one.pid] = Path(one.exe()).name
        return found

    def pids(self, program: str) -> list[int]:
        return [pid for pid, name in self.children().items() if name == program]

    def await_text(self, text: str) -> None:
        def said() -> bool:
            assert self.popen.poll() is None, self.text
            return text in self.text

        await_true(f"{text!r} in {self.text!r}", said, 60)


@contextmanager
def command(tmp_path: Path, *options: str, size: str = "64MiB") -> Iterator[Command]:
    port, metrics = free_port(), free_port()
    arguments = ["--size", size, "--port", str(port), "--metrics-port", str(metrics), *options]
    output = tmp_path / "output"
    with output.open("wb") as file:
        popen = subprocess.Popen(
            [sys.executable, "-m", "tieredkv.cli.app", "pool", *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )
    try:
        yield Command(popen, output, port, metrics)
    finally:
        popen.kill()
        popen.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_runs_a_pool_until_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    with command(tmp_path, "--owners", "2", "--logs", str(tmp_path / "logs")) as run:
        run.await_text("Ctrl-C")
        children = run.children()
        assert set(children.values()) >= PROGRAMS
        assert len(run.pids("mooncake_client")) == 2
        assert run.master.capacity() == 64 * MIB
        keeps_bytes(run.master.address)
        run.popen.send_signal(number)
        assert run.popen.wait(30) == 0, run.text
        assert not any(map(running, children))
        assert run.text.rstrip().endswith("stopping")
    for name in ("master", "owner-0", "owner-1"):
        assert (tmp_path / "logs" / f"{name}.log").stat().st_size > 0


def test_what_the_command_prints_can_be_pasted(tmp_path: Path) -> None:
    with command(tmp_path) as run:
        run.await_text("Ctrl-C")
        lines = run.text.splitlines()
    metrics = f"127.0.0.1:{run.master.metrics_port}"
    tiers = [{"kind": "mooncake", "master": run.master.address, "metrics": metrics}]
    (line,) = (line for line in lines if line.startswith("tiers:"))
    assert yaml.safe_load(line) == {"tiers": tiers}
    (line,) = (line for line in lines if line.startswith("--kv-transfer-config"))
    _, text = shlex.split(line)
    connector = json.loads(text)
    assert connector["kv_connector"] == "TieredKVConnector"
    assert connector["kv_connector_extra_config"] == {"tiers": tiers}
    (tier,) = Config.model_validate(connector["kv_connector_extra_config"]).tiers
    assert tier.kind == "mooncake"


def test_the_command_starts_again_what_dies(tmp_path: Path) -> None:
    with command(tmp_path) as run:
        run.await_text("Ctrl-C")
        for program, name in (("mooncake_client", "owner-0"), ("mooncake_master", "master")):
            (pid,) = run.pids(program)
            os.kill(pid, signal.SIGKILL)
            run.await_text(f"{name} (pid {pid}) died with -9; started again as pid")
            await_true(
                "another one runs", lambda p=program, old=pid: run.pids(p) not in ([], [old])
            )
        assert run.text.count("started again") == 2, "each once"
        await_capacity(run.master, SIZE)
        keeps_bytes(run.master.address)


@pytest.mark.slow
def test_the_command_gives_up_on_what_dies_again_and_again(tmp_path: Path) -> None:
    with command(tmp_path) as run:
        run.await_text("Ctrl-C")
        children = list(run.children())
        deadline = time.monotonic() + 60
        while run.popen.poll() is None and time.monotonic() < deadline:
            with suppress(psutil.NoSuchProcess):
                for pid in run.pids("mooncake_client"):
                    children.append(pid)
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        assert run.popen.wait(10) == 1
        assert run.text.count("started again as pid") == 5
        assert "owner-0" in run.text.splitlines()[-1]
        assert "giving up" in run.text
        assert not any(map(running, children))


def test_nothing_outlives_a_killed_command(tmp_path: Path) -> None:
    with command(tmp_path) as run:
        run.await_text("Ctrl-C")
        children = run.children()
        assert set(children.values()) >= PROGRAMS
        run.popen.kill()
        run.popen.wait(10)
        await_true("its children are dead", lambda: not any(map(running, children)))


def test_a_signal_ends_the_command_while_it_starts(tmp_path: Path) -> None:
    with command(tmp_path) as run:
        await_true("the master has been started", lambda: bool(run.pids("mooncake_master")), 60)
        children = run.children()
        run.popen.terminate()
        assert run.popen.wait(30) == 0, run.text
        assert not any(map(running, children))
        assert "tiers:" not in run.text


def refused(*options: str) -> str:
    """What `tieredkv pool` says on stderr when it ends with exit code 2."""
    done = subprocess.run(
        [sys.executable, "-m", "tieredkv.cli.app", "pool", *options],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    assert "tiers:" not in done.stdout
    return done.stderr


def test_the_command_names_a_taken_port() -> None:
    with listening() as port:
        said = refused("--size", "64MiB", "--port", str(port), "--metrics-port", str(free_port()))
        assert f"port {port} of 127.0.0.1, for mooncake_master, is in use" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--size", "much"], "--size 'much' is no size"),
        (["--size", "0"], "--size '0' is no size"),
        (["--size", "15MiB"], "16 MiB"),
        (["--size", "64MiB", "--owners", "5"], "over 5 owners is 13,421,772 bytes"),
        (["--size", "1024PiB"], "this machine has"),
        (["--size", "64MiB", "--port", "9003"], "are both 9003"),
        (["--size", "64MiB", "--logs", "/proc/nowhere"], "--logs /proc/nowhere"),
        (["--size", "64MiB", "--owners", "0"], "--owners"),
        ([], "--size"),
    ],
)
def test_the_command_names_a_wrong_option(options: list[str], words: str) -> None:
    assert words in refused(*options)


def test_the_deadline_of_await_true_is_one() -> None:
    with pytest.raises(AssertionError, match=r"not after 0.1 s: never"):
        await_true("never", _refuse, 0.1)


def _refuse() -> bool:
    raise ConnectionRefusedError


@pytest.mark.parametrize(("ci", "user"), [("1", 1000), ("", 0), ("", 1000)])
def test_mooncake_is_required_in_ci_and_of_root(
    monkeypatch: pytest.MonkeyPatch, ci: str, user: int
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)  # as if it were not installed
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    outcome = pytest.fail.Exception if ci or user == 0 else pytest.skip.Exception
    with pytest.raises(outcome, match="MOONCAKE IS NOT TESTED HERE"):
        require()
