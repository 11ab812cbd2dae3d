"""Seeded conversations of agents, played turn by turn on anything that completes prompts.

The prompt of a turn is the prompt of the one before, its output, and new tokens. So outputs
that are equal on every turn mean that every reused KV block was right.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.vllm.model import TEXT


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt; `cached` of its tokens were not computed."""

    tokens: tuple[int, ...]
    cached: int
    finish: str | None = None


Complete = Callable[[list[list[int]], list[int]], Sequence[Completion]]
"""Prompts as token ids, the number of output tokens of each -> answers in the same order."""


@dataclass(frozen=True)
class Input:
    """What the user and the tools say in one turn, and how much the model says then."""

    tokens: tuple[int, ...]
    reply: int


Script = tuple[tuple[Input, ...], ...]
"""The inputs of each session."""


@dataclass(frozen=True)
class Turn:
    session: int
    index: int
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    cached: int


def script(
    seed: int,
    *,
    sessions: int = 3,
    turns: int = 4,
    system: int = 150,
    message: tuple[int, int] = (20, 120),
    reply: tuple[int, int] = (8, 24),
) -> Script:
    """Sessions that start with the same `system` tokens, as agents with the same tools do.

    `message` and `reply` are ranges of token counts. With the defaults the longest prompt has
    at most 700 tokens.
    """
    rng = random.Random(seed)
    head = _tokens(rng, system)

    def inputs() -> tuple[Input, ...]:
        return tuple(
            Input((() if i else head) + _tokens(rng, rng.randint(*message)), rng.randint(*reply))
            for i in range(turns)
        )

    return tuple(inputs() for _ in range(sessions))


def play(script: Script, complete: Complete, *, together: bool = True) -> list[Turn]:
    """Play one turn of every session, then the next turn of every session, and so on.

    `together`: the sessions' prompts of a round go into one call of `complete`, else one by one.
    """
    contexts: list[list[int]] = [[] for _ in script]
    played: list[Turn] = []
    for index in range(max(map(len, script))):
        active = [s for s, inputs in enumerate(script) if index < len(inputs)]
        for group in [active] if together else [[s] for s in active]:
            for s in group:
                contexts[s].extend(script[s][index].tokens)
            prompts = [list(contexts[s]) for s in group]
            answers = complete(prompts, [script[s][index].reply for s in group])
            for s, prompt, answer in zip(group, prompts, answers, strict=True):
                contexts[s].extend(answer.tokens)
                played.append(Turn(s, index, tuple(prompt), answer.tokens, answer.cached))
    return played


def difference(expected: Sequence[Turn], actual: Sequence[Turn]) -> str | None:
    """Where the outputs of two plays of one script part first; None if they never do."""
    if [(t.session, t.index) for t in expected] != [(t.session, t.index) for t in actual]:
        return f"not the same turns: {len(expected)} and {len(actual)}"
    for want, got in zip(expected, actual, strict=True):
        if want.output != got.output:
            return (
                f"session {want.session}, turn {want.index}, {len(want.prompt)} prompt tokens "
                f"({want.cached} and {got.cached} cached): {want.output} became {got.output}"
            )
    return None


def reusable(turns: Sequence[Turn], chunk: int) -> list[int]:
    """Per turn, the prompt tokens that a cache without limits knows from turns before it.

    In whole chunks, and at least one token is left to compute. The last output token of a turn
    was never an input, so its KV does not exist. Turns count in order, also those of a round.
    """
    known: set[tuple[int, ...]] = set()
    found: list[int] = []
    for turn in turns:
        hit = 0
        while hit + chunk < len(turn.prompt) and turn.prompt[: hit + chunk] in known:
            hit += chunk
        found.append(hit)
        context = turn.prompt + turn.output[:-1]
        known.update(context[:end] for end in range(chunk, len(context) + 1, chunk))
    return found


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(TEXT) for _ in range(count))
