"""A pool that fails costs misses: no wrong bytes, no crash, and next to no time."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from tests.mooncake.pool import LEASE_MS, SIZE, Master, Owner, await_capacity, await_true
from tests.mooncake.stores import chain, config, disk, memory, opened, put, right
from tieredkv import Outcome, TieredKVStore
from tieredkv.errors import ConfigError
from tieredkv.tiers.mooncake.client import PoolClient

HANG = 15.0
"""Seconds that the first call on something frozen may take; the library's default is 30 to 60."""
BACK = 5.0
"""Seconds after the pool's return by which it is in use again."""


@pytest.fixture
def store(owner: Owner, master: Master) -> Iterator[TieredKVStore]:
    """Memory for one conversation above the pool; conversation 1 is in the pool."""
    store = opened(config(master.address, memory(8)))
    assert put(store, 1) == [Outcome.OK] * 8
    assert put(store, 2) == [Outcome.OK] * 8
    await_true("both are in the pool", lambda: store.stats().tiers[1].blocks == 16)
    assert right(store, 2) == 8
    assert store.lookup(chain(1)).spans == (("mooncake", 8),), "and the second in memory"
    yield store
    assert store.check() == []
    store.close(10)


def took(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def typical_lookup(store: TieredKVStore) -> float:
    """Seconds of a lookup of something unknown."""
    return statistics.median(took(lambda: store.lookup(chain(99))) for _ in range(50))


_NEW = count(1000)


def works_again(store: TieredKVStore) -> bool:
    """A second store, with nothing but the pool, hits what the first one puts now."""
    number = next(_NEW)
    with opened(config(store.config.tiers[1].master)) as other:  # type: ignore[union-attr]
        put(store, number)
        for _ in range(20):
            if right(other, number) == 8:
                return True
            time.sleep(0.05)
        return False


def test_a_dead_master_costs_nothing_but_misses(store: TieredKVStore, master: Master) -> None:
    master.kill()
    assert took(lambda: store.lookup(chain(98))) < 1
    assert typical_lookup(store) < 1e-3
    assert took(lambda: put(store, 3)) < 1
    assert right(store, 3) == 8, "memory goes on"
    assert took(lambda: right(store, 1)) < 1
    assert took(lambda: put(store, 4)) < 1
    assert right(store, 4) == 8
    assert typical_lookup(store) < 1e-3


def test_a_restarted_master_is_in_use_again(
    store: TieredKVStore, master: Master, owner: Owner
) -> None:
    master.kill()
    put(store, 3)
    assert typical_lookup(store) < 1e-3
    master.start()
    master.ready()
    await_capacity(master, SIZE)
    began = time.monotonic()
    await_true("puts reach the pool", lambda: works_again(store), 10)
    assert time.monotonic() - began < BACK
    assert right(store, 1) in (0, 8), "a new master knows nothing of what was"


def test_a_frozen_master(store: TieredKVStore, master: Master) -> None:
    master.freeze()
    try:
        assert took(lambda: store.lookup(chain(98))) < 2
        assert typical_lookup(store) < 1e-3
        assert took(lambda: right(store, 1)) < HANG
        assert took(lambda: put(store, 3)) < HANG
        assert right(store, 3) == 8
        assert typical_lookup(store) < 1e-3
    finally:
        master.thaw()
    began = time.monotonic()
    await_true("puts reach the pool", lambda: works_again(store), 15)
    assert time.monotonic() - began < BACK + 3  # of which the test's own looks take some


def test_a_killed_owner(store: TieredKVStore, owner: Owner, master: Master) -> None:
    owner.kill()
    assert took(lambda: right(store, 1)) < HANG
    assert right(store, 1) == 0
    await_capacity(master, 0)
    assert took(lambda: put(store, 3)) < HANG
    assert right(store, 3) == 8
    owner.start()
    owner.ready()
    await_capacity(master, SIZE)
    assert works_again(store)


def test_a_frozen_owner(store: TieredKVStore, owner: Owner) -> None:
    owner.freeze()
    try:
        assert took(lambda: right(store, 1)) < HANG
        assert took(lambda: put(store, 3)) < HANG
        assert right(store, 3) == 8
    finally:
        owner.thaw()
    await_true("it is in use again", lambda: works_again(store), 20)


def test_a_store_opens_without_its_pool_and_finds_it_later(
    master: Master, owner: Owner, tmp_path: Path
) -> None:
    master.kill()
    wanted = config(master.address, memory(8), after=[disk(tmp_path)])
    with opened(wanted) as store:
        for number in (1, 2, 3):
            assert put(store, number) == [Outcome.OK] * 8
        assert store.flush(20)
        assert [right(store, number) for number in (1, 2, 3)] == [8, 8, 8], "from the disk"
        master.start()
        master.ready()
        await_capacity(master, SIZE)
        await_true("puts reach the pool", lambda: works_again(store), 10)
        assert store.check() == []


@pytest.mark.parametrize("what", ["master", "owner"])
def test_close_beside_something_frozen(
    store: TieredKVStore, master: Master, owner: Owner, what: str
) -> None:
    process = master if what == "master" else owner
    process.freeze()
    try:
        out = np.zeros((8, 1 << 16), np.uint8)
        future = store.get_async(chain(1), out)
        assert took(lambda: store.close(1.0)) < 30
        assert set(future.result(30)) <= {Outcome.OK, Outcome.FAILED, Outcome.BUSY}
    finally:
        process.thaw()


def test_what_the_master_evicts_is_a_miss(store: TieredKVStore, master: Master) -> None:
    time.sleep(1.5 * LEASE_MS / 1000)
    for number in range(100, 200):  # 50 MiB through one of 16
        put(store, number)
    lengths = {right(store, number) for number in (1, 2, *range(100, 200))}
    assert lengths <= set(range(9))
    assert 8 in lengths


def test_a_missing_library_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match=r"pip install 'tieredkv.mooncake.'.*apt-get install"):
        PoolClient("127.0.0.1:1", 0, "tcp", "", None)


def test_a_closed_client_refuses(owner: Owner, master: Master) -> None:
    client = PoolClient(master.address, 0, "tcp", "", None)
    assert client.exist(["x"]) == [0]
    assert client.close()
    assert client.close()
    assert client.call(lambda store: 1) is None
    assert client.exist(["x"]) == []
