"""Tests on real vLLM: `make test-vllm`. Where it is not installed, nothing is collected."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.model import build

if importlib.util.find_spec("vllm") is None:
    # Without tests pytest exits with an error, so `make test-vllm` cannot pass by skipping.
    collect_ignore_glob = ["test_*.py"]
else:
    import tests.vllm.engines  # noqa: F401  sets the environment before anything imports vllm

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engines take their time: the deadlines of the harness must come before pytest's."""
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`models(kind, seed)`: a tiny model, built once. Read-only; `build` makes one of your own."""
    built: dict[Any, Path] = {}

    def get(kind: str = "llama", seed: int = 0) -> Path:
        if (kind, seed) not in built:
            built[kind, seed] = build(tmp_path_factory.mktemp(f"{kind}{seed}"), kind, seed)
        return built[kind, seed]

    return get


@pytest.fixture(scope="session")
def model(models: Callable[..., Path]) -> Path:
    """The tiny Llama."""
    return models()
