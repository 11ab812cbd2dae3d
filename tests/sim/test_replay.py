"""Small traces whose hits are worked out by hand, request by request."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.sim.small import opened, replay, request
from tieredkv.sim.optimum import look_ahead, optimum
from tieredkv.sim.replay import Replayer, block_keys
from tieredkv.sim.request import Request

# Every letter is a block; s and t are a prompt that A and B share. A.1 is forked from A at
# request 4, request 6 resets A. Each request runs for one second: its blocks count as used at
# its arrival and at its end.
CHAINS = {
    1: "A stab",
    2: "B stcd",
    3: "A stabe",
    4: "A.1 stabf",
    5: "B stcdg",
    6: "A stah",
    7: "B stcdg",
    8: "A stahi",
    9: "C xy",
    10: "A stahi",
    11: "C x",
    12: "D z",
    13: "A stahi",
    14: "C x",
    15: "A stahi",
}


def trace(long: int | None = None) -> list[Request]:
    """Ten seconds apart; request `long` runs for 25."""
    turns: dict[str, int] = {}
    made = []
    for number, line in CHAINS.items():
        session, names = line.split()
        turns[session] = turns.get(session, 0) + 1
        made.append(
            request(
                10.0 * number,
                session,
                [ord(name) for name in names],
                turns[session],
                parent="A" if session == "A.1" else None,
                service=25.0 if number == long else 1.0,
            )
        )
    return made


#             1  2  3  4  5  6  7  8  9 10 11 12 13 14 15
INFINITE = [0, 2, 4, 4, 4, 3, 5, 4, 0, 5, 1, 0, 5, 1, 5]

# lru on six slots: what is stored after each request, leaves with their last use, and what goes.
#   1        stab
#   2  st    stab cd
#   3  stab  stab e(31) c         -d: leaves are e's own chain and cd(21)
#   4  stab  stab e(31) f(41)     -c
#   5  st    sta cdg(51)          -e -f; then ab(41), a leaf again, gives its tail: -b
#   6  sta   stah(61) cd          -g
#   7  stcd  sta cdg(71)          -h
#   8  sta   stahi(81) c          -g, then cd, which is as old, gives its tail: -d
#   9  -     stah xy(91)          -c, then the tail of hi(81): -i
#  10  stah  stahi(101) x         -y
#  11  x     the same, x(111)
#  12  -     stah x(111) z(121)   -i: i(101) is the oldest
#  13  stah  stahi(131) z(121)    -x
#  14  -     stahi(131) x(141)    -z
#  15  stahi
LRU = [0, 2, 4, 4, 2, 3, 4, 3, 0, 4, 1, 0, 4, 0, 5]

# fifo: the same up to 11, since the oldest leaf was always the one stored first as well.
#  12  -     stahi x/z: x was stored at 90 and i, stored again, at 100: -x
#  13  stahi
#  14  -     stah z(120) x(140)   -i(100)
#  15  stah
FIFO = [0, 2, 4, 4, 2, 3, 4, 3, 0, 4, 1, 0, 5, 0, 4]

# D finishes with request 12: its z goes before x at 13, which C then finds at 14.
LRU_FINISH = [0, 2, 4, 4, 2, 3, 4, 3, 0, 4, 1, 0, 4, 1, 5]

# D's request runs until 145: z stays. At 14 the tail of A's chain goes instead of it: -i.
LRU_LONG = [0, 2, 4, 4, 2, 3, 4, 3, 0, 4, 1, 0, 4, 0, 4]

# The optimum without rules: e, f, z and y are never used again and need not stay.
#   4  sta cd      b, f: never        9  stah i x     -c -y
#   5  sta cdg                       12  the same     z: never
#   6  sta cdg     h is used at 8, after all others
#   8  stahi c     c, d, g: never; -d -g make room
BOUND = [0, 2, 4, 4, 4, 3, 5, 3, 0, 5, 1, 0, 5, 1, 5]

# The optimum that has to store every block; never means that it is not used again.
#   3  stab e c    -d: c and d are used at 5, the deeper one goes
#   4  stab f c    -e: never
#   5  sta cdg     -f -b: never; st and c were there
#   6  stah cd     -g: used at 7, as c and d, and the deepest of them
#   7  sta cdg     -h: used at 8
#   8  stahi c     -g -d: never
#   9  stah xy     -c: never; of stahi, all used at 10, the deepest: -i
#  10  stahi x     -y: never
#  12  stahi z     -x: used at 14, stahi at 13
#  14  stahi x     -z: never
OPTIMUM = [0, 2, 4, 4, 3, 3, 4, 3, 0, 4, 1, 0, 5, 0, 5]

# With a long request 12, z stays at 14 and the tail of A's chain goes: -i.
OPTIMUM_LONG = [0, 2, 4, 4, 3, 3, 4, 3, 0, 4, 1, 0, 5, 0, 4]


def hits(policy: str, requests: Sequence[Request], finishes: Sequence[int] = ()) -> list[int]:
    slots = 6 if policy != "infinite" else 100
    with opened("lru" if policy == "infinite" else policy, slots) as lab:
        found = [served.hit for served in replay(lab, requests, finishes)]
        assert lab.planner.check([]) == []
    return found


@pytest.mark.parametrize(
    ("policy", "long", "finishes", "expected"),
    [
        ("infinite", None, [], INFINITE),
        ("infinite", 12, range(15), INFINITE),
        ("lru", None, [], LRU),
        ("lru", None, [11], LRU_FINISH),
        ("lru", 12, [], LRU_LONG),
        ("fifo", None, [], FIFO),
        ("fifo", 12, [], FIFO),  # i goes at 14 in any case
    ],
)
def test_policies(policy: str, long: int | None, finishes: list[int], expected: list[int]) -> None:
    assert hits(policy, trace(long), finishes) == expected


def test_bounds() -> None:
    requests = trace()
    future = look_ahead([r.hash_ids for r in requests])
    assert future.seen == INFINITE
    assert future.unique == 14
    assert optimum(future, 14) == optimum(future, 1000) == INFINITE
    assert optimum(future, 6) == BOUND
    for long, expected in ((None, OPTIMUM), (12, OPTIMUM_LONG)):
        spans = [(r.ts, r.ts + (r.service or 0.0)) for r in trace(long)]
        assert optimum(future, 6, spans) == expected


def test_a_session_that_is_over_makes_room_with_all_of_its_turns() -> None:
    """Four slots. A, "ab" and then "abc", finishes; B's "x" is older than both."""
    turns = [
        request(0.0, "B", [10]),
        request(10.0, "A", [1, 2]),
        request(20.0, "A", [1, 2, 3], 2),
        request(30.0, "C", [20, 21, 22]),
        request(40.0, "B", [10], 2),
    ]
    with opened("lru", 4) as lab:  # -x, then c and b
        assert [s.hit for s in replay(lab, turns)] == [0, 0, 2, 0, 0]
    with opened("lru", 4) as lab:  # c, then b and a, of which A was the only user
        assert [s.hit for s in replay(lab, turns, [2])] == [0, 0, 2, 0, 1]


def test_a_prefix_is_kept_while_any_session_is_expected_there() -> None:
    """Six slots, three of which B needs. O's "9" is oldest; A and F share "1 2"."""
    turns = [
        request(0.0, "O", [9]),
        request(10.0, "A", [1, 2]),
        request(20.0, "F", [1, 2, 3], parent="A"),
        request(30.0, "A", [1, 2, 4], 2),
        request(40.0, "B", [10, 11, 12, 13]),
    ]

    def left(finishes: Sequence[int]) -> list[int]:
        with opened("lru", 6) as lab:
            replay(lab, turns, finishes)
            return [lab.lookup(block_keys(ids)).blocks for ids in ([9], [1, 2])]

    assert left([]) == [0, 2]  # -9 -3 -4
    assert left([3]) == [0, 2]  # A is over, F is not: -4 -9 -3
    assert left([2, 3]) == [1, 1]  # both are over: -3 -4, and of "1 2", which nobody awaits: -2


def test_a_running_request_keeps_its_prefix_to_the_end_of_its_response() -> None:
    """Four slots, all pinned until 30: B gets nothing at 10 and everything at 40."""
    with opened("lru", 4) as lab:
        replayer = Replayer(lab)
        replayer.serve(request(0.0, "A", [1, 2, 3, 4], service=30.0))
        assert replayer.serve(request(10.0, "B", [5, 6])).hit == 0
        assert lab.lookup(block_keys((1, 2, 3, 4))).blocks == 4
        assert lab.lookup(block_keys((5, 6))).blocks == 0
        replayer.serve(request(40.0, "B", [5, 6], 2))
        assert lab.lookup(block_keys((1, 2, 3, 4))).blocks == 2
        assert lab.lookup(block_keys((5, 6))).blocks == 2


def test_responses_end_in_the_order_of_their_ends() -> None:
    """Of A (0-20) and B (5-8) A was used last: B goes."""
    turns = [
        request(0.0, "A", [1], service=20.0),
        request(5.0, "B", [2], service=3.0),
        request(30.0, "C", [3]),
    ]
    with opened("lru", 2) as lab:
        replay(lab, turns)
        assert [lab.lookup(block_keys([b])).blocks for b in (1, 2, 3)] == [1, 0, 1]


def test_the_tiers_that_blocks_were_found_in() -> None:
    """Two slots above four. Request 2 pushes the first chain down, request 3 finds it there."""
    turns = [request(0.0, "A", [1, 2]), request(10.0, "B", [3, 4]), request(20.0, "A", [1, 2], 2)]
    with opened("lru", 2, 4) as lab:
        spans = [served.spans for served in replay(lab, turns)]
    assert spans == [(), (), (("memory-1", 2),)]


def test_keys_of_blocks_are_distinct() -> None:
    ids = [*range(2000), *((1 << 64) - 1 - n for n in range(2000)), 1 << 63]
    assert len(set(block_keys(ids))) == len(ids)
