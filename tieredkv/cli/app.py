"""The `tieredkv` command: one verb per module, loaded when it is called.

`tieredkv --help` therefore neither imports torch nor any verb. Exit codes: 0 success, 1 the
verb found something wrong, 2 usage or configuration error (one line per problem on stderr).
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated

import typer

from tieredkv import __version__
from tieredkv.errors import TieredKVError

app = typer.Typer(
    help="Keep the KV cache of LLM prefixes in tiers of memory and storage.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_FORWARD = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],  # `--help` belongs to the verb as well
}


def _forward(verb: str, attribute: str, summary: str) -> None:
    """Register a verb whose module is imported, and whose options are parsed, on call."""

    @app.command(verb, help=summary, context_settings=_FORWARD)
    def run(ctx: typer.Context) -> None:
        target = getattr(import_module(f"tieredkv.cli.{verb}"), attribute)
        if not isinstance(target, typer.Typer):
            function, target = target, typer.Typer(add_completion=False)
            target.command()(function)
        command = typer.main.get_command(target)
        code = command.main(ctx.args, prog_name=f"tieredkv {verb}", standalone_mode=False)
        if isinstance(code, int) and code:  # what typer.Exit becomes without standalone mode
            raise typer.Exit(code)


_forward("demo", "app", "Replay a workload against a real store and verify every byte.")
_forward("simulate", "simulate", "Replay traces under eviction policies and tier sizes.")
_forward("trace", "app", "Generate, convert and describe request traces.")
_forward("plan", "plan", "Find the cheapest tier sizes that reach a hit rate or TTFT.")
_forward("check", "check", "Verify an NVMe directory: records, headers, checksums.")
_forward("doctor", "doctor", "Diagnose this machine, and a configuration on it.")
_forward("config", "app", "Show the configuration in force and where each value comes from.")
_forward("pool", "pool", "Run a Mooncake pool on this machine, for development.")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tieredkv {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="And exit.")
    ] = False,
) -> None:
    """Options before the verb."""


def main() -> None:
    """Entry point of the console script."""
    try:
        app(prog_name="tieredkv")
    except TieredKVError as error:
        for line in str(error).splitlines():
            print(f"tieredkv: {line}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
