"""`genlm bench`: throughput, latency and memory of a model on an engine and this machine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from genlm.cli.arguments import (
    JsonOption,
    LoadOptions,
    SeedOption,
    backends,
    bad_value,
    checked_options,
    load,
)
from genlm.cli.measurement import Cell, Plan, first_row_s, measure
from genlm.cli.output import borderless_table, output_console, print_json, progress_bar

_FIRST_ROW_TOKENS = 16


def bench(
    backend: Annotated[
        str,
        typer.Argument(help="Name of an installed engine.", autocompletion=backends("engine")),
    ],
    model: Annotated[str, typer.Argument(help="Model id, path, or `demo`.")] = "demo",
    *,
    lengths: Annotated[
        str, typer.Option(help="Context lengths in tokens, separated by commas.")
    ] = "16,256,1024",
    batches: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,8,64",
    options: LoadOptions = "{}",
    repeats: Annotated[int, typer.Option(min=1, help="Measurements per batch.")] = 3,
    steps: Annotated[
        int, typer.Option(min=1, help="Number of extensions of each context by one token.")
    ] = 4,
    most_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of tokens in a batch.")
    ] = 2**14,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure throughput by batch size and length, latency of the first row, and memory."""
    plan = Plan(
        _integers("--lengths", lengths), _integers("--batches", batches), repeats, steps,
        most_tokens, seed,
    )  # fmt: skip
    report = _measure(backend, model, checked_options(options), plan)
    if as_json:
        print_json(report | {"cells": [dataclasses.asdict(cell) for cell in report["cells"]]})
    else:
        _print(report, plan)


def _integers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise bad_value(
            option, f"{text!r}: expected numbers of at least 1, separated by commas"
        )
    return numbers


def _measure(backend: str, model: str, options: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Measure a plan; return the report of `--json`, with the cells as objects."""
    from genlm.cli.engine_process import device_memory, peak_memory
    from genlm.cli.env import environment
    from genlm.core.rows.output_cache import OutputCache

    began = time.perf_counter()
    with load(model, backend, {"output_cache": OutputCache(0), **options}) as llm:
        load_s = time.perf_counter() - began
        possible = plan.within(llm.max_context)
        _check_plan(possible, llm.max_context)
        first = first_row_s(llm, min(_FIRST_ROW_TOKENS, llm.max_context or _FIRST_ROW_TOKENS))
        with progress_bar() as bar:
            batches = len(possible.batches)
            cells = list(bar.track(measure(llm, possible), batches, description="measuring"))
        engine = dict(llm.statistics().engine)
    return {
        "backend": backend,
        "model": model,
        "options": options,
        "load_s": load_s,
        "first_row_s": first,
        "peak_memory_bytes": peak_memory(),
        "device_memory_bytes": device_memory(),
        "cells": cells,
        "engine": engine,
        "environment": environment(),
        "max_context": llm.max_context,
        "shortened": sorted({*plan.lengths} - {*possible.lengths}),
    }


def _check_plan(plan: Plan, max_context: int | None) -> None:
    """Refuse a plan without a batch that the model can compute."""
    if max_context is not None and plan.steps >= max_context:
        raise bad_value(
            "--steps", f"{plan.steps}: the model has a context of {max_context} tokens"
        )
    if not plan.batches:
        raise bad_value("--most-tokens", f"{plan.most_tokens}: every batch has more tokens")


def _print(report: Mapping[str, Any], plan: Plan) -> None:
    console = output_console()
    environment, cells, context = report["environment"], report["cells"], report["max_context"]
    system, torch = environment["system"], environment["libraries"].get("torch", "unknown")
    console.print(f"{report['backend']}, model {report['model']!r}", style="bold")
    console.print(f"{system['processor']}, cores: {system['cores']}; torch {torch}")
    possible, on_gpu = plan.within(context), report["device_memory_bytes"]
    console.print(
        f"loaded in {report['load_s']:.1f} s, first row {1000 * report['first_row_s']:.1f} ms "
        f"later; at most {_size(report['peak_memory_bytes'])} of memory"
        + (f", {_size(on_gpu)} on the GPU" if on_gpu else "")
    )
    if report["shortened"]:
        lengths = ",".join(map(str, report["shortened"]))
        longest = max(cell.context_tokens for cell in cells)
        console.print(
            f"--lengths {lengths}: the model has a context of {context} tokens; measured "
            f"{longest} in their place",
            style="yellow",
        )
    for title, figure in (
        ("rows per second, new contexts", "new_rows_per_s"),
        ("rows per second, contexts extended by one token", "continued_rows_per_s"),
    ):
        console.print(f"\n{title}")
        console.print(_table(figure, cells, possible))
    if len(cells) < len(possible.all_batches):
        console.print(f"\n-: not measured, more than {plan.most_tokens} tokens (--most-tokens)")


def _table(figure: str, cells: Sequence[Cell], plan: Plan) -> Table:
    sizes = sorted({*plan.batch_sizes})
    columns = ("tokens", *(f"batch of {size}" for size in sizes))
    table = borderless_table(*columns, justify="right")
    values = {(cell.context_tokens, cell.batch_size): getattr(cell, figure) for cell in cells}
    for length in sorted({*plan.lengths}):
        row = (values.get((length, size)) for size in sizes)
        table.add_row(str(length), *("-" if x is None else f"{x:,.0f}" for x in row))
    return table


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
