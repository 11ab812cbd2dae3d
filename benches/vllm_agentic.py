"""Coding agents on two real vLLM engines: what an external cache is worth, end to end.

Each engine's own cache holds little more than one context, so sessions evict each other.
All arms serve the same sessions, in alternating order, with requests routed `sticky` (a
session stays with its engine) and `round_robin`. Where engines do not share a cache, with
round robin each finds only what it has served itself, and `loss.unshared` says how much
that is.

Every answer is greedy and is compared with the first arm's. A different token counts as
wrong unless the two best were equally likely in both arms: batches are composed differently,
so the last bits of a sum differ.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
import torch

from benches.common import Result, interval
from benches.vllm_arms import ARMS, CHUNK, ON_DISK, OURS, PEERS, SHARED, absent
from benches.vllm_engine import Answer, Shape
from benches.vllm_fleet import Fleet, Served
from benches.vllm_workload import VOCABULARY, Load, Turn, reusable, sessions

ENGINES = 2
TIE = 1e-3
"""Two tokens whose log probabilities differ by less are equally likely."""
OF_POTENTIAL = 92.2 / 94.2
"""Published for such agents on a pool that all engines share: hits over what is reusable."""

ROUTINGS: dict[str, Callable[[Turn], int]] = {
    "sticky": lambda turn: turn.session % ENGINES,
    "round_robin": lambda turn: turn.order % ENGINES,
}


@dataclass(frozen=True, slots=True)
class Size:
    load: Load = field(default_factory=Load)
    layers: int = 4
    hidden: int = 256
    rounds: int = 2
    seconds: float = 520.0
    """No round starts that would probably end later than this after the first began."""
    arms: tuple[str, ...] = tuple(ARMS)
    """The first is the reference."""
    routings: tuple[str, ...] = tuple(ROUTINGS)


@dataclass(frozen=True, slots=True)
class Run:
    """What one arm made of all sessions."""

    served: list[Served]

    @property
    def hit(self) -> float:
        return 100 * sum(s.answer.cached for s in self.served) / self.prompted

    @property
    def prompted(self) -> int:
        return sum(len(s.prompt) for s in self.served)

    @property
    def throughput(self) -> float:
        begin = min(s.submitted for s in self.served)
        end = max(s.answer.done for s in self.served)
        return (self.prompted + sum(len(s.answer.tokens) for s in self.served)) / (end - begin)

    def ttft(self, percent: float) -> float:
        return float(np.percentile([s.answer.first - s.submitted for s in self.served], percent))

    def total(self, percent: float) -> float:
        return float(np.percentile([s.answer.done - s.submitted for s in self.served], percent))


@dataclass(slots=True)
class Book:
    """All runs by routing and arm, and the answers of the first run."""

    runs: dict[tuple[str, str], list[Run]] = field(default_factory=dict)
    answers: dict[tuple[int, int], Answer] = field(default_factory=dict)


def run(size: Size | None = None) -> Iterator[Result]:
    size = size or Size()
    if find_spec("vllm") is None:
        _note("vllm is not installed: nothing to measure")
        return
    arms = []
    for arm in size.arms:
        if reason := absent(arm):
            _note(f"no arm {arm}: {reason}")
            yield Result(f"vllm_agentic.absent.{arm}", 1, "arm", None, None, None, None, 1, (1, 1))
        else:
            arms.append(arm)
    _note("engines share a cache in the arms " + ", ".join(a for a in arms if a in SHARED))
    book = _measure(size, arms)
    for routing in size.routings:
        shares = _reusable(book, routing, arms[0])
        yield from _potential(routing, shares)
        for arm in arms:
            yield from _figures(book, routing, arm, arms[0], shares[0])
        for ours in OURS:
            for peer in PEERS:
                if {ours, peer} <= set(arms):
                    yield from _versus(book, routing, ours, peer)
    yield from _outputs(book, arms)


def _measure(size: Size, arms: Sequence[str]) -> Book:
    book, turns = Book(), sessions(size.load)
    with tempfile.TemporaryDirectory(prefix="tieredkv-bench-model-") as model:
        _write_model(model, size)
        room = size.load.context + CHUNK  # a turn without room for new tokens is longer
        begin = time.monotonic()
        with Fleet(ENGINES, Shape(model, context=room, pool=room)) as fleet:
            for number in range(size.rounds):
                elapsed = time.monotonic() - begin
                if number and elapsed * (number + 1) / number > size.seconds:
                    break
                forward = number % 2 == 0
                for routing in size.routings if forward else size.routings[::-1]:
                    for arm in arms if forward else arms[::-1]:
                        with ARMS[arm](ENGINES) as transfers:
                            lane = ROUTINGS[routing]
                            served = fleet.serve(transfers, turns, lane, book.answers)
                        found = Run(served)
                        book.runs.setdefault((routing, arm), []).append(found)
                        _note(
                            f"round {number + 1} {routing} {arm}: {found.hit:.1f} % hit, TTFT "
                            f"{found.ttft(50):.3f} s, {found.throughput:.0f} tokens/s"
                        )
    return book


def _reusable(book: Book, routing: str, arm: str) -> tuple[float, float, float]:
    """What an infinite cache would reuse, in percent: by the token, by the chunk, and by the
    chunk where each engine has its own."""
    first = book.runs[routing, arm][0]
    pairs = [(s.prompt, book.answers[s.turn.session, s.turn.number].tokens) for s in first.served]
    lanes = [ROUTINGS[routing](s.turn) for s in first.served]
    own = sum(
        reusable((p for p, at in zip(pairs, lanes, strict=True) if at == lane), CHUNK)
        for lane in range(ENGINES)
    )
    token, chunk, engine = (
        100 * tokens / first.prompted
        for tokens in (reusable(pairs, 1), reusable(pairs, CHUNK), own)
    )
    return token, chunk, engine


def _potential(routing: str, shares: tuple[float, float, float]) -> Iterator[Result]:
    token, chunk, engine = shares
    for name, value, unit in (
        ("potential", token, "% of prompt tokens"),
        ("loss.chunks", token - chunk, "points"),
        ("loss.unshared", chunk - engine, "points, where each engine has its own cache"),
    ):
        metric = f"vllm_agentic.{routing}.{name}"
        yield Result(metric, value, unit, None, None, None, None, 1, (value, value))


def _figures(
    book: Book, routing: str, arm: str, reference: str, potential: float
) -> Iterator[Result]:
    prefix = f"vllm_agentic.{routing}.{arm}"
    runs, base = book.runs[routing, arm], book.runs[routing, reference]
    judged = arm in OURS and (routing == "sticky" or arm in SHARED)
    bar = OF_POTENTIAL if judged else None
    yield _ratio(f"{prefix}.hit", "%", [r.hit for r in runs], [potential] * len(runs), bar)
    for name, percent in (("p50", 50), ("p99", 99)):
        for kind, figure in (("ttft", Run.ttft), ("e2e", Run.total)):
            ours, theirs = ([figure(r, percent) for r in side] for side in (runs, base))
            yield _ratio(f"{prefix}.{kind}_{name}", "s", ours, theirs)
    ours, theirs = ([r.throughput for r in side] for side in (runs, base))
    yield _ratio(f"{prefix}.throughput", "tokens/s", ours, theirs)


def _versus(book: Book, routing: str, ours: str, peer: str) -> Iterator[Result]:
    """Ours beside another cache. Without a bar where it is not like with like: engines that
    share against engines that do not, a disk against memory."""
    prefix = f"vllm_agentic.{routing}.{ours}/{peer}"
    runs, others = book.runs[routing, ours], book.runs[routing, peer]
    disk = ours in ON_DISK and peer not in ON_DISK
    like = not disk and (routing == "sticky" or ours in SHARED or peer not in SHARED)
    bar = 1.0 if like else None
    left, right = ([r.ttft(50) for r in side] for side in (runs, others))
    yield _ratio(f"{prefix}.ttft_p50", "s", left, right, bar, higher_is_better=False)
    left, right = ([r.throughput for r in side] for side in (runs, others))
    yield _ratio(f"{prefix}.throughput", "tokens/s", left, right, bar)


def _ratio(
    metric: str,
    unit: str,
    ours: list[float],
    reference: list[float],
    bar: float | None = None,
    higher_is_better: bool = True,
) -> Result:
    """The figures of the rounds, pair by pair."""
    ratios = [a / b for a, b in zip(ours, reference, strict=True)]
    ratio = median(ratios)
    ok = None if bar is None else ratio >= bar if higher_is_better else ratio <= bar
    spread = interval(ratios)
    return Result(metric, median(ours), unit, median(reference), ratio, bar, ok, len(ours), spread)


def _outputs(book: Book, arms: Sequence[str]) -> Iterator[Result]:
    """Answers that differ from those of the first run."""
    for arm in arms:
        compared, ties, wrong = 0, 0, 0
        for (_, name), runs in book.runs.items():
            if name != arm:
                continue
            for served in (s for r in runs for s in r.served):
                turn = served.turn
                verdict = differs(book.answers[turn.session, turn.number], served.answer)
                compared += 1
                ties += verdict == "tie"
                wrong += verdict == "wrong"
        for metric, value, bar in (("ties", ties, None), ("wrong", wrong, 0.0)):
            ok = None if bar is None else value <= bar
            name = f"vllm_agentic.outputs.{metric}.{arm}"
            yield Result(name, value, "answers", None, None, bar, ok, compared, (value, value))


def differs(reference: Answer, answer: Answer) -> str:
    """ "" for the same tokens, "tie" if the first other token was as likely, else "wrong"."""
    if answer.tokens == reference.tokens:
        return ""
    if len(answer.tokens) != len(reference.tokens):
        return "wrong"
    pairs = zip(reference.tokens, answer.tokens, strict=True)
    at = next(i for i, (a, b) in enumerate(pairs) if a != b)
    return "tie" if max(reference.margins[at], answer.margins[at]) < TIE else "wrong"


def _write_model(path: str, size: Size) -> None:
    """Random weights, wide enough apart for answers that depend on the whole context."""
    transformers: Any = import_module("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64,
        num_key_value_heads=size.hidden // 128,
        head_dim=64,
        max_position_embeddings=1 << 15,
        initializer_range=0.2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)


def _note(text: str) -> None:
    print(f"vllm_agentic: {text}", file=sys.stderr, flush=True)
