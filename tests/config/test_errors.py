"""A08: whatever is wrong in a configuration stops the start with its name and the remedy."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from tests.config.cases import CASES, Case
from tieredkv.config import Config
from tieredkv.errors import ConfigError


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.usefixtures("plugins")
def test_each_error_says_what_and_where(case: Case, tmp_path: Path) -> None:
    with pytest.raises(case.error) as caught:
        case.act(tmp_path)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(case.says), lines
    for part in case.says:
        assert any(part in line for line in lines), lines


def test_names_of_cases_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_all_problems_come_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.model_validate(
            {"tiers": [{"kind": "dram", "capacity": 0, "pin": "on"}, {"kind": "nvm"}], "event": 1}
        )
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["python"] * 4
    assert [line.split()[1] for line in lines] == [
        "tiers[0].capacity",
        "tiers[0].pin",
        "tiers[1].kind:",
        "unknown",
    ]


@pytest.mark.parametrize("call", [Config.model_validate, lambda doc: Config(**doc)])
def test_python_callers_get_no_pydantic_error(call: object) -> None:
    with pytest.raises(ConfigError) as caught:
        call({"tierz": []})  # type: ignore[operator]
    shown = "".join(traceback.format_exception(caught.value))
    assert "ValidationError" not in shown


def test_values_in_errors_are_short() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.model_validate({"tiers": "x" * 100_000})
    assert len(str(caught.value)) < 200
