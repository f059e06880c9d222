"""Tables, JSON and progress bars of the commands."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

_PIPE_WIDTH = 10_000
"""Width of tables that are not printed to a terminal, so that no line is wrapped."""


def output_console() -> Console:
    """Return a console for texts and tables on standard output, without markup.

    Lines are not wrapped in a pipe.
    """
    plain = partial(Console, markup=False, highlight=False, emoji=False)
    console = plain()
    return console if console.is_terminal else plain(width=_PIPE_WIDTH)


def borderless_table(*columns: str, **options: Any) -> Table:
    """Create a table without borders; `options` apply to its columns."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, **options)
    return table


def progress_bar() -> Progress:
    """Return a progress bar on standard error, shown on a terminal only until it ends."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def print_json(report: Any) -> None:
    """Print a report of plain values as JSON."""
    typer.echo(json.dumps(finite(report), indent=2, default=str))


def finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON does not have, by their names."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
