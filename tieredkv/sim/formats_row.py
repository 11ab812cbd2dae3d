"""Checked access to the fields of one line of a trace."""

from __future__ import annotations

import json
import math
from typing import Any

from tieredkv.sim.request import TraceError


class Row:
    """One parsed line; every error names the file, the line, the value and a remedy."""

    def __init__(self, line: str, where: str) -> None:
        self._where = where
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            problem = f"{line.strip()[:60]!r} is no JSON ({error})"
            raise self.error(problem, "write one JSON object per line") from None
        if not isinstance(fields, dict):
            raise self.error(f"{line.strip()[:60]!r} is no object", "write one object per line")
        self._fields: dict[str, Any] = fields

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def names(self) -> list[str]:
        return sorted(self._fields)

    def error(self, problem: str, remedy: str) -> TraceError:
        return TraceError(f"{self._where}: {problem}; {remedy}")

    def integer(self, name: str, least: int) -> int:
        value = self._fields.get(name)
        if type(value) is not int or value < least:
            raise self.error(f"{name} is {value!r:.80}", f"an integer >= {least} is needed")
        return value

    def seconds(self, name: str) -> float:
        """A time or a span, in whatever unit the format has."""
        value: Any = self._fields.get(name)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise self.error(f"{name} is {value!r:.80}", "a finite number >= 0 is needed")
        return float(value)

    def optional_seconds(self, name: str) -> float | None:
        return None if self._fields.get(name) is None else self.seconds(name)

    def text(self, name: str) -> str:
        value = self._fields.get(name)
        if not isinstance(value, str) or not value:
            raise self.error(f"{name} is {value!r:.80}", "a non-empty string is needed")
        return value

    def optional_text(self, name: str) -> str | None:
        value = self._fields.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(f"{name} is {value!r:.80}", "a string is needed")
        return value

    def texts(self, name: str) -> list[str]:
        values = self._fields.get(name)
        if not isinstance(values, list) or not set(map(type, values)) <= {str}:
            raise self.error(f"{name} is {str(values)[:60]}", "a list of strings is needed")
        return values

    def ids(self, name: str) -> list[int]:
        """Integers in [0, 2**64)."""
        ids = self._fields.get(name)
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
            raise self.error(f"{name} is {str(ids)[:60]}", "a list of integers is needed")
        if ids and not 0 <= min(ids) <= max(ids) < 1 << 64:
            raise self.error(f"{name} from {min(ids)} to {max(ids)}", "ids must be in [0, 2**64)")
        return ids

    def chained(self, name: str, ids: list[int]) -> list[int]:
        """`ids` if no block occurs twice: chained ids cannot."""
        if len(set(ids)) != len(ids):
            raise self.error(f"{name} names a block twice", "ids must be prefix-chained")
        return ids

    def full_blocks(self, name: str, count: int, size: int, length: int) -> None:
        """Refuse more full blocks than the input holds."""
        if count * size > length:
            raise self.error(
                f"{count} {name} of {size} tokens exceed input_length {length}",
                "list full blocks of the input only",
            )
