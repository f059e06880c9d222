"""`load_model`: from a backend's name to a language model."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable
from typing import Any

from genlm.core.cache import OutputCache
from genlm.core.lm import AsyncLM
from genlm.core.plugins import find_backend, get_backend

__all__ = ["load_model", "load_model_by_name"]


def load_model(
    model: str | os.PathLike[str],
    backend: str | None = None,
    *,
    output_cache: OutputCache | None = None,
    max_batch_size: int | None = None,
    max_wait_s: float = 0.0,
    max_pending: int | None = None,
    **engine_options: Any,
) -> AsyncLM:
    """Load a model with one of the installed engines.

    Blocks while the model loads; in a coroutine use `asyncio.to_thread`.

    Args:
        model: What the engine calls a model: a hub id, a folder, `"demo"`.
        backend: Name of an engine, see `genlm plugins`; by default the one chosen with
            `use_backend` or `GENLM_BACKEND`, or the only one installed.
        output_cache: Rows to remember; see `AsyncLM`.
        max_batch_size: Most queries in the engine at a time, None for no limit.
        max_wait_s: How long an incomplete batch waits for more requests; 0 for no timer.
        max_pending: Most queries accepted at a time; more wait their turn outside.
        **engine_options: Passed to the engine's constructor.

    Returns:
        The model; close it, or use it as a context manager.

    Raises:
        PluginError: The backend is unknown, ambiguous, broken or lacks a library.
        ModelLoadError: The engine cannot serve this model.
        TypeError: The engine takes no such option.
        ValueError: A limit below 1, or a wait that is negative or not finite.
    """
    info = find_backend(backend)
    build = get_backend(info.provider)
    _check_options(build, info.name, engine_options)
    return AsyncLM(
        lambda: build(model, **engine_options),
        name=info.name,
        output_cache=output_cache,
        max_batch_size=max_batch_size,
        max_wait_s=max_wait_s,
        max_pending=max_pending,
    )


load_model_by_name = load_model
"""The name under which genlm-backend published it."""


def _check_options(build: Callable[..., Any], backend: str, options: dict[str, Any]) -> None:
    """Refuse unknown options before anything is loaded."""
    parameters = list(inspect.signature(build).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters]
    unknown = [option for option in options if option not in known]
    if unknown:
        own = list(inspect.signature(load_model).parameters)[2:-1]
        close = difflib.get_close_matches(unknown[0], [*known, *own], 1)
        raise TypeError(
            f"backend {backend!r} takes no option {', '.join(map(repr, unknown))}. "
            f"It takes: {', '.join(known) or 'none'}. On any backend: {', '.join(own)}"
            + "".join(f". Did you mean {name!r}?" for name in close)
        )
