"""`genlm serve`: replicas of a model that outlive their caller, through the plugin `ray`.

The core knows only the functions `serve`, `served` and `stop` of the engine that serves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from genlm.cli.arguments import backends
from genlm.core.plugins import get_backend

__all__ = ["serve"]

_SERVER = "ray"


def serve(
    *,
    name: Annotated[str, typer.Option(help="What load_model(NAME, 'ray') calls it.")] = "",
    backend: Annotated[
        str, typer.Option(help="The engine of each replica.", autocompletion=backends("engine"))
    ] = "hf",
    model: Annotated[str, typer.Option(help="What that engine calls a model.")] = "demo",
    replicas: Annotated[int, typer.Option(min=1, help="How many to load.")] = 1,
    options: Annotated[
        str, typer.Option(help='Of the engine, as JSON: {"dtype": "bfloat16"}.')
    ] = "{}",
    resources: Annotated[
        str, typer.Option(help='What a replica needs, as JSON: {"num_gpus": 1}.')
    ] = '{"num_cpus": 1}',
    address: Annotated[str, typer.Option(help="Of the Ray cluster, host:port.")] = "auto",
    status: Annotated[bool, typer.Option("--status", help="List what is served.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End the model NAME.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """Load a model on a Ray cluster for several programs; list and end such models."""
    if not name and not status:
        raise typer.BadParameter("name the model", param_hint="--name")
    read_options = _object("--options", options)
    read_resources = _object("--resources", resources)
    server: Any = get_backend(_SERVER)
    if stop:
        count = server.stop(name, address)
        typer.echo(f"ended {name}: {count} replicas")
        return
    if status:
        found = [each for each in server.served(address) if name in {"", each["name"]}]
    else:
        found = server.serve(
            name,
            model,
            backend,
            replicas=replicas,
            engine_opts=read_options,
            resources=read_resources,
            address=address,
        )
    if as_json:
        typer.echo(json.dumps(found, indent=2, default=str))
    else:
        _print(found, Console())


def _object(option: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{text!r} is not a JSON object", param_hint=option)
    return found


def _print(found: Sequence[Mapping[str, Any]], console: Console) -> None:
    if not found:
        console.print("no served models")
        return
    table = Table(
        "name", "replica", "state", "engine", "model", "drivers", "pending", "answered"
    )
    for each in found:
        drivers: Mapping[str, int] = each.get("drivers", {})
        cells = (each["name"], each["replica"], each["state"], each.get("engine", ""))
        rest = (
            each.get("model", ""),
            len(drivers),
            sum(drivers.values()),
            each.get("answered", ""),
        )
        table.add_row(*map(str, cells + rest))
    console.print(table)
