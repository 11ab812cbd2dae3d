"""What one replay of a trace measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

BOUNDS = ("optimum", "bound", "infinite")
"""What no engine can have, under the names that results give as their policy: the best order of
eviction under the policies' own rules (running requests keep their blocks, every block is
stored); the same without any rule, which nothing can beat; no eviction at all."""
DAY = 86_400.0


@dataclass(slots=True)
class Share:
    """Counts of a group of requests."""

    requests: int = 0
    input_tokens: int = 0
    hit_tokens: int = 0
    """Input tokens that were found in some tier."""
    potential_tokens: int = 0
    """Input tokens that an infinite cache would have found."""

    @property
    def hit_rate(self) -> float:
        """`hit_tokens` over `input_tokens`; 0 without input."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0


@dataclass(slots=True)
class Result:
    """One replay: one trace, one policy, one set of capacities.

    Counts are of the measured part of the trace, after the warm-up cut.
    """

    trace: str
    policy: str
    """`lru`, or `lru/delay` when the tiers differ, or one of `BOUNDS`."""
    capacity: str
    """Label of the capacities: `10 %`, `0.5x live`, `dram=1TiB nvme=8TiB`."""
    tiers: list[tuple[str, int]]
    """(name, blocks), fastest first."""
    block_tokens: int
    block_bytes: int
    seed: int
    hints: float
    """Share of the sessions that say when they have finished."""
    requests: int
    duration: float
    """Virtual seconds."""
    total: Share = field(default_factory=Share)
    """`hit_tokens` from all tiers together."""
    hit_by_tier: dict[str, int] = field(default_factory=dict)
    """Tokens."""
    by_category: dict[str, Share] = field(default_factory=dict)
    by_gap: dict[str, Share] = field(default_factory=dict)
    """By the time since the session's last turn: `first turn`, `< 15 s`, `15 s - 2 min`,
    `> 2 min`."""
    ttft: dict[str, float] = field(default_factory=dict)
    """Estimated seconds to the first token: `mean`, `p50`, `p90`, `p99`; empty where no model
    was named."""
    moved_bytes: dict[str, int] = field(default_factory=dict)
    """Between media: `hbm>dram`, `dram>nvme`, `nvme>gpu`, ..."""
    nvme_written_bytes: int = 0
    evicted_blocks: dict[str, int] = field(default_factory=dict)
    """Per tier."""
    seconds: float = 0.0
    """Wall time of the replay."""
    gap_closed: float | None = None
    """(hit - LRU) / (optimum - LRU), LRU without hints; None where the optimum is no better."""

    @property
    def hit_rate(self) -> float:
        """Hit tokens over input tokens."""
        return self.total.hit_rate

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that were computed though an earlier request had computed them."""
        return max(0, self.total.potential_tokens - self.total.hit_tokens)

    @property
    def nvme_bytes_per_day(self) -> float:
        """NVMe wear, extrapolated from the measured part; 0 for a trace without duration."""
        return self.nvme_written_bytes * DAY / self.duration if self.duration > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything, properties included, in types that JSON knows."""
        return {
            **asdict(self),
            "hit_rate": self.hit_rate,
            "recomputed_tokens": self.recomputed_tokens,
            "nvme_bytes_per_day": self.nvme_bytes_per_day,
        }
