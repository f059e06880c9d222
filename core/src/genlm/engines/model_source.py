"""`model_source`: from a model's name to a folder, a file or a hub id."""

from __future__ import annotations

import os
import re
from pathlib import Path

from genlm.core.base.errors import ModelLoadError

__all__ = ["model_source"]

# With what engines append to it (`owner/name:Q4_K_M`), or an address (`s3://...`).
_ELSEWHERE = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?|[a-z][a-z0-9+]*://\S+", re.ASCII)


def model_source(model: str | os.PathLike[str]) -> str:
    """Return the folder or file of a model if it exists, else the name.

    Does not contact a hub. A name that can be neither a hub id nor an address is refused at
    once, instead of with the hub's error message.

    Args:
        model: A path, the id of a repository on a hub, or an address.

    Raises:
        ModelLoadError: A path that does not exist, or an empty name.
        TypeError: Neither a string nor a path.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(
            f"asked for the model {model!r}; pass a folder or a hub id such as 'owner/name'"
        )
    name = os.fspath(model)
    path = Path(name).expanduser()
    if name and path.exists():
        return str(path)
    if isinstance(model, os.PathLike) or not _ELSEWHERE.fullmatch(name):
        raise ModelLoadError(
            f"asked for the model in folder {name!r}; there is no such folder. Pass a folder "
            f"with config.json, weights and tokenizer, or a hub id such as 'owner/name'"
        )
    return name
