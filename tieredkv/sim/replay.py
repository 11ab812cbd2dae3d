"""Replay of a trace on a `Lab`: who hits what, what it costs, what moves.

A request pins its prefix from its arrival to the end of its response. Its blocks are stored at
its arrival; the end of the response counts as a use of them, as in an engine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from tieredkv.sim.lab import Lab
from tieredkv.sim.request import Request
from tieredkv.types import Turn

MIX = np.uint64(0x9E3779B97F4A7C15)
"""Odd: multiplying by it modulo 2**64 is a bijection that spreads ids."""
FOREVER = 1e18


def block_keys(blocks: Sequence[int]) -> list[bytes]:
    """The keys of a trace's block ids; distinct for ids in [0, 2**64)."""
    data = (np.array(blocks, dtype=np.uint64) * MIX).astype("<u8").tobytes()
    return [data[at : at + 8] for at in range(0, len(data), 8)]


def service_of(request: Request) -> float:
    """Seconds from arrival to the end of the response; estimated where the trace is silent."""
    if request.service is not None:
        return request.service
    return 0.5 + 0.02 * request.output_length


@dataclass(frozen=True, slots=True)
class Served:
    """What one request found."""

    request: Request
    spans: tuple[tuple[str, int], ...]
    """(tier, blocks), root first."""
    hit: int
    """Leading blocks found."""


class Replayer:
    """Feeds requests to a lab in order of time, with the ends of their responses between."""

    def __init__(
        self, lab: Lab, service: Callable[[Served], float] = lambda it: service_of(it.request)
    ) -> None:
        """`service`: seconds from a request's arrival to the end of its response."""
        self.lab = lab
        self._service = service
        self._running: list[tuple[float, int, Request, bool, list[int]]] = []
        self._order = count()

    def serve(self, request: Request, finishes: bool = False) -> Served:
        """The request arrives; `finishes`: when it has been served, the session says that it
        was the last one."""
        lab, planner = self.lab, self.lab.planner
        self.advance(request.ts)
        keys = block_keys(request.hash_ids)
        session, now = request.session, request.ts
        if request.turn == 1 and request.parent is not None:
            planner.fork(request.parent, session, now)
        planner.turn_began(session, now)
        match = lab.lookup(keys)
        pins = []
        if match.blocks:
            pins.append(planner.pin(keys[: match.blocks], FOREVER, now)[0])
            lab.get(keys[: match.blocks])
        turn = Turn(session=session, category=request.category or None)
        if keys:
            lab.put(keys, match.blocks, turn)
        pins.append(planner.pin(keys, FOREVER, now)[0])
        held = [pin for pin in pins if pin is not None]
        served = Served(request, match.spans, match.blocks)
        end = now + self._service(served)
        heapq.heappush(self._running, (end, next(self._order), request, finishes, held))
        return served

    def advance(self, now: float) -> None:
        """Let the responses end that end by then."""
        lab, planner = self.lab, self.lab.planner
        while self._running and self._running[0][0] <= now:
            lab.now, _, request, finishes, pins = heapq.heappop(self._running)
            for pin in pins:
                planner.pins.release(pin)
            planner.turn_ended(
                request.session,
                lab.now,
                finish_reason=request.stop,
                output_tokens=request.output_length,
            )
            if finishes:
                planner.end_session(request.session, lab.now)
        lab.now = now
