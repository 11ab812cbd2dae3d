"""The offline bounds against what they claim: exhaustive search, plain definitions, policies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.small import Random, opened, replay, traces
from tieredkv.eviction import BUILTIN
from tieredkv.sim.optimum import NEVER, look_ahead, optimum

Chains = Sequence[Sequence[int]]


@given(traces())
def test_the_future_by_definition(trace: Random) -> None:
    chains = trace.chains
    future = look_ahead(chains)
    uses: dict[int, list[int]] = {}
    for index, ids in enumerate(chains):
        for block in ids:
            uses.setdefault(block, []).append(index)
    assert future.unique == len(uses)
    assert future.blocks == [len(ids) for ids in chains]
    assert future.seen == [sum(uses[b][0] < i for b in ids) for i, ids in enumerate(chains)]
    live = [sum(use[0] <= i <= use[-1] for use in uses.values()) for i in range(len(chains))]
    assert future.peak_live == max(live)
    for index, ids in enumerate(chains):
        after = [min((u for u in uses[b] if u > index), default=NEVER) for b in ids]
        assert [n for n, count in future.next_use[index] for _ in range(count)] == after


def exhaustive(chains: Chains, capacity: int) -> int:
    """The most hits of all ways to run a cache that holds prefixes: after each request any set
    of what was there and what came may stay, if no block stays without the one before it."""
    parent = {b: a for ids in chains for a, b in zip([None, *ids], ids, strict=False)}

    @cache
    def best(index: int, held: frozenset[int]) -> int:
        if index == len(chains):
            return 0
        hit = sum(block in held for block in chains[index])
        there = sorted(held | set(chains[index]))
        options = (
            frozenset(kept)
            for size in range(min(capacity, len(there)) + 1)
            for kept in combinations(there, size)
        )
        closed = (kept for kept in options if all(parent[b] in (None, *kept) for b in kept))
        return hit + max(best(index + 1, kept) for kept in closed)

    return best(0, frozenset())


@settings(max_examples=50, deadline=None)
@given(traces(requests=6, new=2, longest=4), st.integers(1, 3))
def test_without_spans_no_cache_hits_more_and_one_hits_as_much(trace: Random, size: int) -> None:
    assert sum(optimum(look_ahead(trace.chains), size)) == exhaustive(trace.chains, size)


@pytest.mark.parametrize("policy", BUILTIN)
@settings(max_examples=12, deadline=None)
@given(traces(), st.data())
def test_no_policy_hits_more_than_the_bound(
    policy: str, trace: Random, data: st.DataObject
) -> None:
    future = look_ahead(trace.chains)
    size = data.draw(st.integers(1, max(1, future.unique)))
    with opened(policy, size) as lab:
        hits = [served.hit for served in replay(lab, trace.requests, trace.finishes)]
    assert sum(hits) <= sum(optimum(future, size))
    if size == future.unique:
        assert hits == future.seen == optimum(future, size)


def block_by_block(trace: Random, capacity: int) -> list[int]:
    """The optimum that plays by the rules, with the state of every block in plain sight: the
    blocks of running requests stay; of the others the one goes that is used furthest in the
    future, the deepest first; all blocks of a request are stored, as far as there is room."""
    chains, hits = trace.chains, []
    held: dict[int, tuple[int, int]] = {}  # block -> (next use, depth)
    running: list[tuple[float, Sequence[int]]] = []
    for index, (ids, (arrival, end)) in enumerate(zip(chains, trace.spans, strict=True)):
        running = [(ends, kept) for ends, kept in running if ends > arrival]
        hit = next((i for i, block in enumerate(ids) if block not in held), len(ids))
        hits.append(hit)
        pinned = {block for _, kept in running for block in kept} | set(ids[:hit])
        wanted = min(len(ids), capacity) - hit
        while len(held) + wanted > capacity:
            free = [(*place, block) for block, place in held.items() if block not in pinned]
            if not free:
                break
            del held[max(free)[2]]
        stored = ids[: hit + min(wanted, capacity - len(held))]
        for depth, block in enumerate(stored, 1):
            later = (i for i in range(index + 1, len(chains)) if block in chains[i])
            held[block] = next(later, NEVER + index), depth
        running.append((end, stored))
        for block in (b for b, (use, _) in held.items() if use < NEVER):
            chain = next(ids for ids in chains if block in ids)
            assert set(chain[: chain.index(block)]) <= held.keys()
    return hits


@settings(max_examples=150, deadline=None)
@given(traces(), st.integers(1, 12))
def test_with_spans_it_plays_by_the_rules(trace: Random, size: int) -> None:
    future = look_ahead(trace.chains)
    hits = optimum(future, size, trace.spans)
    assert hits == block_by_block(trace, size)
    assert sum(hits) <= sum(optimum(future, size))
