"""`tieredkv demo`: the main job, on real tiers, with every byte verified."""

from __future__ import annotations

import json
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tieredkv.cli import demo
from tieredkv.errors import TieredKVError
from tieredkv.sim.generate import generate
from tieredkv.sim.trace import Request, TraceError, read_trace, write_trace

SHARED = Path(__file__).parents[3] / "shared" / "traces"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared traces")
EVERYTHING = ["--hbm", "128MiB", "--dram", "64MiB", "--nvme", "256MiB"]


def invoke(*options: str, code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(demo.app, [*options, "--format", "json"])
    assert result.exit_code == code, (result.output, result.exception)
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return report


def flat_count(requests: list[Request]) -> int:
    """Tokens that a flat cache without limit hits: every block seen before."""
    seen: set[int] = set()
    hit = 0
    for request in requests:
        hit += sum(block in seen for block in request.hash_ids) * request.block_size
        seen.update(request.hash_ids)
    return hit


@pytest.mark.parametrize("preset", ["card942", "scaling", "agentic", "mixed"])
def test_with_room_for_all_it_hits_what_an_infinite_cache_hits(preset: str) -> None:
    options = ["--preset", preset, "--requests", "300", "--bytes-per-token", "1", "--seed", "3"]
    report = invoke(*options, *EVERYTHING)
    assert report["hit_tokens"] == report["potential_tokens"]
    assert report["hit_tokens"] == flat_count(generate(preset, seed=3)[:300]) > 0
    assert report["requests"] == 300
    assert report["verification_errors"] == 0
    assert report["problems"] == []
    assert set(report["get_outcomes"]) == set(report["put_outcomes"]) == {"ok"}


@needs_shared
@pytest.mark.parametrize(
    ("name", "count"), [("claude_code_tune", 2000), ("mooncake_conversation", 3000)]
)
def test_real_traces_to_the_token(name: str, count: int) -> None:
    path = SHARED / f"{name}.jsonl.gz"
    options = ["--trace", str(path), "--requests", str(count), "--bytes-per-token", "1"]
    report = invoke(*options, *EVERYTHING)
    assert report["requests"] == count
    assert report["hit_tokens"] == flat_count(list(islice(read_trace(path), count)))
    assert report["verification_errors"] == 0
    assert report["problems"] == []


@needs_shared
@pytest.mark.slow
def test_a_real_trace_through_all_three_tiers() -> None:
    """Held by the three tiers together, hence hit to the token though most of it moved."""
    path = SHARED / "claude_code_tune.jsonl.gz"
    options = ["--trace", str(path), "--requests", "2000", "--bytes-per-token", "8"]
    report = invoke(*options, "--hbm", "8MiB", "--dram", "24MiB", "--nvme", "1GiB")
    assert report["hit_tokens"] == flat_count(list(islice(read_trace(path), 2000)))
    assert report["verification_errors"] == 0
    assert report["problems"] == []
    assert all(tier["read_bytes"] > 0 for tier in report["tiers"].values())


def test_small_tiers_demote_promote_and_forget_but_never_lie() -> None:
    report = invoke(
        "--requests", "400", "--bytes-per-token", "8",
        "--hbm", "1MiB", "--dram", "3MiB", "--nvme", "6MiB",
    )  # fmt: skip
    assert report["verification_errors"] == 0
    assert report["problems"] == []
    assert 0 < report["hit_tokens"] < report["potential_tokens"]
    for tier in report["tiers"].values():
        assert tier["hit_tokens"] > 0
        assert tier["read_bytes"] > 0
        assert tier["written_bytes"] > 0
    assert report["forgotten_blocks"] > 0
    served = sum(tier["hit_tokens"] for tier in report["tiers"].values())
    assert served >= report["hit_tokens"]
    assert "busy" not in report["put_outcomes"], "the demo waits for room"


def test_table_names_sizes_seed_and_errors(tmp_path: Path) -> None:
    small = ["--requests", "50", "--bytes-per-token", "1", "--seed", "9", "--dir", str(tmp_path)]
    result = CliRunner().invoke(demo.app, [*small, *EVERYTHING])
    assert result.exit_code == 0, result.output
    for text in ("card942, seed 9", "hbm 128.0MiB", "50 requests", "infinite cache", "p99 ms"):
        assert text in result.stdout
    assert "verification errors: 0" in result.stdout
    assert list(tmp_path.iterdir()) == [], "the temporary directory must be gone"


def test_wrong_bytes_end_with_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from tieredkv.store import TieredKVStore
    from tieredkv.testing import FaultyTier

    def wrap(tier: Any) -> Any:
        return FaultyTier(tier, flip_bit=True) if tier.name == "dram" else tier

    monkeypatch.setattr(demo, "TieredKVStore", partial(TieredKVStore, wrap_tier=wrap))
    report = invoke(
        "--requests", "200", "--bytes-per-token", "8",
        "--hbm", "2MiB", "--dram", "64MiB", "--nvme", "64MiB", code=1,
    )  # fmt: skip
    assert report["verification_errors"] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--preset", "nope"], "unknown preset 'nope'"),
        (["--hbm", "lots"], "lots"),
        (["--hbm", "1KiB"], "1KiB|1024"),
        (["--dir", "/nonexistent/x"], "--dir /nonexistent/x is no directory"),
        (["--trace", "/nonexistent/t"], "No such file"),
    ],
)
def test_bad_options_are_explained(options: list[str], said: str) -> None:
    result = CliRunner().invoke(demo.app, options)
    with pytest.raises(TieredKVError, match=said):
        raise result.exception or AssertionError(result.output)


def test_traces_that_cannot_be_replayed(tmp_path: Path) -> None:
    empty, odd = tmp_path / "empty", tmp_path / "odd"
    empty.write_text("")
    write_trace(odd, generate("card942", sessions=1, block_size=500))
    for options, said in (
        (["--trace", str(empty)], "no requests"),
        (["--trace", str(odd), "--bytes-per-token", "1"], "multiple of 8"),
    ):
        result = CliRunner().invoke(demo.app, options)
        with pytest.raises(TieredKVError, match=said):
            raise result.exception or AssertionError(result.output)
    assert issubclass(TraceError, TieredKVError)
