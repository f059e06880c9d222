"""Arguments that several commands take."""

from __future__ import annotations

import json
from typing import Any

import typer

from genlm.core.dtypes import dtype_name

__all__ = ["checked_dtype", "checked_options"]


def checked_dtype(text: str) -> str:
    """Return the name of a dtype, given in any usual spelling; a callback of options."""
    try:
        return dtype_name(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def checked_options(text: str) -> dict[str, Any]:
    """Return options of `load_model`, given as JSON."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{text!r} is not a JSON object", param_hint="--options")
    return found
