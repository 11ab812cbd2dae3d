"""The slot pool against plain sets."""

from __future__ import annotations

import random

import pytest

from tieredkv.index.slots import SlotPool


class Model:
    """Every slot is in exactly one place; the pool has to agree after every step."""

    def __init__(self, limit: int, seed: int) -> None:
        self.pool = SlotPool(limit)
        self.rng = random.Random(seed)
        self.limit = limit
        self.owned: set[int] = set()
        self.reads: dict[int, int] = {}
        self.given: set[int] = set()
        """Given back while they were being read."""
        self.lost: set[int] = set()

    @property
    def free(self) -> int:
        return self.limit - len([s for s in self.owned | self.given | self.lost if s < self.limit])

    def step(self) -> None:
        rng, pool = self.rng, self.pool
        kind = rng.random()
        some = rng.sample(sorted(self.owned), rng.randint(0, len(self.owned)))
        if kind < 0.4:
            count = rng.randint(0, 6)
            taken = pool.take(count)
            assert len(taken) == min(count, self.free)
            assert len(set(taken)) == len(taken)
            assert not set(taken) & (self.owned | self.given | self.lost), "taken twice"
            assert all(0 <= slot < self.limit for slot in taken)
            self.owned.update(taken)
        elif kind < 0.6:
            pool.give(some)
            self.owned -= set(some)
            self.given |= {slot for slot in some if slot in self.reads}
        elif kind < 0.75:
            pool.hold(some)
            for slot in some:
                self.reads[slot] = self.reads.get(slot, 0) + 1
        elif kind < 0.95:
            ended = rng.sample(sorted(self.reads), rng.randint(0, len(self.reads)))
            pool.release(ended)
            for slot in ended:
                self.reads[slot] -= 1
                if not self.reads[slot]:
                    del self.reads[slot]
                    self.given.discard(slot)
        elif kind < 0.98 and some:
            pool.lose(some[0])
            self.owned.discard(some[0])
            self.lost.add(some[0])
        elif kind > 0.995:
            self.limit = min(self.limit, rng.randint(self.limit // 2, self.limit))
            pool.shrink(self.limit)

    def compare(self) -> None:
        pool = self.pool
        assert pool.limit == self.limit
        assert pool.free == self.free
        assert pool.used == self.limit - self.free
        assert pool.lost == len([slot for slot in self.lost if slot < self.limit])
        assert pool.check({slot for slot in self.owned if slot < self.limit}) == []


@pytest.mark.parametrize("seed", range(30))
def test_random_walk(seed: int) -> None:
    model = Model(20, seed)
    for _ in range(400):
        model.step()
        model.compare()
    assert model.pool.check({slot for slot in model.owned if slot < model.limit}) == []


def test_neighbours_stay_neighbours() -> None:
    pool = SlotPool(100)
    first = pool.take(8)
    assert first == list(range(8))
    pool.take(4)
    pool.give(first)
    assert pool.take(8) == first


def test_claimed_slots_are_not_handed_out() -> None:
    pool = SlotPool(8)
    pool.claim([1, 2, 5])
    assert pool.free == 5
    assert sorted(pool.take(8)) == [0, 3, 4, 6, 7]
    assert pool.check({1, 2, 5, 0, 3, 4, 6, 7}) == []


@pytest.mark.parametrize("problem", ["leaked", "owned and free", "free twice"])
def test_check_notices(problem: str) -> None:
    pool = SlotPool(4)
    taken = pool.take(3)
    if problem == "leaked":
        found = pool.check(set(taken[:2]))
    elif problem == "owned and free":
        found = pool.check({*taken, 3})
    else:
        pool.give(taken[:1])
        pool.give(taken[:1])
        found = pool.check(set(taken[1:]))
    assert any(problem in line for line in found)
