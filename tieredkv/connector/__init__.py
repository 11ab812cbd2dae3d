"""The vLLM connector: tiers behind the engine's own paged KV cache."""
