"""Time by hand."""

from __future__ import annotations


class ManualClock:
    """A `tieredkv.types.Clock` that stands still until told otherwise."""

    def __init__(self, start: float = 0.0) -> None:
        """`start` in seconds."""
        self.now = float(start)

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Move on by `seconds` (>= 0) and return the new time."""
        if seconds < 0:
            raise ValueError(f"advance({seconds}): time does not run backwards")
        self.now += seconds
        return self.now
