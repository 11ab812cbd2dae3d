"""What the vLLM connector adds to an engine step: 100 requests that decode, nothing to load.

The scheduler's hooks of one step, with the planner behind them, and the reports of workers that
succeed at once. Yields nothing where vLLM is not installed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from benches.common import Result, absolute

CHUNK, BLOCK, PROMPT = 256, 16, 5_120
PER_REQUEST = 600
"""Engine blocks."""


class Pool:
    """Counts references as the engine's block pool does."""

    def __init__(self, blocks: int) -> None:
        self.blocks = [SimpleNamespace(ref_cnt=1) for _ in range(blocks)]

    def touch(self, blocks: list[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1


class Engine:
    """The scheduler side of a connector, and requests that decode one token a step."""

    def __init__(self, requests: int) -> None:
        from tieredkv.config import Config
        from tieredkv.connector import wire
        from tieredkv.connector.scheduler import Scheduler
        from tieredkv.connector.sides import Geometry
        from tieredkv.types import Fingerprint, Outcome

        self.wire, self.ok = wire, Outcome.OK
        blocks = requests * PER_REQUEST + 1
        config = Config.model_validate(
            {"block_tokens": CHUNK, "tiers": [{"kind": "dram", "capacity": blocks << 16}]}
        )
        geometry = Geometry(BLOCK, BLOCK, blocks, 1)
        self.scheduler = Scheduler(config, Fingerprint("bench"), geometry)
        self.scheduler.bind(Pool(blocks))
        self._answer(hellos=[wire.Hello(1 << 20, [("dram", False, blocks // 16)], 0)])
        self.requests = [self._request(i) for i in range(requests)]
        names = [request.request_id for request in self.requests]
        self.output = SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=names, new_block_ids=[None] * requests, resumed_req_ids=set()
            ),
            num_scheduled_tokens=dict.fromkeys(names, 1),
        )
        self.step()

    def _request(self, number: int) -> Any:
        # spread, so that not all requests fill a chunk in the same step
        tokens = PROMPT + number * CHUNK // 100
        request = SimpleNamespace(
            request_id=f"request-{number}",
            block_hashes=[os.urandom(32) for _ in range(tokens // BLOCK)],
            num_tokens=tokens,
            num_computed_tokens=0,
            num_in_flight_tokens=0,
        )
        self.scheduler.arrived(request)
        if self.scheduler.lookup(request, 0) != (0, False):
            raise RuntimeError("a hit in an empty cache")
        first = 1 + number * PER_REQUEST
        self.scheduler.allocated(request, range(first, first + PER_REQUEST), 0)
        request.num_computed_tokens = tokens
        return request

    def step(self) -> tuple[float, int]:
        """(seconds in the hooks, chunks saved)."""
        scheduler = self.scheduler
        begin = time.perf_counter()
        metadata = scheduler.build(self.output)
        elapsed = time.perf_counter() - begin
        reports = {job.id: self.wire.Report([], [self.ok] * len(job.move)) for job in metadata.jobs}
        begin = time.perf_counter()
        self._answer(reports=reports)
        scheduler.stats(), scheduler.events()
        elapsed += time.perf_counter() - begin
        for request in self.requests:
            request.num_computed_tokens += 1
            request.num_tokens += 1
            if request.num_tokens % BLOCK == 0:
                request.block_hashes.append(os.urandom(32))
        return elapsed, sum(len(job.move) for job in metadata.jobs)

    def _answer(self, **fields: Any) -> None:
        metadata = self.wire.WorkerMetadata(**fields)
        self.scheduler.heard(metadata if any(fields.values()) else None, ())


def run(requests: int = 100, steps: int = 64, samples: int = 31) -> Iterator[Result]:
    """Mean over `steps` steps, with the saves that fall due in them."""
    if find_spec("vllm") is None:
        return
    engine = Engine(requests)
    for _ in range(8):  # the prompts are saved
        engine.step()
    means, saved = [], 0
    for _ in range(samples):
        taken = [engine.step() for _ in range(steps)]
        means.append(1e6 * sum(seconds for seconds, _ in taken) / steps)
        saved += sum(chunks for _, chunks in taken)
    if not saved:
        raise RuntimeError("nothing was saved")
    yield absolute("vllm_step.hooks", "us/step", means, bar=100.0)
