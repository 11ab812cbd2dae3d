"""Values that cross module boundaries: outcomes, identities, matches, moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

Clock = Callable[[], float]
"""Seconds as a float. Production uses wall-clock time, so that ages survive a restart."""


class Outcome(StrEnum):
    """What happened to one block. Results are lists of these, in the order asked."""

    OK = "ok"
    MISSING = "missing"
    """Not stored (get), or an ancestor is not stored (put)."""
    CORRUPT = "corrupt"
    """Stored bytes failed verification; the entry and its descendants are dropped."""
    BUSY = "busy"
    """No room, a full queue, or the deadline passed; trying later may work."""
    FAILED = "failed"
    """The medium returned an error."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything that makes KV bytes of equal tokens differ.

    Two stores share data only if all fields are equal. `world` is (tensor parallel
    size, pipeline parallel size). `layout` names the byte order inside a block.
    """

    model: str
    weights: str = ""
    dtype: str = ""
    layout: str = ""
    world: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True)
class Turn:
    """What is known about the request that stores blocks; every field is optional."""

    session: str | None = None
    category: str | None = None
    finish_reason: str | None = None
    next_tool: str | None = None
    priority: int = 0
    ttl: float | None = None
    """Seconds for which the stored chain is pinned."""
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of a key chain, a snapshot without side effect."""

    blocks: int
    """Number of leading keys that are stored and visible."""
    spans: tuple[tuple[str, int], ...] = ()
    """Run-length form of `tiers`: (tier name, blocks)."""

    @property
    def tiers(self) -> list[str]:
        """Name of the fastest tier of each matched block; `len(tiers) == blocks`."""
        return [name for name, count in self.spans for _ in range(count)]

    def __len__(self) -> int:
        return self.blocks


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks of one tier operation, column by column; all sequences have equal length."""

    slots: Sequence[int]
    keys: Sequence[bytes]
    generations: Sequence[int]
    epoch: int = 0
    pin: float = 0.0
    """Seconds for which a shared tier is to keep what is written; 0: it decides."""

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(slots=True)
class Move:
    """Copy blocks of one chain between tiers; issued by the planner, answered with Outcomes.

    `src` None: the bytes come from the caller's buffers (put, promotion).
    `dst` None: the bytes go to the caller's buffers (get).
    The slots named here are reserved until `Planner.finish` has heard of the move's
    real end.
    """

    src: int | None
    """Tier number, fastest first."""
    dst: int | None
    keys: list[bytes]
    generations: list[int]
    depths: list[int]
    """Position of each block in its chain, from the root."""
    src_slots: list[int] = field(default_factory=list)
    dst_slots: list[int] = field(default_factory=list)
    epoch: int = 0
    pin: float = 0.0
    """As of `Batch`."""

    def __len__(self) -> int:
        return len(self.keys)

    def read_batch(self, lo: int, hi: int) -> Batch:
        return Batch(self.src_slots[lo:hi], self.keys[lo:hi], self.generations[lo:hi], self.epoch)

    def write_batch(self, lo: int, hi: int) -> Batch:
        return Batch(
            self.dst_slots[lo:hi], self.keys[lo:hi], self.generations[lo:hi], self.epoch, self.pin
        )
