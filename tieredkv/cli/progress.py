"""Progress bars and tables of the commands."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


def progress() -> Progress:
    """A progress bar on stderr; silent when stderr is no terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def table_console() -> Console:
    """Standard output for tables; nothing is folded in a pipe."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 1000
    return console
