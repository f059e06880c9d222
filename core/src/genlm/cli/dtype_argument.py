"""`--dtype` in any usual spelling."""

from __future__ import annotations

import typer

from genlm.core.dtypes import dtype_name

__all__ = ["checked_dtype"]


def checked_dtype(text: str) -> str:
    """Return the name of a dtype; a callback of options."""
    try:
        return dtype_name(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
