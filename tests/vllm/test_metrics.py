"""docs/vllm.md and the dashboard name what there is: metrics, keys, and texts of the source."""

from __future__ import annotations

import inspect
import json
import logging.config
import re
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.model import TEXT
from tests.vllm.processes import ROOT
from tieredkv.config import Config, ConnectorConfig
from tieredkv.connector import requests
from tieredkv.connector.stats import COUNTERS, GAUGES, TieredProm, TieredStats
from tieredkv.types import Outcome

DOC = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((ROOT / "docs" / "grafana-vllm.json").read_text(encoding="utf-8"))
OTHER_LABELS = {"engine", "model_name"}


def section(name: str) -> str:
    return DOC.split(f"\n## {name}\n")[1].split("\n## ")[0]


def rows(name: str) -> list[list[str]]:
    lines = re.findall(r"^\| (`.*) \|$", section(name), flags=re.MULTILINE)
    return [re.split(r" \| ", line.replace("| |", "|  |")) for line in lines]


def code(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOC, re.DOTALL)


def exported() -> dict[str, set[str]]:
    """Sample name -> labels of everything that the connector counts."""
    names = {f"tieredkv:{name}_total": set(labels) for name, (_, labels) in COUNTERS.items()}
    return names | {f"tieredkv:{name}": set(labels) for name, (_, labels) in GAUGES.items()}


# --- documents --------------------------------------------------------------------------


def test_the_table_of_metrics_is_what_is_exported() -> None:
    found = {}
    for name, kind, labels, meaning in rows("Metrics"):
        end = "_total" if kind == "counter" else ""
        assert name.strip("`") + end not in found
        found[name.strip("`") + end] = set(filter(None, re.split(r"[, ]+", labels)))
        assert meaning.endswith(".")
        assert kind == ("counter" if name.strip("`")[9:] in COUNTERS else "gauge")
    assert found == exported()


def test_the_table_of_keys_is_the_schema() -> None:
    documented = {row[0].strip("`"): row[1] for row in rows("Configuration")}
    assert documented.keys() == ConnectorConfig.model_fields.keys()
    assert documented["load"] == f"`{ConnectorConfig().load}`"
    assert documented["load_deadline"] == f"`{ConnectorConfig().load_deadline}`"


def test_the_table_of_request_keys_is_what_is_read() -> None:
    documented = {row[0].strip("`") for row in rows("What a request can say") if len(row) == 3}
    parts = ("scheduler.py", "turns.py")
    others = "".join((ROOT / "tieredkv/connector" / part).read_text() for part in parts)
    source = inspect.getsource(requests) + others
    read = re.findall(r'params(?:_of\(request\))?\.get\("(\w+)"', source)
    assert documented == set(read)


def sources() -> str:
    """The texts of the package as they are printed: literals joined, fields as one character."""
    text = ""
    for path in sorted((ROOT / "tieredkv").rglob("*.py")):
        joined = re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))
        text += re.sub(r"\{[^{}\n]*\}|%[sdr]|%\.\d+[a-z]", "…", joined) + "\n"
    return text


SOURCES = sources()


@pytest.mark.parametrize("text", [row[0].strip("`") for row in rows("Troubleshooting")])
def test_every_text_that_is_explained_is_in_the_source(text: str) -> None:
    assert len(text) > 15
    assert text in SOURCES


def test_a_text_that_is_not_in_the_source_is_found_out() -> None:
    assert "is in use by process …; stop them" not in SOURCES
    assert "is in use by process …; stop it" in SOURCES


def test_configurations_that_are_shown_are_valid() -> None:
    shown = [json.loads(text) for text in code("json")]
    (transfer,) = [value for value in shown if "kv_connector" in value]
    (logs,) = [value for value in shown if "loggers" in value]
    (connector,) = [value["connector"] for value in shown if "connector" in value]
    tiers = transfer["kv_connector_extra_config"]["tiers"]
    config = Config.model_validate(transfer["kv_connector_extra_config"])
    assert [tier.kind for tier in config.tiers] == ["dram", "nvme"]
    told = Config.model_validate({"tiers": tiers, "connector": connector}).connector
    assert told.stop_tokens == {128008: "tool_use"}
    logging.config.DictConfigurator(logs)
    assert logs["loggers"].keys() == {"vllm", "tieredkv"}
    assert logs["disable_existing_loggers"] is False


def test_the_tiny_model_of_the_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    monkeypatch.chdir(tmp_path)
    (source,) = code("python")
    exec(compile(source, "vllm.md", "exec"), {})
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    assert len(tokenizer("0123456789abcdef" * 100)["input_ids"]) == 1600
    assert len(tokenizer) == TEXT


# --- the dashboard ----------------------------------------------------------------------


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_every_metric_of_the_dashboard_exists_and_every_metric_is_in_it() -> None:
    from vllm.v1.metrics import loggers

    used = set(re.findall(r"\btieredkv:\w+", json.dumps(DASHBOARD)))
    assert used == exported().keys()
    vllm = set(re.findall(r"\bvllm:\w+", json.dumps(DASHBOARD)))
    source = inspect.getsource(loggers)
    assert vllm
    assert all(f'"{name.removesuffix("_total")}"' in source for name in vllm)


@pytest.mark.parametrize("expression", expressions())
def test_labels_of_the_dashboard_exist(expression: str) -> None:
    names = re.findall(r"\b((?:tieredkv|vllm):\w+)\{", expression)
    assert names
    has = [exported().get(name, {"source"}) | OTHER_LABELS for name in names]
    selected = re.findall(r'(\w+)(?:=~|!=|=)"', expression)
    assert set(selected) <= set.intersection(*has)
    for group in re.findall(r"by \(([^)]*)\)", expression):
        assert set(group.split(", ")) <= set.intersection(*has)
    assert expression.count("(") == expression.count(")")


def test_the_dashboard_is_one_that_grafana_can_import() -> None:
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= DASHBOARD.keys()
    panels = DASHBOARD["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", " ".join(map(json.dumps, panels))))
    assert used - {"__rate_interval"} == variables
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)
        for target in panel["targets"]:
            legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = re.findall(r"by \(([^)]*)\)", target["expr"])
            assert legend == set(", ".join(grouped).split(", ")) - {""}


# --- figures ----------------------------------------------------------------------------


def test_counters_add_up_and_the_newest_gauge_counts() -> None:
    first = TieredStats({"counters": {"hit_tokens|dram": 64}, "gauges": {"pending_jobs": 3}})
    second = TieredStats(
        {"counters": {"hit_tokens|dram": 1, "dropped_blocks": 2}, "gauges": {"pending_jobs": 0}}
    )
    total = first.aggregate(second)
    assert total.reduce() == {"hit_tokens|dram": 65, "dropped_blocks": 2, "pending_jobs": 0}
    assert TieredStats().is_empty()
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()


def test_every_figure_reaches_prometheus() -> None:
    from types import SimpleNamespace

    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    config: Any = SimpleNamespace(kv_transfer_config=None)
    kinds = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    shown = TieredProm(config, kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    values = {"tier": "dram", "operation": "read", "outcome": Outcome.CORRUPT.value}
    try:
        for step in (1, 2):
            data: dict[str, dict[str, int]] = {"counters": {}, "gauges": {}}
            for kind, spec in (("counters", COUNTERS), ("gauges", GAUGES)):
                for name, (_, labels) in spec.items():
                    data[kind]["|".join([name, *(values[label] for label in labels)])] = step
            shown.observe(data, 1)
        for sample, labels in exported().items():
            labelled = {"model_name": "m", "engine": "1", **{name: values[name] for name in labels}}
            expected = 3.0 if sample.endswith("_total") else 2.0
            assert REGISTRY.get_sample_value(sample, labelled) == expected
            assert REGISTRY.get_sample_value(sample, {**labelled, "engine": "0"}) is None
    finally:
        for metric in shown._metrics.values():
            REGISTRY.unregister(metric)
