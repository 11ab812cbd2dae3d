"""A process with real vLLM engines, one after the other, on one core.

It imports vLLM once and builds each engine in itself: front end, scheduler, worker and
connector share its core. It steps while the engine has work, as vLLM's own engine process
does, so a connector's background work goes on between requests.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from benches.vllm_workload import ENGINE_BLOCK, VOCABULARY

IDLE = 0.001
"""Seconds between steps that have nothing to compute."""

KvTransfer = dict[str, Any] | None
"""vLLM's kv_transfer_config; None: no external cache. Under `ENVIRONMENT` it may have variables
that are set before the engine is built."""
ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class Shape:
    """What all engines have in common."""

    model: str
    context: int
    """Longest request in tokens."""
    pool: int
    """Tokens of the engine's own KV cache."""
    block: int = ENGINE_BLOCK
    concurrency: int = 2


@dataclass(frozen=True, slots=True)
class Answer:
    """One served request; times in seconds of the machine's monotonic clock."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    """By how much each token beat the runner-up (log probability)."""
    cached: int
    """Prompt tokens that were not computed: from the engine's own cache or an external one."""
    first: float
    done: float


def main(conn: Connection, core: int, shape: Shape) -> None:
    """Serve the parent until it closes its end. Messages: ("open", transfer), ("request",
    id, session, prompt, answer tokens) and ("close",); answers: (word, id, Answer or None), and
    ("failed", traceback) before the process dies."""
    os.sched_setaffinity(0, {core})
    os.environ.update(
        OMP_NUM_THREADS="1",
        VLLM_CPU_OMP_THREADS_BIND=str(core),
        HF_HUB_OFFLINE="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        MOONCAKE_REQUESTER_LOCAL_HOSTNAME="127.0.0.1",  # read once: vLLM caches its variables
        TORCHDYNAMO_DISABLE="1",  # needs a compiler, and seconds, for one small kernel
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    server = _Server(conn, shape)
    try:
        _make_numba_scannable()
        server.run()
    except EOFError:
        pass  # the parent has gone, or wants us to
    except BaseException:
        conn.send(("failed", traceback.format_exc()))
        raise


def _make_numba_scannable() -> None:
    """Without this no engine starts where numba is imported already (LMCache does): vLLM
    looks into all attributes of all modules, and llvmlite's handle of its library takes
    `__dict__` for the name of a function."""
    with suppress(ImportError):
        ffi: Any = import_module("llvmlite.binding.ffi")
        kind: Any = type(ffi.lib)
        members = {"__slots__": (), "__dict__": property(lambda _: {})}
        ffi.lib.__class__ = type(kind.__name__, (kind,), members)


class _Server:
    def __init__(self, conn: Connection, shape: Shape) -> None:
        self._conn = conn
        self._shape = shape
        self._engine: Any = None
        self._first: dict[str, float] = {}

    def run(self) -> None:
        while True:
            while self._conn.poll(0 if self._busy() else None):
                kind, *rest = self._conn.recv()
                getattr(self, f"_{kind}")(*rest)
            if self._busy():
                self._step()

    def _busy(self) -> bool:
        if self._engine is None:
            return False
        # The scheduler also counts what a connector still has to send.
        return bool(self._engine.engine_core.engine_core.scheduler.has_requests())

    def _open(self, transfer: KvTransfer) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        shape = self._shape
        if transfer is not None:
            os.environ.update(transfer.pop(ENVIRONMENT, {}))
        arguments: dict[str, Any] = {
            "model": shape.model,
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": shape.context,
            # A prompt is never cut: ExampleConnector would save its first part only.
            "max_num_batched_tokens": shape.concurrency * shape.context,
            "max_num_seqs": shape.concurrency,
            "block_size": shape.block,
            "num_gpu_blocks_override": shape.pool // shape.block + 1,  # one is never used
            "kv_transfer_config": transfer,
            "disable_log_stats": True,
        }
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        # Kernels and a connector's paths are compiled and faulted in before the clock runs:
        # a prompt of this process's own, computed, stored and (if it can be) loaded.
        own = os.getpid() % VOCABULARY
        for _ in range(2):
            self._request(-1, "warm-up", [own] * (4 * shape.block), 2)
            while self._busy():
                self._step(report=False)
            self._engine.reset_prefix_cache()
        self._conn.send(("opened", -1, None))

    def _request(self, request: int, session: str, prompt: list[int], output: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=output, ignore_eos=True, detokenize=False, logprobs=2
        )
        tokens = {"prompt_token_ids": prompt}
        self._engine.add_request(str(request), tokens, params, session_id=session)

    def _step(self, report: bool = True) -> None:
        outputs = self._engine.step()
        now = time.monotonic()
        for output in outputs:
            first = self._first.setdefault(output.request_id, now)
            if output.finished:
                del self._first[output.request_id]
                if report:
                    self._conn.send(("done", int(output.request_id), _answer(output, first, now)))
        if not outputs:
            time.sleep(IDLE)  # an asynchronous load needs the interpreter, too

    def _close(self) -> None:
        connector = self._engine.engine_core.engine_core.scheduler.connector
        self._engine.engine_core.shutdown()
        # vLLM forgets the socket of its MooncakeStoreConnector, and collecting it never ends.
        with suppress(AttributeError):
            connector.connector_scheduler.client.close()
        del connector
        self._engine = None
        gc.collect()
        self._conn.send(("closed", -1, None))


def _answer(output: Any, first: float, done: float) -> Answer:
    completion = output.outputs[0]
    margins = []
    for ranked in completion.logprobs:
        best, second = sorted((entry.logprob for entry in ranked.values()), reverse=True)[:2]
        margins.append(best - second)
    return Answer(
        tuple(completion.token_ids), tuple(margins), output.num_cached_tokens, first, done
    )
