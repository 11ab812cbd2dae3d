"""Agent sessions for real engines: the seeded coding agents of the simulator, scaled down.

Lengths are divided by `scale` and pauses by `haste`. Token ids are random, so that two
sessions have nothing in common but the shared prompt. The prompt of a turn is what survives
of the previous one, the answer to it, and new tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from tieredkv import chain_keys
from tieredkv.sim.generate import generate
from tieredkv.sim.request import Request

VOCABULARY = 512
ENGINE_BLOCK = 32
"""Tokens of a block of the engines' own KV cache: the least that vLLM's CPU kernels take."""


@dataclass(frozen=True, slots=True)
class Load:
    """How much of the workload runs, and how fast."""

    sessions: int = 4
    turns: int = 40
    """At most so many per session. With these 94.2 % of all prompt tokens were seen before, as
    in the traces that sharing a pool was published for."""
    scale: int = 16
    haste: float = 40.0
    context: int = 5120
    """Tokens of prompt and answer together; a session that would exceed it ends."""
    answer: tuple[int, int] = (4, 32)
    """Least and most tokens of an answer."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    session: int
    number: int
    """0 for the first."""
    order: int
    """Place in the whole trace, by arrival."""
    pause: float
    """Seconds from the previous response (first turn: from the start) to this request."""
    keep: int | None
    """Tokens of the previous prompt that survive; None: all, and the answer."""
    shared: int
    """Leading tokens that belong to the prompt of all sessions (first turn only)."""
    length: int
    """Tokens of the prompt; more, if what survives leaves no room for a new one."""
    output: int
    seed: int

    def prompt(self, before: Sequence[int], answer: Sequence[int]) -> list[int]:
        """The token ids, given the previous prompt and its answer."""
        if self.number == 0:
            ids = _tokens(self.shared, self.seed)
        else:
            ids = [*before, *answer] if self.keep is None else list(before[: self.keep])
        fresh = max(1, self.length - len(ids))
        # At this residue ExampleConnector finds one file and then opens another.
        fresh += (len(ids) + fresh) % ENGINE_BLOCK == 1
        return ids + _tokens(fresh, self.seed, self.session, self.number)


def sessions(load: Load) -> list[list[Turn]]:
    """The turns of each session."""
    trace = generate("card942", load.sessions, load.seed, block_size=load.scale)
    order = {id(request): place for place, request in enumerate(trace)}
    by_name: dict[str, list[Request]] = {}
    for request in trace:
        by_name.setdefault(request.session, []).append(request)
    firsts = [requests[0] for requests in by_name.values()]
    found = []
    for number, requests in enumerate(by_name.values()):
        shared = max(
            (_same(requests[0].hash_ids, f.hash_ids) for f in firsts if f is not requests[0]),
            default=0,
        )
        turns: list[Turn] = []
        for now, before in zip(requests[: load.turns], [None, *requests], strict=False):
            turn = _turn(load, number, order[id(now)], now, before, shared)
            if turn.length + load.answer[1] > load.context:
                break
            turns.append(turn)
        found.append(turns)
    return found


def _turn(
    load: Load, session: int, order: int, now: Request, before: Request | None, shared: int
) -> Turn:
    # The trace has one block per scaled token.
    kept = _same(now.hash_ids, before.hash_ids) if before else 0
    return Turn(
        session=session,
        number=now.turn - 1,
        order=order,
        pause=(now.ts if now.think is None else now.think) / load.haste,
        keep=None if before and kept == len(before.hash_ids) else kept,
        shared=shared,
        length=now.input_length // load.scale,
        output=int(np.clip(now.output_length // load.scale, *load.answer)),
        seed=load.seed,
    )


def _same(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    )


def _tokens(count: int, *seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, VOCABULARY, count)]


def reusable(served: Iterable[tuple[Sequence[int], Sequence[int]]], granularity: int) -> int:
    """Tokens of the prompts that an infinite cache with blocks of `granularity` tokens has.

    `served`: prompts with their answers in the order of arrival. The last token of an
    answer has no KV: the engine never fed it back.
    """
    seen: set[bytes] = set()
    found = 0
    for prompt, answer in served:
        keys = chain_keys(prompt[:-1], block_tokens=granularity)
        found += granularity * sum(1 for _ in takewhile(seen.__contains__, keys))
        seen.update(chain_keys([*prompt, *answer[:-1]], block_tokens=granularity))
    return found
