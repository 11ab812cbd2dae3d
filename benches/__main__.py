"""`python -m benches NAME... [--json]`: run benchmarks (`all`: each), one line per figure.

A benchmark is a module of this package with `run() -> Iterator[Result]`. One that has options
of its own, given behind its name, also has `parse(options, tables) -> size` for `run(size)`;
`tables` asks for what people read. The exit status is 1 if a figure misses its bar.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys

import benches

FRAME = {
    "__main__",
    "common",
    "world",
    *(f"eviction_{part}" for part in ("cost", "inputs", "rows", "size", "tables", "wrong")),
    *(f"vllm_{part}" for part in ("arms", "engine", "fleet", "offload", "workload")),
}
"""Modules that are no benches."""


def names() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(benches.__path__) if m.name not in FRAME)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches", description=__doc__)
    parser.add_argument("name", nargs="+", choices=["all", *names()])
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args, options = parser.parse_known_args(argv)
    chosen = []
    for name in names() if "all" in args.name else args.name:
        bench = importlib.import_module(f"benches.{name}")
        size = []
        if hasattr(bench, "parse") and "all" not in args.name:
            size.append(bench.parse(options, not args.json))
        elif options:
            parser.error(f"{name} has no options {' '.join(options)}")
        chosen.append((bench, size))
    missed = False
    for bench, size in chosen:
        for result in bench.run(*size):
            print(result.json() if args.json else result.text(), flush=True)
            missed = missed or result.ok is False
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
