"""What the scheduler side tells the planner of sessions, and what the planner makes of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import test_async_scheduler
from tests.vllm.engines import engine, generate, scheduler_connector, tiered
from tests.vllm.test_async_scheduler import World
from tieredkv.eviction.base import SessionState
from tieredkv.eviction.delay_table import bin_of
from tieredkv.testing import ManualClock

Worlds = Callable[..., World]
worlds = test_async_scheduler.worlds


def planner_of(world: World) -> Any:
    return world.side.sides.shipping.planner


def state_of(world: World, session: str) -> SessionState:
    found: SessionState = planner_of(world).sessions._by_id[session]
    return found


def ready(worlds: Worlds, **args: Any) -> tuple[World, ManualClock]:
    """A world whose ranks have said hello, on a clock of its own."""
    world = worlds(eviction="delay", **args)
    world.add(2, 9)
    world.settle()
    clock = ManualClock(1000.0)
    world.side.sides.shipping.clock = clock
    return world, clock


def told(world: World) -> list[tuple[str, str]]:
    """(event, session) as the planner hears them."""
    planner, heard = planner_of(world), []

    def watch(name: str) -> None:
        inner = getattr(planner, name)

        def wrapped(first: Any, *args: Any, **kw: Any) -> Any:
            heard.append((name, first if isinstance(first, str) else "chain"))
            return inner(first, *args, **kw)

        setattr(planner, name, wrapped)

    for name in ("turn_began", "turn_ended", "queued", "end_session", "fork", "abandon"):
        watch(name)
    put = planner.plan_put

    def stored(keys: Any, start: int, turn: Any, *args: Any, **kw: Any) -> Any:
        heard.append(("put", turn.session))
        return put(keys, start, turn, *args, **kw)

    planner.plan_put = stored
    return heard


def arrive(world: World, text: int, length: int, **params: Any) -> Any:
    """`World.add` of a request with these `kv_transfer_params`."""
    from vllm.v1.request import Request

    made: list[Any] = []
    init = Request.__init__

    def hinted(self: Any, *args: Any, **kw: Any) -> None:
        init(self, *args, **kw)
        self.kv_transfer_params = params or None
        made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Request, "__init__", hinted)
        world.add(text, length)
    return made[0]


def test_a_turn_begins_before_its_first_save_and_ends_after_its_last(worlds: Worlds) -> None:
    world, _ = ready(worlds)
    heard = told(world)
    arrive(world, 0, 33, session_id="a", finish=True)
    world.settle()
    assert heard[:2] == [("queued", "a"), ("turn_began", "a")]
    assert heard[-2:] == [("turn_ended", "a"), ("end_session", "a")]
    assert {event for event, _ in heard[2:-2]} == {"put"}
    assert {session for _, session in heard} == {"a"}


def test_the_delay_of_a_session_ends_when_its_next_request_arrives(worlds: Worlds) -> None:
    world, clock = ready(worlds, max_num_seqs=1)
    arrive(world, 0, 17, session_id="a", category="tool_use", tool="bash")
    world.settle()
    model = planner_of(world).sessions.model
    assert state_of(world, "a").next_tool == "bash"
    model.state()  # adds up what is new
    before = model._classes["tool_use", "tool_use", "bash"].events.copy()
    clock.advance(16.0)
    world.add(2, 20, 30)  # takes the only seat
    world.step()
    arrive(world, 0, 33, session_id="a")
    world.step()
    state = state_of(world, "a")
    assert (state.queued, state.running) == (True, False)
    clock.advance(100.0)  # in the engine's queue
    world.settle()
    model.state()
    events = model._classes["tool_use", "tool_use", "bash"].events - before
    assert events.sum() == events[bin_of(16.0)] == 1
    assert state.turns == 2


def test_an_unnamed_request_is_the_next_turn_of_the_chain_that_it_goes_on_from(
    worlds: Worlds,
) -> None:
    world, clock = ready(worlds)
    first = arrive(world, 0, 16)
    world.settle()
    name = f"request:{first.request_id}"
    clock.advance(16.0)
    heard = told(world)
    arrive(world, 0, 40)
    clock.advance(3.0)  # not at the first save, which comes later
    world.settle()
    assert {session for _, session in heard} == {name}
    assert state_of(world, name).turns == 2
    assert state_of(world, name).delay == 16.0
    arrive(world, 1, 40)  # parts from it in the middle
    world.settle()
    assert state_of(world, name).turns == 2
    assert len({session for _, session in heard}) == 2


def test_a_session_that_has_two_requests_ends_its_turn_with_the_last(worlds: Worlds) -> None:
    world, _ = ready(worlds)
    heard = told(world)
    world.add(2, 20, 30)
    arrive(world, 0, 17, session_id="a")
    world.step()
    arrive(world, 0, 33, session_id="a")
    world.settle()
    assert [event for event, session in heard if session == "a" and event == "turn_ended"] == [
        "turn_ended"
    ]
    assert not state_of(world, "a").running


def test_an_aborted_request_waits_no_longer_in_the_queue(worlds: Worlds) -> None:
    world, clock = ready(worlds, max_num_seqs=1)
    arrive(world, 0, 17, session_id="a")
    world.settle()
    world.add(2, 20, 30)
    world.step()
    clock.advance(5.0)
    request = arrive(world, 0, 33, session_id="a")
    assert state_of(world, "a").queued
    world.abort(request.request_id)
    state = state_of(world, "a")
    assert (state.queued, state.running, state.since) == (False, False, 1005.0)
    world.settle()


def test_a_fork_begins_with_its_parents_context(worlds: Worlds) -> None:
    world, _ = ready(worlds)
    arrive(world, 0, 33, session_id="a")
    world.settle()
    arrive(world, 0, 40, session_id="b", parent_session="a")
    assert state_of(world, "b").parent == "a"
    visitors = planner_of(world).res.visitors
    assert visitors.stand(state_of(world, "b")) is visitors.stand(state_of(world, "a"))
    world.settle()
    assert visitors.stand(state_of(world, "b")) is not visitors.stand(state_of(world, "a"))


@pytest.mark.parametrize("hint", ["finish", "abandon"])
def test_what_is_over_goes_first(worlds: Worlds, hint: str) -> None:
    """Though it is the most recent."""
    world, clock = ready(worlds, tiers=(("dram", 9),))
    arrive(world, 0, 25, session_id="a")
    world.settle()
    clock.advance(5.0)
    arrive(world, 3, 25, session_id="b", **{hint: True})
    world.settle()
    clock.advance(5.0)
    arrive(world, 2, 40, session_id="c")
    world.settle()
    assert world.stored(0, 25) == 3
    assert world.stored(3, 25) < 3


@pytest.mark.parametrize(
    "params",
    [
        {"session_id": 7, "parent_session": ["a"], "abandon": "yes", "finish": 0},
        {"session_id": "x" * 5000, "parent_session": "x" * 5000, "abandon": 1},
        {"session_id": "a", "parent_session": "a", "priority": 10**9, "tool": {}},
        {"session_id": "a", "priority": -(10**9), "ttl": "x", "pause": "no"},
    ],
)
def test_nonsense_fails_no_request(worlds: Worlds, params: dict[str, Any]) -> None:
    world, clock = ready(worlds, tiers=(("dram", 7),))
    for text in (0, 3, 0, 2):
        request = arrive(world, text, 33, **params)
        world.settle()
        clock.advance(1.0)
        assert world.done[request.request_id] == "length"


def test_two_turns_on_a_real_engine(model: Path) -> None:
    """The statistics know of one return, of about the pause, under what ended the turn."""
    from vllm import SamplingParams, TokensPrompt

    extra = {
        "block_tokens": 64, "tiers": [{"kind": "dram", "capacity": "64MiB"}],
        "eviction": {"policy": "delay"},
    }  # fmt: skip
    hints = {"session_id": "s", "category": "tool", "tool": "bash"}
    with engine(model, tiered(extra)) as llm:
        sampling = SamplingParams(
            temperature=0, max_tokens=8, ignore_eos=True,
            extra_args={"kv_transfer_params": hints},
        )  # fmt: skip
        prompt = [n % 200 + 5 for n in range(200)]
        (answer,) = llm.generate(
            [TokensPrompt(prompt_token_ids=prompt)], [sampling], use_tqdm=False
        )
        side = scheduler_connector(llm).scheduler
        known = side.sides.shipping.planner.sessions
        ended = time.time()
        assert not known._by_id["s"].running
        time.sleep(2.0)
        longer = [*prompt, *answer.outputs[0].token_ids, *range(7, 100)]
        llm.generate([TokensPrompt(prompt_token_ids=longer)], [sampling], use_tqdm=False)
        state = known._by_id["s"]
        assert state.turns == 2
        assert 1.9 < state.delay < time.time() - ended
        known.model.state()  # adds up what is new
        events = known.model._classes["tool", "tool", "bash"].events
        assert events.sum() == pytest.approx(1.0)
        assert abs(int(events.argmax()) - bin_of(2.0)) <= 2
        # a session that says it is over goes first
        res = side.sides.shipping.planner.res
        generate(llm, [[n % 150 + 9 for n in range(300)]])
        run = known.run("s")
        with side.sides.shipping.lock:
            side.sides.shipping.planner.end_session("s", time.time())
            first = res.victims(0, 1, time.time(), lambda run: 0)[0][0]
        assert first is run
