"""vLLM engines inside the test process, where a test can look into them.

Importing this module sets the environment that vLLM reads when it is imported, so import it
first; vLLM itself is imported by the first engine (8-18 seconds).
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.conversation import Completion

if TYPE_CHECKING:
    from vllm import LLM

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, the least there is
    # models as small as these compute a prompt faster than anything can be loaded
    "TIEREDKV_CONNECTOR_RECOMPUTE": "never",
    "TORCH_COMPILE_DISABLE": "1",  # several ranks would want a C++ compiler even when eager
}
os.environ.update(ENVIRONMENT)
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

ARGUMENTS: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 4,
    "block_size": 32,  # the kernels for CPUs want a multiple of it
    "num_gpu_blocks_override": 256,
}
"""Engine arguments of every test unless it gives its own."""

_live: list[str] = []


def tiered(extra: dict[str, Any], **transfer: Any) -> dict[str, Any]:
    """The kv_transfer_config of our connector with `extra` as its configuration."""
    return {
        "kv_connector": "TieredKVConnector",
        "kv_connector_module_path": "tieredkv.connector.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
        **transfer,
    }


def example(directory: Path) -> dict[str, Any]:
    """The kv_transfer_config of vLLM's ExampleConnector, which keeps whole prompts in files.

    It saves only what the first step of a request computes, so no prompt may be longer than
    `max_num_batched_tokens`, nor share a step that is full.
    """
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(directory)},
    }


def arguments(model: Path, connector: dict[str, Any] | None, **llm_args: Any) -> dict[str, Any]:
    """Engine arguments for a model of `tests.vllm.model`, in the dtype that it was saved in."""
    dtype = json.loads((model / "config.json").read_text())["dtype"]
    base = {**ARGUMENTS, "model": str(model), "dtype": dtype}
    if connector is not None:
        base["kv_transfer_config"] = connector
    return {**base, **llm_args}


def bindings(args: Mapping[str, Any]) -> dict[str, str]:
    """The environment that ties each rank to a core of its own, which vLLM needs for several."""
    ranks = args.get("tensor_parallel_size", 1)
    if ranks == 1:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    assert len(cores) >= ranks, f"{ranks} ranks need as many cores, this process has {cores}"
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores[:ranks]))}


@contextmanager
def engine(model: Path, connector: dict[str, Any] | None = None, **llm_args: Any) -> Iterator[LLM]:
    """An engine that is shut down for good at the end; a process may open many in turn.

    Never two at once: vLLM keeps the worker's side of the connector and the process groups in
    globals, so a second engine would use the connector of the first and lose its groups with it.

    With `tensor_parallel_size` the workers are processes, and in a child of
    `tests.vllm.processes` the scheduler is one as well.
    """
    from vllm import LLM

    if _live:
        raise RuntimeError(f"close the engine of {_live[0]} first: vLLM can hold one per process")
    args = arguments(model, connector, **llm_args)
    _live.append(str(model))
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in bindings(args).items():
                patch.setenv(name, value)
            llm = LLM(**args)
            try:
                yield llm
            finally:
                llm.llm_engine.engine_core.shutdown()
                del llm
                gc.collect()
    finally:
        _forget()
        _live.clear()


def _forget() -> None:
    """Clear vLLM's globals, which an engine leaves behind when it fails to start."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()


def generate(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | Sequence[int] = 16,
    **sampling: Any,
) -> list[Completion]:
    """Complete token ids greedily and to the full length, unless `sampling` says otherwise.

    All prompts are in flight together. `max_tokens` is one for all or one per prompt.
    """
    from vllm import SamplingParams, TokensPrompt

    limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
    options = {"temperature": 0, "ignore_eos": True, "detokenize": False, **sampling}
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts],
        [SamplingParams(max_tokens=limit, **options) for limit in limits],
        use_tqdm=False,
    )
    return [
        Completion(
            tuple(output.outputs[0].token_ids),
            output.num_cached_tokens or 0,
            output.outputs[0].finish_reason,
        )
        for output in outputs
    ]


def core(llm: LLM) -> Any:
    """The EngineCore of an engine in this process: scheduler, executor, worker."""
    client: Any = llm.llm_engine.engine_core
    return client.engine_core


def scheduler_connector(llm: LLM) -> Any:
    """The scheduler's side of the connector of an engine in this process."""
    connector = core(llm).scheduler.connector
    assert connector is not None, "this engine has no connector"
    return connector


def worker_connector() -> Any:
    """The worker's side of the connector of the engine in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()
