"""The tier contract on a real pool, and what is the pool's own."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.mooncake.pool import (
    LEASE_MS,
    LOCALHOST,
    MIB,
    Owner,
    await_capacity,
    bare_client,
    make_master,
)
from tieredkv.errors import CapacityError
from tieredkv.testing import TierSuite
from tieredkv.testing.tier_suite import batch
from tieredkv.tiers.base import Tier
from tieredkv.tiers.mooncake.client import PoolClient
from tieredkv.tiers.mooncake.objects import HEADER
from tieredkv.tiers.mooncake.tier import MooncakeTier
from tieredkv.types import Outcome

SIZE, SLOTS = 8192, 32


@pytest.fixture(scope="module")
def pool(mooncake_runs: None) -> Iterator[str]:
    """The address of a master with an owner of 64 MiB."""
    with make_master() as master, Owner(master.address, 64 * MIB):
        await_capacity(master, 64 * MIB)
        yield master.address


def opened(pool: str, identity: str | None = None, size: int = SIZE) -> MooncakeTier:
    client = PoolClient(pool, 0, "tcp", "", LOCALHOST)
    name = identity or uuid.uuid4().hex
    return MooncakeTier("pool", client, name, SLOTS * size, size)


class Kept(PoolClient):
    """A client of several tiers, one after the other: the library takes a second to close it."""

    def close(self) -> bool:
        return True


@pytest.fixture(scope="module")
def client(pool: str) -> Iterator[Kept]:
    client = Kept(pool, 0, "tcp", "", LOCALHOST)
    yield client
    assert PoolClient.close(client)


class TestBuffersOfTheCaller(TierSuite):
    staged = False

    @pytest.fixture(autouse=True)
    def _client(self, client: Kept) -> None:
        self.client = client

    def make(self, tmp_path: Path) -> Tier:
        capacity, name = self.blocks * self.block_bytes, uuid.uuid4().hex
        return MooncakeTier(
            "pool", self.client, name, capacity, self.block_bytes, staged=self.staged
        )


class TestOwnMemory(TestBuffersOfTheCaller):
    block_bytes = 5000
    staged = True


@pytest.fixture
def pair(pool: str) -> Iterator[tuple[MooncakeTier, MooncakeTier]]:
    """Two processes' tiers with one identity."""
    identity = uuid.uuid4().hex
    tiers = opened(pool, identity), opened(pool, identity)
    yield tiers
    for tier in tiers:
        tier.close()


def rows(slots: list[int], fill: int = 0) -> np.ndarray:
    return np.repeat(np.array([[slot + fill] for slot in slots], np.uint8), SIZE, axis=1)


def test_what_one_has_stored_the_other_finds_and_reads(
    pair: tuple[MooncakeTier, MooncakeTier],
) -> None:
    one, other = pair
    keys = batch([1, 2, 3]).keys
    assert other.found(keys) == 0
    assert one.write(batch([1, 2]), rows([1, 2])) == [Outcome.OK] * 2
    assert other.found(keys) == 2
    assert other.adopt([7, 8], keys[:2]) == []
    out = rows([0, 0])
    assert other.read(batch([1, 2]), out) == [Outcome.OK] * 2
    assert np.array_equal(out, rows([1, 2]))


def test_the_first_gap_ends_what_is_found(pair: tuple[MooncakeTier, MooncakeTier]) -> None:
    one, other = pair
    assert one.write(batch([1, 3]), rows([1, 3])) == [Outcome.OK] * 2
    assert other.found(batch([1, 2, 3]).keys) == 1
    assert other.found(batch([2, 3]).keys) == 0
    assert other.found([]) == 0


def test_another_identity_sees_nothing(pool: str) -> None:
    one, other = opened(pool), opened(pool)
    assert one.write(batch([1]), rows([1])) == [Outcome.OK]
    assert other.found(batch([1]).keys) == 0
    assert other.read(batch([1]), rows([0])) == [Outcome.FAILED]
    one.close()
    other.close()


def test_who_stores_it_second_finds_it_stored(pair: tuple[MooncakeTier, MooncakeTier]) -> None:
    for tier in pair:
        assert tier.write(batch([4]), rows([4])) == [Outcome.OK]
    out = rows([0])
    assert pair[1].read(batch([4]), out) == [Outcome.OK]
    assert np.array_equal(out, rows([4]))


def test_a_slot_that_is_used_again_gives_its_block_up(
    pair: tuple[MooncakeTier, MooncakeTier],
) -> None:
    one, other = pair
    assert one.write(batch([4]), rows([4])) == [Outcome.OK]
    time.sleep(1.5 * LEASE_MS / 1000)
    assert one.write(batch([4], generation=2), rows([5])) == [Outcome.OK]
    assert other.found(batch([4]).keys) == 0
    assert other.found(batch([4], generation=2).keys) == 1


def test_deleted_blocks_stay_away_even_while_they_are_leased(
    pair: tuple[MooncakeTier, MooncakeTier],
) -> None:
    one, other = pair
    keys = batch([4]).keys
    assert one.write(batch([4]), rows([4])) == [Outcome.OK]
    assert other.found(keys) == 1  # leases it
    one.remove(keys)
    assert one.found(keys) == 0
    assert one.write(batch([4]), rows([4], fill=1)) == [Outcome.BUSY], "old bytes would win"
    time.sleep(1.5 * LEASE_MS / 1000)
    assert one.write(batch([4]), rows([4], fill=1)) == [Outcome.OK]
    out = rows([0])
    assert other.read(batch([4]), out) == [Outcome.OK]
    assert np.array_equal(out, rows([5]))


@pytest.mark.parametrize("damage", ["bytes", "header", "name"])
def test_foreign_bytes_under_our_name_are_never_read_as_ours(pool: str, damage: str) -> None:
    tier = opened(pool, "shared")
    assert tier.write(batch([1, 2], 9), rows([1, 2])) == [Outcome.OK] * 2
    names = [f"shared/{key.hex()}" for key in batch([1, 2], 9).keys]
    time.sleep(1.5 * LEASE_MS / 1000)
    with bare_client(pool) as store:
        content = bytearray(store.get(names[1 if damage == "name" else 0]))
        if damage == "bytes":
            content[HEADER.size + 100] ^= 1
        elif damage == "header":
            content[1] ^= 1
        time.sleep(1.5 * LEASE_MS / 1000)
        assert store.remove(names[0]) == 0
        assert store.put(names[0], bytes(content)) == 0
    assert tier.read(batch([1, 2], 9), rows([0, 0])) == [Outcome.CORRUPT, Outcome.OK]
    time.sleep(1.5 * LEASE_MS / 1000)
    assert tier.found(batch([2], 9).keys) == 1
    tier.close()


@pytest.mark.parametrize("size", [1, SIZE, SIZE + HEADER.size - 1, SIZE + HEADER.size + 1])
def test_objects_of_another_size_are_misses(pool: str, size: int) -> None:
    tier = opened(pool)
    name = f"{tier.identity}/{batch([1]).keys[0].hex()}"
    with bare_client(pool) as store:
        assert store.put(name, bytes(size)) == 0
    assert tier.read(batch([1]), rows([0])) == [Outcome.FAILED]
    assert tier.found(batch([1]).keys) == 0, "what could not be got is remembered"
    tier.close()


def test_a_full_pool_refuses_or_evicts_and_never_lies(pool: str) -> None:
    size = 4 << 20
    tier = opened(pool, size=size)
    kept = []
    for slot in range(SLOTS):  # twice what the pool holds
        source = np.full((1, size), slot, np.uint8)
        kept += tier.write(batch([slot]), source)
    assert set(kept) <= {Outcome.OK, Outcome.BUSY}
    assert kept.count(Outcome.OK) >= 8
    out, right = np.empty((1, size), np.uint8), 0
    for slot in range(SLOTS):
        if tier.read(batch([slot]), out) == [Outcome.OK]:
            assert (out == slot).all()
            right += 1
    assert 0 < right < SLOTS
    tier.close()


def test_a_capacity_without_a_block_is_refused(pool: str) -> None:
    client = PoolClient(pool, 0, "tcp", "", LOCALHOST)
    with pytest.raises(CapacityError, match="raise the capacity"):
        MooncakeTier("pool", client, "x", 100, SIZE)
    assert client.close()
