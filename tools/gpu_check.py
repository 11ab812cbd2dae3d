"""Everything of this project that a GPU decides, on one machine in some minutes, without network.

    python tools/gpu_check.py [--wheels DIR] [--out gpu-check.json]

Runs `tieredkv doctor`, the suites of all that copies to and from a device, those of the nvme tier
on kvikio, and `benches gpu`; prints a table and writes JSON. What a machine lacks is said and
left out; without a GPU the same runs on the CPU. With `--wheels` what cannot be imported is
installed from there. Exit code 1 if anything failed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = ("torch", "pytest", "lmdb", "kvikio", "tieredkv")
SUITES = (
    "tests/tiers",
    "tests/connector",
    "tests/store/test_device_buffers.py",
    "tests/nvme/test_checksum.py",
    "tests/nvme/test_gds.py",
)
ON_KVIKIO = ("tests/nvme/test_tier.py",)
"""Run by the engine gds, in whatever mode this machine allows."""
PYTEST = ("-m", "pytest", "-q", "-m", "not slow")
BUDGET = 470.0
"""Seconds for all steps together."""


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    code: int
    """Exit code; -1 if it took too long."""
    seconds: float
    text: str
    """The end of what it printed."""
    rows: list[dict[str, object]]
    """What it printed as JSON, a line each."""


_begun = time.monotonic()


def step(name: str, *command: str, **environment: str) -> Step:
    """Run it with this interpreter from the root of the project, while the budget lasts."""
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=max(1.0, _begun + BUDGET - begin),
        )
        code, text = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        code, text = -1, (late.stdout or b"").decode(errors="replace")
    return Step(name, code, time.monotonic() - begin, text[-20_000:], rows_of(text))


def rows_of(text: str) -> list[dict[str, object]]:
    rows = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
    return rows


def install(wheels: Path) -> Step:
    missing = [name for name in NEEDED if find_spec(name) is None]
    files = sorted(str(path) for path in wheels.glob("*.whl"))
    if not missing or not files:
        return Step("install", 0, 0.0, f"missing: {missing}, wheels: {len(files)}", [])
    return step("install", "-m", "pip", "install", "--no-index", "--no-deps", *files)


def table(steps: list[Step]) -> str:
    lines = []
    for one in steps:
        state = {0: "ok", -1: "TOO LATE"}.get(one.code, f"FAILED ({one.code})")
        last = one.text.strip().splitlines()[-1:] or [""]
        lines.append(f"{one.name:<10} {state:<12} {one.seconds:6.1f} s  {last[0][:100]}")
        for row in one.rows:
            if "metric" in row:
                ratio = row.get("ratio")
                lines.append(
                    f"  {row['metric']:<34} {row['value']:>9} {row['unit']}"
                    + ("" if ratio is None else f"  {ratio} of {row['reference']}")
                )
    return "\n".join(lines)


def _driver() -> bool:
    """Is there a CUDA driver? Without one kvikio does nothing, and the tests bring their own."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--wheels", type=Path, help="a directory of wheels to install from")
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-check.json")
    args = parser.parse_args()
    kvikio = find_spec("kvikio") is not None and _driver()
    steps = [install(args.wheels)] if args.wheels else []
    steps += [
        step("doctor", "-m", "tieredkv.cli.app", "doctor", "--format", "json"),
        step("suites", *PYTEST, *SUITES),
        step("kvikio", *PYTEST, *ON_KVIKIO, TIEREDKV_TEST_ENGINE="gds" if kvikio else "auto"),
        step("gpu", "-m", "benches", "gpu", "--json"),
    ]
    args.out.write_text(json.dumps([asdict(one) for one in steps], indent=1))
    print(table(steps))
    print(f"written to {args.out}")
    return int(any(one.code for one in steps))


if __name__ == "__main__":
    sys.exit(main())
