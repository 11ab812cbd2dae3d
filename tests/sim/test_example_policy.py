"""The policy that docs/policies.md shows: the suite of all policies, and a race."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from examples.my_policy import GRACE, MyPolicy
from tests.eviction.leaves import BLOCK, Leaves, away
from tests.sim.small import opened, replay, request
from tieredkv.eviction.base import EvictionPolicy
from tieredkv.sim.generate import stream
from tieredkv.sim.trace import write_trace
from tieredkv.testing.policy_suite import PolicySuite

ROOT = Path(__file__).parents[2]


class TestMyPolicy(PolicySuite):
    def make(self, capacity: int, block_bytes: int, seed: int) -> EvictionPolicy:
        return MyPolicy(capacity, block_bytes, seed)


def test_the_documentation_shows_it_whole() -> None:
    example = (ROOT / "examples" / "my_policy.py").read_text()
    assert f"```python\n{example}```" in (ROOT / "docs" / "policies.md").read_text()


def test_a_turn_that_ended_in_a_tool_call_counts_as_younger() -> None:
    leaves = Leaves(MyPolicy(4 * BLOCK, BLOCK))
    tool = away("tool", 0.0, finish_reason="tool_use")
    leaves.insert(1, 0.0, tool)
    leaves.insert(2, GRACE - 1, away("person", GRACE - 1, finish_reason="end_turn"))
    leaves.insert(3, GRACE + 1, away("late", GRACE + 1, finish_reason="end_turn"))
    assert leaves.order() == [2, 1, 3]
    leaves.session(1, 0.0)  # it went elsewhere
    assert leaves.order() == [1, 2, 3]


def test_it_keeps_what_waits_for_a_tool_where_lru_does_not() -> None:
    trace = [
        request(0.0, "agent", [1, 2], stop="tool_use"),
        request(10.0, "person", [3, 4], stop="end_turn"),
        request(20.0, "other", [5, 6], stop="end_turn"),
        request(30.0, "agent", [1, 2], turn=2, stop="end_turn"),
    ]
    hits = {}
    for policy in ("lru", "examples.my_policy:MyPolicy"):
        with opened(policy, 4) as lab:
            hits[policy] = [served.hit for served in replay(lab, trace)]
    assert hits == {"lru": [0, 0, 0, 0], "examples.my_policy:MyPolicy": [0, 0, 0, 2]}


def test_it_races_by_name(tmp_path: Path) -> None:
    trace = tmp_path / "agentic.jsonl"
    write_trace(trace, stream("agentic", sessions=8))
    command = [
        "-m", "tieredkv.cli.app", "simulate", str(trace),
        "--policy", "lru,examples.my_policy:MyPolicy", "--capacity", "dram=0.5live",
        "--jobs", "1", "--format", "json",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    rates = {r["policy"]: r["hit_rate"] for r in map(json.loads, done.stdout.splitlines())}
    mine = rates["examples.my_policy:MyPolicy"]
    assert mine != rates["lru"], "both chose the same victims"
    assert 0 < mine <= rates["bound"] <= rates["infinite"]
