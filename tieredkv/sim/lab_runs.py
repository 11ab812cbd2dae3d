"""Everything that one call of the simulator replays, on as many processes as asked for.

Each replay reads its trace as a stream; only the closed loop, which reorders requests, keeps
all of them in memory.
"""

from __future__ import annotations

import heapq
import multiprocessing
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future as Pending
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from tieredkv.config import Config
from tieredkv.config_file import read_document
from tieredkv.errors import UsageError
from tieredkv.sim.cost import CostModel
from tieredkv.sim.generate import stream
from tieredkv.sim.lab import Lab
from tieredkv.sim.measure import Meter
from tieredkv.sim.optimum import Future, look_ahead, optimum
from tieredkv.sim.replay import Replayer, Served, service_of
from tieredkv.sim.request import Request
from tieredkv.sim.result import BOUNDS, Result
from tieredkv.sim.spec import Spec, TierSize, label
from tieredkv.sim.trace import read_trace

GENERATE = "generate:"
BASELINE = "lru"
DECODE = 0.02
"""Seconds per output token in the closed loop."""


def requests_of(trace: str, seed: int) -> Iterator[Request]:
    """The requests of a file, or of the generator's preset after `generate:`."""
    preset = trace.removeprefix(GENERATE)
    return stream(preset, seed=seed) if preset != trace else read_trace(Path(trace))


@dataclass(frozen=True, slots=True)
class Outline:
    """What has to be known of a trace before it is replayed."""

    future: Future
    spans: list[tuple[float, float]]
    """(arrival, end of the response) of each request."""
    last: dict[str, int]
    """Session -> index of its last request."""
    block_tokens: int


def outline(trace: str, seed: int) -> Outline:
    """One pass over a trace. Raises TraceError, or UsageError if it is empty."""
    spans: list[tuple[float, float]] = []
    last: dict[str, int] = {}
    size = 0

    def chains() -> Iterator[list[int]]:
        nonlocal size
        for index, request in enumerate(requests_of(trace, seed)):
            spans.append((request.ts, request.ts + service_of(request)))
            last[request.session] = index
            size = request.block_size
            yield request.hash_ids

    future = look_ahead(chains())
    if not spans:
        raise UsageError(f"{trace}: no requests; name another trace")
    return Outline(future, spans, last, size)


@dataclass(frozen=True, slots=True)
class Task:
    """One replay. `policies`: one per tier; one of `BOUNDS` for a bound."""

    trace: str
    seed: int
    tiers: tuple[TierSize, ...]
    policies: tuple[str, ...]
    hints: float

    @property
    def policy(self) -> str:
        return "/".join(self.policies) if len(set(self.policies)) > 1 else self.policies[0]

    @property
    def setting(self) -> tuple[str, int, str]:
        return self.trace, self.seed, label(self.tiers)


def run_all(spec: Spec, jobs: int, on_done: Callable[[Result], None]) -> list[Result]:
    """Replay everything; results by trace, seed, capacity, hints and policy, in the order of
    `spec`, LRU first and the bounds last. `on_done` hears of each as it ends, in this thread.

    Raises UsageError, TraceError, ConfigError, PluginError.
    """
    _check(spec)
    results: list[Result] = []
    for trace in spec.traces:
        for seed in spec.seeds:
            results += _run_trace(spec, trace, seed, jobs, on_done)
    return results


def _check(spec: Spec) -> None:
    """Refuse at once what would be refused after a pass over a long trace."""
    for policy in (*spec.policies, *spec.tier_policies.values()):
        if policy in BOUNDS:
            raise UsageError(f"policy {policy!r}: a bound, always replayed; name real policies")
    cost = _cost(spec)
    if spec.loop == "closed" and not cost.knows_prefill:
        raise UsageError("--loop closed needs the time of a prefill: pass --model")
    for task in _tasks(spec, spec.traces[0], spec.seeds[0]):
        if task.policies[0] not in BOUNDS:
            _config(spec, task, 1)


def _cost(spec: Spec) -> CostModel:
    overrides = read_document(Path(spec.cost_file)) if spec.cost_file else None
    return CostModel.load(spec.model, spec.gpu, spec.tp, spec.bytes_per_token, overrides)


def _run_trace(
    spec: Spec, trace: str, seed: int, jobs: int, on_done: Callable[[Result], None]
) -> list[Result]:
    facts = outline(trace, seed)
    tasks = list(dict.fromkeys(_tasks(spec, trace, seed)))
    asked = [task for task in tasks if task.hints in spec.hints]
    done: dict[Task, Result] = {}

    def ended(task: Task, result: Result) -> None:
        done[task] = result
        if task in asked:
            on_done(result)

    if jobs == 1:
        for task in tasks:
            ended(task, replay(spec, task, facts))
    else:
        global _facts
        _facts = facts  # forked workers see it without a copy
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context) as pool:
            pending: dict[Pending[Result], Task] = {
                pool.submit(_work, spec, task): task for task in tasks
            }
            for future in as_completed(pending):
                ended(pending[future], future.result())
        _facts = None
    _close_gaps(done)
    return [done[task] for task in asked]


_facts: Outline | None = None


def _work(spec: Spec, task: Task) -> Result:
    assert _facts is not None
    return replay(spec, task, _facts)


def _tasks(spec: Spec, trace: str, seed: int) -> Iterator[Task]:
    """LRU without hints is what gaps are measured from: it is replayed even if not asked for."""
    policies = list(dict.fromkeys([BASELINE, *spec.policies]))
    for tiers in spec.capacities:
        for hints in dict.fromkeys([0.0, *spec.hints]):
            if hints not in spec.hints:
                yield Task(trace, seed, tiers, (BASELINE,) * len(tiers), hints)
                continue
            for policy in policies:
                own = tuple(spec.tier_policies.get(tier.name, policy) for tier in tiers)
                if policy == BASELINE and set(own) != {BASELINE}:
                    yield Task(trace, seed, tiers, (BASELINE,) * len(tiers), hints)
                yield Task(trace, seed, tiers, own, hints)
            for bound in BOUNDS:
                yield Task(trace, seed, tiers, (bound,), hints)


def _close_gaps(done: dict[Task, Result]) -> None:
    rates = {(task.setting, task.policy, task.hints): r.hit_rate for task, r in done.items()}
    for task, result in done.items():
        lru = rates[task.setting, BASELINE, 0.0]
        best = rates.get((task.setting, "optimum", task.hints), lru)
        if best > lru and task.policy not in BOUNDS:
            result.gap_closed = (result.hit_rate - lru) / (best - lru)


def replay(spec: Spec, task: Task, facts: Outline) -> Result:
    """One replay. The bounds of the closed loop are those of the open one: what they need to
    know of the future is not known while arrivals depend on the policy."""
    began = time.perf_counter()
    cost = _cost(spec)
    block_bytes = facts.block_tokens * cost.bytes_per_token
    unique, live = facts.future.unique, facts.future.peak_live
    slots = [tier.blocks(block_bytes, unique, live) for tier in task.tiers]
    tiers = [(tier.name, count) for tier, count in zip(task.tiers, slots, strict=True)]
    meter = Meter(cost, facts.future.seen, int(spec.warmup * len(facts.spans)))
    if task.policies[0] in BOUNDS:
        _bound(task, facts, tiers, meter)
    else:
        _play(spec, task, facts, slots, block_bytes, cost, meter)
    return meter.result(
        trace=task.trace,
        policy=task.policy,
        capacity=label(task.tiers),
        tiers=tiers,
        block_tokens=facts.block_tokens,
        block_bytes=block_bytes,
        seed=task.seed,
        hints=task.hints,
        seconds=time.perf_counter() - began,
    )


def _bound(task: Task, facts: Outline, tiers: list[tuple[str, int]], meter: Meter) -> None:
    """MIN is a stack algorithm: the best k tiers hold what the best caches of their sums hold."""
    names = [name for name, _ in tiers]
    if task.policies[0] == "infinite":
        layers = [facts.future.seen]
        names = names[:1]
    else:
        total, layers = 0, []
        rules = facts.spans if task.policies[0] == "optimum" else None
        for _, blocks in tiers:
            total += blocks
            layers.append(optimum(facts.future, total, rules))
    for index, request in enumerate(requests_of(task.trace, task.seed)):
        below, spans = 0, []
        for name, hits in zip(names, layers, strict=True):
            upto = max(below, hits[index])
            spans.append((name, upto - below))
            below = upto
        meter.add(request, spans)


def _play(
    spec: Spec,
    task: Task,
    facts: Outline,
    slots: list[int],
    block_bytes: int,
    cost: CostModel,
    meter: Meter,
) -> None:
    lab = Lab(_config(spec, task, facts.block_tokens), slots, block_bytes)
    shares = {session: _share(session, task.seed) for session in facts.last} if task.hints else {}

    def finishes(index: int, request: Request) -> bool:
        last = facts.last[request.session] == index
        return last and shares.get(request.session, 1.0) < task.hints

    if spec.loop == "open":
        replayer = Replayer(lab)
        for index, request in enumerate(requests_of(task.trace, task.seed)):
            served = replayer.serve(request, finishes(index, request))
            meter.add(request, served.spans, lab)
        return
    replayer = Replayer(lab, lambda served: _serving(served, cost))
    loop = _ClosedLoop(requests_of(task.trace, task.seed))
    while (arrival := loop.next()) is not None:
        index, request = arrival
        served = replayer.serve(request, finishes(index, request))
        end = request.ts + _serving(served, cost)
        meter.add(request, served.spans, lab, index, end)
        loop.ended(request, end)


def _config(spec: Spec, task: Task, block_tokens: int) -> Config:
    """The configuration that production would have; sizes are the lab's."""
    tiers = []
    for tier, policy in zip(task.tiers, task.policies, strict=True):
        kind = "dram" if tier.name == "mooncake" else tier.name
        entry = {
            "kind": kind,
            "name": tier.name,
            "capacity": 1 << 50,
            "eviction": {"policy": policy},
        }
        if kind == "nvme":
            entry |= {"path": "nowhere", "write": spec.write, "admission": spec.admission}
        tiers.append(entry)
    return Config.model_validate({"block_tokens": block_tokens, "tiers": tiers})


def _serving(served: Served, cost: CostModel) -> float:
    """Seconds from arrival to the end of the response, by the cost model."""
    request = served.request
    tokens = {name: blocks * request.block_size for name, blocks in served.spans}
    new = request.input_length - served.hit * request.block_size
    return cost.ttft(tokens, new, request.input_length) + DECODE * request.output_length


class _ClosedLoop:
    """Requests that wait for the response before them: a session's next one arrives `think`
    seconds later, by default as many as the trace had. Keeps the whole trace."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._waiting: dict[str, deque[tuple[int, Request]]] = {}
        self._arrivals: list[tuple[float, int, Request]] = []
        ends: dict[str, float] = {}
        for index, request in enumerate(requests):
            before = ends.get(request.session)
            ends[request.session] = request.ts + service_of(request)
            if before is None:
                heapq.heappush(self._arrivals, (request.ts, index, request))
                self._waiting[request.session] = deque()
                continue
            think = request.think if request.think is not None else max(0.0, request.ts - before)
            self._waiting[request.session].append((index, replace(request, think=think)))

    def next(self) -> tuple[int, Request] | None:
        """(place in the trace, the request with its time of arrival); None at the end."""
        if not self._arrivals:
            return None
        arrival, index, request = heapq.heappop(self._arrivals)
        return index, replace(request, ts=arrival)

    def ended(self, request: Request, now: float) -> None:
        waiting = self._waiting[request.session]
        if waiting:
            index, following = waiting.popleft()
            heapq.heappush(self._arrivals, (now + (following.think or 0.0), index, following))


def _share(session: str, seed: int) -> float:
    """A number in [0, 1) that a session keeps, so that larger shares contain smaller ones."""
    return zlib.crc32(f"{seed}:{session}".encode()) / 2**32
