"""docs/configuration.md says what the schema says, and explains every error there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tests.config.cases import CASES
from tieredkv.cli.config import _exact_size
from tieredkv.config import TIER_MODELS, Config, TierConfig
from tieredkv.config_errors import submodel
from tieredkv.config_load import effective, load

TEXT = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
NAMES = {int: "integer", float: "seconds", bool: "boolean", str: "text", ByteSize: "size"}
NAMES |= {Path: "path", dict: "mapping"}
Row = tuple[str, str, str, str]


def rows_of(section: str) -> list[list[str]]:
    body = TEXT.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\| (`.*) \|$", body, flags=re.MULTILINE)
    return [re.split(r" \| ", line) for line in lines]


def type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " / ".join(f"`{choice}`" for choice in get_args(annotation))
    inner = [arg for arg in get_args(annotation) if arg is not NoneType]
    if inner and get_origin(annotation) is not dict:
        return type_name(inner[0])
    return NAMES[get_origin(annotation) or annotation]


def default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "none"
    if isinstance(value, ByteSize):
        return f"`{_exact_size(value)}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def schema(model: type[BaseModel], key: str, variable: str) -> Iterator[Row]:
    for name, field in model.model_fields.items():
        inner = submodel(field.annotation)
        path, env = f"{key}{name}", f"{variable}{name.upper()}"
        if inner:
            yield from schema(inner, f"{path}.", f"{env}_")
        elif path != "tiers":
            shown = "none" if name == "kind" else f"`{env}`"
            yield f"`{path}`", type_name(field.annotation), default(field), shown


def expected() -> set[Row]:
    rows = set(schema(Config, "", "TIEREDKV_"))
    shared = set(TierConfig.model_fields)
    for model in (TierConfig, *TIER_MODELS.values()):
        for row in schema(model, "tiers[].", "TIEREDKV_TIERS_<i>_"):
            if model is TierConfig or row[0].strip("`").split(".")[1] not in shared:
                rows.add(row)
    return rows


def test_table_of_keys_is_the_schema() -> None:
    documented = rows_of("Keys")
    assert all(len(row) == 5 and len(row[4]) > 5 for row in documented)
    found = [tuple(row[:4]) for row in documented]
    assert set(found) == expected()
    assert len(found) == len(set(found))


def literal(row: list[str]) -> re.Pattern[str]:
    """The documented text, with `…` standing for anything."""
    return re.compile(".*".join(map(re.escape, row[0].strip("`").split("…"))))


@pytest.mark.usefixtures("plugins")
def test_table_of_errors_is_complete_and_real(tmp_path: Path) -> None:
    patterns = [literal(row) for row in rows_of("Errors")]
    unused = set(patterns)
    for case in CASES:
        with pytest.raises(case.error) as caught:
            case.act(tmp_path)
        for line in str(caught.value).splitlines():
            matching = {pattern for pattern in patterns if pattern.search(line)}
            assert matching, f"not in the table of errors: {line}"
            unused -= matching
    assert not unused, "documented, but no case produces it"


def test_examples_are_valid(tmp_path: Path) -> None:
    examples = re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)
    assert examples
    for i, example in enumerate(examples):
        path = tmp_path / f"{i}.yaml"
        path.write_text(example)
        assert effective(load(path, {}))
