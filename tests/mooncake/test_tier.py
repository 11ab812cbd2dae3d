"""The tier contract on a real pool, and what is the pool's own."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.mooncake.pool import (
    LEASE_MS,
    LOCALHOST,
    MIB,
    Owner,
    await_capacity,
    await_true,
    bare_client,
    make_master,
)
from tieredkv.errors import CapacityError
from tieredkv.testing import TierSuite
from tieredkv.testing.tier_suite import batch
from tieredkv.tiers.base import Tier
from tieredkv.tiers.mooncake.catalogue import QUESTIONS, SECONDS, Catalogue
from tieredkv.tiers.mooncake.client import CALLS, PoolClient
from tieredkv.tiers.mooncake.objects import HEADER, object_name
from tieredkv.tiers.mooncake.tier import MooncakeTier
from tieredkv.types import Batch, Outcome

SIZE, SLOTS = 8192, 32


@pytest.fixture(scope="module")
def pool(mooncake_runs: None) -> Iterator[str]:
    """The address of a master with an owner of 64 MiB."""
    with make_master() as master, Owner(master.address, 64 * MIB):
        await_capacity(master, 64 * MIB)
        yield master.address


class Side(NamedTuple):
    """What one process has of the pool."""

    tier: MooncakeTier
    catalogue: Catalogue

    def found(self, keys: Sequence[bytes]) -> int:
        found = self.catalogue.answer(self.catalogue.ask(keys), wait=60.0)
        assert found is not None
        return found

    def write(self, wanted: Batch, data: np.ndarray) -> list[Outcome]:
        self.catalogue.coming(wanted.keys)
        outcomes = self.tier.write(wanted, data)
        self.catalogue.stored(
            k for k, o in zip(wanted.keys, outcomes, strict=True) if o is Outcome.OK
        )
        return outcomes

    def read(self, wanted: Batch, out: np.ndarray) -> list[Outcome]:
        outcomes = self.tier.read(wanted, out)
        self.catalogue.lost(
            k for k, o in zip(wanted.keys, outcomes, strict=True) if o is not Outcome.OK
        )
        return outcomes

    def close(self) -> None:
        self.catalogue.close()
        self.tier.close()


def side(pool: str, identity: str | None = None, size: int = SIZE) -> Side:
    tier = opened(pool, identity, size)
    catalogue = Catalogue(tier.client, [tier.identity], size, None)
    tier.refused = catalogue.doomed
    return Side(tier, catalogue)


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
def pair(pool: str) -> Iterator[tuple[Side, Side]]:
    """Two processes with one identity."""
    identity = uuid.uuid4().hex
    sides = side(pool, identity), side(pool, identity)
    yield sides
    for one in sides:
        one.close()


def rows(slots: list[int], fill: int = 0) -> np.ndarray:
    return np.repeat(np.array([[slot + fill] for slot in slots], np.uint8), SIZE, axis=1)


def test_what_one_has_stored_the_other_finds_and_reads(
    pair: tuple[Side, Side],
) -> None:
    one, other = pair
    keys = batch([1, 2, 3]).keys
    assert other.found(keys) == 0
    assert one.write(batch([1, 2]), rows([1, 2])) == [Outcome.OK] * 2
    assert other.found(keys) == 2
    out = rows([0, 0])
    assert other.read(batch([1, 2]), out) == [Outcome.OK] * 2
    assert np.array_equal(out, rows([1, 2]))


def test_the_first_gap_ends_what_is_found(pair: tuple[Side, Side]) -> None:
    one, other = pair
    assert one.write(batch([1, 3]), rows([1, 3])) == [Outcome.OK] * 2
    assert other.found(batch([1, 2, 3]).keys) == 1
    assert other.found(batch([2, 3]).keys) == 0
    assert other.found([]) == 0


def test_another_identity_sees_nothing(pool: str) -> None:
    one, other = side(pool), side(pool)
    assert one.write(batch([1]), rows([1])) == [Outcome.OK]
    assert other.found(batch([1]).keys) == 0
    assert other.read(batch([1]), rows([0])) == [Outcome.FAILED]
    one.close()
    other.close()


def test_who_stores_it_second_finds_it_stored(pair: tuple[Side, Side]) -> None:
    for tier in pair:
        assert tier.write(batch([4]), rows([4])) == [Outcome.OK]
    out = rows([0])
    assert pair[1].read(batch([4]), out) == [Outcome.OK]
    assert np.array_equal(out, rows([4]))


def gone(side: Side, keys: Sequence[bytes]) -> None:
    """Wait until all removals were tried, and see that the pool has none of these. (Asking
    earlier would renew their leases.)"""
    catalogue = side.catalogue
    await_true("they are removed", lambda: not (catalogue._leaving or catalogue.doomed))
    names = [object_name(side.tier.identity, key) for key in keys]
    assert set(side.tier.client.exist(names)) == {0}


def test_what_leaves_here_is_removed_if_it_is_ours(pair: tuple[Side, Side]) -> None:
    one, other = pair
    assert one.write(batch([4, 5]), rows([4, 5])) == [Outcome.OK] * 2
    assert other.write(batch([6]), rows([6])) == [Outcome.OK]
    time.sleep(1.5 * LEASE_MS / 1000)
    one.catalogue.left(batch([4, 6]).keys)
    gone(one, batch([4]).keys)
    assert other.found(batch([5]).keys) == other.found(batch([6]).keys) == 1


def test_what_leaves_here_stays_while_others_read_it(pair: tuple[Side, Side]) -> None:
    one, other = pair
    assert one.write(batch([4]), rows([4])) == [Outcome.OK]
    assert other.read(batch([4]), rows([0])) == [Outcome.OK]  # leases it
    one.catalogue.left(batch([4]).keys)
    await_true("it was tried", lambda: not one.catalogue._leaving)
    time.sleep(1.5 * LEASE_MS / 1000)
    assert other.read(batch([4]), rows([0])) == [Outcome.OK]


def test_what_comes_back_in_time_is_not_removed(pair: tuple[Side, Side]) -> None:
    one, other = pair
    assert one.write(batch([4]), rows([4])) == [Outcome.OK]
    with one.catalogue._wake:  # the thread that removes has no turn meanwhile
        one.catalogue.left(batch([4]).keys)
        one.catalogue.coming(batch([4]).keys)
    time.sleep(1.5 * LEASE_MS / 1000)
    assert other.found(batch([4]).keys) == 1


def test_all_that_is_ours_can_be_removed(pair: tuple[Side, Side]) -> None:
    one, other = pair
    assert one.write(batch([4, 5]), rows([4, 5])) == [Outcome.OK] * 2
    assert other.write(batch([6]), rows([6])) == [Outcome.OK]
    one.catalogue.remove_own()
    assert one.found(batch([4]).keys) == 0, "at once"
    gone(one, batch([4, 5]).keys)  # though puts had leased them
    assert other.found(batch([6]).keys) == 1


def test_a_block_is_there_with_the_objects_of_all_ranks(pool: str) -> None:
    name = uuid.uuid4().hex
    ranks = [opened(pool, f"{name}/{rank}") for rank in range(3)]
    client = PoolClient(pool, 0, "tcp", "", LOCALHOST)
    catalogue = Catalogue(client, [rank.identity for rank in ranks], 3 * SIZE, None)
    keys = batch([1, 2, 3]).keys

    def found() -> int | None:
        return catalogue.answer(catalogue.ask(keys), wait=60.0)

    for i, rank in enumerate(ranks):
        assert found() == 0
        assert rank.write(batch([1, 2][: 2 - i // 2]), rows([1, 2][: 2 - i // 2])).count("ok")
    assert found() == 1
    catalogue.remove(keys)
    for rank in ranks:
        gone(Side(rank, catalogue), keys)
        rank.close()
    catalogue.close()


@pytest.mark.parametrize(
    ("used", "own", "excess"),
    [(80, 80, 0), (85, 85, 0), (95, 95, 10), (95, 19, 2), (100, 0, 0), (100, 50, 8), (0, 0, 0)],
)
def test_above_the_watermark_everybody_gives_up_his_share(used: int, own: int, excess: int) -> None:
    catalogue = Catalogue(Nobody("127.0.0.1:1", 0, "tcp", "", None), ["x"], 10, None)
    catalogue.stored([bytes([i]) for i in range(own)])
    assert catalogue._excess(used * 10, 1000) == excess
    catalogue.close()


class Nobody(PoolClient):
    """A client that does not wait for its pool."""

    def __init__(self, *args: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tieredkv.tiers.mooncake.client.OPENING", 0.0)
            super().__init__(*args)


def test_questions_of_a_pool_that_is_down_are_answered_at_once() -> None:
    catalogue = Catalogue(Nobody("127.0.0.1:1", 0, "tcp", "", None), ["x"], 10, None)
    began = time.monotonic()
    for _ in range(100):
        assert catalogue.answer(catalogue.ask([b"k"]), wait=0.0) == 0
    assert time.monotonic() - began < 0.1
    catalogue.close()
    assert catalogue.answer(catalogue.ask([b"k"]), wait=0.0) == 0


def test_what_cannot_be_removed_now_keeps_no_thread_busy() -> None:
    catalogue = Catalogue(Nobody("127.0.0.1:1", 0, "tcp", "", None), ["x"], 10, None)
    catalogue.stored([b"a", b"b"])
    catalogue.left([b"a"])
    catalogue.remove([b"b"])
    (thread,) = (t for t in catalogue._threads if t.name == "tieredkv-pool")
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    before = time.clock_gettime(clock)
    time.sleep(1.0)
    assert time.clock_gettime(clock) - before < 0.3
    catalogue.close()


def test_a_prober_survives_what_the_library_raises(
    pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, raised = PoolClient._set_up, []

    def failing(self: PoolClient, host: str) -> bool:
        if len(raised) < 2:
            raised.append(TimeoutError() if raised else ValueError("of the library"))
            raise raised[-1]
        return inner(self, host)

    monkeypatch.setattr(PoolClient, "_set_up", failing)
    client = PoolClient(pool, 0, "tcp", "", LOCALHOST)
    assert client.exist(["x"]) == [0]
    assert len(raised) == 2
    assert client.close()


def test_questions_wait_for_no_transfer(pool: str) -> None:
    one = side(pool)
    assert one.write(batch([1]), rows([1])) == [Outcome.OK]
    time.sleep(SECONDS)
    for _ in range(CALLS):
        assert one.tier.client._turns.acquire(timeout=1)
    assert one.found(batch([1]).keys) == 1
    assert one.tier.read(batch([1]), rows([0])) == [Outcome.BUSY], "the pool itself is fine"
    for _ in range(CALLS):
        one.tier.client._turns.release()
    assert one.tier.read(batch([1]), rows([0])) == [Outcome.OK]
    one.close()


def test_too_many_questions_are_answered_with_nothing(pool: str) -> None:
    one = side(pool)
    assert one.write(batch([1]), rows([1])) == [Outcome.OK]
    with one.catalogue._wake:
        asked = [one.catalogue.ask(batch([1]).keys) for _ in range(2 * QUESTIONS)]
        at_once = [one.catalogue.answer(question, wait=0.0) for question in asked]
    assert at_once == [None] * QUESTIONS + [0] * QUESTIONS
    answers = [one.catalogue.answer(question, wait=60.0) for question in asked]
    assert answers == [1] * QUESTIONS + [0] * QUESTIONS
    one.close()


def test_deleted_blocks_stay_away_even_while_they_are_leased(
    pair: tuple[Side, Side],
) -> None:
    one, other = pair
    keys = batch([4]).keys
    assert one.write(batch([4]), rows([4])) == [Outcome.OK]
    assert other.found(keys) == 1  # leases it
    one.catalogue.remove(keys)
    assert one.found(keys) == 0
    assert one.write(batch([4]), rows([4], fill=1)) == [Outcome.BUSY], "old bytes would win"
    await_true("it is removed", lambda: not one.catalogue.doomed)
    assert one.write(batch([4]), rows([4], fill=1)) == [Outcome.OK]
    out = rows([0])
    assert other.read(batch([4]), out) == [Outcome.OK]
    assert np.array_equal(out, rows([5]))


@pytest.mark.parametrize("damage", ["bytes", "header", "name"])
def test_foreign_bytes_under_our_name_are_never_read_as_ours(pool: str, damage: str) -> None:
    tier = side(pool, "shared")
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
    tier = side(pool)
    name = object_name(tier.tier.identity, batch([1]).keys[0])
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
