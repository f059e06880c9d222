"""`model_source`: folder, file or hub id of a model."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from genlm.core.base.errors import ModelLoadError

# A hub id, with a suffix of an engine (`owner/name:Q4_K_M`) or without, or a URL (`s3://...`).
_HUB_ID_OR_URL = re.compile(
    r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?|[a-z][a-z0-9+]*://\S+", re.ASCII
)

_MAX_SHOWN = 300
"""Maximum number of characters of a name in a message, more than most paths have."""


def model_source(model: str | os.PathLike[str]) -> str:
    """Return the folder or file of a model if it exists, else the name.

    The function does not contact a hub. A name that is neither a valid hub id nor a URL is
    refused here, instead of with the hub's error message.

    Args:
        model: A path, the id of a repository on a hub, a URL, or `"demo"` for the small model
            in the package of genlm-hf.

    Raises:
        ModelLoadError: The path does not exist, the name is empty, or genlm-hf is not
            installed.
        TypeError: `model` is neither a string nor a path.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(
            f"asked for the model {model!r}; pass a folder or a hub id such as 'owner/name'"
        )
    if model == "demo":
        return _demo_folder()
    name = os.fspath(model)
    path = Path(name).expanduser()
    try:
        exists = bool(name) and path.exists()
    except OSError:  # a name that is too long, such as a text
        exists = False
    if exists:
        return str(path)
    shown = name if len(name) <= _MAX_SHOWN else f"{name[:_MAX_SHOWN]}..."
    if isinstance(model, os.PathLike) or not _HUB_ID_OR_URL.fullmatch(name):
        raise ModelLoadError(
            f"asked for the model in folder {shown!r}; there is no such folder. Pass a folder "
            f"with config.json, weights and tokenizer, or a hub id such as 'owner/name'"
        )
    return name


def _demo_folder() -> str:
    spec = importlib.util.find_spec("genlm_hf")
    if spec is None or spec.origin is None:
        raise ModelLoadError(
            "the model 'demo' is part of genlm-hf, which is not installed: pip install "
            "genlm-hf, or pass a folder or a hub id. The backends reference and llamacpp have "
            "their own model 'demo'"
        )
    folder = Path(spec.origin).parent / "demo"
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"the model 'demo' is not in {folder}; reinstall genlm-hf")
    return str(folder)
