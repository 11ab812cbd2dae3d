"""The catalogue of a Mooncake pool over a pool in a dict, without its thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from cachetools import TTLCache

from tests.store.shared_pool import Link, Pool
from tieredkv.tiers.mooncake.catalogue import GONE, KNOWN, RETRY, SECONDS, Catalogue, Question
from tieredkv.tiers.mooncake.client import PoolClient
from tieredkv.types import Clock

T = TypeVar("T")
LEASED, ABSENT = -706, -704


class SteppedCatalogue(Catalogue):
    """What the thread would do waits for `step`; all times are the test's."""

    def __init__(self, link: Link, clock: Clock, *, soft_pins: bool, block_bytes: int) -> None:
        self.removing: Callable[[bytes, bool], None] = lambda key, deleted: None
        """As of `FakeCatalogue`."""
        self.sealed = False
        self._clock, self._tried = clock, 0.0
        client = cast("PoolClient", _Client(link, self))
        super().__init__(client, ["rank"], block_bytes, None, soft_pins=soft_pins)
        self._present = TTLCache(KNOWN, SECONDS, timer=clock)
        self._absent = TTLCache(KNOWN, GONE, timer=clock)

    @property
    def own(self) -> set[bytes]:
        return set(self._own)

    @property
    def leaving(self) -> dict[bytes, None]:
        return self._leaving

    def ask(self, keys: Sequence[bytes]) -> Question:
        assert not (self.sealed and keys), "asked by a core that has left the pool"
        question = super().ask(keys)
        question.deadline = float("inf")
        return question

    def answer(self, question: Question, *, wait: float) -> int | None:
        while wait and not question.done.is_set():
            self.step()
        return super().answer(question, wait=0.0)

    def step(self) -> bool:
        """Once round the loop of the thread; False if there is nothing to do now."""
        if self._questions:
            question = self._questions.popleft()
            question.found = self._found(question.keys)
            question.done.set()
            return True
        self._retry = 0.0 if self._clock() >= self._tried + RETRY else float("inf")
        if not (self.available and self._due()):
            return False
        before = len(self.doomed)
        self._remove_some()
        if before and len(self.doomed) == before:
            self._tried = self._clock()
        return True

    def _run(self) -> None:
        """Nothing runs by itself."""


class _Client:
    """What a catalogue needs of a `PoolClient`."""

    def __init__(self, link: Link, catalogue: SteppedCatalogue) -> None:
        self.breaker = link
        self._catalogue = catalogue

    def exist(self, names: Sequence[str]) -> list[int]:
        if not names:
            return []
        here = self.breaker.call(lambda pool: [int(pool.exists(_key(name))) for name in names])
        return here or []

    def remove(self, names: Sequence[str]) -> list[int] | None:
        return self.breaker.call(lambda pool: [self._remove(pool, _key(name)) for name in names])

    def close(self) -> None:
        pass

    def _remove(self, pool: Pool, key: bytes) -> int:
        if key not in pool.blocks:
            return ABSENT
        if not pool.remove(key):
            return LEASED
        self._catalogue.removing(key, key in self._catalogue.doomed)
        return 0


def _key(name: str) -> bytes:
    return bytes.fromhex(name.rpartition("/")[2])
