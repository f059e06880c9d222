"""Arguments that several commands have, and the checks of their values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from genlm.core.base.errors import GenlmError
from genlm.core.plugins.lookup import list_backends
from genlm.core.plugins.spec import Kind
from genlm.engines.dtypes import dtype_name
from genlm.testing.target import TOLERANCE_CAPS

if TYPE_CHECKING:
    from genlm.core.model.lm import AsyncLM


def backends(kind: Kind | None = None) -> Callable[[str], list[str]]:
    """Return a function that completes the names of usable engines, tries, or both."""

    def complete(incomplete: str) -> list[str]:
        names = {info.name for info in list_backends(kind) if info.status == "ok"}
        return sorted(name for name in names if name.startswith(incomplete))

    return complete


EngineOption = Annotated[
    str,
    typer.Option(
        envvar="GENLM_BACKEND",
        help="Name of an engine; `genlm plugins` lists them.",
        autocompletion=backends("engine"),
    ),
]
"""`--backend` of the commands that load a model."""

ModelOption = Annotated[str, typer.Option(help="Model id, path, or `demo`.")]
"""`--model` of the same commands."""

LoadOptions = Annotated[
    str, typer.Option(help='Options of `load_model` as JSON, such as `{"dtype": "bf16"}`.')
]
"""`--options` of the same commands."""

SeedOption = Annotated[int, typer.Option(min=0, help="Random seed.")]
"""`--seed` of all commands."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
"""`--json` of all commands that print an object."""


def bad_value(argument: str, message: str) -> typer.BadParameter:
    """Return the error for a value of an argument or option."""
    return typer.BadParameter(message, param_hint=argument)


def checked_dtype(text: str | None) -> str | None:
    """Return the name of a dtype that has a tolerance; a callback of options."""
    if text is None:
        return None
    try:
        name = dtype_name(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if name not in TOLERANCE_CAPS:
        expected = ", ".join(TOLERANCE_CAPS)
        raise typer.BadParameter(
            f"no tolerance is defined for {name!r}; pass the dtype of the model: {expected}"
        )
    return name


def checked_options(text: str, option: str = "--options") -> dict[str, Any]:
    """Return the value of an option that is a JSON object."""
    value = json_object(text)
    if value is None:
        raise bad_value(option, f"{text!r} is not a JSON object")
    for name in sorted({"model", "backend"} & value.keys()):
        raise bad_value(
            option, f"{name!r} is an argument of the command, not an option of the engine"
        )
    return value


def json_object(text: str) -> dict[str, Any] | None:
    """Parse a JSON object; None if the text is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # also integers of too many digits
        return None
    return value if isinstance(value, dict) else None


def require_writable(option: str, path: Path) -> None:
    """Refuse a file that cannot be written, before its content is computed."""
    existed = path.exists()
    if path.is_fifo():  # its reader would see the end of the file
        return
    try:
        path.open("a").close()
    except OSError as error:
        raise bad_value(option, f"{str(path)!r}: {error.strerror}") from error
    if not existed:
        path.unlink()


def load(model: str, backend: str, options: Mapping[str, Any]) -> AsyncLM:
    """Load a model with the options of `--options`; terminals show progress."""
    from genlm.core.model.lm import load_model  # imports torch

    progress = Console(stderr=True).is_terminal
    try:
        return load_model(model, backend, **{"progress": progress, **options})
    except GenlmError:
        raise
    except (TypeError, ValueError) as error:
        if not options:
            raise
        raise bad_value("--options", str(error)) from error
