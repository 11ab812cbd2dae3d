"""tieredkv keeps the KV cache of LLM prefixes in a hierarchy of memory and storage tiers.

Everything a caller needs is importable from here. Names whose modules pull in numpy or
pydantic are resolved on first use, so that `import tieredkv` itself costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tieredkv.errors import (
    BlockSizeError,
    CapacityError,
    ClosedError,
    ConfigError,
    DirectoryError,
    DirectoryInUse,
    FormatError,
    PluginError,
    TieredKVError,
    UsageError,
)
from tieredkv.types import Fingerprint, Match, Outcome, Turn

if TYPE_CHECKING:
    from tieredkv.config import Config
    from tieredkv.keys import chain_keys
    from tieredkv.store import TieredKVStore

__version__ = "0.1.0"

__all__ = [
    "BlockSizeError",
    "CapacityError",
    "ClosedError",
    "Config",
    "ConfigError",
    "DirectoryError",
    "DirectoryInUse",
    "Fingerprint",
    "FormatError",
    "Match",
    "Outcome",
    "PluginError",
    "TieredKVError",
    "TieredKVStore",
    "Turn",
    "UsageError",
    "__version__",
    "chain_keys",
]

_LAZY = {
    "Config": "tieredkv.config",
    "TieredKVStore": "tieredkv.store",
    "chain_keys": "tieredkv.keys",
}


def __getattr__(name: str) -> object:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(module), name)
    globals()[name] = value  # from now on without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
