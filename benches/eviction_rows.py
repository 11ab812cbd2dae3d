"""From replays to lines of output, and the bars that `delay` has to reach."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benches.common import Result, interval
from tieredkv.sim.lab_runs import BASELINE
from tieredkv.sim.result import BOUNDS
from tieredkv.sim.result import Result as Replay

OURS = "delay"
NEVER_WORSE = 0.99
"""Hit rate as a share of LRU's, on any trace, capacity and statistics."""
SLACK = 0.01
"""Points of hit rate that another hint may cost: which blocks an eviction takes from two equal
runs is chance."""


@dataclass(frozen=True, slots=True)
class Bar:
    """What is asked of a kind of trace in a regime."""

    like: tuple[str, ...]
    """Parts of the names of such traces."""
    hints: float
    live: tuple[float, float]
    """Capacities, as multiples of the peak live set."""
    gap: float
    """Share of the gap between LRU and the optimum that is closed, in %."""


CODEX = ("codex", "card942")
BARS = (
    Bar(("claude",), 0.0, (0.0, 0.5), 22.0),
    Bar(("claude",), 1.0, (0.5, 0.5), 40.0),
    Bar(("claude",), 1.0, (1.0, 1.0), 85.0),
    Bar(("mooncake",), 0.0, (0.0, 0.5), 20.0),
    Bar(("mooncake",), 1.0, (0.5, 0.5), 70.0),
    Bar(CODEX, 0.0, (0.5, 0.5), 9.0),
    Bar(CODEX, 1.0, (0.5, 0.5), 28.0),
    Bar(("agentic",), 0.0, (0.5, 0.5), 14.0),
    Bar(("agentic",), 1.0, (0.5, 0.5), 70.0),
)
TTFT_GAP = 60.0
"""% of the gap of the mean time to first token, with all hints."""
FEWER_WRITES = {0.0: 0.8, 1.0: 0.43}
"""NVMe writes as a share of LRU's, by share of hints, at a loss of `LOSS` points of hit rate."""
WRITERS = ("agentic", "mixed")
LOSS = 0.05

Key = tuple[str, float, str]


def line(
    metric: str,
    value: float,
    unit: str,
    *,
    reference: float | None = None,
    bar: float | None = None,
    higher: bool = True,
    samples: Iterable[float] = (),
) -> Result:
    """One figure; `bar` is for value / reference where there is a reference."""
    ratio = None
    if reference is not None:
        ratio = value / reference if reference else 1.0
    judged = value if ratio is None else ratio
    ok = None if bar is None else judged >= bar if higher else judged <= bar
    samples = list(samples) or [judged]
    n, spread = len(samples), interval(samples)
    return Result(metric, value, unit, reference, ratio, bar, ok, n, spread)


def keyed(replays: Iterable[Replay]) -> dict[Key, Replay]:
    """By (capacity, hints, policy)."""
    return {(r.capacity, r.hints, r.policy): r for r in replays}


def peak_live(replays: Iterable[Replay]) -> float | None:
    """Blocks, told from a single tier that is said as a multiple of it."""
    sizes = {}
    for replay in replays:
        multiple, is_live, _ = replay.capacity.partition("x live")
        if is_live and len(replay.tiers) == 1:
            sizes[float(multiple)] = replay.tiers[0][1]
    return sizes[max(sizes)] / max(sizes) if sizes else None


def one_tier(name: str, replays: Sequence[Replay], whole: bool) -> Iterator[Result]:
    """Hit rates, shares of the gap and what hints are worth. The bars are for traces that are
    `whole`, but for those against LRU."""
    found, live = keyed(replays), peak_live(replays)
    for (capacity, hints, policy), replay in found.items():
        if policy in BOUNDS and hints:
            continue  # as without
        where = f"eviction.{_slug(name, capacity, hints)}.{policy}"
        lru = found[capacity, hints, BASELINE]
        yield line(
            f"{where}.hit",
            100 * replay.hit_rate,
            "%",
            reference=100 * lru.hit_rate,
            bar=NEVER_WORSE if policy == OURS else None,
        )
        if policy == OURS and replay.gap_closed is not None:
            multiple = replay.tiers[0][1] / live if live else None
            bar = _bar(name, hints, multiple) if whole else None
            yield line(f"{where}.gap", 100 * replay.gap_closed, "%", bar=bar)
    yield from _steps(name, found)


def _bar(name: str, hints: float, multiple: float | None) -> float | None:
    if multiple is None:
        return None
    for bar in BARS:
        low, high = bar.live
        here = low * 0.98 <= multiple <= high * 1.02
        if here and hints == bar.hints and _any(name, bar.like):
            return bar.gap
    return None


def _steps(name: str, found: dict[Key, Replay]) -> Iterator[Result]:
    """More hints must not hit less."""
    for capacity in dict.fromkeys(capacity for capacity, _, _ in found):
        shares = sorted(h for c, h, p in found if (c, p) == (capacity, OURS))
        rates = [100 * found[capacity, share, OURS].hit_rate for share in shares]
        if len(rates) > 1:
            least = min(after - before for before, after in pairwise(rates))
            where = f"eviction.{_slug(name, capacity)}.{OURS}.least_gain_of_hints"
            yield line(where, least, "points", bar=-SLACK)


def three_tiers(name: str, replays: Sequence[Replay], whole: bool) -> Iterator[Result]:
    """Hit rate, time to first token and NVMe writes, all against LRU without hints."""
    found = keyed(replays)
    for (capacity, hints, policy), replay in found.items():
        if policy in BOUNDS and (hints or policy != "optimum"):
            continue
        lru = found[capacity, 0.0, BASELINE]
        where = f"eviction.{name}.three_tiers.hints{hints:g}.{policy}"
        ours = policy == OURS
        yield line(f"{where}.hit", 100 * replay.hit_rate, "%", reference=100 * lru.hit_rate)
        yield line(
            f"{where}.ttft",
            replay.ttft["mean"],
            "s",
            reference=lru.ttft["mean"],
            bar=1.0 if ours and not hints else None,
            higher=False,
        )
        if policy in BOUNDS:
            continue
        asked = ours and whole and _any(name, WRITERS)
        bar = FEWER_WRITES.get(hints) if asked else None
        yield line(
            f"{where}.nvme_writes",
            writes(replay),
            "blocks/h",
            reference=writes(lru),
            bar=bar,
            higher=False,
        )
        if bar is not None:
            loss = 100 * (lru.hit_rate - replay.hit_rate)
            yield line(f"{where}.hit_loss", loss, "points", bar=LOSS, higher=False)
        if ours and hints:
            bar = TTFT_GAP if hints == 1 and whole else None
            yield from _ttft_gap(where, found, replay, lru, bar)


def _ttft_gap(
    where: str, found: dict[Key, Replay], replay: Replay, lru: Replay, bar: float | None
) -> Iterator[Result]:
    room = lru.ttft["mean"] - found[replay.capacity, replay.hints, "optimum"].ttft["mean"]
    if room > 0:
        gap = 100 * (lru.ttft["mean"] - replay.ttft["mean"]) / room
        yield line(f"{where}.ttft_gap", gap, "%", bar=bar)


def wrong_statistics(
    name: str, kind: str, replays: Sequence[Replay], right: Sequence[Replay]
) -> Iterator[Result]:
    """`replays` with statistics that are `kind`, beside LRU in `right`."""
    lru = keyed(right)
    for (capacity, hints, policy), replay in keyed(replays).items():
        if policy == OURS:
            yield line(
                f"eviction.{_slug(name, capacity, hints)}.{OURS}.{kind}.hit",
                100 * replay.hit_rate,
                "%",
                reference=100 * lru[capacity, hints, BASELINE].hit_rate,
                bar=NEVER_WORSE,
            )


def writes(replay: Replay) -> float:
    """Blocks written to NVMe per hour."""
    if replay.duration <= 0:
        return 0.0
    return replay.nvme_written_bytes / replay.block_bytes / replay.duration * 3600


def _any(name: str, parts: Iterable[str]) -> bool:
    return any(part in name for part in parts)


def _slug(name: str, capacity: str, hints: float | None = None) -> str:
    where = f"{name}.{capacity.replace(' ', '')}"
    return where if hints is None else f"{where}.hints{hints:g}"
