"""FIFO, LRU and the optimum hit as often as kvcache-simulator says, an independent simulator of
prefix caches (PyPI `kvcache-simulator` 0.1.3, kvcache-ai/kvcache-blog, packages/kvcache-simulator).

It weighs blocks by tokens, measures the last half of the requests, and ignores time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from kvcache_sim.plan import build_execution_plan
from kvcache_sim.policies import simulate_policy
from kvcache_sim.trace import parse_trace_lines

from tests.eviction.leaves import lab_hits
from tieredkv.sim.generate import generate
from tieredkv.sim.optimum import look_ahead, optimum


def chained(paths: Sequence[Sequence[str]]) -> list[list[int]]:
    """Ids that are equal if the block and all before it are: ours."""
    ids: dict[tuple[str, ...], int] = {}
    return [
        [ids.setdefault(tuple(path[:end]), len(ids)) for end in range(1, len(path) + 1)]
        for path in paths
    ]


def our_hits(policy: str, chains: Sequence[Sequence[int]], blocks: int) -> list[int]:
    if policy == "optimal":
        return optimum(look_ahead(chains), blocks)
    return lab_hits(policy, chains, blocks)


@pytest.mark.parametrize(
    ("paths", "policy", "blocks", "hit", "total"),
    [
        (["AB", "ACB"], "lru", 2, 1, 3),
        (["AB", "ACB"], "fifo", 2, 1, 3),
        (["AB", "AB", "AB"], "lru", 2, 4, 4),
        (["A", "B", "A"], "optimal", 1, 1, 2),
    ],
)
def test_its_own_examples(paths: list[str], policy: str, blocks: int, hit: int, total: int) -> None:
    """From `PrefixPolicyTests` of its tests/test_kvcache_sim.py, commit 9753288: hit and all
    tokens of the measured half, blocks of one token."""
    chains = chained(paths)
    measured = len(paths) // 2
    assert sum(our_hits(policy, chains, blocks)[measured:]) == hit
    assert sum(map(len, chains[measured:])) == total


def their_hits(policy: str, chains: Sequence[Sequence[int]], blocks: int) -> int:
    """Hit blocks of the measured half."""
    lines = [
        json.dumps({"block_size": 1, "hash_ids": [*chain], "input_length": len(chain)})
        for chain in chains
    ]
    result = simulate_policy(build_execution_plan(parse_trace_lines(lines)), policy, blocks)
    assert result.measurementMode == "fixed_window"
    return int(result.hitTokens)


def generated(preset: str, sessions: int) -> tuple[list[list[int]], list[int]]:
    """Chains of our generator, and capacities of which each holds the longest chain."""
    chains = [request.hash_ids for request in generate(preset, sessions) if request.hash_ids]
    unique = len({block for chain in chains for block in chain})
    longest = max(map(len, chains))
    return chains, [max(longest, int(unique * share)) for share in (0.05, 0.1, 0.2, 0.4)]


@pytest.mark.parametrize("policy", ["lru", "optimal"])
@pytest.mark.parametrize(("preset", "sessions"), [("mixed", 90), ("agentic", 6), ("card942", 6)])
def test_generated_chains(policy: str, preset: str, sessions: int) -> None:
    chains, capacities = generated(preset, sessions)
    counts = []
    for blocks in capacities[1:]:
        counts.append(sum(our_hits(policy, chains, blocks)[len(chains) // 2 :]))
        assert counts[-1] == their_hits(policy, chains, blocks)
    assert counts[0] < counts[-1]


@pytest.mark.parametrize(("preset", "sessions"), [("mixed", 400), ("agentic", 20), ("card942", 25)])
def test_ranking_runs_instead_of_blocks_costs_little(preset: str, sessions: int) -> None:
    """Stored a turn at a time: a hit that ends inside a run renews all of it, unless a put
    splits the run there."""
    chains, capacities = generated(preset, sessions)
    for blocks in capacities:
        ours = sum(lab_hits("lru", chains, blocks, singly=False)[len(chains) // 2 :])
        assert ours == pytest.approx(their_hits("lru", chains, blocks), rel=0.0025)


@pytest.mark.parametrize("policy", ["fifo", "lru", "optimal"])
def test_single_blocks(policy: str) -> None:
    """Where no block hangs on another, FIFO can be compared too."""
    chains = [[(number * number % 41 * 7 + number // 50) % 60] for number in range(4000)]
    capacities = (3, 10, 30)
    counts = [sum(our_hits(policy, chains, blocks)[len(chains) // 2 :]) for blocks in capacities]
    assert counts == [their_hits(policy, chains, blocks) for blocks in capacities]
    assert len(set(counts)) == 3
