"""Store a prefix in memory and on disk, and read it back after a restart."""

import tempfile

import numpy as np

from tieredkv import Config, Fingerprint, TieredKVStore, chain_keys

directory = tempfile.mkdtemp()
config = Config.model_validate(
    {
        "block_tokens": 256,
        "tiers": [
            {"kind": "dram", "capacity": "64MiB"},
            {"kind": "nvme", "path": directory, "capacity": "256MiB", "min_free": 0},
        ],
    }
)
model = Fingerprint(model="demo-8b", weights="v1", dtype="bfloat16", layout="BLHNC")
keys = chain_keys(range(1024))  # 4 blocks of 256 tokens
blocks = np.random.default_rng(0).integers(0, 256, (4, 1 << 20), dtype=np.uint8)

with TieredKVStore(config, model) as store:
    print(store.put(keys, blocks, turn="session-1"))
    store.flush(timeout=10)

with TieredKVStore(config, model) as store:
    match = store.lookup(keys)
    out = np.empty((match.blocks, 1 << 20), np.uint8)
    print(match.tiers, store.get(keys[: match.blocks], out), (out == blocks).all())
