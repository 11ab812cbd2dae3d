"""Configurations of the connector, and what an engine in the test process must look like."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from tests.vllm.conversation import Complete, Completion
from tests.vllm.engines import core, generate, scheduler_connector, tiered, worker_connector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm import LLM

BLOCK = 32
"""Tokens of an engine block."""
BLOCK_BYTES = 32 << 10
"""Bytes of one, in the tiny Llama."""
SECONDS = 60.0
"""Deadline of what takes milliseconds."""


def dram(capacity: str = "64MiB") -> dict[str, Any]:
    return {"kind": "dram", "capacity": capacity}


def nvme(path: Path | str, write: str = "through") -> dict[str, Any]:
    return {
        "kind": "nvme",
        "path": str(path),
        "capacity": "64MiB",
        "min_free": 0,
        "segment": "1MiB",
        "write": write,
    }


def connector(
    tiers: Sequence[dict[str, Any]], *, chunk: int = 64, load: str = "async", **transfer: Any
) -> dict[str, Any]:
    """The kv_transfer_config with these tiers, and chunks of so many tokens."""
    extra = {"block_tokens": chunk, "tiers": list(tiers), "connector": {"load": load}}
    return tiered(extra, **transfer)


def side(llm: LLM) -> Any:
    """Our scheduler's side, also where it is the child of a MultiConnector."""
    return _ours(scheduler_connector(llm)).scheduler


def worker() -> Any:
    """Our worker's side, also where it is the child of a MultiConnector."""
    return _ours(worker_connector()).worker


def _ours(found: Any) -> Any:
    (ours,) = [c for c in getattr(found, "sub_connectors", [found]) if hasattr(c, "_geometry")]
    return ours


def wait(done: Callable[[], object], what: str, seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.001)


def settle(llm: LLM) -> None:
    """Step until nothing is under way, as an idle engine in a process of its own does."""
    scheduler, ours = core(llm).scheduler, side(llm)

    def done() -> bool:
        if scheduler.has_requests():
            llm.llm_engine.step()
            return False
        if ours.sides is None:  # no step so far
            return True
        shipping = ours.sides.shipping
        return bool(shipping._acknowledged >= shipping.planner.last_ticket)

    wait(done, "settling")


def settled(llm: LLM, *, forget: bool = False, **sampling: Any) -> Complete:
    """Completes prompts and settles. `forget`: then empties the engine's own cache, so that
    all the next prompts find is in our tiers."""

    def complete(prompts: list[list[int]], limits: list[int]) -> Sequence[Completion]:
        answers = generate(llm, prompts, limits, **sampling)
        settle(llm)
        if forget:
            assert llm.reset_prefix_cache()
        return answers

    return complete


def check_nothing_leaked(llm: LLM) -> None:
    """The engine is idle: all of its blocks are free and nobody remembers a request."""
    settle(llm)
    scheduler, ours = core(llm).scheduler, side(llm)
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one is the placeholder
    assert not scheduler.requests
    assert ours._pinning.held == 0
    assert not ours.pending
    assert not ours._requests
    assert not ours._queued
    assert not ours._new_loads
    assert not worker()._loading
    assert not worker()._invalid
    if ours.sides is not None:
        assert not ours.sides.shipping.shipped
        assert ours.sides.shipping.check() == []


def count_preemptions(llm: LLM) -> list[str]:
    """Ids of the requests that the scheduler preempts from now on."""
    scheduler = core(llm).scheduler
    found: list[str] = []
    preempt = scheduler._preempt_request

    def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = counted
    return found


def count_hits(llm: LLM) -> dict[str, int]:
    """Tokens that requests load from now on, by tier. (The engine takes the counters of the
    connector with every step.)"""
    counts = side(llm).counts
    found: dict[str, int] = {}
    hit = counts.hit

    def counted(tokens: dict[str, int]) -> None:
        for tier, count in tokens.items():
            found[tier] = found.get(tier, 0) + count
        hit(tokens)

    counts.hit = counted
    return found


@contextmanager
def gate(tier: Any, call: str = "read") -> Iterator[tuple[Event, Event]]:
    """Hold the reads or writes of a tier: (set when one has begun, set it to let them go on)."""
    begun, go_on = Event(), Event()
    inner = getattr(tier, call)

    def held(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(SECONDS)
        return inner(*args)

    # the mover copies to and from memory without asking the tier, where it has views of it
    tier.views = lambda slots: None
    setattr(tier, call, held)
    try:
        yield begun, go_on
    finally:
        go_on.set()
        delattr(tier, call)
        del tier.views
