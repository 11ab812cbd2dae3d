"""What one run of the eviction bench replays."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benches.eviction_tables import merge
from tieredkv.errors import TieredKVError
from tieredkv.eviction import BUILTIN
from tieredkv.plugins import POLICIES, load_plugin
from tieredkv.sim.generate import PRESETS, stream
from tieredkv.sim.lab_runs import GENERATE
from tieredkv.sim.spec import Spec, TierSize, parse_capacities, parse_shares, parse_words
from tieredkv.sim.trace import write_trace

SHARED = Path(__file__).parents[2] / "shared" / "traces"
"""Third-party traces, beside the checkout where there are any."""
FILES = ("claude_code_tune", "mooncake_conversation", "lmcache_agents")
PARTS = ("table", "tiers", "inputs", "wrong", "cost", "speed")
THREE = ["hbm=0.3live", "dram=0.3live", "nvme=1live"]


@dataclass(frozen=True, slots=True)
class Size:
    """Everything by default: hours. Texts are those of `tieredkv simulate`."""

    traces: tuple[str, ...] = (*FILES, *PRESETS)
    """Names of `FILES`, presets of the generator, or paths."""
    sessions: int | None = None
    """Of each preset; None: as many as it has."""
    seed: int = 0
    policies: tuple[str, ...] = tuple(BUILTIN)
    hinted: tuple[str, ...] = ("lru", "delay")
    """Those that are also replayed with finish hints."""
    capacities: tuple[str, ...] = ("2%", "5%", "10%", "20%", "0.25live", "0.5live", "1live")
    hints: tuple[float, ...] = (0.0, 0.5, 1.0)
    parts: tuple[str, ...] = PARTS
    jobs: int = 1
    samples: int = 3
    """Of figures that are times of this machine."""
    tables: bool = False
    """Print them, and leave out the figures that stand in them."""
    markdown: Path | None = None
    """File whose tables are to be replaced."""

    def spec(
        self,
        trace: str,
        policies: Sequence[str],
        capacities: tuple[tuple[TierSize, ...], ...],
        hints: tuple[float, ...] = (0.0,),
    ) -> Spec:
        return Spec(
            traces=(trace,),
            policies=tuple(policies),
            capacities=capacities,
            model="llama-3.1-70b",
            tp=4,
            seeds=(self.seed,),
            hints=hints,
        )

    def single(self) -> tuple[tuple[TierSize, ...], ...]:
        """One tier of each capacity."""
        return parse_capacities([], [f"dram={size}" for size in self.capacities])


QUICK = Size(
    traces=("agentic",),
    sessions=16,
    policies=("lru", "ttl", "workload", "lhd", "delay"),
    capacities=("10%", "0.5live"),
    hints=(0.0, 1.0),
    samples=1,
)
"""A minute: says that everything runs, and little about policies."""
THREE_TIERS = parse_capacities(THREE, [])


@dataclass(frozen=True, slots=True)
class Source:
    """One trace."""

    name: str
    trace: str
    """As the simulator names it."""
    note: str
    """Where it is from, for people."""
    whole: bool
    """False: not with all sessions."""


@contextmanager
def sources(size: Size) -> Iterator[list[Source]]:
    """The traces that are there; what is missing is said on stderr, loudly."""
    with tempfile.TemporaryDirectory(prefix="tieredkv-bench-") as directory:
        found = [_source(name, size, Path(directory)) for name in size.traces]
        yield [source for source in found if source is not None]


def _source(name: str, size: Size, directory: Path) -> Source | None:
    if name in PRESETS:
        whole = PRESETS[name].sessions
        if size.sessions is None or size.sessions == whole:
            note = f"generator, {whole} sessions, seed {size.seed}"
            return Source(name, GENERATE + name, note, True)
        path = directory / f"{name}.jsonl"
        write_trace(path, stream(name, size.sessions, size.seed))
        note = f"generator, {size.sessions} of {whole} sessions, seed {size.seed}"
        return Source(name, str(path), note, False)
    path = SHARED / f"{name}.jsonl.gz" if name in FILES else Path(name)
    if not path.is_file():
        print(f"!!! SKIPPED {name}: no file {path}", file=sys.stderr, flush=True)
        return None
    stem = path.name.split(".", 1)[0]
    return Source(stem, str(path), f"`{path.name}`", True)


def parse(argv: Sequence[str], tables: bool) -> Size:
    """Options of the command line; exits with 2 and a line on stderr for bad ones."""
    parser = argparse.ArgumentParser(prog="python -m benches eviction")
    add = parser.add_argument
    add("--quick", action="store_true", help="a minute instead of hours")
    add("--trace", metavar="A,B", help=f"of {', '.join((*FILES, *PRESETS))}, or files")
    add("--sessions", type=int, help="of each preset, from its start")
    add("--seed", type=int, help="of the presets and of the hints")
    add("--policy", metavar="A,B", help="LRU is always there")
    add("--hinted", metavar="A,B", help="with finish hints too; by default lru, delay")
    add("--capacity", metavar="X,X", help="10%% of the unique blocks, 0.5live, 1TiB")
    add("--hints", metavar="X,X", help="shares of sessions that say when they have finished")
    add("--part", metavar="A,B", help=f"of {', '.join(PARTS)}")
    add("--jobs", type=int, help="processes; times are measured in one")
    add("--markdown", metavar="FILE", type=Path, help="replace the tables in this file")
    args = parser.parse_args(argv)
    try:
        size = replace(
            QUICK if args.quick else Size(), **_chosen(args), tables=tables, markdown=args.markdown
        )
        for policy in (*size.policies, *size.hinted):
            load_plugin(POLICIES, policy, BUILTIN)
        if size.markdown is not None:
            merge(size.markdown, [])
    except TieredKVError as error:  # now, not after hours
        parser.error(str(error))
    return size


def _chosen(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `Size` that were asked for."""
    chosen: dict[str, Any] = {}
    for option, field in (
        ("trace", "traces"),
        ("policy", "policies"),
        ("hinted", "hinted"),
        ("capacity", "capacities"),
        ("part", "parts"),
    ):
        text = getattr(args, option)
        if text is not None:
            chosen[field] = parse_words(f"--{option}", text)
    if args.policy is not None and args.hinted is None:
        named = {"lru", *chosen["policies"]}
        chosen["hinted"] = tuple(policy for policy in Size().hinted if policy in named)
    if args.capacity is not None:
        parse_capacities([], [f"dram={size}" for size in parse_words("", args.capacity)])
    unknown = set(chosen.get("parts", ())) - set(PARTS)
    if unknown:
        raise TieredKVError(f"--part {', '.join(sorted(unknown))}: one of {', '.join(PARTS)}")
    if args.hints is not None:
        chosen["hints"] = parse_shares("--hints", args.hints)
    for option in ("sessions", "seed", "jobs"):
        number = getattr(args, option)
        if number is not None:
            if number < (option != "seed"):
                raise TieredKVError(f"--{option} {number}: pass at least {int(option != 'seed')}")
            chosen[option] = number
    return chosen
