"""A planner in miniature: legal event sequences for eviction policies, and a judge of answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tieredkv.eviction.base import Access, EvictionPolicy, Kind, Victim

Pinned = Callable[[int], int]


def no_pins(run: int) -> int:
    return 0


def check_victims(
    victims: Iterable[Victim], leaves: dict[int, int], nbytes: int, block: int, pinned: Pinned
) -> None:
    """Assert that this is a legal answer for these leaf runs (run -> bytes)."""
    runs = [victim.run for victim in victims]
    strangers = [run for run in runs if run not in leaves]
    assert not strangers, f"runs {strangers} are no leaves (never recorded, or forgotten)"
    assert len(set(runs)) == len(runs), f"the same run is named twice: {runs}"
    for run, taken in victims:
        free = leaves[run] - pinned(run)
        assert taken > 0, f"run {run}: a victim of {taken} bytes"
        assert taken % block == 0, f"run {run}: {taken} bytes are not whole blocks of {block}"
        assert taken <= free, f"run {run}: {taken} bytes of {free} that may go"
    wanted = -(-max(0, nbytes) // block) * block
    free = sum(max(0, size - pinned(run)) for run, size in leaves.items())
    total = sum(taken for _, taken in victims)
    assert total == min(wanted, free), f"{total} bytes for {wanted} wanted, {free} evictable"


@dataclass
class _Run:
    nbytes: int
    born: float
    last: float
    hits: int = 0


class World:
    """Drives a policy with legal random events and checks every answer."""

    def __init__(self, policy: EvictionPolicy, capacity: int, block: int, seed: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.block = block
        self.rng = random.Random(seed)
        self.leaves: dict[int, _Run] = {}
        self.inner: dict[int, _Run] = {}
        """Runs with a child: resident, but not the policy's business."""
        self.log: list[list[Victim]] = []
        """Every answer that was acted on."""
        self.now = 0.0
        self._next = 0

    def sizes(self) -> dict[int, int]:
        return {run: leaf.nbytes for run, leaf in self.leaves.items()}

    def record(self, kind: Kind, run: int) -> None:
        leaf = self.leaves[run]
        blocks = leaf.nbytes // self.block
        key = run.to_bytes(32, "big")
        self.policy.record(
            Access(
                *(kind, run, key, blocks, leaf.nbytes, blocks, leaf.born, leaf.last, leaf.hits),
                first=key,
            )
        )

    def insert(self, nbytes: int) -> int:
        used = sum(run.nbytes for run in (*self.leaves.values(), *self.inner.values()))
        if used + nbytes > self.capacity:
            self.evict(used + nbytes - self.capacity)
        run = self._next
        self._next += 1
        self.leaves[run] = _Run(nbytes, self.now, self.now)
        self.record(Kind.INSERT, run)
        return run

    def hit(self, run: int) -> None:
        self.leaves[run].last = self.now
        self.leaves[run].hits += 1
        self.record(Kind.HIT, run)

    def resize(self, run: int, nbytes: int) -> None:
        self.leaves[run].nbytes = nbytes
        self.record(Kind.RESIZE, run)

    def forget(self, run: int, evicted: bool) -> None:
        leaf = self.leaves.pop(run)
        if not evicted:
            self.inner[run] = leaf
        self.policy.forget(run, evicted)

    def ask(self, nbytes: int, pinned: Pinned = no_pins) -> list[Victim]:
        victims = self.policy.victims(nbytes, self.now, pinned)
        check_victims(victims, self.sizes(), nbytes, self.block, pinned)
        return victims

    def evict(self, nbytes: int, pinned: Pinned = no_pins) -> None:
        victims = self.ask(nbytes, pinned)
        self.log.append(victims)
        for run, taken in victims:
            rest = self.leaves[run].nbytes - taken
            if rest:
                self.resize(run, rest)
            else:
                self.forget(run, evicted=True)

    def step(self) -> None:
        self.now += self.rng.random()
        event = self.rng.randrange(16) if self.leaves else 0
        if event < 6:
            self.insert(self.block * self.rng.randint(1, 5))
            return
        run = self.rng.choice(list(self.leaves))
        blocks = self.leaves[run].nbytes // self.block
        if event < 10:
            self.hit(run)
        elif event == 10:
            self.resize(run, self.block * self.rng.randint(1, blocks))
        elif event == 11:
            self.record(Kind.END, run)
        elif event == 12:
            self.forget(run, evicted=False)
        elif event == 13 and self.inner:
            run = self.rng.choice(list(self.inner))
            self.leaves[run] = self.inner.pop(run)
            self.record(Kind.LEAF, run)
        elif event == 14:
            self.evict(self.rng.randint(1, 8 * self.block), self.pins())
        else:
            self.forget(run, evicted=True)  # deleted, or its bytes were corrupt

    def pins(self) -> Pinned:
        """Some runs pinned wholly, some in part."""
        kept = {
            run: self.block * self.rng.randint(0, leaf.nbytes // self.block)
            for run, leaf in self.leaves.items()
            if self.rng.random() < 0.4
        }
        return lambda run: kept.get(run, 0)
