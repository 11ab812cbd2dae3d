"""Tiny models with saved random weights, small enough to start an engine in a second.

Weights are drawn with a wide spread: then greedy outputs depend on the whole context, and a
wrong KV block changes them. (vLLM's `load_format=dummy` gives outputs that repeat two tokens.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 512
TEXT = 256
"""Token ids below this one are bytes of text, the rest are special or made up."""
BOS, EOS, PAD = 256, 257, 258

_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32768,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}

KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "float32", {}),
    # Two groups of KV caches in vLLM: sliding window and full attention.
    "gemma3": (
        "Gemma3TextConfig",
        "float32",
        {
            "num_hidden_layers": 4,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    # Latent attention. The kernels for CPUs with AMX know no float32 and only these dimensions.
    "mla": (
        "DeepseekV2Config",
        "bfloat16",
        {
            "num_key_value_heads": 4,
            "head_dim": 64,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "first_k_dense_replace": 2,  # no layer has experts
            "moe_intermediate_size": 64,
        },
    ),
}
"""Kind: the configuration class of transformers, the dtype, what differs from a tiny Llama."""


def build(directory: Path, kind: str = "llama", seed: int = 0, **shape: Any) -> Path:
    """Write a model with a tokenizer into `directory` (made if absent) and return it.

    Equal arguments give equal files. Another `seed` over an existing directory is a swap of
    weights at the same path. `shape` overrides fields of the configuration.
    """
    import torch
    import transformers

    config_class, dtype, special = KINDS[kind]
    config = getattr(transformers, config_class)(**{**_SHAPE, **special, **shape})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    _tokenizer().save_pretrained(directory)
    return directory


def _tokenizer() -> Any:
    """One token per byte; every other id decodes to its number, so no output is invisible."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<bos>", "<eos>", "<pad>"]
    words = letters + special + [f"<{i}>" for i in range(TEXT + len(special), VOCAB)]
    bpe = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    )
    return tokenizer
