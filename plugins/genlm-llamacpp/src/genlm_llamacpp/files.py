"""GGUF files of models and adapters."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from genlm.plugin import AdapterError, ModelLoadError, model_source, read_lora_config

_DEMO = Path(__file__).parent / "demo.gguf"

_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


def model_file(model: str | os.PathLike[str]) -> Path:
    """Return the GGUF file of a model, the first one if it is split.

    Raises:
        ModelLoadError: The path has no GGUF file, or the folder has several models.
    """
    if model == "demo":
        return _DEMO
    path = Path(model_source(model))
    if not path.exists():
        raise ModelLoadError(
            f"no model {str(model)!r}; pass a GGUF file, or a folder with one. Nothing is "
            f"downloaded here: download it first, for example with "
            f"huggingface_hub.hf_hub_download"
        )
    files = _gguf_files(path)
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise ModelLoadError(
            f"folder {str(path)!r} has {len(files)} GGUF models ({names}); pass one of the "
            f"files"
        )
    return files[0]


def adapter_file(name: str, path: Path) -> Path:
    """Return the GGUF file of an adapter.

    Raises:
        AdapterError: The path has no GGUF file, or the folder has several.
    """
    files = _gguf_files(path)
    if len(files) != 1 or not files[0].is_file():
        raise AdapterError(
            f"adapter {name!r}: {str(path)!r} is not a GGUF file, nor a folder with one; "
            f"llama.cpp's convert_lora_to_gguf.py converts adapters of peft"
        )
    return files[0]


def adapter_settings(name: str, folder: Path) -> Mapping[str, Any]:
    """Return the settings of an adapter of peft that can be converted to GGUF.

    Converters ignore other settings: a GGUF file has one `lora_alpha`, which is divided by the
    rank of each layer.

    Raises:
        AdapterError: As `genlm.plugin.read_lora_config`.
    """
    return read_lora_config(name, folder, engine="llama.cpp", supported={"rank_pattern"})


def _gguf_files(path: Path) -> list[Path]:
    """Return a file, or the GGUF files of a folder, without later parts of split files."""
    if not path.is_dir():
        return [path]
    return [file for file in sorted(path.glob("*.gguf")) if not _LATER_PART.search(file.name)]
