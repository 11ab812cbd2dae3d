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

What a session is then worth: `delay_table`. Reuse time by class of workload is the idea of Wang
et al., KVCache Cache in the Wild (ATC 2025).
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count
from math import log2
from operator import add

import numpy as np
import numpy.typing as npt

from tieredkv.eviction.base import SessionState
from tieredkv.eviction.delay_state import State, decode, encode
from tieredkv.eviction.delay_table import (
    BINS,
    FIRST,
    PHASE_COUNT,
    PHASE_OF,
    STEP,
    UPPER,
    Floats,
    Table,
    bin_of,
    stay_of,
    table_of,
)

PRIOR = 0.5 * np.log(2) / 4
"""Hazard of one bin before anything was observed."""
SHRINK = 20.0
"""k: observations that the wider class counts for."""
HALF_LIFE = 4 * 3600.0
"""Seconds after which an observation counts half."""
FIRST_LOOK, NEXT_LOOK = 4.0, 2.0**0.25
"""Age in seconds at which a wait is first counted, and by what factor its age grows until it is
counted again."""
NEWS = 0.03
"""Share of new turns at which the classes are brought up to date."""
DAMP = 0.6
"""Power of each factor: features overlap, and their full product would count twice."""
LARGEST = 4.0
"""Largest exponent of a session's factor, either way."""
CLASSES = 512
"""Classes kept; when there are so many, further ones count as the wider class."""
TABLES = 256
"""Tables kept per class between two refreshes: 5 KB each."""
_NEUTRAL = (0,) * PHASE_COUNT


@dataclass(slots=True)
class _Class:
    """Waits of one class, or of all classes below it."""

    parent: _Class | None
    events: Floats = field(default_factory=lambda: np.zeros(BINS))
    exposure: Floats = field(default_factory=lambda: np.zeros(BINS))
    fresh: list[float] = field(default_factory=lambda: [0.0] * BINS)
    """Events of this class alone, not yet added up."""
    edges: list[float] = field(default_factory=lambda: [0.0] * (BINS + 1))
    """Its exposure not yet added up, as differences from bin to bin."""
    hazard: Floats = field(default_factory=lambda: np.full(BINS, PRIOR))
    summed: list[float] = field(default_factory=list)
    """The hazard summed over the bins before each bin."""
    tables: dict[tuple[int, ...], Table] = field(default_factory=dict)

    def add_up(self) -> None:
        """Take in what is new, and pass it on to the wider class."""
        parent = self.parent
        if parent is not None:
            parent.fresh = list(map(add, parent.fresh, self.fresh))
            parent.edges = list(map(add, parent.edges, self.edges))
        self.events += self.fresh
        self.exposure += np.cumsum(self.edges[:-1])
        self.fresh, self.edges = [0.0] * BINS, [0.0] * (BINS + 1)

    def learn(self) -> None:
        """The hazard of what was observed, given that of the wider class."""
        if self.parent is None:
            before = PRIOR
            hazard = []
            for happened, exposed in zip(self.events.tolist(), self.exposure.tolist(), strict=True):
                before = (happened + SHRINK * before) / (exposed + SHRINK)
                hazard.append(before)
            self.hazard = np.array(hazard)
        else:
            self.hazard = (self.events + SHRINK * self.parent.hazard) / (self.exposure + SHRINK)
        self.summed = [0.0, *np.cumsum(self.hazard).tolist()]
        self.tables.clear()


class _Factor:
    """What one value of one feature does to the hazard, by phase of the wait."""

    __slots__ = ("events", "expected", "exponent", "power")

    def __init__(self, known: npt.ArrayLike = ((0.0, 0.0),) * PHASE_COUNT) -> None:
        """`known`: per phase (events, expected events)."""
        events, expected = np.asarray(known, dtype=np.float64).T.tolist()
        self.events: list[float] = events
        self.expected: list[float] = expected
        self.refresh()

    def refresh(self, keep: float = 1.0) -> None:
        """Let what was observed fade, and take it into account."""
        self.events = [keep * events for events in self.events]
        self.expected = [keep * expected for expected in self.expected]
        ratios = [
            min(20.0, max(0.02, (events + SHRINK) / (expected + SHRINK)))
            for events, expected in zip(self.events, self.expected, strict=True)
        ]
        self.exponent = [DAMP * log2(ratio) for ratio in ratios]
        self.power = [ratio**DAMP for ratio in ratios]


class DelayModel:
    """Statistics of one store. Not thread-safe; time is an argument.

    Cost: O(1) per turn, and O(classes) numpy passes over 80 bins when a `NEWS` share of what is
    known is new.
    """

    def __init__(self, half_life: float = HALF_LIFE) -> None:
        self._half_life = half_life
        self._root = _Class(None)
        self._classes: dict[tuple[Hashable, ...], _Class] = {(): self._root}
        self._of: list[_Class] = [self._root]
        """By `SessionState.group`: 0, all classes together, until a turn has ended."""
        self._ids: dict[Hashable, int] = {(): 0}
        self._factors: dict[tuple[str, int], _Factor] = {}
        """By (feature, value)."""
        self._pending: list[tuple[float, int, SessionState, float]] = []
        self._order = count()
        self._fresh = 0.0
        """Events since the classes were last brought up to date."""
        self._mass = 0.0
        self._time: float | None = None
        self._root.learn()

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
        cls, phase = self._of[session.group], PHASE_OF[here]
        half = 0.5 * _factor(session, phase)
        cls.fresh[here] += 1.0
        cls.edges[here] += half
        cls.edges[here + 1] -= half
        self._expect(session, phase, half * (cls.summed[here + 1] - cls.summed[here]))
        for feature in session.features:
            self._factors[feature].events[phase] += 1.0
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
            table = cls.tables[scale] = table_of(cls.hazard, scale)
        return table

    def stay(self, session: SessionState) -> float:
        """Seconds after the end of its last turn by which nearly all sessions like it that come
        back have done so; 0 where less than half do."""
        return stay_of(self._of[session.group].hazard, session.scale or _NEUTRAL)

    # -- what it has learned --------------------------------------------------------------

    def state(self) -> bytes:
        """The statistics, without the waits under way; bounded in size."""
        self._refresh()
        classes = {path: (cls.events, cls.exposure) for path, cls in self._classes.items()}
        factors = {
            feature: np.array([known.events, known.expected]).T
            for feature, known in self._factors.items()
        }
        return encode(State(_SCALE, self._mass + self._fresh, self._time, classes, factors))

    def restore(self, data: bytes) -> None:
        """Go on from there; for a model that has seen nothing. What was learned decays with the
        time that has passed since.

        Raises FormatError for other bytes than those of `state`; nothing is changed then.
        """
        state = decode(data, _SCALE)
        for path, (events, exposure) in state.classes.items():
            cls = self._classes.get(path) or self._new(path, self._classes[path[:-1]])
            cls.events, cls.exposure = events, exposure
        for feature, pairs in state.factors.items():
            self._factors[feature] = _Factor(pairs)
        self._mass, self._time = state.mass, state.time
        self._refresh()

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
                cls = self._classes.get(one) or self._new(one, cls)
            number = self._ids[path] = len(self._of)
            self._of.append(cls)
        return number

    def _new(self, path: tuple[Hashable, ...], parent: _Class) -> _Class:
        cls = self._classes[path] = _Class(parent)
        cls.learn()
        return cls

    def _scale(self, features: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
        """Exponents of the session's factor, one per phase."""
        exponents = []
        known = [self._factors.get(feature) or self._feature(feature) for feature in features]
        for phase in range(PHASE_COUNT):
            total = sum(factor.exponent[phase] for factor in known)
            exponents.append(round(max(-LARGEST, min(LARGEST, total)) / STEP))
        return tuple(exponents)

    def _feature(self, feature: tuple[str, int]) -> _Factor:
        factor = self._factors[feature] = _Factor()
        return factor

    def _survived(self, session: SessionState, upto: int) -> None:
        """The wait has lasted through the bins before `upto`."""
        since = session.counted
        if upto <= since:
            return
        session.counted = upto
        cls = self._of[session.group]
        edges, summed = cls.edges, cls.summed
        for phase in range(PHASE_OF[since], PHASE_OF[upto - 1] + 1):
            lo, hi = max(since, _BEGIN[phase]), min(upto, _BEGIN[phase + 1])
            weight = _factor(session, phase)
            edges[lo] += weight
            edges[hi] -= weight
            self._expect(session, phase, weight * (summed[hi] - summed[lo]))

    def _expect(self, session: SessionState, phase: int, events: float) -> None:
        """Count events that the model expects, for each feature as the others see them."""
        for feature in session.features:
            factor = self._factors[feature]
            factor.expected[phase] += events / factor.power[phase]

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
        if self._fresh > 2.0 + NEWS * self._mass:
            self._decay(now)
            self._refresh()

    def _decay(self, now: float) -> None:
        keep = 1.0
        if self._time is not None:
            keep = 0.5 ** (max(0.0, now - self._time) / self._half_life)
        self._mass *= keep
        for cls in self._classes.values():
            cls.events *= keep
            cls.exposure *= keep
        for factor in self._factors.values():
            factor.refresh(keep)
        self._time = now

    def _refresh(self) -> None:
        """Add up what was observed since the last time. Parents come before children in
        `_classes`."""
        self._mass += self._fresh
        self._fresh = 0.0
        for cls in reversed(self._classes.values()):
            cls.add_up()
        for cls in self._classes.values():
            cls.learn()


_SCALE = (BINS, FIRST, PHASE_COUNT)
_BEGIN = [*(PHASE_OF.index(phase) for phase in range(PHASE_COUNT)), BINS]


def _factor(session: SessionState, phase: int) -> float:
    return float(2.0 ** (STEP * session.scale[phase]))


def _features(session: SessionState) -> tuple[tuple[str, int], ...]:
    """What may make the session's next turn come sooner or later than its class's."""
    delay, output = session.delay, session.output_tokens
    return (
        ("turn", min(8, max(0, session.turns - 1).bit_length())),
        ("blocks", min(12, session.blocks.bit_length())),
        ("delay", -1 if delay is None else min(6, max(0, int(log2(delay + 1) / 1.5)))),
        ("output", -1 if output is None else min(12, output.bit_length())),
    )
