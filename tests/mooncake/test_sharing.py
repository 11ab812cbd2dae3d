"""Several stores on one pool: what one has stored the others hit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.mooncake.pool import LEASE_MS, MIB, Owner, await_capacity, await_true, make_master
from tests.mooncake.stores import (
    FINGERPRINT,
    chain,
    config,
    content,
    disk,
    memory,
    opened,
    put,
    right,
)
from tieredkv import Fingerprint, Outcome, TieredKVStore
from tieredkv.testing import ManualClock
from tieredkv.tiers.base import BlockBuffers, Tier
from tieredkv.tiers.mooncake.catalogue import SECONDS
from tieredkv.types import Batch


@pytest.fixture(scope="module")
def pool(mooncake_runs: None) -> Iterator[str]:
    with make_master() as master, Owner(master.address, 64 * MIB):
        await_capacity(master, 64 * MIB)
        yield master.address


def test_a_new_store_hits_at_once_what_another_has_stored(pool: str) -> None:
    with opened(config(pool)) as one, opened(config(pool)) as other:
        assert put(one, 1) == [Outcome.OK] * 8
        assert right(other, 1) == 8
        assert other.lookup(chain(1)).spans == (("mooncake", 8),)
        assert one.check() == other.check() == []


def test_what_a_put_leaves_in_memory_reaches_the_others_soon(pool: str) -> None:
    with opened(config(pool, memory())) as one, opened(config(pool, memory())) as other:
        put(one, 2)
        assert one.lookup(chain(2)).spans == (("dram", 8),)
        other.put(chain(90), content(chain(90)))  # the first put fixes nothing that matters
        await_true("the other finds it", lambda: other.lookup(chain(2)).blocks == 8)
        assert right(other, 2) == 8
        assert other.lookup(chain(2)).spans == (("dram", 8),), "promoted"
        assert one.check() == other.check() == []


def test_a_chain_is_shared_as_far_as_it_goes(pool: str) -> None:
    with opened(config(pool)) as one, opened(config(pool)) as other:
        put(one, 3, blocks=5)
        assert right(other, 3, blocks=8) == 5
        assert put(other, 3, blocks=8) == [Outcome.OK] * 8
        time.sleep(SECONDS)
        assert one.lookup(chain(3)).blocks == 8
        assert right(one, 3) == 8
        assert one.check() == other.check() == []


def test_other_models_see_nothing(pool: str) -> None:
    with (
        opened(config(pool)) as one,
        opened(config(pool), Fingerprint(model="m", weights="v2", dtype="f")) as other,
    ):
        put(one, 4)
        assert right(other, 4) == 0
        assert put(other, 4) == [Outcome.OK] * 8


def test_what_is_deleted_is_gone_for_all(pool: str) -> None:
    with opened(config(pool)) as one, opened(config(pool)) as other:
        put(one, 5)
        assert right(other, 5) == 8
        assert one.delete(chain(5)[3:]) == 5
        assert one.lookup(chain(5)).blocks == 3, "even while it is leased"
        time.sleep(1.5 * LEASE_MS / 1000)
        one.delete(chain(5)[3:])
        assert right(other, 5) == 3
        assert other.check() == []


def test_clear_takes_what_the_store_has_put_there(pool: str) -> None:
    with opened(config(pool)) as one, opened(config(pool)) as other:
        put(one, 6)
        time.sleep(1.5 * LEASE_MS / 1000)
        assert one.clear() == 8
        assert one.lookup(chain(6)).blocks == 0
        assert right(other, 6) == 0


def test_memory_pool_and_disk_together(pool: str, tmp_path: Path) -> None:
    with opened(config(pool, memory(16), after=[disk(tmp_path)])) as store:
        for number in range(10, 14):
            assert put(store, number) == [Outcome.OK] * 8
        assert store.flush(20)
        for number in range(10, 14):
            assert right(store, number) == 8
        names = {name for n in range(10, 14) for name, _ in store.lookup(chain(n)).spans}
        assert names <= {"dram", "mooncake"}
        assert store.check() == []
        on_disk = next(t for t in store.stats().tiers if t.name == "nvme")
        assert on_disk.blocks == 32


OTHER = """
import sys
from tests.mooncake.stores import config, opened, put, right
from tieredkv import Outcome
with opened(config(sys.argv[1])) as store:
    assert right(store, 7) == 8
    assert put(store, 8) == [Outcome.OK] * 8
print("fine")
"""


def test_two_processes(pool: str) -> None:
    with opened(config(pool)) as store:
        put(store, 7)
        run = subprocess.run(
            [sys.executable, "-c", OTHER, pool],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "fine" in run.stdout, run.stderr
        assert right(store, 8) == 8, "a process's end leaves what it has stored"


def watched(tier: Tier, seen: list[Batch]) -> Tier:
    """Notes what is written to the tier."""
    write = tier.write

    def noted(batch: Batch, sources: BlockBuffers) -> list[Outcome]:
        seen.append(batch)
        return write(batch, sources)

    tier.write = noted  # type: ignore[method-assign]
    return tier


@pytest.mark.parametrize("wanted", [True, False])
def test_blocks_are_pinned_for_as_long_as_their_session_is_expected(
    pool: str, wanted: bool
) -> None:
    """Its turns come a minute apart, and then it has gone for good."""
    clock, seen = ManualClock(1000.0), list[Batch]()
    settings = config(pool, soft_pin=wanted)
    wrap = partial(watched, seen=seen)
    with TieredKVStore(settings, FINGERPRINT, clock=clock, wrap_tier=wrap) as store:
        pins = []
        for turn in range(40):
            for session in range(5):
                keys = chain(1000 + session, turn + 1)
                seen.clear()
                store.put(keys, content(keys), turn=f"session {session}")
                pins.append(max(batch.pin for batch in seen))
            clock.advance(60.0)
        if not wanted:
            assert set(pins) == {0.0}
            return
        assert 30 < pins[-1] < 240, "about a minute"


SOAK = 60.0 if int(os.environ.get("TIEREDKV_CRASHES", "60")) >= 500 else 4.0
"""Seconds; a minute with `make test-full`."""


def test_right_bytes_under_eviction_from_four_clients(pool: str) -> None:
    """Four stores want four times what the pool holds, and what is there is right."""
    end = time.monotonic() + SOAK
    hits = [0] * 4

    def work(which: int) -> None:
        rng = np.random.default_rng(which)
        with opened(config(pool, memory(32))) as store:
            while time.monotonic() < end:
                number = 100 + int(rng.zipf(1.3)) % 500
                hits[which] += right(store, number)
                if put(store, number)[0] is not Outcome.OK:
                    time.sleep(0.01)
            assert store.check() == []

    with ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(work, which) for which in range(4)]:
            future.result(SOAK + 60)
    assert min(hits) > 0
