"""The arms of the agentic benchmark: kv_transfer_configs of two engines, and what they need.

An arm is a context manager: what it started has ended and what it wrote is gone afterwards,
so that every run starts with an empty cache.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benches.common import work_directory
from benches.vllm_engine import ENVIRONMENT, KvTransfer
from tieredkv.errors import TieredKVError
from tieredkv.tiers.mooncake.processes import Master, Owner

CAPACITY = 512 << 20
"""Bytes of every cache: nothing is evicted from one."""
CHUNK = 32
"""Tokens of a chunk in every cache: one block of the engine, as contexts are scaled down."""
START = 60.0
"""Seconds that a server may take to start."""

Arm = Callable[[int], AbstractContextManager[list[KvTransfer]]]
"""Called with the number of engines."""


@contextmanager
def none(engines: int) -> Iterator[list[KvTransfer]]:
    yield [None] * engines


@contextmanager
def example(engines: int) -> Iterator[list[KvTransfer]]:
    """vLLM's own connector: a file per layer and prompt, in one directory for all engines."""
    with work_directory() as path:
        extra = {"shared_storage_path": str(path)}
        yield [_transfer("ExampleConnector", extra)] * engines


@contextmanager
def lmcache(engines: int) -> Iterator[list[KvTransfer]]:
    """One LMCache server in memory for all engines."""
    port, http = _free_port(), _free_port()
    command = [sys.executable, "-m", "lmcache.cli.main", "server"]
    options = {
        "port": port,
        "http-port": http,
        "chunk-size": CHUNK,
        "l1-size-gb": CAPACITY / (1 << 30),
        "supported-transfer-mode": "engine_driven",
        "eviction-policy": "LRU",
        "shm-name": f"tieredkv-bench-{os.getpid()}",
    }
    command += [f"--{name}={value}" for name, value in options.items()]
    command += ["--no-l1-use-lazy", "--disable-observability"]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _wait_for(server, port, log)
            extra = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port}
            yield [_transfer("LMCacheMPConnector", extra)] * engines
        finally:
            server.terminate()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


@contextmanager
def vllm_mooncake(engines: int) -> Iterator[list[KvTransfer]]:
    """vLLM's own connector to Mooncake, as vLLM has it: one pool in memory for all engines.

    It is told to store answers too, which it otherwise leaves to the next prompt.
    """
    with work_directory() as path, mooncake_pool(path) as master:
        config = path / "mooncake.json"
        settings = {
            "mode": "standalone-store",  # the pool's memory is the owner's alone
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": master.address,
            "protocol": "tcp",
            "global_segment_size": 0,
            "local_buffer_size": 64 << 20,  # loads and stores go past it
        }
        config.write_text(json.dumps(settings))
        environment = {"MOONCAKE_CONFIG_PATH": str(config)}
        # Part of the name of a socket, of which every engine of a machine needs its own.
        names = [f"{path.name}-{i}" for i in range(engines)]
        try:
            yield [
                _transfer(
                    "MooncakeStoreConnector", {"save_decode_cache": True, "lookup_rpc_port": name}
                )
                | {ENVIRONMENT: environment}
                for name in names
            ]
        finally:
            for name in names:
                for left in Path(tempfile.gettempdir()).glob(f"lookup_rpc_port_{name}_*"):
                    left.unlink()


@contextmanager
def mooncake_pool(logs: Path) -> Iterator[Master]:
    """A master, and one owner of `CAPACITY` that it counts."""
    with (
        Master(log=logs / "master.log") as master,
        Owner(master.address, CAPACITY, log=logs / "owner.log"),
    ):
        deadline = time.monotonic() + START
        while master.capacity() != CAPACITY:
            if time.monotonic() > deadline:
                raise TieredKVError(f"the Mooncake master counts {master.capacity():,} bytes")
            time.sleep(0.02)
        yield master


@contextmanager
def dram(engines: int) -> Iterator[list[KvTransfer]]:
    """Ours in memory; every engine has a cache of its own."""
    yield [_ours([{"kind": "dram", "capacity": CAPACITY}])] * engines


@contextmanager
def nvme(engines: int) -> Iterator[list[KvTransfer]]:
    """Ours on disk alone; every engine has a cache of its own."""
    with work_directory() as path:
        yield [_ours([_disk(path)], f"engine{i}") for i in range(engines)]


@contextmanager
def mooncake(engines: int) -> Iterator[list[KvTransfer]]:
    """Ours in the memory of a Mooncake pool, which all engines share."""
    with work_directory() as path, mooncake_pool(path) as master:
        yield [_ours([_shared(master, CAPACITY)])] * engines


@contextmanager
def mooncake_nvme(engines: int) -> Iterator[list[KvTransfer]]:
    """The same with a disk of every engine below it."""
    with work_directory() as path, mooncake_pool(path) as master:
        tiers = [_shared(master, CAPACITY), _disk(path)]
        yield [_ours(tiers, f"engine{i}") for i in range(engines)]


def _disk(path: Path) -> dict[str, Any]:
    return {"kind": "nvme", "path": str(path), "capacity": CAPACITY, "min_free": 0}


def _shared(master: Master, capacity: int) -> dict[str, Any]:
    metrics = f"{master.host}:{master.metrics_port}"
    tier = {"kind": "mooncake", "master": master.address, "metrics": metrics}
    return tier | {"capacity": capacity}


ARMS: dict[str, Arm] = {
    "none": none,
    "example": example,
    "lmcache": lmcache,
    "vllm_mooncake": vllm_mooncake,
    "dram": dram,
    "nvme": nvme,
    "mooncake": mooncake,
    "mooncake_nvme": mooncake_nvme,
}
OURS = ("dram", "nvme", "mooncake", "mooncake_nvme")
PEERS = ("example", "lmcache", "vllm_mooncake")
SHARED = frozenset({"example", "lmcache", "vllm_mooncake", "mooncake", "mooncake_nvme"})
"""All engines have one cache."""
ON_DISK = frozenset({"example", "nvme", "mooncake_nvme"})


def absent(arm: str) -> str | None:
    """Why an arm cannot run here, or None."""
    package = {"lmcache": "lmcache", "vllm_mooncake": "mooncake"}.get(arm)
    missing = package is not None and find_spec(package) is None
    return f"{package} is not installed" if missing else None


def _ours(tiers: list[dict[str, Any]], engine: str | None = None) -> KvTransfer:
    # a model as small as the benches' computes a prompt faster than anything can be loaded
    connector: dict[str, Any] = {"recompute": "never"}
    if engine is not None:
        connector["engine"] = engine
    extra = {"block_tokens": CHUNK, "tiers": tiers, "connector": connector}
    return _transfer("TieredKVConnector", extra) | {
        "kv_connector_module_path": "tieredkv.connector.vllm",
        "kv_load_failure_policy": "recompute",
    }


def _transfer(connector: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def _wait_for(server: subprocess.Popen[bytes], port: int, log: Any) -> None:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline and server.poll() is None:
        try:
            socket.create_connection(("localhost", port), 1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    log.seek(0)
    raise RuntimeError(f"the LMCache server did not start:\n{log.read()[-2000:].decode()}")
