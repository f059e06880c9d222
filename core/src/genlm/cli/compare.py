"""`genlm compare`: compare the rows, memory and speed of several engines on one model."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genlm.cli.arguments import (
    JsonOption,
    SeedOption,
    bad_value,
    checked_dtype,
    checked_options,
)
from genlm.cli.output import borderless_table, output_console, print_json
from genlm.cli.text_file import read_lines
from genlm.core.base.errors import UnknownBackendError
from genlm.core.plugins.lookup import find_backend
from genlm.testing.target import TOLERANCE_CAPS

if TYPE_CHECKING:
    from genlm.cli.engine_process import EngineRows
    from genlm.testing.comparison import Differences

_MAX_TIMEOUT_S = 2_000_000
"""Systems wait for at most 2**31 milliseconds."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of one engine.

    Attributes:
        backend: Name of the engine.
        status: `"reference"`, `"within the bound"`, `"beyond the bound"` or `"failed"`.
        reason: Reason of a failure.
        differences: Differences from the rows of the first engine that succeeded; None for
            that engine.
        skipped: Number of contexts that the engine does not support: too long, or with unknown
            ids.
        figures: Memory, speed and sizes.
    """

    backend: str
    status: str
    reason: str = ""
    differences: Differences | None = None
    skipped: int = 0
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def compare(
    model: Annotated[str, typer.Argument(help="Model id or path that every engine loads.")],
    *,
    backends: Annotated[
        str,
        typer.Option(
            help="Names of two or more engines, separated by commas; the first is the baseline."
        ),
    ],
    dtype: Annotated[
        str, typer.Option(help="Dtype of the computation.", callback=checked_dtype)
    ] = "float32",
    texts: Annotated[
        Path | None, typer.Option(help="File of texts to compare on, one per line.")
    ] = None,
    ids: Annotated[
        Path | None,
        typer.Option(help="File of token ids to compare on, one JSON array per line."),
    ] = None,
    bound: Annotated[
        float | None,
        typer.Option(
            help="Maximum difference of log-probabilities; the default depends on the dtype."
        ),
    ] = None,
    longest: Annotated[
        int | None, typer.Option(min=1, help="Maximum context length in tokens.")
    ] = None,
    options: Annotated[
        str,
        typer.Option(
            help="Options of `load_model` per engine as JSON, such as "
            '`{"vllm": {"engine_opts": {}}}`.'
        ),
    ] = "{}",
    seed: SeedOption = 0,
    timeout: Annotated[
        float | None,
        typer.Option(help="Time limit per engine in seconds; no limit by default."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the rows that several engines compute with the same model.

    The contexts include short contexts, contexts with a shared prefix, and contexts beyond the
    attention windows of the model's config. The engines run one after the other, each in its
    own process.

    Exit code 0: all engines agree within the bound. 1: an engine failed or exceeds the bound.
    2: an argument is invalid.
    """
    if texts is not None and ids is not None:
        raise bad_value("--ids", "pass --texts or --ids, not both")
    if timeout is not None and not 0 < timeout <= _MAX_TIMEOUT_S:
        raise bad_value(
            "--timeout", f"{timeout:g}: expected a positive number up to {_MAX_TIMEOUT_S:,}"
        )
    names = _backend_names(backends)
    limit = _bound(bound, dtype)
    engine_options = _engine_options(options, names)
    read_texts = None if texts is None else list(_lines("--texts", texts).values())
    read_ids = None if ids is None else _read_ids(ids)

    from genlm.cli.engine_process import Request, compute_in_process

    outcomes: list[Outcome] = []
    reference: EngineRows | None = None
    for name in names:
        if not as_json:
            typer.echo(f"{name} ...", err=True)
        contexts = None if reference is None else reference.contexts
        request = Request(
            model, name, dtype, engine_options[name], longest, read_texts, read_ids, contexts
        )
        result = compute_in_process(request, timeout)
        if isinstance(result, str):
            outcomes.append(Outcome(name, "failed", result))
        elif reference is None:
            reference = result
            outcomes.append(Outcome(name, "reference", figures=result.figures))
        else:
            outcomes.append(_compare(name, result, reference, limit, seed))
    report: dict[str, Any] = {"model": model, "dtype": dtype, "bound": limit, "seed": seed}
    report |= {"contexts": 0, "longest": 0, "not_reached": [], "family": None}
    if reference is not None:
        report |= {"contexts": len(reference.contexts), **reference.about}
    if as_json:
        print_json(report | {"engines": [dataclasses.asdict(outcome) for outcome in outcomes]})
    else:
        _print(report, outcomes)
    successes = {"reference", "within the bound"}
    raise typer.Exit(code=any(outcome.status not in successes for outcome in outcomes))


def _compare(
    name: str, result: EngineRows, reference: EngineRows, bound: float, seed: int
) -> Outcome:
    """Compare the rows of the contexts that both engines support."""
    import torch

    from genlm.testing.comparison import differences

    expected = {
        ids: torch.from_numpy(row)
        for ids, row in zip(reference.ids[::-1], reference.rows[::-1])  # the first of two rows
    }
    pairs = zip(result.ids, map(torch.from_numpy, result.rows))
    rows = [(ids, row) for ids, row in pairs if ids in expected]
    if not rows:
        reason = "supports no context that the first engine supports"
        return Outcome(name, "failed", reason, figures=result.figures)
    kinds = reference.contexts
    try:
        measured = differences(rows, expected.__getitem__, kinds=kinds, seed=seed)
    except ValueError as error:
        return Outcome(name, "failed", str(error), figures=result.figures)
    is_within = max(measured.largest, measured.repeats) <= bound
    status = "within the bound" if is_within else "beyond the bound"
    skipped = len(kinds) - len({ids for ids, _ in rows})
    return Outcome(name, status, "", measured, skipped, result.figures)


# -- arguments ------------------------------------------------------------------------------


def _backend_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) < 2 or len({*names}) < len(names):
        raise bad_value(
            "--backends", f"{text!r}: name two or more different engines, such as hf,vllm"
        )
    for name in names:
        try:
            find_backend(name)
        except UnknownBackendError as error:
            raise bad_value("--backends", str(error)) from error
    return names


def _bound(bound: float | None, dtype: str) -> float:
    limit = TOLERANCE_CAPS[dtype] if bound is None else bound
    if not (math.isfinite(limit) and limit > 0):
        raise bad_value("--bound", f"{limit}: expected a positive number")
    return limit


def _lines(option: str, path: Path) -> dict[int, str]:
    """Return the lines that are not empty, by their numbers from 1."""
    lines = enumerate(read_lines(str(path), option), 1)
    return {number: line for number, line in lines if line.strip()}


def _read_ids(path: Path) -> list[list[int]]:
    sequences = []
    for number, line in _lines("--ids", path).items():
        try:
            ids = json.loads(line)
        except (ValueError, RecursionError):
            ids = None
        if not (isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)):
            raise bad_value(
                "--ids",
                f"{str(path)!r}, line {number}: expected an array of token ids, such as "
                f"[1, 17, 4]; found {line[:60]!r}",
            )
        sequences.append(ids)
    return sequences


def _engine_options(text: str, names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    options = checked_options(text)
    for name, value in options.items():
        if not isinstance(value, dict):
            raise bad_value("--options", f"{name}: expected a JSON object; found {value!r}")
        if name not in names:
            raise bad_value("--options", f"{name!r} is not among the --backends")
    return {name: options.get(name, {}) for name in names}


# -- output ---------------------------------------------------------------------------------


def _print(report: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
    console = output_console()
    family = report["family"] or "of an unknown architecture"
    console.print(
        f"{report['model']} ({family}), {report['dtype']}: {report['contexts']} contexts of up "
        f"to {report['longest']} tokens, computed twice; bound {report['bound']:g}"
    )
    for name in report["not_reached"]:
        console.print(f"not reached: the {name}; use a larger --longest")
    columns = ["engine", "result", "largest", "at", "total variation", "greedy", "drawn"]
    columns += ["repeats", "memory", "GPU", "load", "rows/s"]
    table = borderless_table(*columns, no_wrap=True)
    table.columns[columns.index("at")].no_wrap = False
    for outcome in outcomes:
        table.add_row(*_cells(outcome))
    console.print(table)
    for outcome in outcomes:
        if outcome.reason:
            console.print(f"{outcome.backend}: {outcome.reason}")
        if outcome.skipped:
            console.print(
                f"{outcome.backend}: {outcome.skipped} contexts were not compared: too long "
                f"for an engine, or with ids that it does not know"
            )


def _cells(outcome: Outcome) -> list[str]:
    differences, figures = outcome.differences, outcome.figures
    cells = [outcome.backend, outcome.status]
    if differences is None:
        cells += [""] * 6
    else:
        variation = (
            f"{differences.total_variation:.1e} (mean {differences.mean_total_variation:.1e})"
        )
        cells += [f"{differences.largest:.1e}", differences.where, variation]
        cells += [
            f"{differences.same_greedy:.1%}",
            f"{differences.same_draw:.1%}",
            f"{differences.repeats:.1e}",
        ]
    if not figures:
        return [*cells, "", "", "", ""]
    gpu = figures["device_memory_bytes"]
    cells += [f"{figures['peak_memory_bytes'] / 2**20:,.0f} MiB"]
    cells += ["" if gpu is None else f"{gpu / 2**20:,.0f} MiB"]
    return [*cells, f"{figures['load_s']:.1f} s", f"{figures['rows_per_s']:,.1f}"]
