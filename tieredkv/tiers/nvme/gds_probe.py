"""Does GPUDirect Storage work in a directory? Asked in another process, which may hang or die.

cuFile can spin for ever in its first call where it does not find the kernel's modules, and it
falls back to copies without a word. So a child opens a file there with every fallback off,
moves a page between it and the GPU, and prints what came of it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PAGE = 4096
SIZE = 64 * PAGE
DEADLINE = 60.0
GRACE = 5.0
ANSWER = "answer: "
WORKS = "gds"
COMMAND = (sys.executable, "-P", __file__)
CUFILE_JSON = "CUFILE_ENV_PATH_JSON"
CUFILE_LOG = "CUFILE_LOGFILE_PATH"
COMMENT = re.compile(r'^\s*//.*$|//[^"\n]*$', re.MULTILINE)
ALLOWED = re.compile(r'("allow_compat_mode"\s*:\s*)\w+')
FORCED = re.compile(r'("force_compat_mode"\s*:\s*)\w+')
PROPERTIES = re.compile(r'"properties"\s*:\s*\{')


def refusal(
    directory: Path, deadline: float = DEADLINE, command: Sequence[str] = COMMAND
) -> str | None:
    """Why files in `directory` cannot be moved by GPUDirect Storage; None if they can.

    Waits for `deadline` seconds at most, and a few more for a child that cannot be killed.
    `command` gets the path of a file of `SIZE` bytes. Raises OSError if that cannot be made.
    """
    path = directory / "probe.tmp"
    with tempfile.TemporaryDirectory(prefix="tieredkv-") as scratch:
        try:
            fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, SIZE)
            finally:
                os.close(fd)
            strict = Path(scratch, "cufile.json")
            strict.write_text(strict_settings(_settings()), encoding="utf-8")
            # cuFile's log would be left in the working directory
            log = str(Path(scratch, "cufile.log"))
            environment = {**os.environ, CUFILE_JSON: str(strict), CUFILE_LOG: log}
            return _ask([*command, str(path)], environment, deadline)
        finally:
            path.unlink(missing_ok=True)


def strict_settings(text: str) -> str:
    """cuFile's settings (JSON with comments), with its own fallback to copies off."""
    text = FORCED.sub(r"\1false", COMMENT.sub("", text))
    if ALLOWED.search(text):
        return ALLOWED.sub(r"\1false", text)
    if PROPERTIES.search(text):
        return PROPERTIES.sub('"properties": {"allow_compat_mode": false, ', text, count=1)
    return '{"properties": {"allow_compat_mode": false}}'


def _settings() -> str:
    try:
        path = os.environ.get(CUFILE_JSON, "/etc/cufile.json")
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _ask(command: Sequence[str], environment: dict[str, str], deadline: float) -> str | None:
    """The child's answer, None for `WORKS`."""
    with tempfile.TemporaryFile() as output:
        try:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
            )
        except OSError as error:
            return f"the probe does not start: {error}"
        try:
            code = child.wait(deadline)
        except subprocess.TimeoutExpired:
            return f"the probe gave no answer in {deadline:g} s"
        finally:
            child.kill()
            with suppress(subprocess.TimeoutExpired):  # inside the kernel even SIGKILL waits
                child.wait(GRACE)
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    answers = [line.removeprefix(ANSWER) for line in lines if line.startswith(ANSWER)]
    if answers:
        return None if answers[-1] == WORKS else answers[-1]
    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return f"the probe {how}" + (f": {lines[-1]}" if lines else "")


def answer(path: str) -> str:
    """`WORKS`, or what is wrong. In the child."""
    import kvikio
    import kvikio.defaults
    import torch

    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    kvikio.defaults.set("compat_mode", kvikio.CompatMode.OFF)
    page = torch.randint(256, (PAGE,), dtype=torch.uint8).cuda()
    back = torch.zeros_like(page)
    torch.cuda.synchronize()
    with kvikio.CuFile(path, "r+") as file:
        # the raw calls: others move as little as a page by copies
        if file.raw_write(page, PAGE, PAGE) != PAGE or file.raw_read(back, PAGE, PAGE) != PAGE:
            return "short transfer"
    torch.cuda.synchronize()
    wanted = page.cpu().numpy().tobytes()
    if back.cpu().numpy().tobytes() != wanted or Path(path).read_bytes()[PAGE : 2 * PAGE] != wanted:
        return "other bytes came back than were written"
    return WORKS


def main(path: str) -> None:
    try:
        found = answer(path)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    print(ANSWER + " ".join(found.split()), flush=True)
    os._exit(0)  # an answer has been given: how CUDA ends is of no interest


if __name__ == "__main__":
    main(sys.argv[1])
