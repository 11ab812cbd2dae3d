"""Engine processes, and the closed loop of sessions that drives them."""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import wait
from types import TracebackType
from typing import Self

from benches.vllm_engine import Answer, KvTransfer, Shape, main
from benches.vllm_workload import Turn

DEADLINE = 180.0
"""Seconds without a word from any engine after which a run has failed."""


@dataclass(frozen=True, slots=True)
class Served:
    turn: Turn
    prompt: list[int]
    submitted: float
    answer: Answer


class Engine:
    """One engine process. Not thread-safe. Raises RuntimeError with the process's own
    traceback when it fails, or when it is silent for too long."""

    def __init__(self, core: int, shape: Shape) -> None:
        context = get_context("spawn")
        self.conn, theirs = context.Pipe()
        self._process = context.Process(target=main, args=(theirs, core, shape), daemon=True)
        self._process.start()
        theirs.close()

    def open(self, transfer: KvTransfer) -> None:
        """Start building an engine; `ready()` waits for it."""
        self._send("open", transfer)

    def ready(self) -> None:
        if not self.conn.poll(DEADLINE):
            raise RuntimeError("the engine is silent")
        self.receive()

    def submit(self, request: int, turn: Turn, prompt: list[int]) -> None:
        self._send("request", request, f"session-{turn.session}", prompt, turn.output)

    def receive(self) -> tuple[int, Answer]:
        """A finished request. Blocks; use `conn` to wait."""
        try:
            kind, *rest = self.conn.recv()
        except EOFError:
            raise RuntimeError(f"the engine died: {self._process.exitcode}") from None
        if kind == "failed":
            raise RuntimeError(f"the engine failed:\n{rest[0]}")
        return rest[0], rest[1]

    def close(self) -> None:
        """Shut the current engine down; the process stays."""
        self._send("close")
        self.ready()

    def _send(self, *message: object) -> None:
        try:
            self.conn.send(message)
        except OSError:
            self.receive()  # raises, with the reason if the process has left one
            raise

    def stop(self) -> None:
        self.conn.close()  # the process leaves at the end of the pipe
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Fleet:
    """So many engine processes on cores of their own, as far as there are cores."""

    def __init__(self, count: int, shape: Shape) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.engines = [Engine(cores[i % len(cores)], shape) for i in range(count)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for engine in self.engines:
            engine.stop()

    def serve(
        self,
        transfers: Sequence[KvTransfer],
        sessions: Sequence[Sequence[Turn]],
        lane: Callable[[Turn], int],
        answers: dict[tuple[int, int], Answer],
    ) -> list[Served]:
        """Serve all sessions by fresh engines, each session one turn after the other.

        `lane` chooses the engine of a turn. `answers` are those of earlier runs by (session,
        number), and are completed: prompts continue them, so that every run has the same
        prompts even where two tokens were equally likely. In order of submission.
        """
        for engine, transfer in zip(self.engines, transfers, strict=True):
            engine.open(transfer)
        for engine in self.engines:
            engine.ready()
        served = _Loop(self.engines, sessions, lane, answers).run()
        for engine in self.engines:
            engine.close()
        return served


class _Loop:
    """The closed loop: a session's next request is due a pause after its last response."""

    def __init__(
        self,
        engines: Sequence[Engine],
        sessions: Sequence[Sequence[Turn]],
        lane: Callable[[Turn], int],
        answers: dict[tuple[int, int], Answer],
    ) -> None:
        self._engines = {engine.conn: engine for engine in engines}
        self._lanes = list(engines)
        self._lane = lane
        self._sessions = sessions
        self._answers = answers
        self._due: list[tuple[float, int, Turn, list[int]]] = []
        self._sent: dict[int, tuple[Turn, list[int], float]] = {}
        self._served: dict[int, Served] = {}

    def run(self) -> list[Served]:
        begin = time.monotonic()
        for turns in filter(None, self._sessions):
            self._schedule(turns[0], begin, [], ())
        while self._due or self._sent:
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                _, _, turn, prompt = heapq.heappop(self._due)
                self._submit(turn, prompt)
            patience = max(0.0, self._due[0][0] - now) if self._due else DEADLINE
            ready = wait(list(self._engines), patience)
            if not ready and not self._due:
                raise RuntimeError(f"{len(self._sent)} requests got no answer in {DEADLINE:g} s")
            for conn in ready:
                self._finish(*self._engines[conn].receive())  # type: ignore[index]
        return [self._served[request] for request in sorted(self._served)]

    def _schedule(
        self, turn: Turn, now: float, before: Sequence[int], answer: Sequence[int]
    ) -> None:
        prompt = turn.prompt(before, answer)
        heapq.heappush(self._due, (now + turn.pause, turn.order, turn, prompt))

    def _submit(self, turn: Turn, prompt: list[int]) -> None:
        request = len(self._sent) + len(self._served)
        self._sent[request] = turn, prompt, time.monotonic()
        self._lanes[self._lane(turn)].submit(request, turn, prompt)

    def _finish(self, request: int, answer: Answer) -> None:
        turn, prompt, submitted = self._sent.pop(request)
        self._served[request] = Served(turn, prompt, submitted, answer)
        known = self._answers.setdefault((turn.session, turn.number), answer)
        turns = self._sessions[turn.session]
        if turn.number + 1 < len(turns):
            self._schedule(turns[turn.number + 1], answer.done, prompt, known.tokens)
