"""What loads and prefills take, measured, and how much of a match is worth loading."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

KEEP = 0.8  # weight that one sample leaves to those before it
MEMORY = 20.0  # seconds after which a sample weighs half: a probe counts more than what it tests
HALF_LIFE = 60.0  # seconds after which a tier of which nothing is heard is believed half as slow
STEP = 256  # tokens: what a step takes that computes fewer is not the tokens' doing
PER_REQUEST = 16  # a step with more tokens per request than this is one of prefills
DEPTH = 16  # steps under way; more means that some have ended unheard


class Line:
    """seconds = latency + blocks * pace, fitted to samples of which the latest weigh most.

    Weighted least squares; where the samples do not tell latency and pace apart, or contradict
    the model, the line goes through the origin.
    """

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self.last: float | None = None
        """When the latest sample came."""

    def add(self, blocks: int, seconds: float, now: float) -> None:
        age = 0.0 if self.last is None else max(0.0, now - self.last)
        keep = KEEP * 0.5 ** (age / MEMORY)
        x, y, self.last = float(blocks), seconds, now
        self._n, self._x, self._y = self._n * keep + 1, self._x * keep + x, self._y * keep + y
        self._xx, self._xy = self._xx * keep + x * x, self._xy * keep + x * y

    def at(self, blocks: int) -> float:
        """Seconds that so many blocks would take; 0 before anything was measured."""
        if not blocks or self.last is None:
            return 0.0
        spread = self._n * self._xx - self._x * self._x
        if spread > 1e-3 * self._n * self._xx:
            pace = (self._n * self._xy - self._x * self._y) / spread
            latency = (self._y - pace * self._x) / self._n
            if pace >= 0.0 and latency >= 0.0:
                return latency + pace * blocks
        return blocks * self._xy / self._xx


@dataclass(slots=True)
class Step:
    """A step of the engine under way. `tokens`: 0 if it says nothing about prefills."""

    tokens: int
    began: float


class Prefill:
    """Tokens per second that the engine computes of prompts. The engine's thread only."""

    def __init__(self, rate: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`rate`: fixed; None: measured over the steps that do little else."""
        self._fixed, self._clock = rate, clock
        self._steps: deque[Step] = deque()
        self._ended = float("-inf")
        self._tokens = self._seconds = 0.0

    def begun(self, tokens: int, requests: int, *, waits: bool = False) -> None:
        """A step with so many tokens was scheduled; `waits`: for loads as well. O(1)."""
        if len(self._steps) >= DEPTH:
            self._steps.clear()
        counts = tokens >= max(STEP, PER_REQUEST * requests) and not waits
        self._steps.append(Step(tokens if counts else 0, self._clock()))

    def ended(self) -> None:
        """The oldest step under way has ended; the next one could begin only now."""
        if not self._steps:
            return
        step, now = self._steps.popleft(), self._clock()
        seconds = now - max(step.began, self._ended)
        self._ended = now
        if step.tokens and seconds > 0.0:
            self._tokens = self._tokens * KEEP + step.tokens
            self._seconds = self._seconds * KEEP + seconds

    @property
    def rate(self) -> float | None:
        """None until something was measured."""
        if self._fixed is not None:
            return self._fixed
        return self._tokens / self._seconds if self._seconds else None


class Bandwidth:
    """Seconds that loads from each tier take. The engine's thread only.

    A tier that was found slow is not asked, and so would never be found faster. Hence the
    belief fades while nothing is heard: an estimate halves every `HALF_LIFE` seconds, until a
    load looks worth it again. That one is the probe: while it is under way, the tier counts as
    slow as before to everybody else. The slower a tier is, the rarer its probes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines: dict[str, Line] = {}
        self._loading: Counter[str] = Counter()

    def begun(self, tier: str) -> None:
        self._loading[tier] += 1

    def ended(self, tier: str, blocks: int, seconds: float) -> None:
        """A load has ended; `seconds` 0 if it says nothing about the tier."""
        self._loading[tier] -= 1
        if seconds > 0.0:
            self._lines.setdefault(tier, Line()).add(blocks, seconds, self._clock())

    def seconds(self, tier: str, blocks: int) -> float:
        """What a load of so many blocks would take now; 0 for a tier that was never measured."""
        line = self._lines.get(tier)
        if line is None or line.last is None:
            return 0.0
        seconds = line.at(blocks)
        if not self._loading[tier]:
            seconds *= 0.5 ** (max(0.0, self._clock() - line.last) / HALF_LIFE)
        return seconds


def worth_loading(
    spans: Sequence[tuple[str, int]],
    chunk: int,
    computed: int,
    seconds: Callable[[str, int], float],
    rate: float | None,
) -> int:
    """How many leading chunks of a match are worth having: loading those beyond the `computed`
    tokens and computing the others takes least. O(spans).

    `spans`: (tier, chunks of `chunk` tokens), from the root. `seconds(tier, chunks)`: of a load.
    `rate`: tokens computed per second; None: unknown, everything is loaded. Both are linear in
    the chunks of a span, so the best length ends with a span, or is none at all.
    """
    total = sum(count for _, count in spans)
    if rate is None:
        return total
    begin, first, cost, best = 0, computed // chunk, 0.0, 0.0
    length = min(total, first)
    loaded: Counter[str] = Counter()
    for tier, count in spans:
        end = begin + count
        more = end - max(begin, first)
        if more > 0:
            before = seconds(tier, loaded[tier]) if loaded[tier] else 0.0
            loaded[tier] += more
            cost += seconds(tier, loaded[tier]) - before
            gain = (end * chunk - computed) / rate
            if cost - gain <= best:
                best, length = cost - gain, end
        begin = end
    return length
