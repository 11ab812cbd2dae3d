"""The testing kit for applications and plug-in authors.

Wrappers that inject faults, time and threads under control, and the suites that every
plug-in must pass. The suites need pytest, and only they import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tieredkv.testing.clock import ManualClock
from tieredkv.testing.devices import LateDevice
from tieredkv.testing.executor import StepExecutor
from tieredkv.testing.faults import BlockCall, Fault, Gate
from tieredkv.testing.tiers import FaultyTier, LatencyTier

if TYPE_CHECKING:
    from tieredkv.testing.index_suite import IndexSuite
    from tieredkv.testing.policy_suite import PolicySuite
    from tieredkv.testing.tier_suite import TierSuite

_SUITES = {
    "IndexSuite": "tieredkv.testing.index_suite",
    "PolicySuite": "tieredkv.testing.policy_suite",
    "TierSuite": "tieredkv.testing.tier_suite",
}


def __getattr__(name: str) -> Any:
    if name in _SUITES:
        return getattr(import_module(_SUITES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BlockCall",
    "Fault",
    "FaultyTier",
    "Gate",
    "IndexSuite",
    "LateDevice",
    "LatencyTier",
    "ManualClock",
    "PolicySuite",
    "StepExecutor",
    "TierSuite",
]
