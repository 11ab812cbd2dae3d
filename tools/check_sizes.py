"""Fail when a module or function outgrows its limit: split it instead of scrolling."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MODULE_LINES = 400
FUNCTION_LINES = 70


def problems(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    lines = text.count("\n")
    if lines > MODULE_LINES:
        yield f"{path}: {lines} lines, the limit is {MODULE_LINES}"
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size > FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {size} lines of {FUNCTION_LINES}"


def main(roots: list[str]) -> int:
    files = sorted(file for root in roots for file in Path(root).rglob("*.py"))
    if not files:
        print(f"no Python files under {roots}", file=sys.stderr)
        return 2
    found = [problem for file in files for problem in problems(file)]
    print("\n".join(found) or f"{len(files)} files within limits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
