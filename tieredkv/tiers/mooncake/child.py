"""One program of the mooncake package as a child that does not outlive us.

Every child belongs to a process group that a small shell leads. The shell waits for the end of
a pipe that only we hold, and kills the group when it comes: however we end, no child is left,
and neither threads nor fork hooks take part in it. (A fork of ours that execs nothing would hold
the pipe as well.)
"""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

from tieredkv.errors import ConfigError, TieredKVError, UsageError

LOCALHOST = "127.0.0.1"
READY = 20.0
"""Default seconds for a process to become ready: some 1 s on an idle core."""
STOP = 5.0
"""Default seconds for a process to end by itself: the master takes up to 1 s, an owner none."""
PROBE = 1.0
"""Seconds for one connection or answer; a frozen process gives none."""
POLL = 0.02
LEASH = ("sh", "-c", "read -r _; kill -s KILL 0")
REMEDY = "apt-get install libibverbs1 libnuma1 libcurl4; pip install 'tieredkv[mooncake]'"
CANNOT_LOAD = 127
"""Exit code of a program whose shared libraries are missing."""


def binary(name: str) -> Path:
    """Where the mooncake package, of either distribution, keeps this program.

    Raises ConfigError if it is not installed.
    """
    spec = importlib.util.find_spec("mooncake")
    package = spec.submodule_search_locations if spec else None
    places = [Path(place) / name for place in package or []]
    places.append(Path(sys.executable).parent / name)
    for path in places:
        if path.is_file() and os.access(path, os.X_OK):
            return path
    looked = ", ".join(str(path.parent) for path in places)
    raise ConfigError(f"{name} is not in {looked}: {REMEDY}")


def free_port(host: str = LOCALHOST) -> int:
    """A TCP port that nobody listens on now; another process may take it before you do."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class Process:
    """One child on a leash. Starts once more after its end. One thread at a time.

    As a context manager it is ready inside and stopped afterwards.
    """

    program: str

    def __init__(self, host: str, ports: Sequence[int], log: Path | None) -> None:
        """`log` is appended to; without one what the child prints is dropped."""
        self.host = host
        self.log = log
        self._ports = tuple(ports)
        self._popen: subprocess.Popen[bytes] | None = None
        self._leash: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the child, also after its end. UsageError, as below, if it was never started."""
        return self._started.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; the negative number of the signal that ended it."""
        return self._started.poll()

    @property
    def alive(self) -> bool:
        """Started and not ended; a frozen process is alive."""
        return self._popen is not None and self._popen.poll() is None

    def start(self) -> None:
        """Start the child, which then is not yet ready.

        Raises ConfigError if it is not installed, a port of it is taken or the log cannot be
        written; UsageError if it is running.
        """
        if self.alive:
            raise UsageError(f"{self.program} is running: stop it first, or call restart()")
        self.kill()  # what an ended child left of its group
        command = [str(binary(self.program)), *self._arguments(), "--logtostderr=1"]
        for port in self._ports:
            _check_free(self.program, self.host, port)
        try:
            output = open(self.log or os.devnull, "ab")  # noqa: SIM115  closed below
        except OSError as error:
            raise ConfigError(f"log {self.log}: {error.strerror}; name another place") from None
        with output:
            self._spawn(command, output)

    def _spawn(self, command: list[str], output: IO[bytes]) -> None:
        leash = subprocess.Popen(
            LEASH,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        self._leash = leash
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Without a master in sight an owner tries 20 times, for 90 s.
            env={"MC_STORE_CLIENT_SETUP_RETRIES": "1", **os.environ},
            process_group=leash.pid,
        )

    def is_ready(self) -> bool:
        """Whether it serves now; takes up to some seconds when it hangs.

        Raises TieredKVError when the child has ended, ConfigError when it cannot be loaded.
        """
        code = self.returncode
        if code is None:
            return self._serves()
        if code == CANNOT_LOAD:
            why = self._last_words()
            raise ConfigError(f"{self.program} lacks a shared library{why}: {REMEDY}")
        raise TieredKVError(f"{self.program} ended with {code}{self._last_words()}")

    def ready(self, timeout: float = READY) -> None:
        """Wait until it serves. Raises TieredKVError after `timeout` seconds, or as `is_ready`."""
        deadline = time.monotonic() + timeout
        while not self.is_ready():
            if time.monotonic() > deadline:
                raise TieredKVError(
                    f"{self.program} is not ready after {timeout:g} s{self._last_words()}"
                )
            time.sleep(POLL)

    def stop(self, timeout: float = STOP) -> None:
        """Ask it to end, kill it after `timeout` seconds (a frozen one too). Nothing is left."""
        if self.alive:
            self._started.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._started.wait(timeout)
        self.kill()

    def kill(self) -> None:
        """SIGKILL, and wait until it is dead. Harmless when it is already."""
        leash, self._leash = self._leash, None
        if leash is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(leash.pid, signal.SIGKILL)
        if self._popen is not None:
            self._popen.wait()
        leash.communicate()

    def freeze(self) -> None:
        """Stop it in its tracks, as a swapping or stuck machine would."""
        self._started.send_signal(signal.SIGSTOP)
        # its threads run on for a moment
        os.waitid(os.P_PID, self._started.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        """Let a frozen process run on."""
        self._started.send_signal(signal.SIGCONT)

    def restart(self, timeout: float = READY) -> None:
        """Kill it if it is alive, start it at the same ports and wait until it is ready."""
        self.kill()
        self.start()
        self.ready(timeout)

    def __enter__(self) -> Self:
        try:
            self.start()
            self.ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        if self._popen is None:
            raise UsageError(f"{self.program} was never started: call start()")
        return self._popen

    def _arguments(self) -> list[str]:
        raise NotImplementedError

    def _serves(self) -> bool:
        """Whether all ports accept."""
        for port in self._ports:
            try:
                socket.create_connection((self.host, port), PROBE).close()
            except OSError:
                return False
        return True

    def _last_words(self) -> str:
        if self.log is None:
            return "; give it a log to see why"
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
            lines = log.read().decode(errors="replace").splitlines()
        return f"; {self.log} ends: " + " / ".join(line[:200] for line in lines[-3:])


def _check_free(program: str, host: str, port: int) -> None:
    with socket.socket() as probe:
        # As the programs do it: connections of a predecessor do not keep its port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"port {port} of {host}, for {program}, is in use:"
                    " stop what listens there or choose another one"
                ) from None
            raise ConfigError(f"{host}:{port}, for {program}: {error.strerror}") from None
