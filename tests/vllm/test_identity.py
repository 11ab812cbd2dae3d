"""Identity of blocks: what changes their bytes changes it, nothing else does, all ranks agree."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm.engines import engine
from tests.vllm.identity_world import PAGE, TIERS, caches, configure, identify, settings, spec
from tests.vllm.model import build
from tests.vllm.processes import call
from tieredkv.connector import identity
from tieredkv.connector.identity import (
    block_bytes,
    chunk_tokens,
    engine_name,
    fingerprint,
    refuse,
)
from tieredkv.errors import ConfigError
from tieredkv.types import Fingerprint


@pytest.fixture(scope="module")
def base(model: Path) -> Fingerprint:
    return identify(model)


def changed(one: Fingerprint, other: Fingerprint) -> set[str]:
    return {name for name in one.__slots__ if getattr(one, name) != getattr(other, name)}


# --- what changes it ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        ({"hf_overrides": {"rope_theta": 5.0}}, {"model"}),
        ({"hf_overrides": {"rms_norm_eps": 0.1}}, {"model"}),
        ({"dtype": "bfloat16"}, {"model"}),  # the spec, which follows, is given here
        ({"disable_sliding_window": True}, {"model"}),
        ({"kv_cache_dtype": "fp8_e5m2"}, {"dtype"}),
        ({"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]}, {"layout"}),
        ({"prefix_caching_hash_algo": "sha256_cbor"}, {"layout"}),
        ({"tensor_parallel_size": 2}, {"world"}),
        ({"load_format": "dummy"}, {"weights"}),
        ({"load_format": "dummy", "seed": 1}, {"weights"}),
        ({"weights_id": "release 7"}, {"weights"}),
        ({"order": "BLHNC"}, {"layout"}),
        ({"order": "LBNHC"}, {"layout"}),
        ({"attention_backend": "CPU_ATTN"}, {"layout"}),
    ],
)
def test_an_argument_that_changes_kv_changes_it(
    model: Path, base: Fingerprint, args: dict[str, Any], fields: set[str]
) -> None:
    assert changed(base, identify(model, **args)) == fields


@pytest.mark.parametrize(
    "layers",
    [
        [{}],
        [{}] * 3,
        [{"block_size": 64}] * 2,
        [{"num_kv_heads": 1}] * 2,
        [{"head_size": 64}] * 2,
        [{"num_kv_heads": 1, "head_size": 64}] * 2,  # pages of the same size
        [{"num_head_slots": 4, "state_content_bytes": 128}] * 2,  # and once more
        [{"sliding_window": 64}] * 2,
        [{}, {"head_size": 64, "head_size_v": 64}],
        [{"dtype": torch.bfloat16}] * 2,
    ],
)
def test_the_shape_of_the_cache_changes_it(
    model: Path, base: Fingerprint, layers: list[dict[str, Any]]
) -> None:
    fields = changed(base, identify(model, *(spec(**layer) for layer in layers)))
    assert fields - {"dtype"} == {"layout"}
    assert ("dtype" in fields) == ("dtype" in layers[0])


def test_which_layer_has_which_shape_changes_it(model: Path) -> None:
    """Though the first layer, the bytes of a block and the names of layers are the same."""

    def found(*sizes: int) -> Fingerprint:
        return identify(model, *(spec(head_size=size, head_size_v=size) for size in sizes))

    assert changed(found(32, 64, 128), found(32, 128, 64)) == {"layout"}
    assert changed(found(32, 64, 32), found(32, 32, 64)) == {"layout"}


def test_quantisation_of_the_cache_changes_it(model: Path) -> None:
    from vllm.v1.kv_cache_interface import KVQuantMode

    modes = [KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR, KVQuantMode.NVFP4]
    found = {
        identify(model, spec(dtype=torch.uint8, kv_quant_mode=mode), kv_cache_dtype=dtype).dtype
        for mode in modes
        for dtype in ("fp8_e4m3", "fp8_e5m2")
    }
    assert len(found) == 6


def test_the_environment_changes_it(
    model: Path, base: Fingerprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {base}
    for seed in ("0", "1"):
        with monkeypatch.context() as patch:
            patch.setenv("PYTHONHASHSEED", seed)
            found.add(identify(model))
    with monkeypatch.context() as patch:
        amx = torch.cpu._is_amx_tile_supported()
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: not amx)
        found.add(identify(model))
    with monkeypatch.context() as patch:
        patch.setattr("vllm.__version__", "0.99.0")
        found.add(identify(model))
    assert len(found) == 5
    assert {one.layout for one in found} == {
        one.layout for one in found if changed(one, base) <= {"layout"}
    }


def test_the_context_length_changes_it_only_where_attention_depends_on_it(model: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
        "original_max_position_embeddings": 1024,
        "factor": 32.0,
    }
    long = {"hf_overrides": {"rope_parameters": rope}}
    one, other = (identify(model, max_model_len=n, **long) for n in (1024, 2048))
    assert changed(one, other) == {"model"}
    assert identify(model, max_model_len=1024) == identify(model, max_model_len=2048)


def test_a_draft_model_with_kv_changes_it(model: Path, models: Callable[..., Path]) -> None:
    found = [identify(model)]
    for draft in (models(), models(seed=1)):
        asked = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
        found.append(identify(model, speculative_config=asked))
    assert changed(found[1], found[2]) == {"weights"}
    assert changed(found[0], found[1]) == {"model", "weights"}
    config = configure(model, speculative_config=asked)
    cache = caches(config)
    for field, value in (("method", "eagle"), ("kv_cache_dtype", "fp8")):
        before = fingerprint(config, cache, settings())
        setattr(config.speculative_config, field, value)
        assert changed(before, fingerprint(config, cache, settings())) == {"model"}
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    assert identify(model, speculative_config=ngram) == found[0]


def test_other_weights_or_configuration_at_the_same_path_change_it(tmp_path: Path) -> None:
    path = build(tmp_path / "model")
    before = identify(path)
    build(path, seed=1)
    swapped = identify(path)
    assert changed(before, swapped) == {"weights"}
    saved = json.loads((path / "config.json").read_text())
    saved["rms_norm_eps"] = 0.5
    (path / "config.json").write_text(json.dumps(saved))
    assert changed(swapped, identify(path)) == {"model"}
    build(path)
    assert identify(path) == before


def test_a_function_as_override_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"hf_overrides is the function .* pass a dict"):
        identify(model, hf_overrides=_same)


def _same(config: Any) -> Any:
    return config


# --- what does not --------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        {"blocks": 300},
        {"max_num_seqs": 8},
        {"max_num_batched_tokens": 1024},
        {"max_model_len": 1024},
        {"gpu_memory_utilization": 0.5},
        {"scheduling_policy": "priority"},
        {"enable_prefix_caching": False},
        {"served_model_name": "another"},
        {"seed": 7},
        {"data_parallel_size": 2},
        {"transfer": {"engine_id": "one", "kv_port": 4242, "kv_role": "kv_producer"}},
        {"transfer": {"kv_connector_extra_config": {"tiers": []}}},
    ],
)
def test_unrelated_arguments_do_not_change_it(
    model: Path, base: Fingerprint, args: dict[str, Any]
) -> None:
    assert identify(model, **args) == base


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_the_number_of_blocks_does_not_change_it(model: Path, order: str) -> None:
    assert len({identify(model, order=order, blocks=n) for n in (256, 257, 1000)}) == 1


def test_a_copy_of_the_model_has_the_same_identity(
    model: Path, base: Fingerprint, tmp_path: Path
) -> None:
    copy = shutil.copytree(model, tmp_path / "elsewhere" / "copy")
    os.utime(copy / "model.safetensors", (0, 0))
    assert identify(copy) == base


def test_scheduler_and_workers_agree_where_layers_differ(model: Path) -> None:
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

    config = configure(model)
    for order in ("LBHNC", "BLHNC"):
        worker = caches(config, spec(), spec(head_size=64, head_size_v=64), spec(), order=order)
        scheduler = generate_scheduler_kv_cache_config([worker])
        assert worker.kv_cache_groups[0].kv_cache_spec != scheduler.kv_cache_groups[0].kv_cache_spec
        one, other = (fingerprint(config, kv, settings()) for kv in (worker, scheduler))
        assert one == other
        assert block_bytes(worker) == block_bytes(scheduler) == 4 * PAGE


# --- real engines ---------------------------------------------------------------------


def _told(model: str, report: str, **args: Any) -> dict[str, Any]:
    """What each process of an engine says of its identity."""
    transfer = {
        "kv_connector": "Probe",
        "kv_connector_module_path": "tests.vllm.identity_probe",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"report": report},
    }
    Path(report).mkdir(parents=True)
    with engine(Path(model), transfer, **args):
        files = sorted(Path(report).iterdir())
        return {file.stem: json.loads(file.read_text()) for file in files}


def test_two_ranks_and_their_scheduler_agree(tmp_path: Path) -> None:
    """With a model whose workers change its configuration when they load it."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,
    }
    path = build(tmp_path / "model", "mla", rope_parameters=yarn)
    told = call(_told, model=path, report=tmp_path / "report", tensor_parallel_size=2)
    assert [name.split("-")[0] for name in told] == ["scheduler", "worker", "worker"]
    assert {one["rope"] for one in told.values()} == {"yarn", "deepseek_yarn"}
    assert len({one["digest"] for one in told.values()}) == 1
    assert {one["engine"] for one in told.values()} == {"dp0"}
    assert [one["world"] for one in told.values()] == [[2, 1]] * 3
    # one latent vector of bfloat16 for each of 2 layers and 32 tokens
    assert {one["block_bytes"] for one in told.values()} == {2 * 32 * (512 + 64) * 2}
    assert {one["registered"] for one in told.values() if "registered" in one} == {
        2 * 32 * (512 + 64) * 2
    }


def test_restarted_engines_agree_and_block_bytes_are_what_they_register(
    model: Path, tmp_path: Path
) -> None:
    first = _told(str(model), str(tmp_path / "a"))
    second = _told(str(model), str(tmp_path / "b"), num_gpu_blocks_override=100)
    told = [*first.values(), *second.values()]
    assert len(first) == len(second) == 2
    assert len({one["digest"] for one in told}) == 1
    assert {one["block_bytes"] for one in told} == {2 * PAGE}
    assert [one["registered"] for one in told if "registered" in one] == [2 * PAGE] * 2


# --- geometry and names ---------------------------------------------------------------


def test_chunks_have_a_mebibyte_or_what_is_asked(model: Path) -> None:
    config = configure(model)
    small = caches(config)
    assert block_bytes(small) == 2 * PAGE
    assert chunk_tokens(small, None) == 32 * (1 << 20) // (2 * PAGE) == 1024
    large = caches(config, *[spec(num_kv_heads=64)] * 2)
    assert chunk_tokens(large, None) == 32
    odd = caches(config, *[spec(head_size=96)] * 2)
    assert chunk_tokens(odd, None) == 32 * 11
    assert [chunk_tokens(small, n) for n in (32, 64, 32 * 77)] == [32, 64, 32 * 77]
    for wrong, near in ((48, 64), (0, 32), (-32, 32), (1, 32), (100, 96)):
        expected = rf"block_tokens = {wrong} is not .* block size of 32 tokens; set it to {near},"
        with pytest.raises(ConfigError, match=expected):
            chunk_tokens(small, wrong)


def test_engines_are_named_by_their_data_parallel_rank(model: Path) -> None:
    config = configure(model, data_parallel_size=2)
    parallel = config.parallel_config
    assert engine_name(config, settings()) == "dp0"
    parallel.data_parallel_index = 1  # as an engine's process does for a model without experts
    parallel.reconfigure_for_independent_dp_rank()
    assert engine_name(config, settings()) == "dp1"
    assert engine_name(config, settings(engine="blue")) == "blue"


# --- refusals -------------------------------------------------------------------------


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, identity.__name__)
    return lambda: [r.getMessage() for r in caplog.records if r.name == identity.__name__]


def test_what_can_be_stored_is_not_refused(model: Path, warnings: Callable[[], list[str]]) -> None:
    for order in ("LBHNC", "BLHNC"):
        config = configure(model)
        refuse(config, caches(config, order=order))
        refuse(config, caches(config, spec(), spec(head_size=64, head_size_v=64), order=order))
    assert warnings() == []


def test_failing_requests_are_warned_of(model: Path, warnings: Callable[[], list[str]]) -> None:
    config = configure(model, transfer={"kv_load_failure_policy": "fail"})
    refuse(config, caches(config))
    (warning,) = warnings()
    assert "kv_load_failure_policy = 'fail'" in warning
    assert "'recompute'" in warning


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"prefix_caching_hash_algo": "xxhash"}, "'xxhash'.*must be sha256 or sha256_cbor"),
        ({"prefix_caching_hash_algo": "xxhash_cbor"}, "'xxhash_cbor'.*must be sha256 or"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size = 2 .* set it to 1"),
        (
            {"transfer": {"kv_connector_extra_config": {"tiers": [*TIERS, {"kind": "hbm"}]}}},
            r"tiers\[1\].kind = 'hbm'.*remove this tier",
        ),
    ],
)
def test_settings_are_refused(model: Path, args: dict[str, Any], message: str) -> None:
    config = configure(model, **args)
    with pytest.raises(ConfigError, match=message) as error:
        refuse(config, caches(configure(model)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["decode_context", "prefill_context"])
def test_context_parallelism_is_refused(model: Path, name: str) -> None:
    config = configure(model)
    # set here, for vLLM accepts it on GPUs and with more heads only
    setattr(config.parallel_config, f"{name}_parallel_size", 4)
    with pytest.raises(ConfigError, match=rf"^{name}_parallel_size = 4 .* set it to 1$"):
        refuse(config, caches(configure(model)))


def _kinds() -> dict[str, tuple[Any, str]]:
    from vllm.v1 import kv_cache_interface as kv

    shape: dict[str, Any] = {"block_size": 32, "num_kv_heads": 1, "head_size": 64}
    shape["dtype"] = torch.float32
    mamba = {"block_size": 32, "shapes": ((4, 4),), "dtypes": (torch.float32,)}
    return {
        "sliding": (kv.SlidingWindowSpec(**shape, sliding_window=64), "kind SlidingWindowSpec"),
        "chunked": (kv.ChunkedLocalAttentionSpec(**shape, attention_chunk_size=64), "kind Chunked"),
        "mamba": (kv.MambaSpec(**mamba), "kind MambaSpec cannot be stored, only FullAttentionSpec"),
        "rswa": (kv.RSWASpec(**shape, rswa_window=64), "kind RSWASpec"),
        "mla": (kv.MLAAttentionSpec(**shape), "MLA attention on the CPU.*use a GPU"),
        "not causal": (kv.FullAttentionSpec(**shape, non_causal=True), "not causal"),
    }


@pytest.mark.parametrize("kind", ["sliding", "chunked", "mamba", "rswa", "mla", "not causal"])
def test_kinds_of_caches_are_refused(model: Path, kind: str) -> None:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    found, message = _kinds()[kind]
    config, cache = configure(model), caches(configure(model))
    group = cache.kv_cache_groups[0]
    for wrapped in (found, UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": found})):
        group.kv_cache_spec = wrapped
        with pytest.raises(ConfigError, match=message) as error:
            refuse(config, cache)
        assert "\n" not in str(error.value)


def test_mla_on_a_gpu_is_not_refused(model: Path) -> None:
    config, cache = configure(model), caches(configure(model))
    cache.kv_cache_groups[0].kv_cache_spec = _kinds()["mla"][0]
    with pytest.raises(ConfigError, match="MLA attention on the CPU"):
        refuse(config, cache)
    config.device_config.device_type = "cuda"
    refuse(config, cache)


def test_several_groups_and_none_are_refused_with_all_other_reasons(model: Path) -> None:
    config = configure(model, prefix_caching_hash_algo="xxhash")
    cache = caches(configure(model))
    cache.kv_cache_groups *= 2
    with pytest.raises(ConfigError) as error:
        refuse(config, cache)
    groups, algorithm = str(error.value).split("\n")
    assert groups.startswith("the model has 2 groups of KV caches")
    assert "--disable-hybrid-kv-cache-manager" in groups
    assert algorithm.startswith("prefix_caching_hash_algo = 'xxhash'")
    cache.kv_cache_groups = []
    with pytest.raises(ConfigError, match="has 0 groups"):
        refuse(config, cache)


def test_encoders_and_old_engines_are_refused(model: Path) -> None:
    config, cache = configure(model), caches(configure(model))
    with pytest.raises(ConfigError, match=r"use vLLM 0\.32"):
        refuse(config, replace(cache, kv_cache_layout=None))
    config.model_config.is_encoder_decoder = True
    with pytest.raises(ConfigError, match="encoder-decoder"):
        refuse(config, cache)


def test_sleep_mode_is_refused(model: Path) -> None:
    """What sleeps gives up the memory of the KV cache, while it may be copied."""
    config = configure(model)
    cache = caches(config)
    refuse(config, cache)
    config.model_config.enable_sleep_mode = True
    with pytest.raises(ConfigError, match="start without it"):
        refuse(config, cache)
