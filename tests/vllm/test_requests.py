"""What a request says of itself, and which of its chunks may be stored."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tieredkv.config import ConnectorConfig
from tieredkv.connector.pinning import Pinning
from tieredkv.connector.requests import Tracked, ending, turn_of
from tieredkv.types import Turn

CONFIG = ConnectorConfig(
    stop_tokens={7: "tool_use", 8: "end_turn"}, marker_tokens={50: "bash", 51: "grep"}
)


def request(**fields: Any) -> Any:
    base = {"kv_transfer_params": None, "session_id": None, "priority": 0, "output_token_ids": []}
    return SimpleNamespace(**{**base, **fields})


@pytest.mark.parametrize(
    ("fields", "turn"),
    [
        ({}, Turn()),
        ({"session_id": "s"}, Turn("s")),
        ({"session_id": "s", "kv_transfer_params": {"session_id": "t"}}, Turn("t")),
        ({"priority": 3}, Turn(priority=-3)),  # the engine serves the lowest first
        (
            {"kv_transfer_params": {"category": "code", "ttl": 5, "priority": 2}},
            Turn(category="code", ttl=5.0, priority=2),
        ),
        # nonsense is ignored: a client's hint must not fail its request
        ({"kv_transfer_params": {"ttl": -1, "priority": "x", "category": 9}}, Turn()),
        ({"kv_transfer_params": {"ttl": float("nan"), "category": "x" * 300}}, Turn()),
        ({"kv_transfer_params": "no mapping"}, Turn()),
    ],
)
def test_what_a_request_brings(fields: dict[str, Any], turn: Turn) -> None:
    assert turn_of(request(**fields)) == turn


@pytest.mark.parametrize(
    ("params", "output", "reason", "tool"),
    [
        (None, [1, 2], "stop", None),
        (None, [1, 7], "tool_use", None),
        (None, [7, 8], "end_turn", None),
        (None, [50, 1], "tool_use", "bash"),
        (None, [51, 50, 8], "end_turn", "grep"),
        ({"tool": "edit"}, [50, 1], "tool_use", "edit"),
        ({"category": "review", "tool": "edit"}, [7], "review", "edit"),
        ({"pause": True}, [1], "pause", None),
        ({"pause": True}, [7], "tool_use", None),
        ({}, [], "stop", None),
    ],
)
def test_why_a_turn_ended(
    params: dict[str, Any] | None, output: list[int], reason: str, tool: str | None
) -> None:
    ended = request(
        kv_transfer_params=params, output_token_ids=output, get_finished_reason=lambda: "stop"
    )
    assert ending(ended, CONFIG) == {
        "finish_reason": reason,
        "next_tool": tool,
        "output_tokens": len(output),
    }


def hashes(text: str) -> list[bytes]:
    return [text[: i + 1].encode() for i in range(len(text))]


def test_keys_follow_a_streaming_input_that_replaces_its_last_tokens() -> None:
    it = request(block_hashes=hashes("abcdef"), num_computed_tokens=0)
    tracked = Tracked(it, 2, Turn())
    assert tracked.update_keys() == [b"ab", b"abcd", b"abcdef"]
    it.block_hashes[5:] = []
    assert tracked.update_keys() == [b"ab", b"abcd"]
    it.block_hashes[:] = hashes("abcxyz")
    assert tracked.update_keys() == [b"ab", b"abcx", b"abcxyz"]


def test_only_what_is_computed_and_certain_is_confirmed() -> None:
    it = request(block_hashes=hashes("abcdef"), num_computed_tokens=24, num_in_flight_tokens=0)
    tracked = Tracked(it, 2, Turn())
    assert tracked.confirmed(8) == 0  # never scheduled: a load may still be under way
    tracked.ready = True
    assert tracked.confirmed(8) == 3
    it.num_in_flight_tokens = 1
    assert tracked.confirmed(8) == 2
    it.num_computed_tokens, it.num_in_flight_tokens = 100, 0
    assert tracked.confirmed(8) == 3  # the tokens beyond are not known
    tracked.fresh = False
    assert tracked.confirmed(8) == 0


def test_what_was_found_or_loaded_proves_nothing_before_anything_was_computed_on_it() -> None:
    it = request(block_hashes=hashes("abcdef"), num_computed_tokens=20, num_in_flight_tokens=4)
    tracked = Tracked(it, 2, Turn(), ready=True, base=16)
    assert tracked.confirmed(8) == 0
    it.num_in_flight_tokens = 0
    assert tracked.confirmed(8) == 2


def test_held_blocks_come_free_only_where_nobody_else_has_them() -> None:
    class Pool:
        blocks: ClassVar = [SimpleNamespace(ref_cnt=1) for _ in range(10)]

        def touch(self, blocks: list[Any]) -> None:
            for block in blocks:
                block.ref_cnt += 1

        def free_blocks(self, blocks: Iterable[Any]) -> None:
            for block in blocks:
                block.ref_cnt -= 1

    pool, pinning = Pool(), Pinning(10)
    assert not pinning.frees
    pinning.bind(pool)
    first, second = pinning.pin([1, 2]), pinning.pin([2, 3])
    assert (pinning.held, pinning.frees) == (4, False)
    pool.free_blocks(pool.blocks[2:3])  # its request has ended: only the pins are left
    assert pinning.frees
    first()
    assert (pinning.held, pinning.frees) == (2, True)
    second()
    assert (pinning.held, pinning.frees) == (0, False)
    assert [block.ref_cnt for block in pool.blocks[:4]] == [1, 1, 0, 1]
    assert pinning.fits(100)
    last = pinning.pin([1])
    assert (pinning.fits(1), pinning.fits(2), pinning.fits(2, own=1)) == (True, False, True)
    last()


def test_a_request_that_rests_on_lost_blocks_stores_nothing() -> None:
    it = request(block_hashes=hashes("abcdef"), num_computed_tokens=24)
    tracked = Tracked(it, 2, Turn(), blocks=[10, 11, 12, 13, 14, 15], ready=True, saved=3)
    tracked.distrust({99}, 4, 8)
    assert (tracked.fresh, tracked.limit, tracked.saved) == (True, None, 3)
    tracked.distrust({13}, 4, 8)
    assert (tracked.fresh, tracked.limit, tracked.saved) == (False, 1, 1)
    rewound = Tracked(it, 2, Turn(), blocks=[10, 11, 12, 13], ready=True)
    it.num_computed_tokens = 12
    rewound.distrust({13}, 4, 8)  # it computes that block anew by itself
    assert (rewound.fresh, rewound.limit) == (True, 1)
