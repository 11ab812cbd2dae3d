"""What the tests on a real Mooncake pool share."""

from __future__ import annotations

import importlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tieredkv.errors import ConfigError
from tieredkv.tiers.mooncake.processes import LOCALHOST, Master, Owner, binary

MIB = 1 << 20
CLIENT_TTL = 2
"""Seconds until the master forgets an owner; a cluster's are longer."""
LEASE_MS = 500
SIZE = 64 * MIB
"""Of an owner."""


def require() -> None:
    """Skip the test where Mooncake cannot run, with a line that is seen; fail where it must run.

    It must in CI and where we are root, since then `.ci/run` can install what is missing.
    """
    try:
        importlib.import_module("mooncake.store")
        binary("mooncake_master")
        binary("mooncake_client")
    except (ImportError, ConfigError) as error:
        why = f"MOONCAKE IS NOT TESTED HERE: {error}"
        if os.environ.get("CI") or os.geteuid() == 0:
            pytest.fail(why, pytrace=False)
        pytest.skip(why)


def make_master(**options: Any) -> Master:
    """With short times, unless the options set others."""
    return Master(**{"lease_ttl_ms": LEASE_MS, "client_ttl": CLIENT_TTL, **options})


def await_true(what: str, holds: Callable[[], bool], seconds: float = 10) -> float:
    """Wait until it holds, and how many seconds that took. An OSError is taken for no."""
    start = time.monotonic()
    while True:
        with suppress(OSError):
            if holds():
                return time.monotonic() - start
        assert time.monotonic() < start + seconds, f"not after {seconds:g} s: {what}"
        time.sleep(0.02)


def await_capacity(master: Master, capacity: int, seconds: float = 10) -> float:
    """Wait until the master counts so many bytes."""
    return await_true(
        f"a capacity of {capacity:,} bytes", lambda: master.capacity() == capacity, seconds
    )


def make_empty(master: Master) -> None:
    """A running master that counts no owner, whatever a test has done to it."""
    if master.alive:
        master.thaw()
        master.ready()
    else:
        master.restart()
    await_capacity(master, 0, CLIENT_TTL + 10)


@contextmanager
def bare_client(master: str, segment: int = 0) -> Iterator[Any]:
    """A MooncakeDistributedStore without any of our code, closed afterwards.

    Its own deadlines are as short as the environment makes them when the first one is made.
    """
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(LOCALHOST, "P2PHANDSHAKE", segment, 16 * MIB, "tcp", "", master)
    assert code == 0, f"setup against {master} returned {code}"
    try:
        yield store
    finally:
        store.close()


def keeps_bytes(master: str, sizes: Sequence[int] = (1, 4096, MIB)) -> None:
    """Bytes that one client puts come back to another one, through the owners."""
    contents = {f"test/{uuid.uuid4().hex}": os.urandom(size) for size in sizes}
    with bare_client(master) as writer, bare_client(master) as reader:
        for key, content in contents.items():
            assert writer.put(key, content) == 0
        for key, content in contents.items():
            assert reader.get(key) == content


__all__ = [
    "CLIENT_TTL",
    "LEASE_MS",
    "LOCALHOST",
    "MIB",
    "SIZE",
    "Master",
    "Owner",
    "await_capacity",
    "await_true",
    "bare_client",
    "keeps_bytes",
    "make_empty",
    "make_master",
    "require",
]
