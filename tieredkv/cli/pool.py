"""`tieredkv pool`: a Mooncake pool on this machine, for development."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from tieredkv.cli.progress import table_console
from tieredkv.config import METRICS_PORT, Positive
from tieredkv.errors import ConfigError, TieredKVError
from tieredkv.tiers.mooncake.processes import MIN_OWNER_BYTES, Master, Owner, Process

WATCH = 0.2
"""Seconds between two looks at the processes."""
READY = 30.0
"""Seconds for a process to become ready."""
RESTARTS, WITHIN = 5, 60.0
"""A process that dies more often than that in so many seconds ends the command."""
PAUSE = 1.0
"""Seconds from the start of a process to its next start, at least."""


def pool(
    size: Annotated[str, typer.Option(help="Memory of the pool, such as 8GiB.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the master.")] = 50051,
    metrics_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Of the master's /metrics and /health.")
    ] = METRICS_PORT,
    owners: Annotated[
        int, typer.Option(min=1, max=64, help="Processes that share the memory.")
    ] = 1,
    logs: Annotated[
        Path | None, typer.Option(help="Directory for what the processes print.")
    ] = None,
) -> None:
    """Run a Mooncake master and owners of memory until SIGINT or SIGTERM.

    A process that dies is started again. Other machines cannot reach the master.
    """
    total = _size(size)
    share = total // owners
    if share < MIN_OWNER_BYTES:
        raise ConfigError(
            f"--size {size} over {owners} owners is {share:,} bytes each; Mooncake needs"
            f" {MIN_OWNER_BYTES:,} (16 MiB): raise --size or lower --owners"
        )
    if port == metrics_port:
        raise ConfigError(f"--port and --metrics-port are both {port}: choose two")
    master = Master(port, metrics_port, log=_log(logs, "master"))
    lenders = {
        name: Owner(master.address, share, log=_log(logs, name))
        for name in (f"owner-{number}" for number in range(owners))
    }
    names: dict[str, Process] = {"master": master, **lenders}
    console = table_console()
    with _ended_by_signals() as end, ExitStack() as stack:
        for process in names.values():  # the master first, hence stopped last
            stack.callback(process.stop)
            process.start()
            if not _await_ready(process, end):
                return
        _print_recipe(console, master, size, list(lenders.values()))
        _watch([_Watched(name, process) for name, process in names.items()], end, console)
        console.print("stopping")


def _size(text: str) -> int:
    try:
        return int(TypeAdapter(Positive).validate_python(text))
    except ValidationError:
        raise ConfigError(f"--size {text!r} is no size: write it like 8GiB") from None


def _log(logs: Path | None, name: str) -> Path | None:
    if logs is None:
        return None
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--logs {logs}: {error.strerror}; name a directory") from None
    return logs / f"{name}.log"


@contextmanager
def _ended_by_signals() -> Iterator[threading.Event]:
    """Set at SIGINT, SIGTERM and the terminal's end, so that every process is stopped first."""
    end = threading.Event()
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signals.append(signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: end.set()) for number in signals}
    try:
        yield end
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _await_ready(process: Process, end: threading.Event) -> bool:
    """False if we are to end first. Raises TieredKVError if the process dies or takes too long."""
    deadline = time.monotonic() + READY
    while not process.is_ready():
        if time.monotonic() > deadline:
            raise TieredKVError(f"{process.program} is not ready after {READY:g} s")
        if end.wait(0.05):
            return False
    return not end.is_set()


def _print_recipe(console: Console, master: Master, size: str, owners: Sequence[Owner]) -> None:
    tier = {"kind": "mooncake", "master": master.address}
    if master.metrics_port != METRICS_PORT:
        tier["metrics"] = f"{master.host}:{master.metrics_port}"
    connector = {
        "kv_connector": "TieredKVConnector",
        "kv_connector_module_path": "tieredkv.connector.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tiers": [tier]},
    }
    console.print(
        f"pool of {size} in {len(owners)} owner{'s' * (len(owners) > 1)}, master"
        f" {master.address}, http://{master.host}:{master.metrics_port}/metrics"
    )
    console.print("\nA configuration file; dram can stand before the pool and nvme behind it:\n")
    listed = ", ".join(f"{key}: {value}" for key, value in tier.items())
    console.print(f"tiers: [{{{listed}}}]", soft_wrap=True)
    console.print("\nvLLM:\n")
    console.print(f"--kv-transfer-config '{json.dumps(connector)}'", soft_wrap=True)
    console.print("\nCtrl-C ends it.")


class _Watched:
    """A process and when it was started."""

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.process = process
        self._starts: deque[float] = deque([time.monotonic()], RESTARTS + 1)

    def exhausted(self, now: float) -> bool:
        return len(self._starts) > RESTARTS and now - self._starts[0] < WITHIN

    def resting(self, now: float) -> bool:
        return now - self._starts[-1] < PAUSE

    def start(self, now: float) -> None:
        self._starts.append(now)
        self.process.start()


def _watch(watched: Sequence[_Watched], end: threading.Event, console: Console) -> None:
    """Start again what dies, until the end; typer.Exit if something dies too often."""
    while not end.wait(WATCH):
        for one in watched:
            now = time.monotonic()
            if one.process.alive or one.resting(now):
                continue
            died = f"{one.name} (pid {one.process.pid}) died with {one.process.returncode}"
            if one.exhausted(now):
                console.print(
                    f"{died}, for the {RESTARTS + 1}th time within {WITHIN:g} s: giving up;"
                    " --logs DIR keeps what it says"
                )
                raise typer.Exit(1)
            one.start(now)
            console.print(f"{died}; started again as pid {one.process.pid}")
