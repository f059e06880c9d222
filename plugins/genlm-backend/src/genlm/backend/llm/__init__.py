"""Published language models."""

from __future__ import annotations

from typing import Any

import torch

import genlm
from genlm.backend.llm.base import AsyncLM, MockAsyncLM, temper
from genlm.backend.llm.hf import AsyncTransformer
from genlm.backend.llm.mlx import AsyncMlxLM
from genlm.backend.llm.served import ServedLM
from genlm.backend.llm.sgl import AsyncSGLTransformer
from genlm.backend.llm.vllm import AsyncVirtualLM
from genlm.plugin import get_backend

__all__ = [
    "AsyncLM",
    "AsyncMlxLM",
    "AsyncSGLTransformer",
    "AsyncTransformer",
    "AsyncVirtualLM",
    "MockAsyncLM",
    "load_model_by_name",
    "temper",
]

_CLASSES: dict[str, Any] = {
    "vllm": AsyncVirtualLM,
    "hf": AsyncTransformer,
    "sgl": AsyncSGLTransformer,
    "mlx": AsyncMlxLM,
    "mock": MockAsyncLM,
}


def load_model_by_name(
    name: str,
    backend: str | None = None,
    llm_opts: dict[str, Any] | None = None,
) -> AsyncLM:
    """Load a model; maps to `genlm.load_model`.

    Args:
        name: Hub id or folder; for `"hf"` also `"demo"`, the packaged model.
        backend: `"vllm"`, `"hf"`, `"sgl"`, `"mlx"`, `"mock"`, or any other installed
            engine. By default `"vllm"` if there is a CUDA device and genlm-vllm can
            be used, else `"hf"`.
        llm_opts: Arguments of the `from_name` method of the backend's class, or options of
            another engine.

    Raises:
        ValueError: The backend is unknown.
        MissingRequirementError: The backend's plugin or library is not installed; an
            `ImportError`.
    """
    if backend is None:
        backend = "vllm" if torch.cuda.is_available() and _usable("vllm") else "hf"
    options = llm_opts or {}
    if backend in _CLASSES:
        model: AsyncLM = _CLASSES[backend].from_name(name, **options)
        return model
    try:
        engine = get_backend(backend)
    except genlm.UnknownBackendError as error:
        raise ValueError(
            f"backend={backend!r}: expected one of {', '.join(_CLASSES)}, or None; {error}"
        ) from error
    return ServedLM(lambda: engine(name, **options), name=backend)


def _usable(backend: str) -> bool:
    return any(
        info.name == backend and info.status == "ok" for info in genlm.list_backends("engine")
    )
