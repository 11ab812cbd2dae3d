"""What an operator sees: usage, /metrics and the log of a real server, sessions, KV events."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conversation import Completion, Turn, difference, play, reusable, script
from tests.vllm.engines import core, engine, generate, scheduler_connector, tiered
from tests.vllm.processes import NAME, ROOT, Server, server
from tieredkv.eviction.base import Access
from tieredkv.eviction.lru import LruPolicy

CHUNK = 64
CHUNK_BYTES = 2 * 2 * CHUNK * 2 * 32 * 4
"""Layers, keys and values, tokens, heads, dimensions, float32."""
DRAM_CHUNKS = 6
TALK = script(11, sessions=2, turns=3)
RECORD = "RECORDED_ACCESSES"
CHANNELS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "by-body": ({"session_id": "by-body"}, {}),
    "by-header": ({}, {"X-Session-ID": "by-header"}),
    "by-xargs": ({"vllm_xargs": {"session_id": "by-xargs"}}, {}),
    "by-params": (
        {
            "kv_transfer_params": {
                "session_id": "by-params", "category": "tool_use", "tool": "grep",
                "priority": 3, "ttl": 60, "finish": True,
            }
        },
        {},
    ),
}  # fmt: skip
"""Session: what names it in the body and in the headers of a request."""


class Recorder(LruPolicy):
    """Writes down what the planner tells the policy; runs in the server's engine."""

    def record(self, access: Access) -> None:
        super().record(access)
        if RECORD in os.environ and access.turn is not None:
            with open(os.environ[RECORD], "a") as file:
                file.write(json.dumps({"kind": access.kind, **asdict(access.turn)}) + "\n")


def configuration(path: Path, dram: int = DRAM_CHUNKS, **dram_more: Any) -> dict[str, Any]:
    nvme = {"kind": "nvme", "path": str(path), "capacity": "64MiB", "min_free": 0}
    return tiered(
        {
            "block_tokens": CHUNK,
            "tiers": [
                {"kind": "dram", "capacity": dram * CHUNK_BYTES, **dram_more},
                {**nvme, "segment": "1MiB", "write": "through"},
            ],
        }
    )


@dataclass(frozen=True)
class Life:
    """What one server has answered and shown."""

    turns: list[Turn]
    metrics: dict[str, dict[frozenset[tuple[str, str]], float]]
    """Name -> labels -> value."""
    types: dict[str, str]
    log: str
    recorded: list[dict[str, Any]]

    def value(self, name: str, **labels: str) -> float:
        """The sum of all samples of this name that have these labels."""
        found = [
            v for have, v in self.metrics[name].items() if labels.items() <= dict(have).items()
        ]
        return sum(found)


def read_metrics(api: Server) -> tuple[dict[str, Any], dict[str, str]]:
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    types = {}
    for family in text_string_to_metric_families(api.request("/metrics").decode()):
        types[family.name] = family.type
        for sample in family.samples:
            values.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return values, types


def forget_in_engine(api: Server) -> None:
    """Empty vLLM's own prefix cache; it refuses while blocks are being saved."""
    deadline = time.monotonic() + 60
    while not json.loads(api.request("/reset_prefix_cache", {}))["success"]:
        assert time.monotonic() < deadline, "blocks of the engine are held for ever"
        time.sleep(0.02)


def external(
    api: Server, prompts: Sequence[Sequence[int]], limits: Sequence[int]
) -> list[Completion]:
    """Complete with nothing in vLLM's own cache: every cached token came from a tier."""
    forget_in_engine(api)
    return api.complete(prompts, limits)


def settled(api: Server) -> tuple[dict[str, Any], dict[str, str]]:
    """/metrics once nothing is under way."""
    deadline = time.monotonic() + 60
    while True:
        values, types = read_metrics(api)
        pending = values.get("tieredkv:pending_jobs", {})
        if pending and not any(pending.values()):
            return values, types
        assert time.monotonic() < deadline, f"jobs stay pending: {pending}"
        time.sleep(0.1)


def logging_config(folder: Path) -> Path:
    """The logging configuration that docs/vllm.md shows."""
    text = (ROOT / "docs" / "vllm.md").read_text()
    (code,) = [part for part in text.split("```json\n")[1:] if '"loggers"' in part.split("```")[0]]
    path = folder / "logging.json"
    path.write_text(code.split("```")[0])
    return path


def live(
    model: Path, folder: Path, use: Callable[[Server], list[Turn]], *, last: bool, **dram: Any
) -> Life:
    accesses = folder / "accesses"
    accesses.write_text("")
    env = {
        "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
        "VLLM_LOG_STATS_INTERVAL": "1",
        "VLLM_LOGGING_CONFIG_PATH": str(logging_config(folder)),
        RECORD: str(accesses),
    }
    connector = configuration(folder / "kv", **dram)
    with server(model, connector, env=env, shutdown_timeout=20) as api:
        turns = use(api)
        metrics, types = settled(api)
        deadline = time.monotonic() + 30
        while "KV Transfer metrics" not in api.log and time.monotonic() < deadline:
            time.sleep(0.2)
        log = api.log
        if last:
            api.kill()  # saves ten seconds
        else:
            api.stop(60)
    recorded = [json.loads(line) for line in accesses.read_text().splitlines()]
    return Life(turns, metrics, types, log, recorded)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Turn]:
    with engine(model, enable_prefix_caching=False) as llm:
        return play(TALK, partial(generate, llm), together=False)


@pytest.fixture(scope="module")
def first(model: Path, folder: Path) -> Life:
    """Sessions named in every way, then a conversation, then its first prompts again."""

    def use(api: Server) -> list[Turn]:
        for number, (body, headers) in enumerate(CHANNELS.values()):
            prompt = [(number + 17 * i) % 256 for i in range(2 * CHUNK + 10)]
            api.complete([prompt], [4], headers, **body)
        turns = play(TALK, partial(external, api), together=False)
        again = []
        for turn in turns:
            (answer,) = external(api, [turn.prompt], [len(turn.output)])
            again.append(Turn(turn.session, turn.index, turn.prompt, answer.tokens, answer.cached))
        return turns + again

    return live(model, folder, use, last=False, eviction={"policy": f"{__name__}:Recorder"})


@pytest.fixture(scope="module")
def second(model: Path, folder: Path, first: Life) -> Life:
    """Another server on the directory that the first has left: all prompts, last turn first."""

    def use(api: Server) -> list[Turn]:
        turns = []
        for turn in reversed(first.turns[: len(first.turns) // 2]):
            (answer,) = external(api, [turn.prompt], [len(turn.output)])
            turns.append(Turn(turn.session, turn.index, turn.prompt, answer.tokens, answer.cached))
        return turns[::-1]

    return live(model, folder, use, last=True)


def whole_chunks(turn: Turn) -> int:
    """Prompt tokens in chunks that a turn before has stored in full."""
    return len(turn.prompt) // CHUNK * CHUNK


def test_usage_tells_the_tokens_that_came_from_tiers(first: Life, expected: list[Turn]) -> None:
    half = len(first.turns) // 2
    turns, again = first.turns[:half], first.turns[half:]
    assert difference(expected, turns) is None
    assert difference(expected, again) is None
    assert [turn.cached for turn in turns] == reusable(turns, CHUNK)
    assert sum(turn.cached for turn in turns) > 0
    # at least one token is computed
    assert [t.cached for t in again] == [min(whole_chunks(t), len(t.prompt) - 1) for t in again]


def test_a_restarted_server_finds_everything_on_nvme(second: Life, expected: list[Turn]) -> None:
    assert difference(expected, second.turns) is None
    assert [turn.cached for turn in second.turns] == [
        min(whole_chunks(turn), len(turn.prompt) - 1) for turn in second.turns
    ]
    assert second.value("tieredkv:hit_tokens_total", tier="nvme") > 0


@pytest.mark.parametrize("life", ["first", "second"])
def test_metrics_agree_with_vllm_and_with_each_other(
    life: str, request: pytest.FixtureRequest
) -> None:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    seen: Life = request.getfixturevalue(life)
    loaded = {tier: seen.value("tieredkv:hit_tokens_total", tier=tier) for tier in ("dram", "nvme")}
    assert min(loaded.values()) > 0, "a tier was not used"
    by_source = {
        source.value: seen.value("vllm:prompt_tokens_cached_by_source_total", source=source.value)
        for source in CacheHitSource
    }
    assert by_source["host"] == loaded["dram"]
    assert by_source["disk"] == loaded["nvme"]
    assert by_source["external_unspecified"] == by_source["p2p"] == 0
    assert seen.value("vllm:external_prefix_cache_hits_total") == sum(loaded.values())
    assert sum(turn.cached for turn in seen.turns) == sum(loaded.values())
    for operation in ("read", "write"):
        for tier in ("dram", "nvme"):
            labels = {"operation": operation, "tier": tier}
            good = seen.value("tieredkv:moved_blocks_total", outcome="ok", **labels)
            assert good == seen.value("tieredkv:moved_blocks_total", **labels)
            assert good * CHUNK_BYTES == seen.value("tieredkv:moved_bytes_total", **labels)
    assert seen.value("tieredkv:moved_blocks_total", operation="read", tier="nvme") > 0


@pytest.mark.parametrize("life", ["first", "second"])
def test_gauges_stay_within_capacity(life: str, request: pytest.FixtureRequest) -> None:
    seen: Life = request.getfixturevalue(life)
    assert seen.value("tieredkv:capacity_bytes", tier="dram") == DRAM_CHUNKS * CHUNK_BYTES
    for tier in ("dram", "nvme"):
        used = seen.value("tieredkv:used_bytes", tier=tier)
        assert 0 < used <= seen.value("tieredkv:capacity_bytes", tier=tier) <= 64 << 20
        assert used % CHUNK_BYTES == 0
    assert seen.value("tieredkv:pending_jobs") == seen.value("tieredkv:held_blocks") == 0


def test_every_metric_is_there_with_its_type_and_the_engines_labels(first: Life) -> None:
    from tieredkv.connector.stats import COUNTERS, GAUGES

    ours = {
        name: kind
        for name, kind in first.types.items()
        if re.match(r"tieredkv:(?!.*_created)", name)
    }
    assert ours == {f"tieredkv:{name}": "counter" for name in COUNTERS} | {
        f"tieredkv:{name}": "gauge" for name in GAUGES
    }
    for (name, (_, labels)), end in [(c, "_total") for c in COUNTERS.items()] + [
        (g, "") for g in GAUGES.items()
    ]:
        for have in first.metrics.get(f"tieredkv:{name}{end}", {}):
            assert dict(have).keys() == {"model_name", "engine", *labels}
            assert dict(have)["model_name"] == NAME


def test_missed_tokens_are_those_that_were_computed(first: Life) -> None:
    computed = sum(len(turn.prompt) - turn.cached for turn in first.turns)
    computed += len(CHANNELS) * (2 * CHUNK + 10)
    assert first.value("tieredkv:missed_tokens_total") == computed


def test_log_lines(first: Life) -> None:
    start = f"chunks of {CHUNK} tokens and {CHUNK_BYTES} bytes; tiers: dram {DRAM_CHUNKS} slots"
    assert start in first.log
    hits = re.findall(
        r"request \S+: hit (\d+) tokens beyond 0 in the engine, to load (\d+) \((.*)\)", first.log
    )
    assert sum(int(hit) for hit, *_ in hits) == sum(turn.cached for turn in first.turns)
    for tier in ("dram", "nvme"):
        loaded = sum(int(n) for *_, told in hits for n in re.findall(rf"{tier} (\d+)", told))
        assert loaded == first.value("tieredkv:hit_tokens_total", tier=tier)
    stored = re.findall(r"request \S+: stored (\d+) of (\d+) tokens", first.log)
    assert len(stored) == len(CHANNELS) + len(first.turns)
    assert all(int(tokens) == (int(total) - 1) // CHUNK * CHUNK for tokens, total in stored)
    assert re.search(r"KV Transfer metrics: .*\bmoved_bytes\|write\|dram=[1-9]", first.log)
    assert "Traceback" not in first.log


def test_sessions_reach_the_planner_by_every_channel(first: Life) -> None:
    named = [turn for turn in first.recorded if not str(turn["session"]).startswith("request:")]
    assert {turn["session"] for turn in named} == set(CHANNELS)
    params = [turn for turn in named if turn["session"] == "by-params"]
    assert {(turn["priority"], turn["ttl"]) for turn in params} == {(3, 60.0)}
    assert params[0]["category"] == "tool_use"
    (end,) = [turn for turn in first.recorded if turn["kind"] == "end"]
    assert (end["session"], end["next_tool"], end["output_tokens"]) == ("by-params", "grep", 4)
    assert end["finish_reason"] == "tool_use"


def test_unnamed_turns_continue_the_session_that_they_extend(first: Life) -> None:
    own = [t["session"] for t in first.recorded if str(t["session"]).startswith("request:")]
    assert len(set(own)) == len(TALK)


def test_nothing_is_cached_for_a_request_that_says_so(model: Path, tmp_path: Path) -> None:
    prompt = [(5 * i + i * i) % 256 for i in range(200)]
    with engine(model, configuration(tmp_path)) as llm:
        generate(llm, [prompt])
        drain(llm)
        assert llm.reset_prefix_cache()
        (skipped,) = generate(llm, [prompt], skip_reading_prefix_cache=True)
        drain(llm)
        assert llm.reset_prefix_cache()
        (loaded,) = generate(llm, [prompt])
    assert (skipped.cached, loaded.cached) == (0, 192)


def test_a_session_that_finishes_with_its_last_save_under_way_goes_first(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accesses = tmp_path / "accesses"
    monkeypatch.setenv(RECORD, str(accesses))
    eviction = {"policy": f"{__name__}:Recorder"}
    params = {"session_id": "short", "finish": True}
    with engine(model, configuration(tmp_path / "kv", eviction=eviction)) as llm:
        # one step: all of the prompt is stored at the end
        generate(llm, [[3] * 200], 1, extra_args={"kv_transfer_params": params})
        drain(llm)
    recorded = [json.loads(line) for line in accesses.read_text().splitlines()]
    assert {turn["session"] for turn in recorded} == {"short"}
    assert recorded[-1]["kind"] == "end"


# --- KV events, in this process ---------------------------------------------------------


class Router:
    """Follows events as a router would: medium -> hashes."""

    def __init__(self) -> None:
        self.blocks: dict[str, set[Any]] = {}
        self.sizes: set[int] = set()

    def publish(self, batch: Any) -> None:
        from msgspec import msgpack
        from vllm.distributed.kv_events import KVEventBatch

        received = msgpack.Decoder(KVEventBatch).decode(msgpack.encode(batch))
        self.hear(received.events)

    def hear(self, events: Iterator[Any] | Sequence[Any]) -> None:
        for event in events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self.blocks.clear()
                continue
            blocks = self.blocks.setdefault(event.medium, set())
            if kind == "BlockStored":
                blocks.update(event.block_hashes)
                if event.medium != "GPU":
                    self.sizes.add(event.block_size)
            else:
                blocks.difference_update(event.block_hashes)

    def shutdown(self) -> None:
        return


def drain(llm: Any) -> None:
    """Step an idle engine until its connector has nothing under way, as the server's loop does."""
    deadline = time.monotonic() + 60
    while scheduler_connector(llm).has_pending_push_work():
        assert time.monotonic() < deadline
        core(llm).step_with_batch_queue() if core(llm).batch_queue else core(llm).step()


def resident(llm: Any) -> Mapping[str, set[Any]]:
    """Hashes by medium of what the planner has."""
    from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

    shipping = scheduler_connector(llm).scheduler.sides.shipping
    found: dict[str, set[Any]] = {"CPU": set(), "STORAGE": set()}
    with shipping.lock:
        res = shipping.planner.res
        for run in res.tree.runs.values():
            for tier, level in enumerate(res.levels):
                for key, slot in zip(run.keys, run.slots[tier] or (), strict=False):
                    if slot >= 0:
                        medium = "STORAGE" if level.durable else "CPU"
                        found[medium].add(maybe_convert_block_hash(BlockHash(key)))
    return found


def replay(llm: Any, router: Router) -> dict[str, set[Any]]:
    drain(llm)
    time.sleep(0.2)  # a commit may come in
    router.hear(scheduler_connector(llm).take_events())
    return {medium: router.blocks.get(medium, set()) for medium in ("CPU", "STORAGE")}


@pytest.fixture
def listening(model: Path, tmp_path: Path) -> Iterator[Callable[[], tuple[Any, Router]]]:
    """`listening()`: an engine, and a router that hears all its events."""
    with ExitStack() as stack:

        def start() -> tuple[Any, Router]:
            stack.pop_all().close()
            events = {"enable_kv_cache_events": True, "publisher": "null"}
            connector = configuration(tmp_path, dram=8)
            llm = stack.enter_context(engine(model, connector, kv_events_config=events))
            router = Router()
            core(llm).scheduler.kv_event_publisher = router
            return llm, router

        yield start


def test_replayed_events_are_what_is_resident(
    listening: Callable[[], tuple[Any, Router]],
) -> None:
    llm, router = listening()
    play(TALK, partial(generate, llm), together=False)  # evicts from DRAM
    heard = replay(llm, router)
    assert heard == resident(llm)
    assert 0 < len(heard["CPU"]) <= 8 < len(heard["STORAGE"])
    assert router.sizes == {CHUNK}
    assert heard["STORAGE"] <= router.blocks["GPU"], "chunks are named as the engine's blocks are"
    on_disk = heard["STORAGE"]
    del llm
    llm, router = listening()
    generate(llm, [[1] * 40])  # less than a chunk
    assert replay(llm, router) == resident(llm)
    assert router.blocks["STORAGE"] == on_disk, "a restart announces what it finds"
    assert llm.reset_prefix_cache(reset_connector=True)
    generate(llm, [[2] * 100])
    heard = replay(llm, router)
    assert heard == resident(llm)
    assert [len(heard["CPU"]), len(heard["STORAGE"])] == [1, 1]
