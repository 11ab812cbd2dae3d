"""The one-pass curve against LRU played out capacity by capacity."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from tieredkv.errors import UsageError
from tieredkv.sim.curve import Curve, miss_ratio_curve
from tieredkv.sim.generate import generate
from tieredkv.sim.request import Request, TraceError
from tieredkv.sim.trace import read_trace, stats

SHARED = Path(__file__).parents[3] / "shared" / "traces"


def request(number: int, ids: list[int], tail: int = 0) -> Request:
    """Blocks of 10 tokens, and `tail` tokens beyond the last."""
    return Request(float(number), f"s{number}", 1, 10 * len(ids) + tail, 1, 10, ids)


def played_out(requests: Iterable[Request], capacity: int) -> tuple[int, int]:
    """Hit blocks, and the sum of the positions of their tokens, of an LRU cache that removes
    one leaf at a time. It knows of no stack, no stretch and no tie: leaves never tie."""
    used: dict[int, int] = {}
    parent: dict[int, int | None] = {}
    children: dict[int, int] = {}
    hits = places = 0
    for now, r in enumerate(requests):
        hit = 0
        while hit < len(r.hash_ids) and r.hash_ids[hit] in used:
            hit += 1
        hits += hit
        places += (hit * r.block_size) ** 2
        above: int | None = None
        for block in r.hash_ids:
            if block not in used:
                parent[block], children[block] = above, 0
                if above is not None:
                    children[above] += 1
            used[block] = now
            above = block
        leaves = sorted((used[b], b) for b in used if not children[b])
        while len(used) > capacity:
            _, leaf = leaves.pop(0)
            del used[leaf]
            above = parent.pop(leaf)
            if above is not None:
                children[above] -= 1
                if not children[above]:
                    leaves.append((used[above], above))
                    leaves.sort()
    return hits, places


def hit_blocks(curve: Curve, capacity: int) -> float:
    return float(curve.at(capacity)) * curve.input_tokens / curve.block_tokens


def test_by_hand() -> None:
    trace = [
        request(0, [1, 2, 3]),  # order: 1 2 3
        request(1, [1, 4]),  # 1 hits from capacity 1 on; order: 1 4 2 3
        request(2, [1, 2, 3, 5], tail=5),  # 1 at 1, 2 at 3, 3 at 4; order: 1 2 3 5 4
        request(3, [1, 4]),  # 1 at 1, 4 at 5
    ]
    curve = miss_ratio_curve(trace)
    assert curve.capacity.tolist() == [0, 1, 2, 3, 4, 5]
    hits = np.rint(curve.hit_rate * curve.input_tokens / 10)
    assert hits.tolist() == [0, 3, 3, 4, 5, 6]
    assert curve.input_tokens == 115
    assert curve.infinite == pytest.approx(60 / 115)
    # 450 + 200 + 45 ** 2 / 2 + 200 pairs; hits at positions 0-10, and 10-20, 20-30, 10-20.
    assert curve.pairs == 450 + 200 + 1012.5 + 200
    saved = curve.hit_pairs * curve.pairs
    assert saved.tolist() == pytest.approx([0, 150, 150, 300, 550, 700])
    assert curve.unique_blocks == 5
    assert not curve.error.any()


@pytest.mark.parametrize(
    ("preset", "sessions"), [("card942", 12), ("agentic", 12), ("mixed", 60), ("memoryless", 60)]
)
def test_equals_lru_played_out(preset: str, sessions: int) -> None:
    trace = generate(preset, sessions, seed=5)[:700]
    curve = miss_ratio_curve(trace)
    unique = curve.unique_blocks
    assert unique == len({block for r in trace for block in r.hash_ids})
    for capacity in (1, 7, 40, unique // 20, unique // 7, unique // 3, unique - 1, unique):
        hits, places = played_out(trace, capacity)
        assert hit_blocks(curve, capacity) == pytest.approx(hits, abs=1e-6)
        assert curve.pairs_at(capacity) * curve.pairs == pytest.approx(places / 2, rel=1e-9)
    assert hit_blocks(curve, unique // 3) > hit_blocks(curve, unique // 20) > 0
    assert curve.infinite == pytest.approx(stats(trace).hit_share)


@pytest.mark.parametrize("preset", ["card942", "agentic", "mixed", "memoryless", "scaling"])
@pytest.mark.parametrize("share", [0.3, 0.1, 0.03])
def test_sampled_within_the_stated_error(preset: str, share: float) -> None:
    trace = generate(preset, {"mixed": 700, "memoryless": 700}.get(preset, 70), seed=1)
    exact = miss_ratio_curve(trace)
    capacities = np.array([0.01, 0.05, 0.1, 0.2, 0.4, 1.0]) * exact.unique_blocks
    for seed in range(3):
        curve = miss_ratio_curve(trace, share, seed)
        off = np.abs(curve.at(capacities) - exact.at(capacities))
        assert (off <= curve.error_at(capacities)).all(), (seed, off)
        assert curve.sample == pytest.approx(share, rel=0.15)
        assert curve.unique_blocks == pytest.approx(exact.unique_blocks, rel=0.1)
        assert (np.diff(curve.hit_rate) >= -1e-12).all()
        pairs = curve.pairs_at(capacities) - exact.pairs_at(capacities)
        assert np.abs(pairs).max() < max(0.02, 3 * curve.error_at(capacities).max())
        assert 0 < curve.error_at(capacities[-1]) < 0.1, "an error that says something"


def test_the_error_shrinks_with_the_sample() -> None:
    trace = generate("mixed", 600, seed=2)
    errors = [miss_ratio_curve(trace, share).error_at(8_000).item() for share in (0.5, 0.1, 0.02)]
    assert errors == sorted(errors)
    assert errors[0] < 0.02


def test_seeds_choose_other_blocks_and_equal_seeds_the_same() -> None:
    trace = generate("mixed", 200)
    one, same, other = (miss_ratio_curve(trace, 0.1, seed) for seed in (1, 1, 2))
    assert one.hit_rate.tolist() == same.hit_rate.tolist()
    assert one.hit_rate.tolist() != other.hit_rate.tolist()


def test_ids_of_any_size_can_be_sampled() -> None:
    trace = generate("mixed", 100)
    huge = [
        Request(r.ts, r.session, r.turn, r.input_length, 1, 512, [b << 40 | b for b in r.hash_ids])
        for r in trace
    ]
    huge[5].hash_ids[-1] = -3
    huge[6].hash_ids[-1] = 1 << 90
    sampled, exact = miss_ratio_curve(huge, 0.1), miss_ratio_curve(huge)
    assert abs(sampled.infinite - exact.infinite) <= sampled.error[-1]


def test_what_no_curve_can_be_drawn_of() -> None:
    with pytest.raises(UsageError, match=r"sample=0, seed=0: pass a share in \(0, 1\]"):
        miss_ratio_curve([], 0)
    with pytest.raises(UsageError, match="no requests with input tokens"):
        miss_ratio_curve([])
    moved = [request(0, [1, 2, 3]), request(1, [4, 2])]
    with pytest.raises(TraceError, match=r"request 2: .* prefix-chained"):
        miss_ratio_curve(moved)
    with pytest.raises(TraceError, match="prefix-chained"):
        miss_ratio_curve([request(0, [1, 2, 1])])
    other = Request(1.0, "x", 1, 40, 1, 20, [1, 2])
    with pytest.raises(TraceError, match="request 2: block size 20 after 10"):
        miss_ratio_curve([request(0, [1]), other])


def test_requests_without_a_full_block_miss() -> None:
    curve = miss_ratio_curve([request(0, [], tail=9), request(1, [], tail=3)])
    assert curve.hit_rate.tolist() == [0]
    assert curve.at(100) == 0
    sampled = miss_ratio_curve([request(0, [], tail=9)], 0.1)
    assert sampled.infinite == 0


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared traces")
def test_a_real_trace() -> None:
    trace = list(read_trace(SHARED / "mooncake_conversation.jsonl.gz"))
    exact = miss_ratio_curve(trace)
    assert exact.infinite == pytest.approx(stats(trace).hit_share)
    capacities = np.array([0.02, 0.05, 0.1, 0.2, 1.0]) * exact.unique_blocks
    for seed in range(2):
        curve = miss_ratio_curve(trace, 0.1, seed)
        off = np.abs(curve.at(capacities) - exact.at(capacities))
        assert (off <= curve.error_at(capacities)).all()
