"""Tests on a real Mooncake pool: one master for all of them, an owner for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mooncake.pool import (
    SIZE,
    Master,
    Owner,
    await_capacity,
    make_empty,
    make_master,
    require,
)

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They wait for leases and for what is gone to be noticed: not for `make test-core`."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def mooncake_runs() -> None:
    """Skips, or fails in CI and as root, where Mooncake is not installed."""
    require()


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes' output is kept."""
    return tmp_path_factory.mktemp("mooncake")


@pytest.fixture(scope="session")
def session_master(mooncake_runs: None, logs: Path) -> Iterator[Master]:
    with make_master(log=logs / "master.log") as master:
        yield master


@pytest.fixture
def master(session_master: Master) -> Master:
    """A master that serves and counts no owner. A test may kill, freeze or restart it."""
    make_empty(session_master)
    return session_master


@pytest.fixture
def owner(master: Master, logs: Path) -> Iterator[Owner]:
    """An owner of 64 MiB that the master counts. A test may kill, freeze or restart it."""
    with Owner(master.address, SIZE, log=logs / "owner.log") as owner:
        await_capacity(master, SIZE)
        yield owner
