"""The code that the README and the examples show runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_readme_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert '"/tmp/kv"' in code
    exec(compile(code.replace("/tmp/kv", str(tmp_path)), "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.count("'dram'") == 4
    assert printed.count("'ok'") == 4


def test_the_quickstart() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "quickstart.py")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=ROOT,
    )
    assert done.stdout.count("'ok'") == 8
    assert done.stdout.rstrip().endswith("True")
