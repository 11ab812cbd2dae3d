"""The engine `gds`: what it does with kvikio's answers, and the NVMe tests on kvikio itself.

kvikio asks the CUDA driver about every buffer, so those run in a process with a driver that
knows no device (`libcuda.c`), and kvikio copies.
"""

from __future__ import annotations

import errno
import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.nvme.world import batch, get, opened, put
from tieredkv.buffers import RevocableViews
from tieredkv.errors import ConfigError
from tieredkv.tiers.nvme import gds, gds_probe, selection
from tieredkv.tiers.nvme.gds import GdsFile, error_of
from tieredkv.types import Outcome

HERE = Path(__file__).parent
PAGE = 4096
CRASHES = "8"  # of the power loss tests, which decide nothing by the engine
MODULES = {
    "gds_tests": 100,
    "test_tier": 80,
    "test_kill": 3,
    "test_powerloss": 5,
    "test_space test_sync test_check": 30,
}
"""Least number of tests in each."""


def cannot(why: str) -> None:
    """Skip, or fail where it must run: in CI and as root, who can install what is missing."""
    why = f"kvikio IS NOT TESTED HERE: {why}"
    if os.environ.get("CI") or os.geteuid() == 0:
        pytest.fail(why, pytrace=False)
    pytest.skip(why)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a libcuda.so.1 that knows no device."""
    compiler = shutil.which("cc")
    if compiler is None:
        cannot("there is no C compiler")
    if importlib.util.find_spec("kvikio") is None:
        cannot("kvikio is not installed")
    path = tmp_path_factory.mktemp("driver")
    command = [str(compiler), "-shared", "-fPIC", "-o", path / "libcuda.so.1", HERE / "libcuda.c"]
    subprocess.run(command, check=True)
    return path


@pytest.mark.parametrize(
    "modules",
    [pytest.param(m, marks=() if m == "gds_tests" else pytest.mark.slow) for m in MODULES],
)
def test_nvme_tests_on_kvikio(driver: Path, tmp_path: Path, modules: str) -> None:
    files = [str(HERE / f"{name}.py") for name in modules.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(filter(None, [str(driver), os.environ.get("LD_LIBRARY_PATH")])),
        "KVIKIO_COMPAT_MODE": "ON",
        "TIEREDKV_TEST_ENGINE": "gds",
        "TIEREDKV_CRASHES": CRASHES,
    }
    command += ["--basetemp", str(tmp_path / "child")]
    done = subprocess.run(
        command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]
    summary = done.stdout.splitlines()[-1]
    assert "skipped" not in summary
    assert int(summary.split()[0]) >= MODULES[modules], summary


class Future:
    """Of the fake file below: `act` is what `get` does."""

    def __init__(self, act: Callable[[], int]) -> None:
        self.act, self.calls = act, 0

    def get(self) -> int:
        self.calls += 1
        return self.act()


class FakeCuFile:
    """Answers like kvikio's, one after the other."""

    def __init__(self, *acts: Callable[[], int]) -> None:
        self.acts = list(acts)
        self.futures: list[Future] = []
        self.memory: list[weakref.ref[Any]] = []

    def pwrite(self, memory: Any, size: int, offset: int, task: int) -> Future:
        self.memory.append(weakref.ref(memory))
        self.futures.append(Future(self.acts.pop(0)))
        return self.futures[-1]

    pread = pwrite


def fake(tmp_path: Path, *acts: Callable[[], int]) -> tuple[GdsFile, FakeCuFile]:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * PAGE))
    cufile = FakeCuFile(*acts)
    engine: Any = SimpleNamespace(check_process=lambda: None, usable=False)
    return GdsFile(engine, os.open(path, os.O_RDWR), cufile), cufile


def says(text: str) -> Callable[[], int]:
    def act() -> int:
        raise RuntimeError(text)

    return act


@pytest.mark.parametrize("call", ["pread", "pwrite"])
def test_futures_hold_their_buffers_and_nothing_holds_them_later(tmp_path: Path, call: str) -> None:
    views = RevocableViews(np.zeros((2, PAGE), np.uint8))

    def look() -> int:
        gc.collect()
        assert all(memory() is not None for memory in cufile.memory)
        assert views.revoke() == 2  # in use: whoever takes them back knows
        return PAGE

    def fail() -> int:
        look()
        raise RuntimeError("no errno here")

    file, cufile = fake(tmp_path, look, look, look, fail)
    assert getattr(file, call)(views, 0) == 2 * PAGE
    assert [memory() for memory in cufile.memory] == [None] * 2
    assert views.revoke() == 0
    views = RevocableViews(np.zeros((2, PAGE), np.uint8))
    cufile.memory.clear()
    gc.disable()  # nothing may wait for it
    try:
        with pytest.raises(OSError, match="no errno here"):
            getattr(file, call)(views, 0)
        assert [memory() for memory in cufile.memory] == [None] * 2
        assert views.revoke() == 0
    finally:
        gc.enable()
    file.close()


def test_every_future_is_awaited_whatever_happens(tmp_path: Path) -> None:
    interrupts = [KeyboardInterrupt()]

    def interrupted() -> int:
        if interrupts:
            raise interrupts.pop()
        return PAGE

    buffers = [np.zeros(PAGE, np.uint8) for _ in range(3)]
    file, cufile = fake(tmp_path, says("one"), interrupted, lambda: PAGE)
    with pytest.raises(KeyboardInterrupt):
        file.pwrite(buffers, 0)
    assert [future.calls for future in cufile.futures] == [1, 2, 1]
    file, cufile = fake(tmp_path, lambda: PAGE, lambda: PAGE)
    released = memoryview(bytearray(PAGE))
    released.release()
    with pytest.raises(ValueError, match="released"):
        file.pwrite([buffers[0], released], 0)
    file, cufile = fake(tmp_path, lambda: PAGE, lambda: PAGE)
    views: Any = [*buffers[:2], SimpleNamespace(__len__=len)]
    with pytest.raises(TypeError):
        file.pread(views, 0)
    assert [future.calls for future in cufile.futures] == [1, 1]


def test_short_counts_are_of_what_leads(tmp_path: Path) -> None:
    buffers = [np.zeros(2 * PAGE, np.uint8) for _ in range(3)]
    whole: Callable[[], int] = lambda: 2 * PAGE  # noqa: E731
    file, _ = fake(tmp_path, whole, lambda: PAGE, whole)
    assert file.pread(buffers, 0) == 3 * PAGE
    file, _ = fake(tmp_path, whole, says("POSIX error on pread: EOF"), whole)
    assert file.pread(buffers, 0) == 2 * PAGE
    file, _ = fake(tmp_path, whole, says("POSIX error on pread: Input/output error"), whole)
    with pytest.raises(OSError, match="Input/output") as caught:
        file.pread(buffers, 0)
    assert caught.value.errno == errno.EIO
    large = [np.zeros(PAGE, np.uint8), np.zeros(gds.TASK + PAGE, np.uint8)]
    file, _ = fake(tmp_path, lambda: PAGE, lambda: gds.TASK)
    assert file.pwrite(large, 0) == PAGE  # which of the two tasks was short?


class FakeKvikio:
    """Its defaults, modes and registration; `log` is what was called in which mode."""

    CompatMode = SimpleNamespace(ON="on", OFF="off")

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"compat_mode": "auto", "num_threads": 16}
        self.defaults = SimpleNamespace(set=self.set, get=self.values.get)
        self.log: list[tuple[str, str]] = []
        self.broken = False

    @contextmanager
    def _restored(self, old: dict[str, Any]) -> Iterator[None]:
        try:
            yield
        finally:
            self.values.update(old)

    def set(self, new: dict[str, Any]) -> AbstractContextManager[None]:
        old = {key: self.values.get(key) for key in new}
        self.values.update(new)
        return self._restored(old)

    def memory_register(self, buffer: Any) -> None:
        self.log.append(("register", self.values["compat_mode"]))
        if self.broken:
            raise RuntimeError("cuFile error at: /a.cpp:1: internal error")

    def memory_deregister(self, buffer: Any) -> None:
        self.log.append(("deregister", self.values["compat_mode"]))
        if self.broken:
            raise RuntimeError("CUDA error at: /a.cpp:1: CUDA_ERROR_DEINITIALIZED")


def test_device_memory_is_registered_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kvikio = FakeKvikio()
    monkeypatch.setattr(gds, "load", lambda: kvikio)
    one, two = (SimpleNamespace(__cuda_array_interface__={"data": (n, False)}) for n in (1, 2))
    engine = gds.GdsEngine("gds")
    assert kvikio.values["num_threads"] == 16  # more than we ask for
    for buffer in (one, one, two):
        engine.register(buffer)
    assert kvikio.log == [("register", "off")] * 2
    engine.close()
    engine.close()
    assert kvikio.log[2:] == [("deregister", "off")] * 2
    assert engine.device
    assert not gds.GdsEngine("compat").device  # host memory has checksums
    assert kvikio.values["compat_mode"] == "auto"
    engine.register(one)
    kvikio.broken = True
    with pytest.raises(OSError, match="internal error"):
        engine.register(two)
    engine.close()
    assert "stays registered" in caplog.text
    assert len(kvikio.log) == 7


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("KvikIO failure at: /a/posix_io.hpp:90: POSIX error on pwrite: {}", errno.ENOSPC),
        ("KvikIO failure at: /a/posix_io.hpp:90: POSIX error on pread: {}", errno.EIO),
        ("KvikIO failure at: /a/posix_io.hpp:90: POSIX error on pread: {}", errno.EINVAL),
        ("cuFile error at: /a/file_handle.cpp:1: {}", errno.EACCES),
        ("Unable to open file. Linux system/library function call error at: /a:160: {}", 24),
        ("KvikIO failure at: /a/posix_io.hpp:89: POSIX error: Operation not permitted", 9),
        ("CUDA error at: /a/utils.cpp:4: CUDA_ERROR_OUT_OF_MEMORY(out of memory)", errno.ENOMEM),
        ("cuFile error at: /a.cpp:1: nvidia-fs driver is not loaded. Set x", errno.EIO),
        ("something new", errno.EIO),
        ("", errno.EIO),
    ],
)
def test_errors_are_recovered_from_texts(text: str, code: int) -> None:
    error = error_of(text.format(os.strerror(code)))
    assert error.errno == code
    assert "/a" not in str(error)
    assert type(error) is type(OSError(code, ""))


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("while True: pass", "no answer in 0.5 s"),
        ("import os; os.abort()", "died of SIGABRT"),
        ("raise SystemExit(3)", "ended with status 3"),
        ("raise ImportError('no module')", "ended with status 1: ImportError: no module"),
        ("print('noise'); print('answer: nvidia-fs is missing')", "nvidia-fs is missing"),
        ("print('answer: gds'); raise SystemExit(1)", None),
        ("import os, sys; print('answer:', os.path.getsize(sys.argv[1]))", str(gds_probe.SIZE)),
        (
            "import os; print('answer:', open(os.environ['CUFILE_ENV_PATH_JSON']).read())",
            '{"properties": {"allow_compat_mode": false}}',
        ),
    ],
)
def test_whatever_the_probe_does_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, answer: str | None
) -> None:
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(tmp_path / "nothing"))
    deadline = 0.5 if "while" in code else 30.0
    start = time.monotonic()
    found = gds_probe.refusal(tmp_path, deadline, [sys.executable, "-c", code])
    assert time.monotonic() - start < deadline + 5
    assert found is answer if answer is None else answer in (found or "")
    assert list(tmp_path.iterdir()) == []


def test_the_probe_itself_says_what_is_missing(tmp_path: Path) -> None:
    if importlib.util.find_spec("kvikio") is not None:
        import torch

        if torch.cuda.is_available():
            pytest.skip("a GPU answers")
    found = gds_probe.refusal(tmp_path)
    assert found is not None
    assert "kvikio" in found or "CUDA" in found


def test_a_probe_that_cannot_start(tmp_path: Path) -> None:
    assert "does not start" in str(gds_probe.refusal(tmp_path, 1.0, [str(tmp_path / "no")]))
    with pytest.raises(OSError, match="No such file"):
        gds_probe.refusal(tmp_path / "no")


@pytest.mark.parametrize(
    ("given", "strict"),
    [
        ("", '{"properties": {"allow_compat_mode": false}}'),
        ('{"a": 1}', '{"properties": {"allow_compat_mode": false}}'),
        (
            '{"properties": {"x": 1}}',
            '{"properties": {"allow_compat_mode": false, "x": 1}}',
        ),
        (
            '{"properties": {"allow_compat_mode": true, "use_pci_p2pdma": true}}',
            '{"properties": {"allow_compat_mode": false, "use_pci_p2pdma": true}}',
        ),
        (
            '{"properties": {\n// "allow_compat_mode": true\n"force_compat_mode" : true}}',
            '{"properties": {"allow_compat_mode": false, \n\n"force_compat_mode" : false}}',
        ),
    ],
)
def test_the_probe_runs_without_cufiles_fallback(given: str, strict: str) -> None:
    assert gds_probe.strict_settings(given) == strict


@pytest.mark.parametrize(
    ("lack", "remedy"), [("kvikio", "pip install 'tieredkv"), ("driver", "CUDA driver is missing")]
)
def test_what_is_missing_is_named_and_auto_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lack: str, remedy: str
) -> None:
    monkeypatch.setattr(gds, "DRIVER", "libno-such-driver.so.1")
    spec = None if lack == "kvikio" else object()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with (
        pytest.raises(ConfigError, match=f"{remedy}.*or use engine: auto"),
        opened(tmp_path, engine="gds"),
    ):
        pass
    with opened(tmp_path, engine="auto") as tier:
        assert tier.mode == "direct"
        put(tier, [0])
        assert get(tier, [0]) == [Outcome.OK]


def test_a_broken_kvikio_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise RuntimeError("libcufile.so.0 not found")  # what it says without nvidia-cufile

    monkeypatch.setattr(gds, "missing", lambda: None)
    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(ConfigError, match=r"libcufile\.so\.0 not found.*pip install"):
        gds.load()


@pytest.mark.parametrize(
    ("kind", "why", "shown"),
    [
        ("auto", None, ("gds", "GPUDirect Storage works")),
        ("gds", None, ("gds", "configured")),
        ("auto", "no nvidia-fs", ("direct", "O_DIRECT works")),
        ("gds", "no nvidia-fs", ("compat", "no GPUDirect Storage: no nvidia-fs")),
    ],
)
def test_the_probe_decides(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    why: str | None,
    shown: tuple[str, str],
) -> None:
    class Engine(selection.DirectEngine):
        def __init__(self, mode: str) -> None:
            self.name = mode

    monkeypatch.delenv("KVIKIO_COMPAT_MODE", raising=False)
    monkeypatch.setattr(gds, "missing", lambda: None)
    monkeypatch.setattr(gds, "load", lambda: None)
    monkeypatch.setattr(gds, "GdsEngine", Engine)
    monkeypatch.setattr(gds_probe, "refusal", lambda directory: why)
    with opened(tmp_path, engine=kind) as tier:
        assert (tier.mode, tier.mode_reason) == shown


def test_auto_survives_an_engine_that_fails_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(mode: str) -> Any:
        raise ConfigError("kvikio does not load")

    monkeypatch.delenv("KVIKIO_COMPAT_MODE", raising=False)
    monkeypatch.setattr(gds, "missing", lambda: None)
    monkeypatch.setattr(gds, "GdsEngine", fails)
    monkeypatch.setattr(gds_probe, "refusal", lambda directory: None)
    with opened(tmp_path, engine="auto") as tier:
        assert tier.mode == "direct"


def test_another_engine_reads_what_one_has_written(tmp_path: Path) -> None:
    """The format is the same, so a directory may change its engine."""
    with opened(tmp_path, engine="portable") as tier:
        put(tier, range(4))
    with opened(tmp_path, engine="direct") as tier:
        assert get(tier, range(4)) == [Outcome.OK] * 4
        assert tier.verify(batch(range(4))) == [Outcome.OK] * 4
