"""Where a model is to be loaded from, as far as its name tells; for engines that load one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from genlm.core.errors import ModelLoadError

__all__ = ["model_source"]

# With what engines append to it (`owner/name:Q4_K_M`), or an address (`s3://...`).
_ELSEWHERE = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?|[a-z][a-z0-9+]*://\S+", re.ASCII)


def model_source(model: str | os.PathLike[str]) -> str:
    """Return the folder or file that a model's name means if there is one, else the name.

    Looks nothing up elsewhere. What cannot be found elsewhere is refused at once, which
    spares users a misleading message when the hub has been asked for it in vain.

    Args:
        model: A path, the id of a repository on a hub, or an address.

    Raises:
        ModelLoadError: A path at which there is nothing, or no name at all.
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
