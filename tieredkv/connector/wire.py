"""What travels between the scheduler's planner and the workers' tiers.

Down, in the connector metadata of a step: jobs, each one Move and the engine blocks it copies
from or to. Up, in the worker metadata: what became of each block, and once, at the start, what
each rank's tiers hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tieredkv.types import Move, Outcome

Outcomes: TypeAlias = list[Outcome]


@dataclass(slots=True)
class Job:
    """One move for every rank to execute, on the same slots."""

    id: int
    move: Move
    """`src` None: from engine blocks. `dst` None: into engine blocks."""
    blocks: list[list[int]] | None = None
    """Engine blocks of each chunk; None between tiers. Ids below 0 are left alone."""


@dataclass(slots=True)
class Load:
    """All that one request waits for."""

    request: str
    jobs: list[Job]
    missing: list[int]
    """Engine blocks that were promised and cannot be had any more."""
    wait: bool
    """The step waits for it."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    loads: list[Load] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    """Saves and moves between tiers."""
    cancelled: list[str] = field(default_factory=list)
    """Requests whose load must not count as good any more: the cache was reset."""


@dataclass(slots=True)
class Hello:
    """What a rank's tiers hold; sent once."""

    chunk_bytes: int
    tiers: list[tuple[str, bool, int]]
    """(name, durable, slots), fastest first."""
    index_bytes: int


@dataclass(slots=True)
class Report:
    """What became of one job on `ranks` ranks."""

    read: Outcomes
    write: Outcomes
    ranks: int = 1
    holding: int = 1
    """Those of them that had not released the job's engine blocks before."""
    seconds: float = 0.0
    """What it took on the slowest rank, the wait for a thread included; 0: not known."""

    def merge(self, other: Report) -> Report:
        """A failure on one rank is a failure of the block."""
        return Report(
            worst(self.read, other.read),
            worst(self.write, other.write),
            self.ranks + other.ranks,
            self.holding + other.holding,
            max(self.seconds, other.seconds),
        )


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    reports: dict[int, Report] = field(default_factory=dict)
    hellos: list[Hello] = field(default_factory=list)
    released: dict[int, int] = field(default_factory=dict)
    """Jobs that have not ended but touch no engine block any more -> ranks that say so."""
    late: set[int] = field(default_factory=set)
    """Loads that missed their deadline and have not ended."""
    slots: list[int] | None = None
    """Usable slots of each tier, where a store has just failed."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        assert isinstance(other, WorkerMetadata)
        reports = dict(self.reports)
        for job, report in other.reports.items():
            reports[job] = reports[job].merge(report) if job in reports else report
        slots = self.slots or other.slots
        if self.slots and other.slots:
            slots = [min(pair) for pair in zip(self.slots, other.slots, strict=True)]
        released = dict(self.released)
        for job, ranks in other.released.items():
            released[job] = released.get(job, 0) + ranks
        late = self.late | other.late
        return WorkerMetadata(reports, self.hellos + other.hellos, released, late, slots)


_SEVERITY = (Outcome.OK, Outcome.BUSY, Outcome.MISSING, Outcome.FAILED, Outcome.CORRUPT)


def worst(one: Sequence[Outcome], other: Sequence[Outcome]) -> Outcomes:
    return [max(pair, key=_SEVERITY.index) for pair in zip(one, other, strict=True)]
