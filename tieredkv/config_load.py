"""Configuration files and environment variables, with the source of every value.

Nothing is cached: each call reads the file and the environment again. Thread-safe.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tieredkv.config import TIER_MODELS, Config, TierConfig, tier_tag
from tieredkv.config_errors import KeyPath, Origin, dotted, submodel
from tieredkv.config_file import parse_yaml, read_document
from tieredkv.errors import ConfigError
from tieredkv.suggest import nearest

PREFIX = "TIEREDKV_"
FILE_VARIABLE = "TIEREDKV_CONFIG_FILE"
NOT_SETTINGS = frozenset({FILE_VARIABLE, "TIEREDKV_CRASHES"})
"""Variables with our prefix that configure no store: the file, and the length of crash tests."""


MAPPINGS = {"options", "stop_tokens", "marker_tokens"}  # their variables hold YAML


@dataclass(frozen=True)
class Loaded:
    """A configuration and where each of its values came from."""

    config: Config
    document: Mapping[str, Any]
    origin: Origin


@dataclass(frozen=True)
class Setting:
    """One effective value.

    `key` is spelt as in errors; sizes are `ByteSize`, paths are text; `source` is `default`,
    `file NAME`, `env NAME`, `kind` (a name taken from it), or the global key that a tier
    inherits, followed by that key's own source.
    """

    key: str
    value: Any
    source: str


def load(path: str | Path | None = None, environ: Mapping[str, str] | None = None) -> Loaded:
    """Read `path` (None: the file named by TIEREDKV_CONFIG_FILE) and apply the environment.

    `environ` None: the environment of the process. Raises ConfigError or CapacityError.
    """
    environ = os.environ if environ is None else environ
    if path is None:
        path = environ.get(FILE_VARIABLE) or None
        if path is None:
            raise ConfigError(f"no configuration: pass a file or set {FILE_VARIABLE}")
    return parse(read_document(Path(path)), f"file {path}", environ)


def parse(
    document: Mapping[str, Any], label: str = "python", environ: Mapping[str, str] | None = None
) -> Loaded:
    """Validate a document that is already in memory; `label` is what errors call it.

    `environ` None: no variable applies. `document` is not changed.
    """
    merged, by_path = _override(document, environ or {})
    origin = Origin(label, by_path)
    config = Config.model_validate(merged, context={"origin": origin})
    return Loaded(config, merged, origin)


def effective(loaded: Loaded) -> list[Setting]:
    """Every value in force, in schema order."""
    return [Setting(dotted(path), *_value(loaded, path)) for path in _paths(loaded.config)]


def _value(loaded: Loaded, path: KeyPath) -> tuple[Any, str]:
    value: Any = loaded.config
    given: Any = loaded.document
    for part in path:
        value, given = _child(value, part), _child(given, part)
    if value is _ABSENT:
        value = None
    if path[0] == "tiers" and value is None:
        tier = loaded.config.tiers[int(path[1])]
        if path[2] == "name":
            return tier.label, "kind"
        if path[2] == "eviction":
            value, source = _value(loaded, path[2:])
            return value, f"{dotted(path[2:])}: {source}"
    if isinstance(value, Path):
        value = str(value)
    return value, "default" if given is _ABSENT else loaded.origin.of(path)


_ABSENT = object()


def _child(node: Any, part: str | int) -> Any:
    """One step down a document; `_ABSENT` where it does not lead on (a null included)."""
    if isinstance(part, int):
        return node[part] if isinstance(node, list | tuple) and part < len(node) else _ABSENT
    if isinstance(node, Mapping):
        value = node.get(part)
        return _ABSENT if value is None else value
    value = getattr(node, part, None) if isinstance(node, BaseModel) else None
    return _ABSENT if value is None else value


def _paths(document: Any) -> Iterator[KeyPath]:
    """Every settable key of the schema, for the tiers of this document, outermost first."""
    for path in _model_paths(Config, ()):
        if path != ("tiers",):
            yield path
            continue
        tiers = _child(document, "tiers")
        for i, tier in enumerate(tiers if isinstance(tiers, list | tuple) else ()):
            model = TIER_MODELS.get(tier_tag(tier) or "", TierConfig)
            yield from _model_paths(model, ("tiers", i))


def _model_paths(model: type[BaseModel], prefix: KeyPath) -> Iterator[KeyPath]:
    for name, field in model.model_fields.items():
        inner = submodel(field.annotation)
        if inner:
            yield from _model_paths(inner, (*prefix, name))
        else:
            yield (*prefix, name)


def variable(path: KeyPath) -> str:
    """`("tiers", 0, "capacity")` -> `TIEREDKV_TIERS_0_CAPACITY`."""
    return PREFIX + "_".join(str(part) for part in path).upper()


def unknown_variables(
    document: Mapping[str, Any], environ: Mapping[str, str]
) -> dict[str, str | None]:
    """Variables with our prefix that set no key of this document, and the nearest valid name."""
    names = (*_variables(document), *NOT_SETTINGS)
    found = (name for name in sorted(environ) if name.upper().startswith(PREFIX))
    return {name: nearest(name, names) for name in found if name not in names}


def _variables(document: Mapping[str, Any]) -> dict[str, KeyPath]:
    # The kind decides which other keys exist, so no variable can change it.
    return {variable(path): path for path in _paths(document) if path[-1] != "kind"}


def _override(
    document: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[Mapping[str, Any], dict[KeyPath, str]]:
    """The document with the variables applied, and the variable of each path they set."""
    valid = _variables(document)
    by_path: dict[KeyPath, str] = {}
    unknown = [
        f"env {name}: unknown variable; nearest valid name: {near!r}"
        for name, near in unknown_variables(document, environ).items()
    ]
    if unknown:
        raise ConfigError("\n".join(unknown))
    for name, path in sorted((name, path) for name, path in valid.items() if name in environ):
        text = environ[name]
        value = parse_yaml(text, f"env {name}") if path[-1] in MAPPINGS else text
        document = _assign(document, path, value)
        by_path[path] = name
    return document, by_path


def _assign(node: Any, path: KeyPath, value: Any) -> Any:
    """A copy of `node` with one value replaced; untouched where `path` does not fit it."""
    if not path:
        return value
    head, rest = path[0], path[1:]
    if isinstance(head, int):
        return [_assign(item, rest, value) if i == head else item for i, item in enumerate(node)]
    if node is None:
        node = {}
    elif isinstance(node, BaseModel):
        node = {key: getattr(node, key) for key in node.model_fields_set}
    if not isinstance(node, Mapping):
        return node  # of a wrong type: validation says so
    return {**node, head: _assign(node.get(head), rest, value)}
