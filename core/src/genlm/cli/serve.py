"""`genlm serve`: replicas of a model that keep running after the command, with plugin `ray`.

The core uses only the functions `join`, `serve`, `served`, `stop` and `leaver` of the plugin. A
cluster is joined only if the user names it, because served models outlive the command.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from genlm.cli.arguments import backends, bad_value, checked_options
from genlm.cli.output import output_console, print_json
from genlm.core.base.errors import GenlmError
from genlm.core.plugins.lookup import get_backend

_SERVER = "ray"


def serve(
    *,
    name: Annotated[
        str, typer.Option(help="Name of the served model, for load_model(NAME, 'ray').")
    ] = "",
    backend: Annotated[
        str, typer.Option(help="Engine of each replica.", autocompletion=backends("engine"))
    ] = "hf",
    model: Annotated[str, typer.Option(help="Model id or path.")] = "demo",
    replicas: Annotated[int, typer.Option(min=1, help="Number of replicas.")] = 1,
    options: Annotated[
        str, typer.Option(help='Engine options as JSON: {"dtype": "bfloat16"}.')
    ] = "{}",
    resources: Annotated[
        str, typer.Option(help='Resources of a replica as JSON: {"num_gpus": 1}.')
    ] = '{"num_cpus": 1}',
    address: Annotated[
        str, typer.Option(help="Address of the Ray cluster, host:port; by default RAY_ADDRESS.")
    ] = "",
    local: Annotated[
        bool, typer.Option("--local", help="Use the Ray cluster that runs on this machine.")
    ] = False,
    status: Annotated[bool, typer.Option("--status", help="List the served models.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the served model NAME.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """Serve a model on a Ray cluster for several programs; list and stop served models."""
    if not name and not status:
        raise bad_value("--name", "missing; it names the model to serve or to stop")
    if status and stop:
        raise typer.BadParameter("--status and --stop exclude each other")
    if local and address:
        raise typer.BadParameter("--local and --address exclude each other")
    if not (local or address or os.environ.get("RAY_ADDRESS")):
        raise typer.BadParameter(
            "name the Ray cluster: --address host:port, RAY_ADDRESS, or --local for the "
            "cluster that runs on this machine"
        )
    engine_options = checked_options(options)
    replica_resources = checked_options(resources, "--resources")
    server: Any = get_backend(_SERVER)
    leave_cluster = server.leaver()
    status_code = 1  # if the command raises

    def leave() -> None:
        # Ray's exit handler waits without limit for a cluster that does not answer.
        if not leave_cluster():
            typer.echo("the Ray cluster does not answer; left it as it is", err=True)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status_code)

    atexit.register(leave)
    address = server.join(address or None, is_local=local)
    typer.echo(f"joined the Ray cluster at {address}", err=True)
    if stop:
        count = server.stop(name, address)
        typer.echo(f"stopped {name} ({count} replica{'s' * (count != 1)})")
        status_code = 0
        return
    if status:
        served = [entry for entry in server.served(address) if name in {"", entry["name"]}]
    else:
        try:
            served = server.serve(
                name,
                model,
                backend,
                replicas=replicas,
                engine_opts=engine_options,
                resources=replica_resources,
                address=address,
            )
        except GenlmError:  # not an argument, such as a cluster that is in use
            raise
        except ValueError as error:  # of the name or the resources
            raise typer.BadParameter(str(error)) from error
    if as_json:
        print_json(served)
    else:
        _print(served)
    status_code = 0


def _print(served: Sequence[Mapping[str, Any]]) -> None:
    console = output_console()
    if not served:
        console.print("no served models")
        return
    table = Table(
        "name", "replica", "state", "engine", "model", "drivers", "pending", "answered"
    )
    for entry in served:
        drivers: Mapping[str, int] = entry.get("drivers", {})
        cells = (
            entry["name"],
            entry["replica"],
            entry["state"],
            entry.get("engine", ""),
            entry.get("model", ""),
            len(drivers),
            sum(drivers.values()),
            entry.get("answered", ""),
        )
        table.add_row(*map(str, cells))
    console.print(table)
