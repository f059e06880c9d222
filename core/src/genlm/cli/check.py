"""`genlm check`: run the conformance suite on an engine or a trie."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from genlm.cli.arguments import JsonOption, SeedOption, backends, bad_value, checked_dtype
from genlm.cli.output import print_json
from genlm.core.base.error_handling import import_required
from genlm.core.base.errors import GenlmError

if TYPE_CHECKING:
    from genlm.testing.report import Report
    from genlm.testing.run import Run


def check(
    backend: Annotated[
        str,
        typer.Argument(help="Name of an installed engine or trie.", autocompletion=backends()),
    ],
    *,
    model: Annotated[
        str | None,
        typer.Option(help="Model id or path to check without an oracle, in place of targets."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of that model, by default float32; determines the tolerance.",
            callback=checked_dtype,
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID",
            help="Id of a check, or of a check of one target, `check[model]`; may be repeated.",
        ),
    ] = None,
    profile: Annotated[str, typer.Option(help="Number of examples: quick or full.")] = "quick",
    xfail: Annotated[Path | None, typer.Option(help="File of expected failures.")] = None,
    seed: SeedOption = 0,
    no_skips: Annotated[
        bool, typer.Option("--no-skips", help="Count a skipped check as a failure.")
    ] = False,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="Stop at the first failure.")
    ] = False,
    as_list: Annotated[
        bool, typer.Option("--list", help="List the checks without running them.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run the conformance suite against a backend.

    Exit code 0: no check failed. 1: a check failed, or the backend is unknown or unusable.
    2: an option is invalid, or names an unknown check.
    """
    import_required("hypothesis", "genlm check", "'genlm-core[testing]'")
    if dtype is not None and model is None:
        raise bad_value(
            "--dtype",
            "it is the dtype of --model; the targets of a backend have dtypes of their own",
        )
    from genlm.testing.run import Settings, prepared

    settings = Settings(
        backend,
        model=model,
        dtype=dtype or "float32",
        only=tuple(only or ()),
        profile=profile,
        xfail=xfail,
        seed=seed,
        no_skips=no_skips,
    )
    with contextlib.ExitStack() as stack:
        try:
            run = stack.enter_context(prepared(settings))
        except GenlmError:
            raise
        except (LookupError, ValueError) as error:
            raise typer.BadParameter(str(error)) from error
        if as_list:
            properties = {case.id: case.check.property for case in run.cases}
            if as_json:
                print_json(properties)
                return
            for name, text in properties.items():
                typer.echo(f"{name}: {text}")
            return
        report = _run_cases(run, quiet=as_json, fail_fast=fail_fast)
    if as_json:
        print_json(report.as_json())
    else:
        typer.echo(report.as_text())
    raise typer.Exit(code=bool(report.failures))


def _run_cases(run: Run, *, quiet: bool, fail_fast: bool) -> Report:
    from genlm.testing.report import Report, one_line

    outcomes = []
    for outcome in run.outcomes():
        outcomes.append(outcome)
        if not quiet:
            typer.echo(one_line(outcome))
        if fail_fast and run.fails(outcome):
            break
    return Report(run, outcomes)
