"""Names, locks and markers of fingerprint directories."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.nvme.world import FP
from tieredkv.errors import DirectoryError, DirectoryInUse
from tieredkv.tiers.nvme.directory import Directory
from tieredkv.tiers.nvme.lock import FileLock, is_free, refused

NAMES = ["../x", "a/../../x", "/etc/x", "a\0b", "x" * 300, "con", "ünï", "", "..", ".", "A", "a"]


def test_a07_no_name_leaves_the_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    paths = set()
    for field in ("model", "weights", "dtype", "layout"):
        for name in NAMES:
            directory = Directory.open(root, replace(FP, **{field: name + "!"}), 16)
            assert directory.path.resolve().parent == root.resolve()
            assert directory.index_path.is_relative_to(root.resolve())
            paths.add(directory.path)
            directory.close()
    assert len(paths) == 4 * len(NAMES)
    assert {p.name for p in tmp_path.iterdir()} == {"root"}
    assert {p.resolve() for p in root.iterdir()} == paths


def test_block_tokens_are_part_of_the_name(tmp_path: Path) -> None:
    a, b = Directory.open(tmp_path, FP, 16), Directory.open(tmp_path, FP, 32)
    assert a.path != b.path
    a.close()
    b.close()


def test_the_marker_can_be_read_by_people(tmp_path: Path) -> None:
    directory = Directory.open(tmp_path, FP, 16)
    marker = json.loads((directory.path / "fingerprint.json").read_text())
    assert marker["fingerprint"]["model"] == "model"
    assert marker["block_tokens"] == 16
    assert marker["digest"] == directory.path.name == directory.digest.hex()
    directory.close()


def test_a_second_opening_in_this_process(tmp_path: Path) -> None:
    directory = Directory.open(tmp_path, FP, 16)
    with pytest.raises(DirectoryInUse, match=r"open in this process.*close the other"):
        Directory.open(tmp_path, FP, 16)
    directory.close()
    directory.close()
    assert not directory.owned
    Directory.open(tmp_path, FP, 16).close()


def test_each_rank_and_the_index_have_their_own_lock(tmp_path: Path) -> None:
    scheduler = Directory.open(tmp_path, FP, 16, rank=None)
    workers = [Directory.open(tmp_path, FP, 16, rank=r, index=False) for r in (0, 1)]
    assert workers[0].rank_path != workers[1].rank_path
    with pytest.raises(DirectoryInUse, match="rank-1"):
        Directory.open(tmp_path, FP, 16, rank=1, index=False)
    with pytest.raises(DirectoryInUse):
        Directory.open(tmp_path, FP, 16, rank=2)
    for directory in (scheduler, *workers):
        directory.close()


HOLD = """
import sys, time
from pathlib import Path
from tieredkv.tiers.nvme.directory import Directory
from tieredkv.types import Fingerprint
Directory.open(Path(sys.argv[1]), Fingerprint("model", layout="X"), 16)
print("ready", flush=True)
time.sleep(60)
"""


def test_another_process_is_named_and_its_end_frees_the_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=_environment()) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        with pytest.raises(DirectoryInUse, match=rf"process {holder.pid}; stop it"):
            Directory.open(tmp_path, FP, 16)
        holder.send_signal(signal.SIGKILL)
    Directory.open(tmp_path, FP, 16).close()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    directory = Directory.open(tmp_path, FP, 16)
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    child = context.Process(target=stop.wait, args=(30,))
    child.start()
    with pytest.raises(DirectoryInUse):  # the parent still has it
        Directory.open(tmp_path, FP, 16)
    directory.close()
    Directory.open(tmp_path, FP, 16).close()
    stop.set()
    child.join(10)
    assert child.exitcode == 0


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryError, match="choose a path that is a directory"):
        Directory.open(tmp_path / "file", FP, 16)
    with pytest.raises(DirectoryError, match="choose a path that is a directory"):
        Directory.open(tmp_path / "file" / "below", FP, 16)


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(DirectoryError, match="write permission"):
        Directory.open(tmp_path / "root", FP, 16)


def test_a_link_in_place_of_the_directory(tmp_path: Path) -> None:
    directory = Directory.open(tmp_path / "root", FP, 16)
    directory.close()
    (tmp_path / "elsewhere").mkdir()
    os.rename(directory.path, tmp_path / "moved")
    directory.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DirectoryError, match="symbolic link"):
        Directory.open(tmp_path / "root", FP, 16)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_attach_wants_a_fingerprint_directory(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match="no fingerprint directory"):
        Directory.attach(tmp_path)
    directory = Directory.open(tmp_path, FP, 16)
    with pytest.raises(DirectoryInUse):
        Directory.attach(directory.path)
    directory.close()
    again = Directory.attach(directory.path)
    assert again.digest == directory.digest
    again.close()


def test_no_descriptor_leaks_when_opening_fails(tmp_path: Path) -> None:
    directory = Directory.open(tmp_path, FP, 16)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(DirectoryInUse):
            Directory.open(tmp_path, FP, 16)
    assert len(os.listdir("/proc/self/fd")) == before
    directory.close()


def test_waiting_for_a_lock_ends(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    assert not is_free(tmp_path / "lock")
    with pytest.raises(DirectoryInUse):
        FileLock(tmp_path / "lock", wait=0.05)
    lock.close()
    assert is_free(tmp_path / "lock")
    assert "check the filesystem" in str(refused(tmp_path, OSError(5, "Input/output error")))
