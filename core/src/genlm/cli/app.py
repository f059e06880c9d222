"""The list of commands, and the output of their errors."""

from __future__ import annotations

import importlib.metadata
import io
import sys
import traceback
from typing import Annotated

import typer

from genlm.cli.bench import bench
from genlm.cli.check import check
from genlm.cli.compare import compare
from genlm.cli.demo import demo
from genlm.cli.env import env
from genlm.cli.new_plugin import plugin_commands
from genlm.cli.plugins import plugins
from genlm.cli.score import score
from genlm.cli.serve import serve
from genlm.core.base.errors import GenlmError
from genlm.core.plugins.lookup import is_strict

app = typer.Typer(
    name="genlm",
    help="Compute next-token distributions with any inference engine.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command()(bench)
app.command()(check)
app.command()(compare)
app.command()(demo)
app.command()(env)
app.command()(plugins)
app.command()(score)
app.add_typer(plugin_commands)
app.command()(serve)


def _print_version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"genlm {importlib.metadata.version('genlm-core')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Compute next-token distributions with any inference engine."""


def main() -> None:
    """Run the command line. An error is printed as one line, and the exit code is 1.

    With `GENLM_STRICT=1` the traceback of the error, or of the cause of a `GenlmError`, is
    printed first. Characters that standard output cannot encode are printed as escapes.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except (GenlmError, OSError) as error:  # OSError: such as a full disk
        cause = error if isinstance(error, OSError) else error.__cause__
        if is_strict() and cause is not None:
            traceback.print_exception(cause)
        typer.echo(f"genlm: {error}", err=True)
        sys.exit(1)
