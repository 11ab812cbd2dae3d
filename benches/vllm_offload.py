"""vLLM's CPU offload manager beside our planner: the same bookkeeping, at the same size.

Both are driven as an engine's scheduler drives them, with LRU and no bytes: look a prefix up,
load it (protect, read, release, mark as used), store the blocks of a turn into a full cache.
Yields nothing where vLLM is not installed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import count
from typing import Any

from benches.common import Result, compare
from benches.world import OK, ControlPlane, fresh_copies, random_keys

TURN = 256
"""Blocks of one put."""


class Offload:
    """A `CPUOffloadingManager` of so many chunks, whose transfers succeed at once."""

    def __init__(self, chunks: int) -> None:
        from vllm.v1.kv_offload import base
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self.manager: Any = CPUOffloadingManager(chunks, "lru")
        self.hit = base.LookupResult.HIT
        self._key = base.make_offload_key
        self._context = base.ReqContext
        self._requests = count()

    def keys(self, hashes: Sequence[bytes]) -> list[bytes]:
        return [self._key(block, 0) for block in hashes]

    def request(self) -> Any:
        request = self._context(str(next(self._requests)))
        self.manager.on_new_request(request)
        return request

    def lookup(self, keys: Sequence[bytes]) -> int:
        request, manager, hit = self.request(), self.manager, self.hit
        for found, key in enumerate(keys):
            if manager.lookup(key, request) is not hit:
                return found
        return len(keys)

    def load(self, keys: Sequence[bytes]) -> None:
        request, manager = self.request(), self.manager
        manager.prepare_load(keys, request)
        manager.complete_load(keys, request)
        manager.on_request_finished(request)

    def store(self, keys: Sequence[bytes]) -> None:
        request, manager = self.request(), self.manager
        output = manager.prepare_store(keys, request)
        if output is None or len(output.keys_to_store) != len(keys):
            raise RuntimeError("the manager refused a store")
        manager.complete_store(output.keys_to_store, request)
        manager.on_request_finished(request)


def run(resident: int, chain: int, samples: int) -> Iterator[Result]:
    if find_spec("vllm") is None:
        return
    ours, theirs = ControlPlane(resident), Offload(resident)
    keys = ours.chain(chain, 20)
    theirs.store(theirs.keys(keys))
    for _ in range((resident - chain) // TURN):
        ours.put(random_keys(TURN))
        theirs.store(theirs.keys(random_keys(TURN)))

    def load(keys: Sequence[bytes]) -> None:
        planner, now = ours.planner, ours.now
        _, moves = planner.plan_get(keys, 0, now)
        for move in moves:
            planner.finish(move, [OK] * len(move), [], now)
        planner.drain()

    if ours.planner.match(keys).blocks != chain or theirs.lookup(theirs.keys(keys)) != chain:
        raise RuntimeError("the chain is not stored")
    for name, mine, other in (
        ("lookup", ours.planner.match, theirs.lookup),
        ("load", load, theirs.load),
    ):
        yield compare(
            f"index.{name}.vllm",
            "us/block",
            lambda mine=mine: _cost(mine, fresh_copies(keys)),  # type: ignore[misc]
            lambda other=other: _cost(other, theirs.keys(keys)),  # type: ignore[misc]
            higher_is_better=False,
            pairs=samples,
        )
    yield compare(
        "index.insert+evict.vllm",
        "us/block",
        lambda: _cost(ours.put, random_keys(TURN)),
        lambda: _cost(theirs.store, theirs.keys(random_keys(TURN))),
        higher_is_better=False,
        pairs=samples,
    )


def _cost(call: Callable[[Sequence[bytes]], object], keys: Sequence[bytes]) -> float:
    """Microseconds of CPU time per key."""
    begin = time.thread_time()
    call(keys)
    return (time.thread_time() - begin) / len(keys) * 1e6
