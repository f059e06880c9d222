"""`model_source`: folder, file or hub id of a model."""

from __future__ import annotations

import os
import re
from pathlib import Path

from genlm.core.base.errors import ModelLoadError

__all__ = ["model_source"]

# A hub id, with a suffix of an engine (`owner/name:Q4_K_M`) or without, or a URL (`s3://...`).
_HUB_ID_OR_URL = re.compile(
    r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?|[a-z][a-z0-9+]*://\S+", re.ASCII
)


def model_source(model: str | os.PathLike[str]) -> str:
    """Return the folder or file of a model if it exists, else the name.

    The function does not contact a hub. A name that is neither a valid hub id nor a URL is
    refused here, instead of with the hub's error message.

    Args:
        model: A path, the id of a repository on a hub, or a URL.

    Raises:
        ModelLoadError: The path does not exist, or the name is empty.
        TypeError: `model` is neither a string nor a path.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(
            f"asked for the model {model!r}; pass a folder or a hub id such as 'owner/name'"
        )
    name = os.fspath(model)
    path = Path(name).expanduser()
    if name and path.exists():
        return str(path)
    if isinstance(model, os.PathLike) or not _HUB_ID_OR_URL.fullmatch(name):
        raise ModelLoadError(
            f"asked for the model in folder {name!r}; there is no such folder. Pass a folder "
            f"with config.json, weights and tokenizer, or a hub id such as 'owner/name'"
        )
    return name
