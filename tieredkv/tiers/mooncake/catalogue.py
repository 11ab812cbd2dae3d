"""What a pool has of one engine's chains: asked, counted and removed, where the planner is.

A block is in the pool if it has an object for every rank. The master alone knows what exists;
here is remembered what this engine has put there itself, since that alone it removes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from math import ceil

from cachetools import TTLCache

from tieredkv.tiers.mooncake.client import PoolClient
from tieredkv.tiers.mooncake.meter import Meter
from tieredkv.tiers.mooncake.objects import ABSENT, object_name

KNOWN, SECONDS = 1 << 16, 1.0
"""Blocks whose existence is remembered, and for how long: each question renews a lease in the
pool, and what is leased cannot be removed."""
DOOMED = 1 << 20
"""Deleted blocks that are remembered until they are gone: some 100 MB at most."""
GONE = 10.0
"""Seconds for which a block that could not be got counts as absent: as long as the master goes
on listing what a dead process held (its `client_ttl`)."""
ASK = 1.0
"""Seconds that a question may take before the pool counts as down."""
QUESTIONS = 64
"""Questions that wait at a time; further ones are answered with nothing at once."""
BATCH = 256
"""Objects that one call removes."""
RETRY = 0.5
"""Seconds until a removal that met a reader is tried again."""
WATERMARK = 0.85
"""Share of the pool above which this engine gives up blocks of its own."""
WATCH = 1.0
"""Seconds between two looks at the pool's use."""


@dataclass(slots=True, eq=False)
class Question:
    """How many leading blocks of a chain the pool has."""

    keys: Sequence[bytes]
    deadline: float
    found: int = 0
    done: threading.Event = field(default_factory=threading.Event)


class Catalogue:
    """Implements `tieredkv.tiers.base.SharedCatalogue`; thread-safe.

    One thread asks and removes, another looks at the pool's use once a second. No method but
    `answer` and `close` waits.
    """

    def __init__(
        self,
        client: PoolClient,
        identities: Sequence[str],
        block_bytes: int,
        meter: Meter | None,
        *,
        soft_pins: bool = True,
    ) -> None:
        """`identities` of all ranks: what begins the names of their objects. `block_bytes` of a
        block on all ranks together. Without a meter nothing is given up at the watermark. The
        client is the catalogue's, and perhaps a tier's."""
        self.soft_pins = soft_pins
        self.doomed: dict[bytes, None] = {}
        """Deleted, and perhaps still there because somebody was reading: not found any more,
        and not to be put, since the old bytes would win."""
        self.shed: Callable[[int], object] | None = None
        self._client, self._identities = client, tuple(identities)
        self._block_bytes, self._meter = block_bytes, meter
        self._wake = threading.Condition()
        self._questions: deque[Question] = deque()
        self._own: dict[bytes, None] = {}
        self._leaving: dict[bytes, None] = {}
        """Evicted here, and to be removed unless somebody uses them just then."""
        self._present: TTLCache[bytes, bool] = TTLCache(KNOWN, SECONDS)
        self._absent: TTLCache[bytes, bool] = TTLCache(KNOWN, GONE)
        self._retry = 0.0
        self._closed = False
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, name="tieredkv-pool", daemon=True)]
        if meter is not None:
            name = "tieredkv-pool-meter"
            self._threads.append(threading.Thread(target=self._watch, name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def available(self) -> bool:
        return self._client.breaker.closed

    @property
    def failures(self) -> int:
        return self._client.breaker.failures

    # -- what others have stored ----------------------------------------------------------

    def ask(self, keys: Sequence[bytes]) -> Question:
        question = Question(keys, time.monotonic() + ASK)
        with self._wake:
            if keys and self.available and not self._closed and len(self._questions) < QUESTIONS:
                self._questions.append(question)
                self._wake.notify()
            else:
                question.done.set()
        return question

    def answer(self, question: Question, *, wait: float) -> int | None:
        left = question.deadline - time.monotonic()
        if question.done.wait(max(0.0, min(left, wait))):
            found = question.keys[: question.found]  # of which some may be deleted since
            return sum(1 for _ in takewhile(lambda key: key not in self.doomed, found))
        if time.monotonic() < question.deadline:
            return None
        self._client.broke("a question of existence hung")
        return 0

    def lost(self, keys: Iterable[bytes]) -> None:
        with self._wake:
            for key in keys:
                self._own.pop(key, None)
                self._present.pop(key, None)
                if self.available:  # else it says nothing about the block
                    self._absent[key] = True

    # -- what is ours ---------------------------------------------------------------------

    def coming(self, keys: Iterable[bytes]) -> None:
        with self._wake:
            for key in keys:
                self._leaving.pop(key, None)

    def stored(self, keys: Iterable[bytes]) -> None:
        with self._wake:
            for key in keys:
                self._absent.pop(key, None)
                self._present[key] = True
                self._own[key] = None

    def left(self, keys: Iterable[bytes]) -> None:
        with self._wake:
            own = [key for key in keys if key in self._own]
            for key in own:
                del self._own[key]
                self._present.pop(key, None)
                self._leaving[key] = None
            _trim(
                self._leaving, KNOWN
            )  # what is forgotten here leaves by the master's own eviction
            self._wake.notify()

    def remove(self, keys: Iterable[bytes]) -> None:
        with self._wake:
            for key in keys:
                self._own.pop(key, None)
                self._leaving.pop(key, None)
                self._present.pop(key, None)
                self.doomed[key] = None
            _trim(self.doomed, DOOMED)
            self._retry = 0.0
            self._wake.notify()

    def remove_own(self) -> None:
        with self._wake:
            own = list(self._own)
        self.remove(own)

    def disown(self) -> None:
        with self._wake:
            for keys in (self._own, self._leaving, self._present):
                keys.clear()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._stop.set()
            self._wake.notify()
        for thread in self._threads:
            thread.join(ASK)
        self._client.close()

    # -- the thread that asks and removes -------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(self._due, RETRY)
                if self._closed:
                    for waiting in self._questions:
                        waiting.done.set()
                    return
                question = self._questions.popleft() if self._questions else None
            if question is not None:
                question.found = self._found(question.keys)
                question.done.set()
            else:
                self._remove_some()

    def _due(self) -> bool:
        late = bool(self.doomed) and time.monotonic() >= self._retry
        work = self.available and bool(self._leaving or late)
        return self._closed or work or bool(self._questions)

    def _found(self, keys: Sequence[bytes]) -> int:
        with self._wake:
            gone = (self._absent, self.doomed, self._leaving)
            keys = list(takewhile(lambda key: not any(key in some for some in gone), keys))
            unknown = [key for key in keys if key not in self._present]
        codes = self._client.exist(self._names(unknown))
        ranks = len(self._identities)
        with self._wake:
            for i, key in enumerate(unknown if codes else ()):
                if codes[i * ranks : (i + 1) * ranks] == [1] * ranks:
                    self._present[key] = True
            return sum(1 for _ in takewhile(self._present.__contains__, keys))

    def _remove_some(self) -> None:
        """One call's worth of what is deleted, else of what has left."""
        count = max(1, BATCH // len(self._identities))
        with self._wake:
            deleted = bool(self.doomed) and time.monotonic() >= self._retry
            keys = list(islice(self.doomed if deleted else self._leaving, count))
        if not keys or not self.available:
            return
        codes = self._client.remove(self._names(keys))
        with self._wake:
            if not deleted:
                for key in keys:
                    self._leaving.pop(key, None)
                return
            ranks = len(self._identities)
            for i, key in enumerate(keys):
                here = codes[i * ranks : (i + 1) * ranks] if codes else [None]
                if all(code == 0 or code in ABSENT for code in here):
                    self.doomed.pop(key, None)
                elif key in self.doomed:  # behind the others
                    del self.doomed[key]
                    self.doomed[key] = None
            if codes is None or not all(code == 0 or code in ABSENT for code in codes):
                self._retry = time.monotonic() + RETRY

    def _names(self, keys: Iterable[bytes]) -> list[str]:
        return [object_name(identity, key) for key in keys for identity in self._identities]

    # -- the thread that watches the pool fill --------------------------------------------

    def _watch(self) -> None:
        assert self._meter is not None
        while not self._stop.wait(WATCH):
            usage = self._meter.read() if self.available else None
            blocks = 0 if usage is None else self._excess(*usage)
            if blocks and self.shed is not None:
                self.shed(blocks)

    def _excess(self, used: int, capacity: int) -> int:
        """Blocks of ours to give up: our share of what the pool has above the watermark."""
        over = used - WATERMARK * capacity
        if over <= 0 or not used:
            return 0
        share = min(1.0, len(self._own) * self._block_bytes / used)
        return ceil(over * share / self._block_bytes)


def _trim(keys: dict[bytes, None], most: int) -> None:
    while len(keys) > most:
        del keys[next(iter(keys))]
