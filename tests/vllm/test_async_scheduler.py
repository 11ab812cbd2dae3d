"""vLLM's own AsyncScheduler with our connector's scheduler side, and no model.

A fake engine takes its steps: it knows for every token of every engine block which prefix was
computed there, on each rank. A save must find in the blocks it names the very prefix that its
key stands for; a load counts as good only if its blocks then hold it; a forward pass must find
right what it does not compute itself.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.vllm.engines import arguments, tiered
from tests.vllm.model import build
from tieredkv.types import Outcome

BLOCK, CHUNK = 4, 8
BLOCKS = 24
GARBAGE = -7
"""What a forward pass writes, and samples, over KV that is wrong."""
TEXTS = [[random.Random(i // 2).randrange(50) + (i % 2) * (n >= 12) for n in range(200)]
         for i in range(4)]  # fmt: skip
"""Prompts are beginnings of these; pairs of them part in the middle of a chunk."""


@cache
def tiny() -> Path:
    return build(Path(tempfile.mkdtemp(prefix="tieredkv-vllm-")))


@dataclass
class Load:
    """A request's load on one rank."""

    request: str
    left: set[int]
    jobs: list[Any]
    invalid: set[int]
    wait: bool
    cancelled: bool = False
    late: bool = False


@dataclass
class Rank:
    """The worker's side of one rank, as far as the scheduler can tell."""

    kv: dict[int, list[Any]] = field(default_factory=dict)
    slots: dict[tuple[int, int], tuple[bytes, int, list[Any]]] = field(default_factory=dict)
    running: list[Any] = field(default_factory=list)
    loads: dict[str, Load] = field(default_factory=dict)
    revoked: set[int] = field(default_factory=set)
    """Loads that must not write into engine blocks any more."""
    freed: dict[int, list[list[Any]] | None] = field(default_factory=dict)
    """Saves that touch no engine block any more: what they have copied out by then."""
    released: dict[int, int] = field(default_factory=dict)
    reports: dict[int, Any] = field(default_factory=dict)
    invalid: set[int] = field(default_factory=set)
    rotten: set[tuple[int, int]] = field(default_factory=set)
    greeted: bool = False
    inline: Callable[[Any], set[int]] = lambda job: set()
    """Which chunks of a load that the step waits for fail."""
    eager: bool = False
    """Saves end at once."""

    def begin(self, step: Any, expected: dict[bytes, list[Any]]) -> None:
        for name in step.cancelled:
            if name in self.loads:
                self.loads[name].cancelled = True
        for load in step.loads:
            assert load.request not in self.loads, "two loads of one request"
            ids = {job.id for job in load.jobs}
            state = Load(load.request, ids, load.jobs, set(load.missing), load.wait)
            self.loads[load.request] = state
            self.running += load.jobs
            if load.wait:
                for job in load.jobs:
                    self.end(job, self.inline(job), expected)
        self.running += step.jobs
        if self.eager:
            for job in step.jobs:
                self.end(job, set(), expected)

    def block(self, number: int) -> list[Any]:
        return self.kv.setdefault(number, [None] * BLOCK)

    def end(self, job: Any, failing: set[int], expected: dict[bytes, list[Any]]) -> None:
        """Execute a job; the chunks `failing` (places in the move) come out bad."""
        from tieredkv.connector.wire import Report

        self.running.remove(job)
        move, read, write = job.move, [], []
        for i, (key, generation) in enumerate(zip(move.keys, move.generations, strict=True)):
            got, content = self._read(job, i, i in failing, expected)
            if move.src is not None:
                read.append(got)
            if move.dst is None:
                write += self._into_blocks(job, i, got, content)
            else:
                at = (move.dst, move.dst_slots[i])
                self.slots.pop(at, None)
                self.rotten.discard(at)
                if got is Outcome.OK and i not in failing:
                    self.slots[at] = (key, generation, content)
                write.append(Outcome.FAILED if i in failing else got)
        held = job.id not in self.freed
        self.reports[job.id] = Report(
            read, write if move.dst is not None else [], holding=int(held)
        )
        self.revoked.discard(job.id)
        self.freed.pop(job.id, None)
        for load in self.loads.values():
            load.left.discard(job.id)

    def _read(
        self, job: Any, i: int, fails: bool, expected: dict[bytes, list[Any]]
    ) -> tuple[Outcome, list[Any]]:
        move = job.move
        if move.src is None:
            if job.id in self.freed:
                copies = self.freed[job.id]
                return (Outcome.BUSY, []) if copies is None else (Outcome.OK, copies[i])
            return Outcome.OK, self._gather(job, i, expected)
        at = (move.src, move.src_slots[i])
        if at in self.rotten or fails:
            return (Outcome.CORRUPT if at in self.rotten else Outcome.FAILED), []
        assert at in self.slots, f"job {job.id} reads a slot that holds nothing"
        key, generation, content = self.slots[at]
        assert (key, generation) == (move.keys[i], move.generations[i]), "somebody else's slot"
        return Outcome.OK, content

    def _gather(self, job: Any, i: int, expected: dict[bytes, list[Any]]) -> list[Any]:
        content = [entry for number in job.blocks[i] for entry in self.block(number)]
        assert content == expected[job.move.keys[i]], (
            f"job {job.id} stores under the key of chunk {job.move.depths[i]} from the blocks "
            f"{job.blocks[i]} what is not its content: {content}"
        )
        return content

    def release(self, job: Any, copied: bool, expected: dict[bytes, list[Any]]) -> None:
        """A save misses its deadline, before or after it has copied the engine's blocks."""
        if job.move.src is None and job.id not in self.freed:
            chunks = [self._gather(job, i, expected) for i in range(len(job.move))]
            self.freed[job.id] = chunks if copied else None
            self.released[job.id] = 1

    def _into_blocks(self, job: Any, i: int, got: Outcome, content: list[Any]) -> list[Outcome]:
        if job.id in self.revoked:
            return [Outcome.BUSY]
        if got is Outcome.OK:
            for j, number in enumerate(job.blocks[i]):
                if number >= 0:
                    self.kv[number] = content[j * BLOCK : (j + 1) * BLOCK]
        else:
            for load in self.loads.values():
                if job in load.jobs:
                    load.invalid.update(job.blocks[i])
        return [got]

    def settle(self) -> set[str]:
        settled = set()
        for name, load in list(self.loads.items()):
            if load.left and not load.late:
                continue
            for job in load.jobs:
                if job.id in load.left:
                    self.revoked.add(job.id)
                if job.id in load.left or load.cancelled:
                    load.invalid.update(number for chunk in job.blocks for number in chunk)
            self.invalid |= {number for number in load.invalid if number >= 0}
            del self.loads[name]
            if not load.wait:
                settled.add(name)
        return settled


@dataclass
class Step:
    output: Any
    tokens: dict[str, list[int]]
    ranks: list[Any]
    rejected: dict[str, tuple[int, int]]
    """Of each request: drafts that turned out wrong, preemptions so far."""


class World:
    """An AsyncScheduler, `ranks` fake workers, and what must hold between them."""

    def __init__(
        self,
        path: Path,
        *,
        ranks: int = 1,
        tiers: tuple[tuple[str, int], ...] = (("dram", 64),),
        asynchronous: bool = True,
        load: str = "async",
        policy: str = "recompute",
        blocks: int = BLOCKS,
        drafts: int = 0,
        greet: bool = True,
        eviction: str = "lru",
        **limits: Any,
    ) -> None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        self.path, self.tiers, self.greet, self.load = path, tiers, greet, load
        self.eviction = eviction
        self.depth = 2 if asynchronous else 1
        config = self._config(ranks, load, policy, drafts, limits)
        config.scheduler_config.async_scheduling = asynchronous
        kind = AsyncScheduler if asynchronous else Scheduler
        cache = _cache_config(config, blocks)
        self.scheduler = kind(config, cache, StructuredOutputManager(config), BLOCK)
        connector = self.scheduler.connector
        assert connector is not None
        connector.bind_gpu_block_pool(self.pool)
        self.connector: Any = connector
        self.side: Any = self.connector.scheduler
        self.ranks = [Rank() for _ in range(ranks)]
        self.expected: dict[bytes, list[Any]] = {}
        self.flight: deque[Step] = deque()
        self.live: dict[str, Any] = {}
        self.done: dict[str, str] = {}
        self.known: dict[str, list[Any]] = {}
        self.rejects: Callable[[], int] = lambda: 0
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

        self.aggregator = KVOutputAggregator(ranks)
        self.count = 0

    def _config(
        self, ranks: int, load: str, policy: str, drafts: int, limits: dict[str, Any]
    ) -> Any:
        from vllm import EngineArgs

        specs: list[dict[str, Any]] = [
            {"kind": kind, "name": f"{kind}{i}", "capacity": "64MiB"}
            for i, (kind, _) in enumerate(self.tiers)
        ]
        if self.tiers[-1][0] == "nvme":
            specs[-1] |= {"path": str(self.path), "segment": "1MiB", "min_free": 0}
            specs[-1] |= {"write": "through"}
        extra = {
            "block_tokens": CHUNK,
            "tiers": specs,
            "mover": {"room_wait": 0},
            "connector": {"load": load},
            "eviction": {"policy": self.eviction},
        }
        args: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 4, **limits}
        if drafts:
            ngram = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3}
            args["speculative_config"] = ngram
        transfer = tiered(extra, kv_load_failure_policy=policy)
        made = arguments(tiny(), transfer, max_model_len=60, tensor_parallel_size=ranks, **args)
        config = EngineArgs(**made).create_engine_config()
        config.cache_config.block_size = BLOCK
        return config

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    # -- requests -------------------------------------------------------------------------

    def add(self, text: int, length: int, max_tokens: int = 4, **params: Any) -> str:
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256)
        self.count += 1
        name = f"r{self.count}"
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        hasher = get_request_block_hasher(BLOCK, sha256)
        request = Request(name, TEXTS[text][:length], sampling, None, block_hasher=hasher, **params)
        self.live[name] = request
        self._learn(request)
        self.scheduler.add_request(request)
        return name

    def truth(self, request: Any, count: int) -> tuple[list[int], list[Any]]:
        """The first tokens that the request must have, and what KV of each must say."""
        tokens = list(request.prompt_token_ids)
        chain: list[Any] = []
        last: Any = 0
        for at in range(count):
            if at == len(tokens):
                tokens.append(last % 50)
            last = hash((last, tokens[at]))
            chain.append(last)
        return tokens, chain

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.live.pop(name)
        self.done[name] = "abort"

    # -- steps ----------------------------------------------------------------------------

    def schedule(self) -> None:
        """Schedule a step and execute it; its output is processed by `deliver`."""
        assert len(self.flight) < self.depth
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        tokens: dict[str, list[int]] = {}
        told = []
        rejected = {
            name: (min(len(drafts), self.rejects()), self.live[name].num_preemptions)
            for name, drafts in output.scheduled_spec_decode_tokens.items()
        }
        for rank in self.ranks:
            # vLLM starts the jobs after the forward pass, unless the pass needs loaded blocks
            if output.has_sync_kv_loads:
                rank.begin(metadata, self.expected)
            tokens = self._forward(rank, output, rejected)
            if not output.has_sync_kv_loads:
                rank.begin(metadata, self.expected)
            told.append(self._tell(rank))
        self.flight.append(Step(output, tokens, told, rejected))

    def deliver(self) -> None:
        """Process the oldest step's output."""
        from vllm.v1.outputs import ModelRunnerOutput

        step = self.flight.popleft()
        names = list(step.output.num_scheduled_tokens)
        outputs = [
            ModelRunnerOutput(
                names,
                {name: i for i, name in enumerate(names)},
                [step.tokens[name] for name in names],
                kv_connector_output=told,
            )
            for told in step.ranks
        ]
        merged = self.aggregator.aggregate(outputs)
        told = self.scheduler.update_from_output(step.output, merged)
        for request in self.live.values():
            self._learn(request)
        for made in told.values():
            for out in made.outputs:
                if out.finish_reason is not None:
                    assert out.request_id not in self.done, "completed twice"
                    self.done[out.request_id] = str(out.finish_reason)
                    self._check(self.live.pop(out.request_id))
        self.settle_index()

    def _check(self, request: Any) -> None:
        if self.done[request.request_id] == "length":
            want, _ = self.truth(request, request.num_tokens)
            assert list(request.all_token_ids) == want, "the output rests on wrong KV"

    def step(self) -> None:
        """One step from its schedule to its output, after what is in flight."""
        while len(self.flight) >= self.depth:
            self.deliver()
        self.schedule()

    def _learn(self, request: Any) -> None:
        hashes = request.block_hashes
        for i in range(CHUNK // BLOCK - 1, len(hashes), CHUNK // BLOCK):
            if bytes(hashes[i]) not in self.expected:
                end = (i + 1) * BLOCK
                self.expected[bytes(hashes[i])] = self.truth(request, end)[1][end - CHUNK :]

    def _forward(
        self, rank: Rank, output: Any, rejected: dict[str, tuple[int, int]]
    ) -> dict[str, list[int]]:
        sampled: dict[str, list[int]] = {}
        started = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        started |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, count in output.num_scheduled_tokens.items():
            # what is in flight counts its drafts as accepted; the worker knows better
            request = self.scheduler.requests[name]
            flying = [step.rejected.get(name, (0, -1)) for step in self.flight]
            wrong = sum(n for n, age in flying if age == request.num_preemptions)
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            bad = rejected.get(name, (0, 0))[0]
            sampled[name] = self._compute(rank, request, started[name] - wrong, count, drafts, bad)
        return sampled

    def _compute(
        self, rank: Rank, request: Any, start: int, count: int, drafts: int, rejected: int
    ) -> list[int]:
        (table,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        tokens, chain = self.truth(request, start + count + 1)
        right = all(rank.block(table[at // BLOCK])[at % BLOCK] == chain[at] for at in range(start))
        # a step that waits for its loads computes with them, whatever has become of them
        assert right or self.load == "sync", f"{request.request_id} computes on wrong KV"
        end = start + count - rejected
        for at in range(start, start + count):
            good = right and at < end
            rank.block(table[at // BLOCK])[at % BLOCK] = chain[at] if good else GARBAGE
        first = start + count - drafts
        if request.is_prefill_chunk:
            return []
        return [token if right else GARBAGE for token in tokens[first : end + 1]]

    def _tell(self, rank: Rank) -> Any:
        from vllm.v1.outputs import KVConnectorOutput

        from tieredkv.connector.wire import Hello, WorkerMetadata

        settled = rank.settle()
        metadata = WorkerMetadata(rank.reports, [], rank.released)
        rank.reports, rank.released = {}, {}
        if self.greet and not rank.greeted:
            rank.greeted = True
            tiers = [(f"{k}{i}", k == "nvme", n) for i, (k, n) in enumerate(self.tiers)]
            metadata.hellos.append(Hello(4096, tiers, 1 << 24))
        invalid, rank.invalid = rank.invalid, set()
        return KVConnectorOutput(
            finished_recving=settled or None,
            invalid_block_ids=invalid,
            kv_connector_worker_meta=metadata,
        )

    # -- the workers' jobs ------------------------------------------------------------------

    def work(self, rank: Rank | None = None, failing: set[int] | None = None) -> None:
        """End all jobs that run."""
        for one in [rank] if rank is not None else self.ranks:
            for job in list(one.running):
                one.end(job, failing or set(), self.expected)

    def jobs(self, kind: str) -> list[Any]:
        """Jobs that run on the first rank: save, load or move."""
        named = {"save": (True, False), "load": (False, True), "move": (False, False)}[kind]
        return [
            job
            for job in self.ranks[0].running
            if (job.move.src is None, job.move.dst is None) == named
        ]

    def settle_index(self) -> None:
        if self.side.sides is not None and self.side.sides.shipping.index is not None:
            import time

            assert self.side.sides.shipping._await_commit(time.monotonic() + 20)

    def run(self, steps: int = 200, *, work: bool = True) -> None:
        """Step until nothing is left to do."""
        for _ in range(steps):
            while self.flight and (len(self.flight) >= self.depth or not self._busy):
                self.deliver()
            if not self._busy and not self.flight:
                return
            self.schedule()
            if work:
                self.work()
        raise AssertionError(f"no end in sight: {self.live}, {self.scheduler.requests}")

    @property
    def _busy(self) -> bool:
        return bool(self.scheduler.has_requests())

    def settle(self) -> None:
        """Everything ends; then the engine owns all of its blocks, and nothing is tracked."""
        self.run()
        assert not self.live
        assert not self.scheduler.requests
        assert not self.side._requests
        assert not self.side._queued
        assert self.side._pinning.held == 0
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        self.check()

    def check(self) -> None:
        """What holds between any two calls."""
        for rank in self.ranks:
            for job in rank.running:
                if job.move.src is None and job.id not in rank.freed:
                    pinned = [n for chunk in job.blocks for n in chunk]
                    assert all(self.pool.blocks[n].ref_cnt > 0 for n in pinned), "not held"
        if self.side.sides is not None:
            assert self.side.sides.shipping.check() == []

    def stored(self, text: int, length: int) -> int:
        """Chunks of a prompt that a lookup finds."""
        name = self.add(text, length)
        request = self.live.pop(name)
        keys = [bytes(key) for key in request.block_hashes[CHUNK // BLOCK - 1 :: CHUNK // BLOCK]]
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        shipping = self.side.sides.shipping
        return int(shipping.planner.match(keys).blocks)

    def forget_local(self) -> None:
        """Empty the engine's own prefix cache."""
        assert self.scheduler.kv_cache_manager.reset_prefix_cache()

    def close(self) -> None:
        self.connector.shutdown()
        self.scheduler.shutdown()


def _cache_config(config: Any, blocks: int) -> Any:
    import torch
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config.cache_config.kv_cache_layout = "LBHNC"
    config.cache_config.num_gpu_blocks_override = blocks
    (made,) = get_kv_cache_configs(config, [{"layer.0": spec}], [1 << 30])
    made.kv_cache_layout = "LBHNC"
    config.cache_config.num_gpu_blocks = blocks
    return made


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(**args: Any) -> World:
        made.append(World(tmp_path / f"w{len(made)}", **args))
        return made[-1]

    yield make
    for world in made:
        world.close()


def warm(world: World, text: int = 0, length: int = 33) -> None:
    """Have a prompt's chunks stored, and gone from the engine's own cache."""
    world.add(text, length)
    world.settle()
    assert world.stored(text, length) == length // CHUNK
    world.forget_local()


def fail_first(job: Any) -> set[int]:
    return {0}


def none(job: Any) -> set[int]:
    return set()


def test_a_request_is_stored_and_loaded(worlds: Callable[..., World]) -> None:
    world = worlds()
    warm(world)
    name = world.add(0, 33)
    world.step()
    (job,) = world.jobs("load")
    assert len(job.move) == 4
    world.settle()
    assert world.done[name] == "length"


def test_unknown_until_all_ranks_have_said_what_they_hold(worlds: Callable[..., World]) -> None:
    world = worlds(ranks=2, greet=False)
    name = world.add(0, 33)
    for _ in range(3):
        world.step()
        assert not world.flight[-1].output.num_scheduled_tokens
    assert world.side.lookup(world.live[name], 0) == (None, False)
    world.greet = True
    world.step()
    world.settle()
    assert world.done[name] == "length"


def test_a_request_goes_on_when_the_ranks_stay_silent(
    worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds(greet=False)
    monkeypatch.setattr("tieredkv.connector.scheduler.HELLO_WAIT", 0.0)
    name = world.add(0, 33)
    world.settle()
    assert world.done[name] == "length"


def test_nothing_in_flight_is_saved(worlds: Callable[..., World]) -> None:
    """Two steps ahead, with drafts of which all but one are rejected later."""
    world = worlds(drafts=3)
    drawn = random.Random(5)
    world.rejects = lambda: drawn.randrange(4)
    names = [world.add(text, 21, 20) for text in range(4)]
    saved = 0
    while any(name in world.live for name in names):
        world.step()
        saved += len(world.jobs("save"))
        world.work()
    world.settle()
    assert saved
    assert world.stored(0, 21) == 2


def test_a_long_answer_is_stored_up_to_its_confirmed_end(worlds: Callable[..., World]) -> None:
    world = worlds()
    name = world.add(0, 9, 20)
    request = world.live[name]
    world.settle()
    keys = [bytes(key) for key in request.block_hashes[1::2]]
    # the last token was never an input
    assert len(keys) == (9 + 20) // CHUNK
    assert world.side.sides.shipping.planner.match(keys).blocks == (9 + 19) // CHUNK


def test_a_request_is_preempted_rather_than_waiting_for_its_own_save(
    worlds: Callable[..., World],
) -> None:
    """A20. The end of the save would free nothing: the requests have the blocks themselves."""
    world = worlds(blocks=17)
    requests = [world.live[world.add(text, 27, 24)] for text in (0, 2)]
    for _ in range(60):
        world.step()
        world.check()
    assert any(request.num_preemptions for request in requests)
    world.settle()
    assert set(world.done.values()) == {"length"}


def test_what_a_queued_request_needs_is_promoted_while_it_waits(
    worlds: Callable[..., World],
) -> None:
    world = worlds(tiers=(("dram", 32), ("nvme", 64)), max_num_seqs=1)
    warm(world)
    shipping = world.side.sides.shipping
    shipping.clear(0)
    world.add(2, 20, 12)  # the only seat is taken
    world.step()
    queued = world.live[world.add(0, 33)]
    while not world.jobs("move"):
        assert queued.num_computed_tokens == 0
        world.step()
    (job,) = world.jobs("move")
    assert (job.move.src, job.move.dst, len(job.move)) == (1, 0, 4)
    world.work()
    for _ in range(4):  # until the report is delivered
        world.step()
    assert queued.num_computed_tokens == 0
    keys = [bytes(key) for key in queued.block_hashes[1::2]]
    assert shipping.planner.match(keys).tiers == ["dram0"] * 4
    world.settle()
    assert set(world.done.values()) == {"length"}


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_a_save_that_is_late_gives_its_blocks_back(
    worlds: Callable[..., World], copied: bool, together: bool
) -> None:
    """`together`: it ends before the engine has heard that it is late."""
    world = worlds()
    name = world.add(0, 33)
    while not world.jobs("save"):
        world.step()
    (job,) = world.jobs("save")
    world.ranks[0].release(job, copied, world.expected)
    if not together:
        for _ in range(12):
            world.step()
        assert world.done[name] == "length"
        assert world.pool.get_num_free_blocks() == BLOCKS - 1
        assert world.ranks[0].running == [job]
    world.work()
    world.settle()


@pytest.mark.parametrize("ends", ["well", "badly", "late"])
def test_abort_during_a_load(worlds: Callable[..., World], ends: str) -> None:
    world = worlds()
    warm(world)
    name = world.add(0, 33)
    world.step()
    (job,) = world.jobs("load")
    while world.flight:
        world.deliver()
    world.abort(name)
    for _ in range(2):
        world.step()
    free = world.pool.get_num_free_blocks()
    assert free < BLOCKS - 1, "the blocks were given up under the load"
    if ends == "late":
        world.ranks[0].loads[name].late = True
        world.run(work=False, steps=5) if not world.side.pending else [
            world.step() for _ in range(4)
        ]
        assert world.pool.get_num_free_blocks() == BLOCKS - 1
        assert world.ranks[0].running == [job]
    world.work(failing={0} if ends == "badly" else None)
    world.settle()
    assert world.stored(0, 33) == (0 if ends == "badly" else 4)


def test_ranks_report_a_load_in_different_steps_and_one_fails(
    worlds: Callable[..., World],
) -> None:
    """A23."""
    world = worlds(ranks=2)
    warm(world)
    name = world.add(0, 33)
    world.step()
    jobs = [list(rank.running) for rank in world.ranks]
    assert [[job.id for job in one] for one in jobs] == [[jobs[0][0].id]] * 2
    world.work(world.ranks[1], failing={2})
    for _ in range(3):
        world.step()
    assert world.live[name].status.name == "WAITING_FOR_REMOTE_KVS"
    assert world.stored(0, 33) == 4, "decided before the other rank has said anything"
    world.work(world.ranks[0])
    for _ in range(3):
        world.step()
    assert world.live[name].status.name == "RUNNING"
    world.settle()
    assert world.done[name] == "length"
    assert world.stored(0, 33) == 4, "not stored anew"


def test_a_save_that_fails_on_one_rank_is_no_hit(worlds: Callable[..., World]) -> None:
    world = worlds(ranks=2)
    name = world.add(0, 33, 20)
    keys = [bytes(key) for key in world.live[name].block_hashes[1::2]]

    def found() -> int:
        for _ in range(3):
            world.step()
        return int(world.side.sides.shipping.planner.match(keys).blocks)

    while not world.jobs("save"):
        world.step()
    world.work(world.ranks[0])
    assert found() == 0
    world.work(world.ranks[1], failing={1})
    assert found() == 1
    world.settle()
    assert world.done[name] == "length"
    assert world.stored(0, 33) == 4, "not stored anew"


def test_a_load_that_fails_at_its_first_block_is_not_tried_again(
    worlds: Callable[..., World],
) -> None:
    """A12, vllm#49176."""
    world = worlds()
    warm(world)
    name = world.add(0, 33)
    loads = 0
    for _ in range(40):
        world.step()
        loads += len(world.jobs("load"))
        for job in list(world.ranks[0].running):
            world.ranks[0].end(job, {0} if job.move.dst is None else set(), world.expected)
        if name not in world.live:
            break
    assert loads == 1
    world.settle()
    assert world.done[name] == "length"
    assert world.stored(0, 33) == 4


def test_a_late_load_keeps_its_slots_and_forbids_its_tier(worlds: Callable[..., World]) -> None:
    world = worlds()
    warm(world)

    def go(steps: int) -> None:
        """Steps in which everything ends but the load that hangs."""
        for _ in range(steps):
            world.step()
            for save in world.jobs("save"):
                world.ranks[0].end(save, set(), world.expected)

    name = world.add(0, 33)
    go(1)
    (job,) = world.jobs("load")
    world.ranks[0].loads[name].late = True
    go(6)
    second = world.add(0, 29)
    go(20)
    assert world.ranks[0].running == [job], "the tier that hangs was asked again"
    assert world.done[name] == world.done[second] == "length"
    assert world.pool.get_num_free_blocks() == BLOCKS - 1
    pool = world.side.sides.shipping.planner.res.levels[0].pool
    free = pool.take(pool.free)
    assert not set(job.move.src_slots) & set(free)
    pool.give(free)
    world.work()
    go(3)
    assert world.side.sides.shipping.shipped == {}


def test_the_tier_is_asked_again_after_its_late_report(worlds: Callable[..., World]) -> None:
    world = worlds()
    warm(world)
    name = world.add(0, 33)
    world.step()
    world.ranks[0].loads[name].late = True
    for _ in range(4):
        world.step()
    world.settle()
    world.forget_local()
    world.add(0, 33)
    world.step()
    assert len(world.jobs("load")) == 1
    world.settle()


def test_reset_while_a_load_is_in_flight(worlds: Callable[..., World]) -> None:
    world = worlds()
    warm(world)
    name = world.add(0, 33)
    world.step()
    assert len(world.jobs("load")) == 1
    for at, (key, generation, content) in world.ranks[0].slots.items():
        world.ranks[0].slots[at] = (key, generation, [GARBAGE] * len(content))  # other weights
    assert world.scheduler.reset_connector_cache()
    world.step()
    world.work()
    world.settle()
    assert world.done[name] == "length"
    assert world.stored(0, 33) == 4, "computed after the reset, all of it"


def test_reset_while_a_save_is_in_flight(worlds: Callable[..., World]) -> None:
    world = worlds(tiers=(("dram", 16), ("nvme", 32)))
    name = world.add(0, 33)
    while not world.jobs("save"):
        world.step()
    assert world.scheduler.reset_connector_cache()
    world.settle()
    assert world.done[name] == "length"
    assert world.stored(0, 33) == 0
    world.forget_local()
    warm(world)


def test_the_engine_refuses_to_reset_while_a_save_holds_blocks(
    worlds: Callable[..., World],
) -> None:
    """Its own cache comes first, and that wants all blocks back. Afterwards all goes on."""
    world = worlds()
    name = world.add(0, 33)
    while not world.jobs("save"):
        world.step()
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        world.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    world.settle()
    assert world.done[name] == "length"
    assert world.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert world.stored(0, 33) == 0


def test_an_ended_request_whose_save_waits_for_room(worlds: Callable[..., World]) -> None:
    world = worlds(tiers=(("dram", 4), ("dram", 9)))
    warm(world)
    world.add(2, 33, 1)
    world.settle()
    assert world.stored(2, 33) == 4


@pytest.mark.parametrize(
    "policy",
    [
        "recompute",
        "fail",
    ],
)
def test_what_rests_on_a_failed_load_of_another_request_is_not_stored(
    worlds: Callable[..., World], policy: str
) -> None:
    """A24: the second request shares the blocks that the first one loads in the same step."""
    budget = {"max_num_batched_tokens": 128}
    world = worlds(load="sync", asynchronous=False, policy=policy, **budget)
    warm(world, 0, 33)
    warm(world, 2, 33)
    (rank,) = world.ranks
    rank.inline, rank.eager = fail_first, True
    world.add(0, 33, 6)
    world.add(0, 33, 6)
    world.step()
    rank.inline = none
    world.add(2, 33, 6)  # a step that waits for loads starts its saves before it computes
    world.step()
    world.run()
    # each save was checked against what its blocks hold; here, that the loads did fail
    ended = list(world.done.values())
    assert ended.count("error") == (2 if policy == "fail" else 0)
    assert ended.count("length") == len(ended) - ended.count("error")


def test_metrics_count_every_token_once(worlds: Callable[..., World]) -> None:
    """A29."""
    world = worlds()
    warm(world)
    total: Counter[str] = Counter()
    take = world.side.counts.take
    world.side.counts.take = lambda: total.update(counted := take()) or counted
    world.add(0, 33)
    world.settle()
    assert total["hit_tokens|dram0"] == 32
    assert total["missed_tokens"] == 1


class Machine(RuleBasedStateMachine):
    """Arrivals, steps, ends of jobs in any order on each rank, failures, aborts, resets."""

    shape: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="tieredkv-vllm-"))
        self.world = World(self.home, **self.shape)

    def teardown(self) -> None:
        try:
            self.world.settle()
        finally:
            self.world.close()
            shutil.rmtree(self.home)

    @rule(text=st.integers(0, 3), length=st.integers(1, 36), answer=st.integers(1, 24))
    def arrive(self, text: int, length: int, answer: int) -> None:
        if len(self.world.live) < 6:
            self.world.add(text, length, answer)

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.world.step()

    @precondition(lambda self: self.world.flight)
    @rule()
    def deliver(self) -> None:
        self.world.deliver()

    @rule(which=st.integers(0, 1), pick=st.integers(0, 50), bad=st.sets(st.integers(0, 9)))
    def end(self, which: int, pick: int, bad: set[int]) -> None:
        rank = self.world.ranks[which % len(self.world.ranks)]
        if rank.running:
            job = rank.running[pick % len(rank.running)]
            rank.end(job, bad if pick % 3 == 0 else set(), self.world.expected)

    @rule()
    def work(self) -> None:
        self.world.work()

    @rule(which=st.integers(0, 1), pick=st.integers(0, 9))
    def give_up(self, which: int, pick: int) -> None:
        loads = list(self.world.ranks[which % len(self.world.ranks)].loads.values())
        if loads:
            loads[pick % len(loads)].late = True

    @rule(which=st.integers(0, 1), pick=st.integers(0, 9), copied=st.booleans())
    def release(self, which: int, pick: int, copied: bool) -> None:
        rank = self.world.ranks[which % len(self.world.ranks)]
        if rank.running:
            rank.release(rank.running[pick % len(rank.running)], copied, self.world.expected)

    @rule(which=st.integers(0, 1), pick=st.integers(0, 99))
    def rot(self, which: int, pick: int) -> None:
        rank = self.world.ranks[which % len(self.world.ranks)]
        if rank.slots:
            rank.rotten.add(sorted(rank.slots)[pick % len(rank.slots)])

    @precondition(lambda self: self.world.live)
    @rule(pick=st.integers(0, 9))
    def abort(self, pick: int) -> None:
        self.world.abort(sorted(self.world.live)[pick % len(self.world.live)])

    @rule(local=st.booleans())
    def reset(self, local: bool) -> None:
        if local:
            self.world.scheduler.reset_prefix_cache(reset_connector=True)
        else:
            self.world.scheduler.reset_connector_cache()

    @invariant()
    def holds(self) -> None:
        self.world.check()


SHAPES: dict[str, dict[str, Any]] = {
    "Memory": {"tiers": (("dram", 7),)},
    "TwoRanks": {"ranks": 2, "tiers": (("dram", 5), ("dram", 7))},
    "Disk": {"tiers": (("dram", 5), ("nvme", 12))},
    "Sync": {"asynchronous": False, "tiers": (("dram", 5), ("dram", 9)), "ranks": 2},
    "Pressure": {"blocks": 17, "tiers": (("dram", 9),), "drafts": 2},
}
PROFILE = settings(
    max_examples=40,
    stateful_step_count=50,
    derandomize=True,
    deadline=None,
    database=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
for _name, _shape in SHAPES.items():
    _case = type(_name, (Machine,), {"shape": _shape}).TestCase
    _case.settings = PROFILE
    globals()[f"Test{_name}"] = _case
    del _case
