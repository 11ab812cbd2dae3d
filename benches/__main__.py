"""`python -m benches NAME... [--json]`: run benchmarks (`all`: each), one line per figure.

A benchmark is a module of this package with `run() -> Iterator[Result]`. The exit status
is 1 if a figure misses its bar.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys

import benches

FRAME = {"__main__", "common", "world"} | {
    f"vllm_{part}" for part in ("arms", "engine", "fleet", "offload", "workload")
}
"""Modules that are no benches."""


def names() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(benches.__path__) if m.name not in FRAME)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches", description=__doc__)
    parser.add_argument("name", nargs="+", choices=["all", *names()])
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args(argv)
    missed = False
    for name in names() if "all" in args.name else args.name:
        for result in importlib.import_module(f"benches.{name}").run():
            print(result.json() if args.json else result.text(), flush=True)
            missed = missed or result.ok is False
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
