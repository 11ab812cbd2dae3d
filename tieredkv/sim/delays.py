"""How long sessions of a trace pause between turns, by what ended the turn.

The delay is the trace's `think`, else the time from the end of the previous response to the
request, else (a trace without `service`) from request to request. What ended the turn is its
`stop`; in a trace without any, its category. A session whose next turn the trace does not
show may still come back: it is censored, not ended (Kaplan and Meier, JASA 1958).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import floor, log2

from tieredkv.sim.request import Request

SHORTEST = 0.05
"""Upper edge of the first bin, seconds."""
PER_OCTAVE = 4
"""Bins for each doubling of the delay."""
_CATEGORY = "\0category "
"""Marks turns of which only the category is known."""


@dataclass(slots=True)
class Delays:
    """Delays after turns that ended alike, in logarithmic bins."""

    turns: int = 0
    returned: Counter[int] = field(default_factory=Counter)
    """Bin -> next turns that came after a delay in it."""
    pending: Counter[int] = field(default_factory=Counter)
    """Bin -> sessions whose next turn had not come after a delay in it, when the trace ended."""

    def density(self) -> list[tuple[float, float]]:
        """(upper edge in s, share of the delays in the bin) from the first to the last bin."""
        total = self.returned.total()
        if not total:
            return []
        bins = range(min(self.returned), max(self.returned) + 1)
        return [(edge(index), self.returned[index] / total) for index in bins]

    def survival(self) -> list[tuple[float, float]]:
        """(t in s, P(next turn later than t)), decreasing; what never falls is never coming."""
        at_risk = self.returned.total() + self.pending.total()
        alive = 1.0
        curve: list[tuple[float, float]] = []
        for index in sorted(self.returned | self.pending):
            alive *= 1 - self.returned[index] / at_risk
            at_risk -= self.returned[index] + self.pending[index]
            curve.append((edge(index), alive))
        return curve

    @property
    def return_rate(self) -> float:
        """Share of the turns whose next one the trace shows."""
        return self.returned.total() / self.turns if self.turns else 0.0

    def percentile(self, share: float) -> float:
        """Upper edge of the bin that holds this share of the delays; 0 without any."""
        left = share * self.returned.total()
        for index in sorted(self.returned):
            left -= self.returned[index]
            if left <= 0:
                return edge(index)
        return 0.0


@dataclass(slots=True)
class _Pause:
    """A session between two turns."""

    ended: str
    since: float


class DelayMeter:
    """Memory is bounded by the sessions and by bins per way to end a turn."""

    def __init__(self) -> None:
        self._kinds: dict[str, Delays] = {}
        self._pauses: dict[str, _Pause] = {}
        self._now = 0.0

    def add(self, request: Request) -> None:
        self._now = request.ts
        pause = self._pauses.get(request.session)
        if pause is not None:
            delay = request.ts - pause.since if request.think is None else request.think
            self._kinds[pause.ended].returned[place(delay)] += 1
        ended = request.stop or _CATEGORY + request.category
        self._kinds.setdefault(ended, Delays()).turns += 1
        since = request.ts + (request.service or 0.0)
        self._pauses[request.session] = _Pause(ended, since)

    def result(self) -> dict[str, Delays]:
        """What ended the turn -> delays after it, the most frequent first. Ends the measurement:
        sessions that are pausing are counted as pending."""
        for pause in self._pauses.values():
            self._kinds[pause.ended].pending[place(self._now - pause.since)] += 1
        self._pauses.clear()
        self._kinds = _named(self._kinds)
        order = sorted(self._kinds, key=lambda kind: -self._kinds[kind].turns)
        return {kind: self._kinds[kind] for kind in order}


def _named(kinds: dict[str, Delays]) -> dict[str, Delays]:
    """Categories stand for stop reasons only where the trace gives none."""
    by_stop = any(not kind.startswith(_CATEGORY) for kind in kinds)
    named: dict[str, Delays] = {}
    for kind, delays in kinds.items():
        if kind.startswith(_CATEGORY):
            kind = "unknown" if by_stop else kind.removeprefix(_CATEGORY) or "all"
        total = named.setdefault(kind, Delays())
        total.turns += delays.turns
        total.returned.update(delays.returned)
        total.pending.update(delays.pending)
    return named


def measure(requests: Iterable[Request]) -> dict[str, Delays]:
    """What ended the turn -> delays after it, for requests in order of arrival."""
    meter = DelayMeter()
    for request in requests:
        meter.add(request)
    return meter.result()


def place(delay: float) -> int:
    """The bin of a delay in seconds; negative ones (overlapping turns) are in the first."""
    return 0 if delay <= SHORTEST else 1 + floor(PER_OCTAVE * log2(delay / SHORTEST))


def edge(index: int) -> float:
    """Upper edge of a bin in seconds."""
    return float(SHORTEST * 2 ** (index / PER_OCTAVE))
