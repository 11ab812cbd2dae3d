"""A pool that fails costs misses: no wrong bytes, no crash, and next to no time."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from tests.mooncake.pool import LEASE_MS, SIZE, Master, Owner, await_capacity, await_true
from tests.mooncake.stores import chain, config, disk, memory, opened, put, right
from tieredkv import Outcome, TieredKVStore
from tieredkv.errors import ConfigError
from tieredkv.testing.tier_suite import batch
from tieredkv.tiers.mooncake.catalogue import Catalogue
from tieredkv.tiers.mooncake.client import PoolClient
from tieredkv.tiers.mooncake.tier import MooncakeTier

HANG = 15.0
"""Seconds that the first call on something frozen may take; the library's default is 30 to 60."""
BACK = 5.0
"""Seconds after the pool's return by which it is in use again."""


@pytest.fixture
def store(owner: Owner, master: Master) -> Iterator[TieredKVStore]:
    """Memory for one conversation above the pool; conversation 1 is in the pool."""
    store = opened(config(master.address, memory(8)))
    assert put(store, 1) == [Outcome.OK] * 8
    await_true("it is in the pool", lambda: store.stats().tiers[1].blocks == 8)
    assert put(store, 2) == [Outcome.OK] * 8
    assert store.lookup(chain(1)).spans == (("mooncake", 8),), "and the second in memory"
    await_true("both are in the pool", lambda: store.stats().tiers[1].blocks == 16)
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


WRITER = """
import sys
import numpy as np
from tests.mooncake.pool import LOCALHOST
from tieredkv.testing.tier_suite import batch
from tieredkv.tiers.mooncake.catalogue import Catalogue
from tieredkv.tiers.mooncake.client import PoolClient
from tieredkv.tiers.mooncake.tier import MooncakeTier
from tieredkv.tiers.mooncake.tier import MooncakeTier
from tieredkv.testing.tier_suite import batch
size = 4 << 20
tier = MooncakeTier("pool", PoolClient(sys.argv[1], 0, "tcp", "", LOCALHOST), "x", 8 * size, size)
print("writes", flush=True)
print(tier.write(batch([1]), np.ones((1, size), np.uint8)), flush=True)
"""


def test_a_writer_killed_in_the_middle_of_a_put(master: Master, owner: Owner) -> None:
    """Its block is no block for anybody: puts of it say success and store nothing."""
    size = 4 << 20
    owner.freeze()
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, master.address],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writes\n"
        await_true("the master knows of the put", lambda: master.metric("master_key_count") == 1)
    finally:
        writer.kill()
        writer.wait()
        owner.thaw()
    client = PoolClient(master.address, 0, "tcp", "", None)
    tier = MooncakeTier("pool", client, "x", 8 * size, size)
    catalogue = Catalogue(client, ["x"], size, None)
    keys = batch([1]).keys
    assert catalogue.answer(catalogue.ask(keys), wait=60.0) == 0
    out = np.zeros((1, size), np.uint8)
    assert tier.write(batch([1]), out + 1) == [Outcome.BUSY]
    assert tier.read(batch([1]), out) in ([Outcome.BUSY], [Outcome.FAILED])
    assert tier.write(batch([2]), out + 2) == [Outcome.OK]
    catalogue.close()


def test_soft_pins_hold_while_the_pool_fills_and_expire(master: Master, owner: Owner) -> None:
    size, pinned = 1 << 20, 16
    client = PoolClient(master.address, 0, "tcp", "", None)
    tier = MooncakeTier("pool", client, "x", 512 * size, size)
    kept = batch(list(range(pinned)))
    rows = np.repeat(np.arange(pinned, dtype=np.uint8)[:, None], size, axis=1)
    assert tier.write(replace(kept, pin=4.0), rows) == [Outcome.OK] * pinned

    def fill(first: int) -> int:
        """Blocks that found room, of more than the pool holds."""
        good = 0
        for slot in range(first, first + 100):
            good += tier.write(batch([slot]), rows[:1]) == [Outcome.OK]
            time.sleep(0.01)
        return good

    assert fill(100) > 50
    out = np.zeros_like(rows)
    assert tier.read(kept, out) == [Outcome.OK] * pinned
    assert np.array_equal(out, rows)
    time.sleep(4)
    assert fill(300) > 50
    assert tier.read(kept, out).count(Outcome.OK) < pinned, "they do not expire"
    tier.close()


def test_a_pool_above_its_watermark_is_relieved(master: Master, owner: Owner) -> None:
    """One store fills it with what it will never need again; the other's use goes on."""
    wanted = config(master.address, metrics=f"{master.host}:{master.metrics_port}", capacity=0)
    assert wanted.tiers[0].capacity == 0
    with opened(wanted) as one, opened(wanted) as other:
        assert put(other, 1) == [Outcome.OK] * 8
        slots = one.stats().tiers[0].slots
        assert slots == int(0.85 * SIZE) // (1 << 16)
        for number in range(10, 10 + slots // 8):
            put(one, number)
            time.sleep(0.001)
        assert master.metric("master_allocated_bytes") > 0.8 * SIZE
        for number in range(300, 400):  # beyond the watermark: it gives up its oldest
            put(one, number)
            assert right(other, 1) == 8
            time.sleep(0.02)

        def relieved() -> bool:
            return master.metric("master_allocated_bytes") <= 0.86 * SIZE

        await_true("it is below the watermark", relieved)
        assert right(other, 1) == 8
        assert one.check() == other.check() == []


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


def test_a_forked_child_is_refused_and_leaves_the_pool_alone(
    store: TieredKVStore, master: Master
) -> None:
    client = PoolClient(master.address, 0, "tcp", "", None)
    pid = os.fork()
    if not pid:
        fine = client.call(lambda library: 1) is None and client.exist(["x"]) == []
        os._exit(0 if fine and client.close() else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert client.exist(["x"]) == [0]
    assert right(store, 1) == 8
    assert client.close()
