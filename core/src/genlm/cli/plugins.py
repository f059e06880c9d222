"""`genlm plugins`: list the installed backends and their status."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from genlm.core.plugins import BackendInfo, list_backends

__all__ = ["plugins"]

_COLOURS = {"ok": "green", "disabled": "bright_black"}
_PIPE_WIDTH = 10_000  # no wrapping in a pipe


def plugins(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list with every field.")
    ] = False,
) -> None:
    """List the installed engines and tries. Imports no engine."""
    backends = list_backends()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(info) for info in backends], indent=2))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)
    console.print(_table(backends))


def _table(backends: list[BackendInfo]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "kind", "provided by", "api", "capabilities"):
        table.add_column(column, no_wrap=True)
    table.add_column("status", overflow="fold")
    for info in backends:
        table.add_row(
            Text(info.name),
            info.kind or "?",
            Text(f"{info.distribution} {info.version}"),
            "?" if info.api is None else str(info.api),
            Text(", ".join(info.capabilities) or "-"),
            Text(_status(info), style=_COLOURS.get(info.status, "red")),
        )
    return table


def _status(info: BackendInfo) -> str:
    if info.status == "missing":
        return f"missing: {', '.join(info.missing)}; {info.install}"
    return f"{info.status}: {info.reason}" if info.reason else info.status
