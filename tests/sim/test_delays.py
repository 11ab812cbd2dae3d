"""Delays between turns and the survival of sessions."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tieredkv.sim.delays import PER_OCTAVE, SHORTEST, Delays, edge, measure, place
from tieredkv.sim.generate import generate
from tieredkv.sim.request import Request


def request(ts: float, session: str, **fields: object) -> Request:
    return Request(ts, session, 1, 1, 1, 8, [], **fields)  # type: ignore[arg-type]


def test_bins_are_logarithmic_and_hold_their_edge() -> None:
    assert place(-3) == place(0) == place(SHORTEST) == 0
    assert place(SHORTEST * 1.01) == 1
    assert place(SHORTEST * 2.02) == PER_OCTAVE + 1
    for delay in (0.06, 1.0, 17.0, 3600.0, 1e6):
        assert edge(place(delay) - 1) <= delay <= edge(place(delay))


def test_a_delay_runs_from_the_end_of_the_response_unless_the_trace_says_more() -> None:
    measured = measure(
        [
            request(0, "known", stop="a", service=4.0),
            request(0, "silent", stop="b"),
            request(10, "known", stop="x"),
            request(10, "silent", stop="x"),
            request(10, "said", stop="c", service=4.0),
            request(20, "said", stop="x", think=1.0),
        ]
    )
    assert {kind: list(measured[kind].returned) for kind in "abc"} == {
        "a": [place(6.0)],
        "b": [place(10.0)],
        "c": [place(1.0)],
    }


def test_categories_stand_in_only_where_no_stop_is_known() -> None:
    plain = [request(0, "s", category="chat"), request(1, "s"), request(2, "t")]
    assert {kind: d.turns for kind, d in measure(plain).items()} == {"all": 2, "chat": 1}
    mixed = [*plain, request(3, "u", stop="end_turn")]
    assert {kind: d.turns for kind, d in measure(mixed).items()} == {"unknown": 3, "end_turn": 1}


def test_survival_is_the_kaplan_meier_estimate() -> None:
    """Worked out by hand: 4 return early, then 2 are censored, 2 of the other 4 return late."""
    delays = Delays(turns=10)
    delays.returned.update({4: 4, 9: 2})
    delays.pending.update({6: 2, 12: 2})
    assert delays.survival() == [
        (edge(4), pytest.approx(0.6)),
        (edge(6), pytest.approx(0.6)),
        (edge(9), pytest.approx(0.3)),
        (edge(12), pytest.approx(0.3)),
    ]
    assert delays.return_rate == 0.6
    assert (delays.percentile(0.5), delays.percentile(1.0)) == (edge(4), edge(9))
    shares = dict(delays.density())
    assert list(shares) == [edge(i) for i in range(4, 10)]
    assert (shares[edge(4)], shares[edge(5)], shares[edge(9)]) == (4 / 6, 0, 2 / 6)


def test_nothing_measured_is_no_curve() -> None:
    assert measure([]) == {}
    assert Delays().survival() == Delays().density() == []
    assert Delays().percentile(0.5) == Delays().return_rate == 0.0


def test_delays_of_a_generated_trace_follow_its_law() -> None:
    """`memoryless`: exponential pauses of mean 60 s, another turn with probability .85."""
    (only,) = measure(generate("memoryless", 1500, seed=5)).values()
    assert only.return_rate == pytest.approx(0.85, abs=0.02)
    assert edge(place(41.6) - 2) <= only.percentile(0.5) <= edge(place(41.6) + 1)
    curve = only.survival()
    assert all(a >= b for (_, a), (_, b) in pairwise(curve))
    assert curve[-1][1] == pytest.approx(0.15, abs=0.02)


def test_every_turn_is_followed_by_a_return_or_is_pending() -> None:
    for delays in measure(generate("agentic", 30)).values():
        assert delays.returned.total() + delays.pending.total() == delays.turns
