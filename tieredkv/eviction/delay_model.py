"""When sessions come back: age-conditional hazards per class, learned online.

The age of a session runs from the end of its last turn, in bins of a quarter octave. For each
class g of turns (what ended it, its category, the next tool) and bin b

    O_g[b]  turns that began in the bin,
    X_g[b]  exposure: waits that survived the bin, each weighted with its session's factor m,
    L_g[b]  = (O_g[b] + k L_parent[b]) / (X_g[b] + k), the hazard, shrunk to the wider class,

where the widest class shrinks to its own previous bin, and bin 0 to a value that makes the
hazard fall like 1/age: with nothing observed the order of sessions is LRU. Sessions that still
wait count as exposure, so that a class whose sessions never come back needs no model of its
own. m is a product of factors, each (O + k) / (E + k) for one value of one feature in one
phase of the wait, with E the events that the rest of the model expected there; since features
overlap, only the power `DAMP` of each factor counts.

A session of class g and factor m has h_b = 1 - exp(-m L_g[b]). Its *index* at age b is the best
rate of hits per second that keeping it for some time from now on can give,

    G(b) = max_{k > b} (A_k - A_b) / (T_k - T_b),
    A_k = sum_{j<k} S_j h_j,  T_k = sum_{j<k} S_j (1 - h_j / 2) w_j,  S_{j+1} = S_j (1 - h_j)

with bin widths w: the index of Gittins (Bandit processes and dynamic allocation indices, JRSS B
41, 1979) for a block that may be dropped at any time. Hit density by age is the idea of LHD
(Beckmann, Chen, Cidon, NSDI 2018), reuse time by class of workload that of Wang et al., KVCache
Cache in the Wild (ATC 2025).
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count
from math import log2

import numpy as np
import numpy.typing as npt

from tieredkv.eviction.base import SessionState
from tieredkv.eviction.delay_state import State, decode, encode

Floats = npt.NDArray[np.float64]

BINS = 80
FIRST = 0.05
"""Upper edge of bin 0 in seconds; the last bin begins after 11 hours."""
UPPER: Floats = FIRST * 2.0 ** (np.arange(BINS) / 4)
WIDTH: Floats = np.diff(UPPER, prepend=0.0)
PHASES = (15.0, 120.0)
"""Seconds where one phase of a wait ends and the next begins."""
PRIOR = 0.5 * np.log(2) / 4
"""Hazard of one bin before anything was observed."""
SHRINK = 20.0
"""k: observations that the wider class counts for."""
HALF_LIFE = 4 * 3600.0
"""Seconds after which an observation counts half."""
FIRST_LOOK, NEXT_LOOK = 4.0, 2.0**0.25
"""Age in seconds at which a wait is first counted, and by what factor its age grows until it is
counted again."""
STEP = 0.5
"""Factors are rounded to powers of two of this exponent."""
DAMP = 0.6
"""Power of each factor: features overlap, and their full product would count twice."""
LARGEST = 4.0
"""Largest exponent of a session's factor, either way."""
CLASSES = 512
"""Classes kept; when there are so many, further ones count as the wider class."""
RARE = 1e-6
"""Share of a class that still waits, below which sums over its waits are not exact enough."""
TABLES = 256
"""Tables kept per class between two refreshes: 5 KB each."""


def bin_of(age: float) -> int:
    """The bin of an age in seconds."""
    if age <= FIRST:
        return 0
    return min(BINS - 1, 1 + int(4 * log2(age / FIRST)))


PHASE_OF = np.array([sum(edge <= upper for edge in PHASES) for upper in UPPER - WIDTH / 2])
_NEUTRAL = (0,) * (len(PHASES) + 1)


@dataclass(slots=True)
class _Class:
    """Waits of one class, or of all classes below it."""

    parent: _Class | None
    events: Floats = field(default_factory=lambda: np.zeros(BINS))
    edges: Floats = field(default_factory=lambda: np.zeros(BINS + 1))
    """Exposure not yet added up: differences from bin to bin."""
    exposure: Floats = field(default_factory=lambda: np.zeros(BINS))
    hazard: Floats = field(default_factory=lambda: np.full(BINS, PRIOR))
    summed: list[float] = field(default_factory=list)
    """The hazard summed over the bins before each bin."""
    tables: dict[tuple[int, ...], Table] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Table:
    """What a session of one class and factor is worth, by bin of its age."""

    index: list[float]
    """Hits per second that keeping its blocks can give at best."""
    returns: list[float]
    """Probability that it comes back at all."""


class DelayModel:
    """Statistics of one store. Not thread-safe; time is an argument.

    Cost: O(1) per turn, and O(classes) numpy passes over 80 bins when a hundredth of what is
    known has changed.
    """

    def __init__(self, half_life: float = HALF_LIFE) -> None:
        self._half_life = half_life
        self._root = _Class(None)
        self._classes: dict[tuple[Hashable, ...], _Class] = {(): self._root}
        self._of: list[_Class] = [self._root]
        """By `SessionState.group`: 0, all classes together, until a turn has ended."""
        self._ids: dict[Hashable, int] = {(): 0}
        self._factors: dict[tuple[str, int], list[list[float]]] = {}
        """(feature, value) -> per phase [events, expected events]."""
        self._pending: list[tuple[float, int, SessionState, float]] = []
        self._order = count()
        self._fresh = 0.0
        """Events since the classes were last brought up to date."""
        self._mass = 0.0
        self._time: float | None = None
        self._hazards()

    # -- what happens ---------------------------------------------------------------------

    def completed(self, session: SessionState, now: float) -> None:
        """A turn has ended, and the session waits from now on."""
        session.group = self._class_of(session)
        session.features = _features(session)
        session.scale = self._scale(session.features)
        session.counted = 0
        heapq.heappush(self._pending, (now + FIRST_LOOK, next(self._order), session, session.since))
        self._advance(now)

    def returned(self, session: SessionState, now: float) -> None:
        """The session's next turn has begun."""
        if not session.features:
            return
        here = bin_of(now - session.since)
        self._survived(session, here)
        cls: _Class | None = self._of[session.group]
        phase = int(PHASE_OF[here])
        half = 0.5 * self._factor(session, phase)
        while cls is not None:
            cls.events[here] += 1.0
            cls.edges[here] += half
            cls.edges[here + 1] -= half
            cls = cls.parent
        hazard = float(self._of[session.group].hazard[here])
        self._expect(session, phase, 0.5 * hazard)
        for feature in session.features:
            self._factors[feature][phase][0] += 1.0
        session.features = ()
        self._fresh += 1.0
        self._advance(now)

    def ended(self, session: SessionState, now: float) -> None:
        """The session waits no longer, and its turn did not come: count its wait so far."""
        if session.features and not session.running:
            self._survived(session, bin_of(now - session.since))
        session.features = ()

    # -- what it is asked -----------------------------------------------------------------

    def table(self, session: SessionState) -> Table:
        """By bin of the session's age, as of its last turn's end."""
        cls = self._of[session.group]
        scale = session.scale or _NEUTRAL
        table = cls.tables.get(scale)
        if table is None:
            if len(cls.tables) >= TABLES:
                cls.tables.clear()
            table = cls.tables[scale] = _table(cls.hazard, scale)
        return table

    # -- what it has learned --------------------------------------------------------------

    def state(self) -> bytes:
        """The statistics, without the waits under way; bounded in size."""
        self._refresh()
        classes = {path: (cls.events, cls.exposure) for path, cls in self._classes.items()}
        factors = {feature: np.array(known) for feature, known in self._factors.items()}
        return encode(State(_SCALE, self._mass + self._fresh, self._time, classes, factors))

    def restore(self, data: bytes) -> None:
        """Go on from there; for a model that has seen nothing. What was learned decays with the
        time that has passed since.

        Raises FormatError for other bytes than those of `state`; nothing is changed then.
        """
        state = decode(data, _SCALE)
        for path, (events, exposure) in state.classes.items():
            cls = self._classes.get(path) or _Class(self._classes[path[:-1]])
            cls.events, cls.exposure = events, exposure
            self._classes[path] = cls
        for feature, pairs in state.factors.items():
            self._factors[feature] = pairs.tolist()
        self._mass, self._time = state.mass, state.time
        self._hazards()

    # -- inside ---------------------------------------------------------------------------

    def _class_of(self, session: SessionState) -> int:
        path: tuple[Hashable, ...] = (
            session.finish_reason,
            session.category,
            session.next_tool,
        )
        number = self._ids.get(path)
        while number is None:
            wider = [path[:depth] for depth in range(1, len(path) + 1)]
            if len(self._classes) + sum(one not in self._classes for one in wider) > CLASSES:
                path = path[:-1]  # clients name the classes: they must not fill the memory
                number = self._ids.get(path)
                continue
            cls = self._root
            for one in wider:
                cls = self._classes.setdefault(one, _Class(cls))
            number = self._ids[path] = len(self._of)
            self._of.append(cls)
            self._hazards()
        return number

    def _scale(self, features: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
        """Exponents of the session's factor, one per phase."""
        exponents = []
        for phase in range(len(PHASES) + 1):
            total = 0.0
            for feature in features:
                ratio = self._ratio(feature, phase)
                total += log2(ratio)
            exponents.append(round(max(-LARGEST, min(LARGEST, DAMP * total)) / STEP))
        return tuple(exponents)

    def _ratio(self, feature: tuple[str, int], phase: int) -> float:
        known = self._factors.get(feature)
        if known is None:
            known = self._factors[feature] = [[0.0, 0.0] for _ in range(len(PHASES) + 1)]
        events, expected = known[phase]
        return min(20.0, max(0.02, (events + SHRINK) / (expected + SHRINK)))

    @staticmethod
    def _factor(session: SessionState, phase: int) -> float:
        return float(2.0 ** (STEP * session.scale[phase]))

    def _survived(self, session: SessionState, upto: int) -> None:
        """The wait has lasted through the bins before `upto`."""
        since = session.counted
        if upto <= since:
            return
        session.counted = upto
        leaf = self._of[session.group]
        for phase in range(int(PHASE_OF[since]), int(PHASE_OF[upto - 1]) + 1):
            lo, hi = max(since, _BEGIN[phase]), min(upto, _BEGIN[phase + 1])
            weight = self._factor(session, phase)
            cls: _Class | None = leaf
            while cls is not None:
                cls.edges[lo] += weight
                cls.edges[hi] -= weight
                cls = cls.parent
            summed = leaf.summed
            self._expect(session, phase, summed[hi] - summed[lo])

    def _expect(self, session: SessionState, phase: int, hazard: float) -> None:
        """Count events that the model expects, for each feature as the others see them."""
        whole = hazard * self._factor(session, phase)
        for feature in session.features:
            self._factors[feature][phase][1] += whole / self._ratio(feature, phase) ** DAMP

    def _advance(self, now: float) -> None:
        """Count waits that have grown old, and bring the classes up to date."""
        pending = self._pending
        while pending and pending[0][0] <= now:
            due, order, session, since = heapq.heappop(pending)
            if session.features and not session.running and session.since == since:
                self._survived(session, bin_of(due - since))
                age = due - since
                if age < UPPER[-1]:
                    heapq.heappush(pending, (since + NEXT_LOOK * age, order, session, since))
        if self._fresh > 2.0 + 0.01 * self._mass:
            self._decay(now)
            self._mass += self._fresh
            self._fresh = 0.0
            self._refresh()

    def _decay(self, now: float) -> None:
        if self._time is not None:
            keep = 0.5 ** (max(0.0, now - self._time) / self._half_life)
            self._mass *= keep
            for cls in self._classes.values():
                cls.events *= keep
                cls.exposure *= keep
            for phases in self._factors.values():
                for pair in phases:
                    pair[0] *= keep
                    pair[1] *= keep
        self._time = now

    def _refresh(self) -> None:
        """Add up what was observed since the last time."""
        for cls in self._classes.values():
            cls.exposure += np.cumsum(cls.edges[:-1])
            cls.edges[:] = 0.0
        self._hazards()

    def _hazards(self) -> None:
        """Parents come before children in `_classes`."""
        for cls in self._classes.values():
            if cls.parent is None:
                before = PRIOR
                events, exposure = cls.events.tolist(), cls.exposure.tolist()
                hazard = []
                for happened, exposed in zip(events, exposure, strict=True):
                    before = (happened + SHRINK * before) / (exposed + SHRINK)
                    hazard.append(before)
                cls.hazard = np.array(hazard)
            else:
                cls.hazard = (cls.events + SHRINK * cls.parent.hazard) / (cls.exposure + SHRINK)
            cls.summed = [0.0, *np.cumsum(cls.hazard).tolist()]
            cls.tables.clear()


_SCALE = (BINS, FIRST, len(PHASES) + 1)
_BEGIN = [0, *(int(np.argmax(phase <= PHASE_OF)) for phase in range(1, len(PHASES) + 1)), BINS]


def _table(hazard: Floats, scale: tuple[int, ...]) -> Table:
    factor = np.array([2.0 ** (STEP * exponent) for exponent in scale])[PHASE_OF]
    h = -np.expm1(-hazard * factor)
    alive = np.concatenate(([1.0], np.cumprod(1.0 - h)))
    hits = np.concatenate(([0.0], np.cumsum(alive[:-1] * h)))
    held = np.concatenate(([0.0], np.cumsum(alive[:-1] * (1.0 - h / 2) * WIDTH)))
    gain = hits[None, 1:] - hits[:-1, None]
    time = held[None, 1:] - held[:-1, None]
    # Where nearly nobody is left the differences are rounding: the hazard itself has to do.
    index = np.where(alive[:-1] > RARE, (gain / (time + _EARLIER)).max(axis=1), h / WIDTH)
    returns = 1.0 - np.cumprod((1.0 - h)[::-1])[::-1]
    return Table(index.tolist(), returns.tolist())


_EARLIER = np.where(np.triu(np.ones((BINS, BINS), dtype=bool)), 1e-300, np.inf)


def _features(session: SessionState) -> tuple[tuple[str, int], ...]:
    """What may make the session's next turn come sooner or later than its class's."""
    delay, output = session.delay, session.output_tokens
    return (
        ("turn", min(8, max(0, session.turns - 1).bit_length())),
        ("blocks", min(12, session.blocks.bit_length())),
        ("delay", -1 if delay is None else min(6, max(0, int(log2(delay + 1) / 1.5)))),
        ("output", -1 if output is None else min(12, output.bit_length())),
    )
