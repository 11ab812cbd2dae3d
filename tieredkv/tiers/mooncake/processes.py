"""The processes of a Mooncake pool on one machine: a master, and owners of its memory.

For development and tests; docs/mooncake.md says how a cluster runs them. Every child belongs to
a process group that a small shell leads. The shell waits for the end of a pipe that only we
hold, and kills the group when it comes: no child outlives us, however we end, and no thread or
fork hook takes part in it. (A fork of ours that execs nothing would hold the pipe as well.)
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import IO, Self

from tieredkv.errors import ConfigError, TieredKVError, UsageError

LOCALHOST = "127.0.0.1"
MIN_OWNER_BYTES = 16 << 20
"""Mooncake refuses a smaller segment."""
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
    inside = list(spec.submodule_search_locations or ()) if spec else []
    places = [Path(place) / name for place in (*inside, Path(sys.executable).parent)]
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
            raise ConfigError(
                f"{self.program} lacks a shared library{self._last_words()}: {REMEDY}"
            )
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
            log.seek(max(0, log.seek(0, os.SEEK_END) - 600))
            lines = log.read().decode(errors="replace").splitlines()
        return f"; {self.log} ends: " + " / ".join(lines[-3:])


class Master(Process):
    """`mooncake_master`, the authority on what the pool holds. A restart forgets all of it."""

    program = "mooncake_master"

    def __init__(
        self,
        port: int | None = None,
        metrics_port: int | None = None,
        *,
        host: str = LOCALHOST,
        lease_ttl_ms: int = 5000,
        client_ttl: int = 10,
        eviction_watermark: float = 0.95,
        eviction_ratio: float = 0.05,
        evict_soft_pinned: bool = False,
        log: Path | None = None,
    ) -> None:
        """Ports are free ones unless given.

        For `lease_ttl_ms` after a get or a question of existence nothing evicts or removes the
        key. After `client_ttl` seconds without a sign of life an owner and all that it holds is
        gone. Above the share `eviction_watermark` of the capacity the master evicts
        `eviction_ratio` of it, soft-pinned objects only with `evict_soft_pinned`; 1.0 and 0
        switch its eviction off.
        """
        self.port = free_port(host) if port is None else port
        self.metrics_port = free_port(host) if metrics_port is None else metrics_port
        super().__init__(host, (self.port, self.metrics_port), log)
        self._flags = {
            "rpc_address": host,
            "rpc_port": self.port,
            "metrics_host": host,
            "metrics_port": self.metrics_port,
            "enable_metric_reporting": "false",
            "default_kv_lease_ttl": lease_ttl_ms,
            "client_ttl": client_ttl,
            "eviction_high_watermark_ratio": eviction_watermark,
            "eviction_ratio": eviction_ratio,
            "allow_evict_soft_pinned_objects": str(evict_soft_pinned).lower(),
        }

    @property
    def address(self) -> str:
        """`host:port`, as clients and the tier's `master` take it."""
        return f"{self.host}:{self.port}"

    def metric(self, name: str) -> float:
        """The value of a metric without labels; OSError if the master does not answer.

        KeyError if there is no such metric.
        """
        for line in self._get("/metrics").splitlines():
            found, _, value = line.partition(" ")
            if found == name:
                return float(value)
        raise KeyError(name)

    def capacity(self) -> int:
        """Bytes of all owners and of clients that lend memory; OSError as `metric`."""
        return int(self.metric("master_total_capacity_bytes"))

    def _arguments(self) -> list[str]:
        return [f"--{name}={value}" for name, value in self._flags.items()]

    def _serves(self) -> bool:
        try:
            health = json.loads(self._get("/health"))
        except (OSError, ValueError):
            return False
        return health.get("service_ready") is True and super()._serves()

    def _get(self, path: str) -> str:
        connection = HTTPConnection(self.host, self.metrics_port, timeout=PROBE)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        except HTTPException as error:
            raise OSError(f"no HTTP answer from {self.host}:{self.metrics_port}") from error
        finally:
            connection.close()


class Owner(Process):
    """`mooncake_client` as a process that lends memory to the pool; what it holds ends with it.

    It finds a restarted master by itself. The master counts its memory until `client_ttl` after
    its end. Its data ports are chosen by Mooncake and bound to all interfaces.
    """

    program = "mooncake_client"

    def __init__(
        self,
        master: str,
        size: int,
        port: int | None = None,
        *,
        host: str = LOCALHOST,
        log: Path | None = None,
    ) -> None:
        """`master` is its `host:port`, `size` in bytes; `port` a free one unless given.

        Raises ConfigError if the size is below 16 MiB or above this machine's memory.
        """
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if not MIN_OWNER_BYTES <= size <= memory:
            raise ConfigError(
                f"an owner of {size:,} bytes: Mooncake needs {MIN_OWNER_BYTES:,} (16 MiB) or"
                f" more, and this machine has {memory:,}; change the size or the owners' number"
            )
        self.port = free_port(host) if port is None else port
        self.size = size
        super().__init__(host, (self.port,), log)
        # The size without a unit: "64MiB" is taken for no memory at all.
        self._flags = {
            "master_server_address": master,
            "metadata_server": "P2PHANDSHAKE",
            "host": host,
            "port": self.port,
            "global_segment_size": size,
        }

    def _arguments(self) -> list[str]:
        return [f"--{name}={value}" for name, value in self._flags.items()]


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
