"""What a session that waits is worth, by its age: bins, and the table of one hazard.

A session with hazard L and factor m has h_b = 1 - exp(-m L_b). Its *index* at age b is the best
rate of hits per second that keeping it for some time from now on can give,

    G(b) = max_{k > b} (A_k - A_b) / (T_k - T_b),
    A_k = sum_{j<k} S_j h_j,  T_k = sum_{j<k} S_j (1 - h_j / 2) w_j,  S_{j+1} = S_j (1 - h_j)

with bin widths w: the index of Gittins (Bandit processes and dynamic allocation indices, JRSS B
41, 1979) for a block that may be dropped at any time. Hit density by age is the idea of LHD
(Beckmann, Chen, Cidon, NSDI 2018).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BINS = 80
FIRST = 0.05
"""Upper edge of bin 0 in seconds; the last bin begins after 11 hours."""
UPPER: Floats = FIRST * 2.0 ** (np.arange(BINS) / 4)
WIDTH: Floats = np.diff(UPPER, prepend=0.0)
PHASES = (15.0, 120.0)
"""Seconds where one phase of a wait ends and the next begins."""
STEP = 0.5
"""Factors are rounded to powers of two of this exponent."""
RARE = 1e-9
"""Share of a class that still waits, below which sums over its waits are not exact enough."""
NEARLY_ALL = 0.9
"""Share of those that come back, by whose time `stay` is long enough."""
PHASE_OF = [sum(edge <= upper for edge in PHASES) for upper in (UPPER - WIDTH / 2).tolist()]
PHASE_COUNT = len(PHASES) + 1


def bin_of(age: float) -> int:
    """The bin of an age in seconds."""
    if age <= FIRST:
        return 0
    return min(BINS - 1, 1 + int(4 * log2(age / FIRST)))


@dataclass(frozen=True, slots=True)
class Table:
    """What a session of one class and factor is worth, by bin of its age."""

    index: list[float]
    """Hits per second that keeping its blocks can give at best."""
    returns: list[float]
    """Probability that it comes back at all."""


def stay_of(hazard: Floats, scale: tuple[int, ...]) -> float:
    """Seconds of a wait by which `NEARLY_ALL` of those that ever come back have done so; 0 where
    less than half of all do. Arguments as of `table_of`."""
    alive = np.cumprod(np.exp(-hazard * _factor(scale)))
    back = 1.0 - alive
    if back[-1] < 0.5:
        return 0.0
    return float(UPPER[np.searchsorted(back, NEARLY_ALL * back[-1])])


def table_of(hazard: Floats, scale: tuple[int, ...]) -> Table:
    """Of the hazard per bin, and per phase the exponent of the factor in `STEP`s."""
    h = -np.expm1(-hazard * _factor(scale))
    alive = np.concatenate(([1.0], np.cumprod(1.0 - h)))
    hits = np.concatenate(([0.0], np.cumsum(alive[:-1] * h))).tolist()
    held = np.concatenate(([0.0], np.cumsum(alive[:-1] * (1.0 - h / 2) * WIDTH))).tolist()
    # Where nearly nobody is left the differences are rounding: the hazard itself has to do.
    index = (h / WIDTH).tolist()
    some = int(np.count_nonzero(alive[:-1] > RARE))
    majorant = [some]  # corners of the least concave majorant of hits over held, leftmost last
    for here in reversed(range(some)):
        best = -1.0
        while majorant:
            then = majorant[-1]
            slope = (hits[then] - hits[here]) / (held[then] - held[here])
            if slope < best:
                break
            best = slope
            corner = majorant.pop()
        majorant += (corner, here)
        index[here] = best
    returns = 1.0 - np.cumprod((1.0 - h)[::-1])[::-1]
    return Table(index, returns.tolist())


def _factor(scale: tuple[int, ...]) -> Floats:
    factor: Floats = np.array([2.0 ** (STEP * exponent) for exponent in scale])[PHASE_OF]
    return factor
