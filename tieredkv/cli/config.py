"""`tieredkv config show`: every effective value with its source."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import ByteSize

from tieredkv.config_load import Setting, effective, load

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def root() -> None:
    """The configuration in force."""


@app.command()
def show(
    file: Annotated[
        Path | None, typer.Argument(help="YAML or JSON; else the file in TIEREDKV_CONFIG_FILE.")
    ] = None,
    output: Annotated[Literal["table", "json"], typer.Option("--format")] = "table",
) -> None:
    """Print each value in force and its source: default, file or environment variable."""
    settings = effective(load(file))
    if output == "json":
        typer.echo(_json({"settings": [asdict(setting) for setting in settings]}))
    else:
        _print_table(settings)


def _print_table(settings: list[Setting]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("key", "value", "source", box=None, pad_edge=False)
    for setting in settings:
        table.add_row(setting.key, _text(setting), setting.source)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 1000  # nothing is folded in a pipe
    console.print(table)


def _text(setting: Setting) -> str:
    if setting.value is None:
        return "-"
    if isinstance(setting.value, ByteSize):
        return _exact_size(setting.value)
    return setting.value if isinstance(setting.value, str) else _json(setting.value)


def _json(value: object) -> str:
    return json.dumps(value, default=str)  # YAML also knows dates


def _exact_size(count: int) -> str:
    """In the largest unit that needs no rounding, so that it can be pasted back."""
    for unit, shift in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count and count % (1 << shift) == 0:
            return f"{count >> shift}{unit}"
    return str(count)
