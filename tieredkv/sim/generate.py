"""Synthetic workloads: seeded sessions whose statistics match published measurements.

| preset | sessions | what it is |
|---|---|---|
| `card942` | 610 | coding agents on one system prompt: 94.2 % reusable, input:output 131:1 |
| `scaling` | 75 | equal agents: 20K common tokens, 10K own, 30 turns of 2,048 + 900 tokens |
| `agentic` | 610 | `card942` with human pauses, compaction at 160K tokens and forked sub-agents |
| `mixed` | 3,000 | 45 % chat, 15 % agents, 40 % one-shot API calls |
| `memoryless` | 3,000 | exponential pauses, constant chance of another turn, nothing shared |
| `drift` | 3,000 | two classes that swap their delay laws at half time |

Sessions arrive as a Poisson process at a fixed rate; asking for fewer sessions makes the
trace shorter, not thinner. Each session draws from a generator of its own, so session k is
the same whatever else is generated.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from tieredkv.errors import UsageError
from tieredkv.sim.request import Request
from tieredkv.sim.sessions import MEMORYLESS, Plan, Rng, agentic, card, drift, mixed, scaling


@dataclass(frozen=True, slots=True)
class _Preset:
    sessions: int
    spacing: float
    """Mean seconds between the arrivals of sessions."""
    plan: Callable[[Rng, bool], Plan]
    """(generator, whether the session starts in the second half of the trace) -> session."""


PRESETS: dict[str, _Preset] = {
    "card942": _Preset(610, 12.0, lambda rng, _: card(rng)),
    "scaling": _Preset(75, 15.0, lambda rng, _: scaling(rng)),
    "agentic": _Preset(610, 12.0, lambda rng, _: agentic(rng)),
    "mixed": _Preset(3000, 2.4, lambda rng, _: mixed(rng)),
    "memoryless": _Preset(3000, 2.4, lambda rng, _: MEMORYLESS.plan(rng, "chat")),
    "drift": _Preset(3000, 2.4, drift),
}


def stream(
    preset: str, sessions: int | None = None, seed: int = 0, block_size: int = 512
) -> Iterator[Request]:
    """Yield the requests of a preset in order of arrival; memory is bounded by the sessions
    that are active at one time. Arguments as for `generate`."""
    if preset not in PRESETS:
        raise UsageError(f"unknown preset {preset!r}; one of {', '.join(PRESETS)}")
    law = PRESETS[preset]
    sessions = law.sessions if sessions is None else sessions
    if sessions < 1 or block_size < 1 or seed < 0:
        raise UsageError(
            f"sessions={sessions}, block_size={block_size}, seed={seed}; give at least one "
            "session, one token per block and a seed >= 0"
        )
    return _merge(law, preset, sessions, seed, block_size)


def generate(
    preset: str, sessions: int | None = None, seed: int = 0, block_size: int = 512
) -> list[Request]:
    """The requests of a preset in order of arrival.

    `sessions`: how many start (default: the preset's). Equal arguments give equal requests.
    Raises UsageError for an unknown preset or a count below one.
    """
    return list(stream(preset, sessions, seed, block_size))


def _merge(
    law: _Preset, preset: str, sessions: int, seed: int, block_size: int
) -> Iterator[Request]:
    layout = _Layout(block_size)
    arrivals = np.random.default_rng([seed, 0])
    pending: list[tuple[float, int, Request]] = []
    order = count()
    start = 0.0
    for index in range(sessions):
        while pending and pending[0][0] <= start:
            yield heapq.heappop(pending)[2]
        rng = np.random.default_rng([seed, 1, index])
        plan = law.plan(rng, 2 * start >= sessions * law.spacing)
        requests, _ = layout.place(plan, f"{preset}-{index}", start)
        for request in requests:
            heapq.heappush(pending, (request.ts, next(order), request))
        start = round(start + float(arrivals.exponential(law.spacing)), 6)
    while pending:
        yield heapq.heappop(pending)[2]


class _Layout:
    """Gives sessions their times and prefix-chained block ids."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._fresh = count()
        self._prompts: dict[str, list[int]] = {}

    def place(
        self,
        plan: Plan,
        session: str,
        start: float,
        parent: str | None = None,
        context: Sequence[int] = (),
    ) -> tuple[list[Request], float]:
        """The requests of the session and of its sub-agents, and when the last response ends.

        A sub-agent starts with the blocks of its parent's `context`.
        """
        ids = [*(self._prompt(plan) if plan.prompt else context)]
        placed: list[Request] = []
        free = start
        for turn, step in enumerate(plan.steps, 1):
            ts = free + step.think
            full = step.length // self._block_size
            del ids[step.keep // self._block_size :]
            ids += islice(self._fresh, max(0, full - len(ids)))
            placed.append(
                Request(
                    ts=round(ts, 6),
                    session=session,
                    turn=turn,
                    input_length=step.length,
                    output_length=step.output,
                    block_size=self._block_size,
                    hash_ids=ids[:full],
                    category=plan.category,
                    think=round(step.think, 6) if turn > 1 else None,
                    service=round(step.service, 6),
                    stop=step.stop,
                    parent=parent,
                )
            )
            free = done = ts + step.service
            for number, child in enumerate(step.spawn, 1):
                name = f"{session}.{turn}.{number}"
                requests, end = self.place(child, name, done, session, ids)
                placed += requests
                free = max(free, end)
        return placed, free

    def _prompt(self, plan: Plan) -> list[int]:
        """Block ids of a shared prompt: its full blocks."""
        name = plan.prompt or ""
        if name not in self._prompts:
            blocks = plan.shared // self._block_size
            self._prompts[name] = list(islice(self._fresh, blocks))
        return self._prompts[name]
