"""Checks of what callers pass: one UsageError that names the value and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

from tieredkv.errors import UsageError
from tieredkv.types import Turn

KEY_BYTES = 32
YEAR = 365 * 86400.0  # longer waits overflow the platform's timers


def chain(keys: object, start: object = 0, *, every: bool = False) -> Sequence[bytes]:
    """`keys` as a list or tuple. Checked are both ends, with `every` all keys from `start` on:
    lookups must not cost O(n)."""
    if isinstance(keys, bytes | bytearray | memoryview | str) or not isinstance(keys, Sequence):
        raise UsageError(f"keys is a {type(keys).__name__}: pass the list of chain_keys()")
    if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start <= len(keys):
        raise UsageError(f"start={start!r:.80}: pass an index into the {len(keys)} keys")
    found = keys if isinstance(keys, list | tuple) else list(keys)
    if found:
        if every:  # the loop below is slower, and only it can say which key is bad
            part = found[start:]
            if set(map(type, part)) <= {bytes} and set(map(len, part)) <= {KEY_BYTES}:
                return found
        for i in range(start, len(found)) if every else (0, len(found) - 1):
            key = found[i]
            if type(key) is not bytes or len(key) != KEY_BYTES:
                raise UsageError(
                    f"keys[{i}] = {key!r:.80}: keys are {KEY_BYTES} bytes each; "
                    "pass the list of chain_keys()"
                )
    return found


def seconds(name: str, value: object, *, above_zero: bool = False) -> float:
    """A duration of at most a year."""
    if isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
        if (number > 0 if above_zero else number >= 0) and number <= YEAR:
            return number
    least = "above 0" if above_zero else "0 or more"
    raise UsageError(f"{name}={value!r:.80}: pass a number of seconds, {least}, at most a year")


def session(value: object, name: str = "session") -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{name} {value!r:.80}: pass a non-empty text")
    return value


def turn(value: object) -> Turn | None:
    """A `Turn` whose fields have the documented types."""
    if value is None:
        return None
    if isinstance(value, str):
        return Turn(session=session(value))
    if not isinstance(value, Turn):
        raise UsageError(f"turn is a {type(value).__name__}: pass a session id or a Turn")
    if value.session is not None:
        session(value.session)
    for field in ("category", "finish_reason", "next_tool"):
        text(f"turn.{field}", getattr(value, field))
    if value.ttl is not None:
        seconds("turn.ttl", value.ttl, above_zero=True)
    if not isinstance(value.priority, int) or isinstance(value.priority, bool):
        raise UsageError(f"turn.priority={value.priority!r:.80}: pass an integer")
    count("turn.output_tokens", value.output_tokens)
    return value


def text(name: str, value: object) -> None:
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{name}={value!r:.80}: pass a text or None")


def count(name: str, value: object) -> None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return
    raise UsageError(f"{name}={value!r:.80}: pass an integer, 0 or more, or None")
