"""From pydantic's errors to one line per problem: where, what value, what to do."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from pydantic import BaseModel, ValidationError

from tieredkv.suggest import nearest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

KeyPath: TypeAlias = tuple[str | int, ...]


def dotted(path: KeyPath) -> str:
    """`("tiers", 0, "capacity")` -> `tiers[0].capacity`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


_PLAIN = {
    "model_type": "must be a mapping of keys to values",
    "tuple_type": "must be a list",
    "byte_size": "give bytes or a text such as 512MiB or 40GiB",
}
"""Where pydantic speaks of Python's types to people who write YAML."""


@dataclass(frozen=True)
class Origin:
    """Where values came from: one document, and environment variables over it."""

    label: str = "python"
    """`file NAME`, `python`, or whatever else the document is called in errors."""
    env: Mapping[KeyPath, str] = field(default_factory=dict)
    """Variable that set each overridden path."""

    def of(self, path: KeyPath) -> str:
        variable = self.env.get(path)
        return f"env {variable}" if variable else self.label


def submodel(annotation: Any) -> type[BaseModel] | None:
    """The model that a field of this type (or `Model | None`) holds."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def explain(
    error: ValidationError,
    origin: Origin,
    root: type[BaseModel],
    tagged: Mapping[str, type[BaseModel]],
) -> str:
    """All problems, one line each. `tagged`: union tag -> model, for paths through a union."""
    lines = []
    for detail in error.errors(include_url=False):
        path, model = _walk(detail["loc"], root, tagged)
        where = f"{origin.of(path)}: "
        lines.append(where + _describe(detail, path, model))
    return "\n".join(lines)


def _walk(
    loc: KeyPath, root: type[BaseModel], tagged: Mapping[str, type[BaseModel]]
) -> tuple[KeyPath, type[BaseModel] | None]:
    """The path without union tags, and the model that holds its last key."""
    path: list[str | int] = []
    holder: type[BaseModel] | None = None
    model: type[BaseModel] | None = root
    after_index = False
    for part in loc:
        if after_index and part in tagged:
            model = tagged[str(part)]
        else:
            path.append(part)
            holder = model
            known = model.model_fields.get(str(part)) if model else None
            model = submodel(known.annotation) if known else None
        after_index = isinstance(part, int)
    return tuple(path), holder


def _describe(detail: ErrorDetails, path: KeyPath, model: type[BaseModel] | None) -> str:
    kind, value = detail["type"], detail["input"]
    name = dotted(path)
    if kind == "extra_forbidden":
        valid = list(model.model_fields) if model else []
        return (
            f"unknown key {str(path[-1])!r} at {name}; nearest valid key: "
            f"{nearest(path[-1], valid)!r} (valid: {', '.join(valid)})"
        )
    if kind == "missing":
        return f"{name} is missing; add this key"
    if kind == "invalid_key":
        return f"keys must be strings, got {path[-1]!r} at {name}"
    if kind == "union_tag_not_found":
        return f"{name}.kind is missing; say which kind of tier this is"
    if kind == "union_tag_invalid":
        return f"{name}.kind: {detail['ctx']['tag']}"
    message = _PLAIN.get(kind, detail["msg"][:1].lower() + detail["msg"][1:])
    if not path:
        return f"{message}, got {reprlib.repr(value)}"
    return f"{name} = {reprlib.repr(value)}: {message}"
