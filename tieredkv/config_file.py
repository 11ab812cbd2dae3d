"""YAML and JSON documents, strictly: no duplicate keys, no surprising booleans."""

from __future__ import annotations

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from tieredkv.errors import ConfigError

MAX_BYTES = 1 << 20


def read_document(path: Path) -> dict[str, Any]:
    """The mapping in a file: JSON if the name ends in .json, else YAML (of which JSON without
    tabs is a part). Raises ConfigError naming the file and, where known, line and column."""
    label = f"file {path}"
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{label}: cannot be read: {error.strerror}; check the path") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{label}: larger than {MAX_BYTES} bytes; not a configuration")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{label}: not a text file in UTF-8; write YAML or JSON") from None
    document = _json(text, label) if path.suffix == ".json" else parse_yaml(text, label)
    if document is None:
        raise ConfigError(f"{label}: is empty; it must at least name tiers")
    if not isinstance(document, dict):
        kind = type(document).__name__
        raise ConfigError(f"{label}: holds a {kind}, not a mapping of keys to values")
    return document


def parse_yaml(text: str, label: str) -> Any:
    """One YAML value; ConfigError names `label` and the line."""
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" line {mark.line + 1} column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{label}{where}: not valid YAML: {error.problem}") from None
    except RecursionError:
        raise ConfigError(f"{label}: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: impossible dates, huge numbers
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{label}: not valid YAML: {reason}") from None


class _StrictLoader(yaml.SafeLoader):
    """YAML 1.2 booleans (`off` is a text, as in `write: off`), and each key once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key!r}; keep one", key_node.start_mark
                )
            if isinstance(key, Hashable):
                seen.add(key)
        return super().construct_mapping(node, deep)


_BOOL = "tag:yaml.org,2002:bool"
_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != _BOOL or first in "tTfF"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _json(text: str, label: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_once) if text.strip() else None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise ConfigError(f"{label} {where}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ConfigError(f"{label}: nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"{label}: not valid JSON: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"duplicate key {twice!r}; keep one")
    return document
