"""What goes wrong, and where."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tieredkv.types import Outcome

Op: TypeAlias = Literal["read", "write"]


@dataclass(frozen=True, slots=True)
class BlockCall:
    """One block of one call of a wrapped tier, as fault predicates see it."""

    op: Op
    call: int
    """1 for the first call of this operation."""
    index: int
    """Position in the batch."""
    slot: int
    key: bytes


Select: TypeAlias = bool | Callable[[BlockCall], bool] | Collection[bytes | int]
"""Which blocks: all or none, a predicate, or a collection of keys (bytes) and slots (int)."""


@dataclass(frozen=True)
class Fault:
    """Which blocks a fault hits, and how it shows.

    `op` None means reads and writes; `calls` restricts it to these calls of an operation
    (1 is the first one after the wrapper was made).
    """

    when: Select = True
    op: Op | None = None
    calls: Collection[int] | None = None
    outcome: Outcome = Outcome.FAILED
    """What is reported for the block."""
    raises: BaseException | None = None
    """Raised instead of returning anything."""
    reply: Literal["outcomes", "none", "few"] = "outcomes"
    """How the whole call answers when a block is hit: honestly, with None in place of the
    list, or with a list that ends before the first block hit (as broken plug-ins do)."""
    bit: int = 0
    """Bit number within the block, for `flip_bit`."""

    def hits(self, at: BlockCall) -> bool:
        if (self.op or at.op) != at.op or (self.calls is not None and at.call not in self.calls):
            return False
        if isinstance(self.when, bool):
            return self.when
        if callable(self.when):
            return self.when(at)
        return at.key in self.when or at.slot in self.when


class Gate:
    """Holds calls until `release`; a hung device that a test can bring back to life."""

    def __init__(
        self,
        when: Select = True,
        op: Op | None = None,
        calls: Collection[int] | None = None,
        timeout: float = 600.0,
    ) -> None:
        """`timeout` in seconds bounds each hold, so that no test hangs for ever."""
        self.fault = Fault(when, op, calls)
        self._timeout = timeout
        self._changed = threading.Condition()
        self._open = False
        self._waiting = 0
        self._entered = 0

    @property
    def waiting(self) -> int:
        """Calls held right now."""
        return self._waiting

    @property
    def is_open(self) -> bool:
        """True after `release`."""
        return self._open

    def wait_entered(self, count: int = 1, timeout: float = 10.0) -> bool:
        """Wait until `count` calls have been held in all; False at the deadline."""
        with self._changed:
            return self._changed.wait_for(lambda: self._entered >= count, timeout)

    def release(self) -> None:
        """Let all calls through, now and later."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def hold(self) -> None:
        """Wait for `release`, at most `timeout`."""
        with self._changed:
            self._waiting += 1
            self._entered += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._open, self._timeout)
            self._waiting -= 1


FaultSpec: TypeAlias = "Fault | Select | Outcome | BaseException | type[BaseException] | int | None"
"""A `Fault`, or short: True for all blocks, a predicate or collection, an outcome to report,
an exception to raise, a bit number (for `flip_bit`); None or False for no fault."""


def fault(spec: FaultSpec, op: Op | None = None) -> Fault | None:
    """The long form of `spec`; `op` is the operation that the short forms mean."""
    if spec is None or spec is False:
        return None
    if isinstance(spec, Fault):
        return spec
    if isinstance(spec, Outcome):
        return Fault(op=op, outcome=spec)
    if isinstance(spec, BaseException):
        return Fault(op=op, raises=spec)
    if isinstance(spec, type):
        return Fault(op=op, raises=spec("injected by FaultyTier"))
    if isinstance(spec, int):
        return Fault(op=op, bit=0 if spec is True else spec)
    return Fault(spec, op)


def hits(fault: Fault | None, at: Sequence[BlockCall]) -> set[int]:
    """Positions in the batch that the fault hits."""
    return set() if fault is None else {block.index for block in at if fault.hits(block)}
