"""`tieredkv doctor`: what is wrong with this machine, or with a configuration on it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from tieredkv.doctor.diagnose import diagnose
from tieredkv.doctor.finding import Finding, State

STYLES = {State.OK: "green", State.NOTE: "cyan", State.WARNING: "yellow", State.PROBLEM: "red"}


def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="YAML or JSON; else the file in TIEREDKV_CONFIG_FILE.")
    ] = None,
    output: Annotated[Literal["table", "json"], typer.Option("--format")] = "table",
) -> None:
    """Look at versions, GPU, limits, and the directories and pools of a configuration.

    Changes nothing, and disturbs no store that runs. Exit code 1 if there is a problem.
    """
    findings = diagnose(config)
    good = all(finding.state is not State.PROBLEM for finding in findings)
    if output == "json":
        typer.echo(json.dumps({"ok": good, "findings": [asdict(row) for row in findings]}))
    else:
        _print_table(findings)
    if not good:
        raise typer.Exit(1)


def _print_table(findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    from tieredkv.cli.progress import table_console

    console = table_console()
    table = Table("check", "state", "found", "remedy", box=None, pad_edge=False)
    for row in findings:
        state = Text(row.state.value, STYLES[row.state])
        table.add_row(row.check, state, row.found, row.remedy)
    console.print(table)
    counts = Counter(row.state for row in findings)
    console.print(
        ", ".join(f"{counts[s]} {s}{'s' * (counts[s] != 1 and s is not State.OK)}" for s in State)
    )
