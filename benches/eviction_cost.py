"""What `delay` costs in time, and how fast the simulator is."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from time import thread_time
from typing import Any

from benches.common import Result
from benches.eviction_rows import OURS, line
from benches.eviction_size import Size, Source
from tieredkv.config import Config
from tieredkv.eviction.base import Access, Kind
from tieredkv.sim.lab import Lab
from tieredkv.sim.lab_runs import BASELINE, outline, requests_of, run_all
from tieredkv.sim.replay import Replayer
from tieredkv.sim.spec import parse_capacities

COMPLETION, EVICTION = 60.0, 15.0
"""us per completed turn, and per run that an eviction trims."""
SPEED = 3e5
"""Block accesses per second."""
OF_EVICTIONS = {Kind.LEAF, Kind.RESIZE}
"""Events that follow an eviction; the others follow a turn."""


class Clock:
    """Adds up the time inside methods of some objects."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        """Processor seconds per label; one is not inside another."""
        self.calls: Counter[str] = Counter()

    def watch(self, owner: Any, method: str, label: Callable[..., str]) -> None:
        """Time this method of one object; `label` is given its arguments."""
        inner, spent, calls = getattr(owner, method), self.spent, self.calls

        def timed(*args: Any) -> Any:
            begin = thread_time()
            answer = inner(*args)
            taken = thread_time() - begin
            name = label(*args)
            spent[name] += taken
            calls[name] += 1
            return answer

        setattr(owner, method, timed)

    def net(self, *names: str) -> float:
        """Seconds without what watching them costs."""
        own = _own_cost()
        return sum(self.spent[name] - own * self.calls[name] for name in names)


def _own_cost(calls: int = 20_000) -> float:
    """Seconds that `Clock` counts for a method that does nothing."""

    class Nothing:
        def method(self, one: int, two: int) -> None:
            pass

    clock, nothing = Clock(), Nothing()
    clock.watch(nothing, "method", lambda *_: "nothing")
    for number in range(calls):
        nothing.method(number, number)
    return clock.spent["nothing"] / calls


def cost(source: Source, size: Size) -> Iterator[Result]:
    """In one tier of half the peak live set; the guard's shadows on their own line."""
    samples = [_cost(source, size) for _ in range(size.samples)]
    for name, bar in (("completion", COMPLETION), ("eviction", EVICTION), ("guard", None)):
        figures = [sample[name] for sample in samples]
        where = f"eviction.cost.{source.name}.{name}"
        value = statistics.median(figures)
        yield line(where, value, "us", bar=bar, higher=False, samples=figures)


def _cost(source: Source, size: Size) -> dict[str, float]:
    """us per completed turn, per trimmed run, and of the guard per completed turn."""
    facts = outline(source.trace, size.seed)
    slots = max(1, facts.future.peak_live // 2)
    tier = {"kind": "dram", "capacity": 1 << 50, "eviction": {"policy": OURS}}
    lab = Lab(Config.model_validate({"tiers": [tier]}), [slots], 1)
    clock, sessions = Clock(), lab.planner.sessions
    policy, model = lab.planner.res.levels[0].policy, sessions.model
    trimmed = 0

    def asked(nbytes: int, *_: Any) -> str:
        return "victims"

    def recorded(access: Access) -> str:
        nonlocal trimmed
        trimmed += access.kind is Kind.RESIZE
        return "after eviction" if access.kind in OF_EVICTIONS else "record"

    def forgotten(run: int, evicted: bool) -> str:
        nonlocal trimmed
        trimmed += evicted
        return "after eviction" if evicted else "record"

    clock.watch(policy, "victims", asked)
    clock.watch(policy, "record", recorded)
    clock.watch(policy, "forget", forgotten)
    for method in ("completed", "returned", "ended"):
        clock.watch(model, method, lambda *_, name=method: name)
    for guard in sessions.guards:
        for method in ("stored", "ended"):
            clock.watch(guard, method, lambda *_: "guard")
    replayer = Replayer(lab)
    for request in requests_of(source.trace, size.seed):
        replayer.serve(request)
    turns = max(1, clock.calls["completed"])
    return {
        "completion": clock.net("completed", "returned", "ended", "record") / turns * 1e6,
        "eviction": clock.net("victims", "after eviction") / max(1, trimmed) * 1e6,
        "guard": clock.net("guard") / turns * 1e6,
    }


def speed(source: Source, size: Size) -> Iterator[Result]:
    """Block accesses per second of a whole replay, reading the trace included."""
    accesses = sum(outline(source.trace, size.seed).future.blocks)
    spec = size.spec(source.trace, (BASELINE, OURS), parse_capacities([], ["dram=10%"]))
    found: dict[str, list[float]] = {BASELINE: [], OURS: []}
    for _ in range(size.samples):
        for replay in run_all(spec, 1, lambda _: None):
            if replay.policy in found:
                found[replay.policy].append(accesses / replay.seconds)
    for policy, figures in found.items():
        yield line(
            f"eviction.speed.{source.name}.{policy}",
            statistics.median(figures),
            "accesses/s",
            bar=SPEED if "claude" in source.name else None,
            samples=figures,
        )
