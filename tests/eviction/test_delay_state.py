"""What the delay model has learned, as bytes; and how large it can grow."""

from __future__ import annotations

import random
import zlib

import pytest

from tieredkv.errors import FormatError
from tieredkv.eviction import delay_model, delay_state
from tieredkv.eviction.base import SessionState
from tieredkv.eviction.delay_model import DelayModel


def turn(model: DelayModel, now: float, delay: float, reason: str, tool: str | None = None) -> None:
    state = SessionState("s", turns=1, since=now, finish_reason=reason, next_tool=tool)
    model.completed(state, now)
    model.returned(state, now + delay)


def taught(seed: int = 0) -> tuple[DelayModel, float]:
    """(a model, the time): tool calls return after seconds, people after minutes or never."""
    model, rng, now = DelayModel(), random.Random(seed), 1e9
    for _ in range(400):
        now += rng.expovariate(0.5)
        turn(model, now, rng.lognormvariate(1.0, 0.5), "tool_use", rng.choice(["bash", "grep"]))
        turn(model, now, rng.lognormvariate(5.0, 0.5), "end_turn")
        model.completed(SessionState("gone", turns=1, since=now, finish_reason="end_turn"), now)
    return model, now


def asked(model: DelayModel, reason: str, tool: str | None, now: float) -> tuple[list[float], ...]:
    state = SessionState("s", turns=1, since=now, finish_reason=reason, next_tool=tool)
    state.group, state.scale = model._class_of(state), ()
    table = model.table(state)
    return table.index, table.returns


CASES = [("tool_use", "bash"), ("tool_use", "new"), ("end_turn", None), ("unheard of", None)]


def test_a_model_goes_on_where_another_has_ended() -> None:
    model, now = taught()
    data = model.state()
    assert len(data) < 10_000
    again = DelayModel()
    again.restore(data)
    assert again.state() == data
    for reason, tool in CASES:
        for ours, theirs in zip(
            asked(again, reason, tool, now), asked(model, reason, tool, now), strict=True
        ):
            assert ours == pytest.approx(theirs, rel=1e-5)
    assert asked(again, "end_turn", None, now) != asked(DelayModel(), "end_turn", None, now)


def test_what_was_learned_fades_while_nobody_runs() -> None:
    model, now = taught()
    again = DelayModel()
    again.restore(model.state())
    known = again._classes[()].events.sum()
    later = now + 30 * 24 * 3600.0
    for n in range(50):
        turn(again, later + n, 7.0, "end_turn")
    assert again._classes[()].events.sum() <= 50 < known


@pytest.mark.parametrize("kind", ["empty", "foreign", "short", "flipped", "format", "scale"])
def test_other_bytes_are_refused_and_change_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytearray(taught()[0].state())
    if kind == "empty":
        data = bytearray()
    elif kind == "foreign":
        data = bytearray(random.Random(0).randbytes(500))
    elif kind == "short":
        del data[len(data) // 2 :]
    elif kind == "flipped":
        data[len(data) // 2] ^= 4
    elif kind == "format":
        data[8] = 9
    else:
        monkeypatch.setattr(delay_model, "_SCALE", (81, 0.05, 3))
    model = DelayModel()
    before = asked(model, "end_turn", None, 0.0)
    with pytest.raises(FormatError):
        model.restore(bytes(data))
    assert asked(model, "end_turn", None, 0.0) == before


def test_bytes_with_a_good_checksum_and_a_bad_body_are_refused() -> None:
    for text in (b"", b"[]\n", b"{}\n", b'{"scale": [80, 0.05, 3]}\nxyz', b"\xff\n"):
        body = zlib.compress(text)
        head = delay_state.MAGIC + (1).to_bytes(4, "little")
        with pytest.raises(FormatError):
            DelayModel().restore(head + zlib.crc32(body).to_bytes(4, "little") + body)


def test_a_client_that_invents_tools_fills_nothing() -> None:
    model = DelayModel()
    for n in range(5_000):
        turn(model, 10.0 * n, 7.0, "tool_use", f"tool-{n}")
    assert len(model._classes) <= delay_model.CLASSES
    assert len(model._ids) <= delay_model.CLASSES
    bash = asked(model, "tool_use", "bash", 50_000.0)  # the wider class has all of them
    assert bash[1][0] > 0.9
    assert model._classes[("tool_use",)].events.sum() > 400
    for n in range(5_000):  # nor one that invents everything
        turn(model, 50_000.0 + n, 7.0, f"reason-{n}", f"tool-{n}")
    assert len(model._classes) <= delay_model.CLASSES
    assert len(model.state()) < 100_000
    again = DelayModel()
    again.restore(model.state())
    assert again._classes[()].events.sum() == pytest.approx(
        model._classes[()].events.sum(), rel=1e-5
    )
