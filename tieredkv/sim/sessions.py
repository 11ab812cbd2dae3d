"""Laws of synthetic sessions: how many turns, how long, how fast.

Medians and sigmas are fits of published measurements of coding agents and chat. A plan has
lengths and pauses only; `generate` gives it a start time and block ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

Rng = np.random.Generator

CARD_SHARED, CARD_SHARING = 11_520, 568 / 610
"""Tokens of the common prompt, and the share of sessions that have it."""
KEEP_ALL = 1 << 62
CONTEXT_LIMIT = 250_000
COMPACT_AT = 160_000


@dataclass(slots=True)
class Step:
    """One turn: `think` follows the previous response, `keep` tokens of the context survive."""

    length: int
    output: int
    service: float
    think: float = 0.0
    keep: int = KEEP_ALL
    stop: str = "tool_use"
    spawn: list[Plan] = field(default_factory=list)
    """Sub-agents started by this turn's response; the next turn waits for them."""


@dataclass(slots=True)
class Plan:
    """A session before it has a start time and block ids."""

    category: str
    steps: list[Step]
    prompt: str | None = None
    """Name of the shared prompt it starts with; None if it has one of its own, or a sub-agent."""
    shared: int = 0
    """Tokens of the shared prompt."""


def _lognormal(rng: Rng, median: float, sigma: float) -> float:
    return float(median * np.exp(sigma * rng.standard_normal()))


def _output(rng: Rng) -> int:
    return int(np.clip(_lognormal(rng, 300, 1.05), 16, 16_000))


def _step(rng: Rng, length: float, gap: float | None) -> Step:
    """A turn whose successor starts `gap` seconds later (None: there is none)."""
    output = _output(rng)
    busy = 1 + 0.012 * output
    return Step(int(length), output, busy if gap is None else min(busy, 0.7 * gap))


def card(rng: Rng) -> Plan:
    """A coding agent of the data card; turns and final context are correlated (0.78)."""
    z1, z2 = rng.standard_normal(2)
    z2 = 0.78 * z1 + np.sqrt(1 - 0.78**2) * z2
    turns = int(np.clip(round(30 * np.exp(0.475 * z1)), 3, 200))
    first = CARD_SHARED + _lognormal(rng, 758, 0.45)
    last = max(first, min(CONTEXT_LIMIT, 80_000 * np.exp(0.365 * z2)))
    prompt = "card" if rng.random() < CARD_SHARING else None
    plan = Plan("agent", _growing(rng, turns, first, last, CARD_SHARED), prompt, CARD_SHARED)
    plan.steps[-1].stop = "end_turn"
    return plan


def _growing(rng: Rng, turns: int, first: float, last: float, fixed: int) -> list[Step]:
    """Turns from `first` to `last` tokens, early ones growing most. Now and then one rewrites
    part of its context, never the first `fixed` tokens."""
    weights = 1 + 6.3 * np.exp(-np.arange(turns - 1) / 4.7)
    weights *= rng.gamma(1.3, size=turns - 1)
    lengths = first + (last - first) * np.concatenate(([0], weights.cumsum() / weights.sum()))
    steps: list[Step] = []
    gap = 0.0
    for t in range(turns):
        following = _lognormal(rng, 5.2, 1.1825)
        step = _step(rng, lengths[t], following if t + 1 < turns else None)
        if steps:
            step.think = gap - steps[-1].service
            if rng.random() < 0.063:
                step.keep = fixed + int(rng.random() * (steps[-1].length - fixed))
        steps.append(step)
        gap = following
    return steps


def agentic(rng: Rng) -> Plan:
    plan = card(rng)
    cut = 0
    for previous, step in zip(plan.steps, plan.steps[1:], strict=False):
        if rng.random() < 0.11:
            law = (68, 1.4) if rng.random() < 0.9 else (3600, 2.0)
            previous.stop, step.think = "end_turn", _lognormal(rng, *law)
        elif rng.random() < 0.02:
            previous.spawn = [_fork(rng, previous.length) for _ in range(rng.integers(1, 4))]
        step.length -= cut
        if step.length > COMPACT_AT:
            compacted = CARD_SHARED + int(rng.uniform(8_000, 25_000))
            cut += step.length - compacted
            step.length, step.keep = compacted, CARD_SHARED
    return plan


def _fork(rng: Rng, context: int) -> Plan:
    """A sub-agent that starts from its parent's context."""
    turns = int(np.clip(round(10 * np.exp(0.475 * rng.standard_normal())), 3, 40))
    first = context + _lognormal(rng, 758, 0.45)
    last = min(CONTEXT_LIMIT, first + (turns - 1) * _lognormal(rng, 2_250, 0.365))
    return Plan("subagent", _growing(rng, turns, first, max(first, last), context))


def scaling(rng: Rng) -> Plan:
    steps: list[Step] = []
    for t in range(30):
        gap = _lognormal(rng, 5.2, 1.1825)
        service = min(1 + 0.012 * 900, 0.7 * gap)
        steps.append(Step(30_000 + t * (2_048 + 900), 900, service))
        if t:
            steps[t].think = gap - service
    steps[-1].stop = "end_turn"
    return Plan("agent", steps, "common", 20_000)


@dataclass(frozen=True, slots=True)
class Law:
    """A class of growing sessions; pairs are (median, sigma) of lognormals."""

    first: tuple[float, float]
    growth: tuple[float, float]
    turns: Callable[[Rng], int]
    think: Callable[[Rng], tuple[float, str]]
    """Pause before a turn, and what ended the response before it."""

    def plan(self, rng: Rng, category: str, prompt: str | None = None, shared: int = 0) -> Plan:
        length = min(shared + _lognormal(rng, *self.first), CONTEXT_LIMIT)
        steps: list[Step] = []
        for t in range(self.turns(rng)):
            if length > CONTEXT_LIMIT:
                break
            step = _step(rng, length, None)
            if t:
                step.think, steps[-1].stop = self.think(rng)
            steps.append(step)
            length += _lognormal(rng, *self.growth)
        steps[-1].stop = "end_turn"
        return Plan(category, steps, prompt, shared)


def _human(median: float, sigma: float) -> Callable[[Rng], tuple[float, str]]:
    return lambda rng: (_lognormal(rng, median, sigma), "end_turn")


def _agent_think(rng: Rng) -> tuple[float, str]:
    if rng.random() < 0.94:
        return _lognormal(rng, 3.5, 0.8), "tool_use"
    return _lognormal(rng, 120, 1.0), "end_turn"


def _turns(median: float, sigma: float, least: int) -> Callable[[Rng], int]:
    return lambda rng: max(least, round(_lognormal(rng, median, sigma)))


CHAT = Law((3000, 1.1), (900, 0.9), lambda rng: int(rng.geometric(0.3)), _human(45, 1.1))
AGENT = Law((4000, 0.8), (1500, 0.9), _turns(25, 0.8, 2), _agent_think)
MEMORYLESS = Law(
    (3000, 1.1),
    (900, 0.9),
    lambda rng: int(rng.geometric(0.15)),
    lambda rng: (float(rng.exponential(60)), "end_turn"),
)
FAST = Law((4000, 0.8), (1500, 0.9), _turns(20, 0.6, 1), _human(4, 0.8))
SLOW = Law((4000, 0.8), (1500, 0.9), lambda rng: int(rng.geometric(0.5)), _human(150, 1.0))

TEMPLATES = 40
_zipf = 1 / np.arange(1, TEMPLATES + 1) ** 0.9
TEMPLATE_SHARE = _zipf / _zipf.sum()
TEMPLATE_TOKENS = 3000 * np.exp(0.6 * np.random.default_rng(40).standard_normal(TEMPLATES))


def mixed(rng: Rng) -> Plan:
    kind = rng.random()
    if kind < 0.45:
        return CHAT.plan(rng, "chat", f"chat{rng.integers(5)}", 2_000)
    if kind < 0.60:
        return AGENT.plan(rng, "agent", f"agent{rng.integers(3)}", 16_000)
    template = int(rng.choice(TEMPLATES, p=TEMPLATE_SHARE))
    shared = int(TEMPLATE_TOKENS[template])
    step = _step(rng, shared + _lognormal(rng, 2500, 1.0), None)
    step.stop = "end_turn"
    return Plan("api", [step], f"api{template}", shared)


def drift(rng: Rng, second_half: bool) -> Plan:
    fast = bool(rng.random() < 0.5)
    label = "a" if fast != second_half else "b"
    return (FAST if fast else SLOW).plan(rng, label)
