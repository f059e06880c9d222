"""`load_model`: from a backend's name to a language model."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

from genlm.core.cache import OutputCache
from genlm.core.engine import Engine
from genlm.core.errors import ModelLoadError, TokenIdError
from genlm.core.lm import AsyncLM
from genlm.core.plugins import find_backend, get_backend
from genlm.core.query import Query
from genlm.core.rows import invalid_rows
from genlm.core.vocab import Vocabulary

__all__ = ["load_model", "load_model_by_name"]


_FIRST_ROW_ID = -1
"""The scheduler's query ids begin at 0."""

_FIRST_ROW_TOKENS = 3

_MAX_STEPS = 10_000
"""Many more than an engine takes that works on a prompt in several steps."""


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

    The engine computes one row before this returns, so that a model whose kernels fail is
    refused here. Blocks while the model loads; in a coroutine use `asyncio.to_thread`.

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
        ModelLoadError: The engine cannot serve this model, or fails to compute a row of it.
        TypeError: The engine takes no such option.
        ValueError: A limit below 1, or a wait that is negative or not finite.
    """
    info = find_backend(backend)
    build = get_backend(info.provider)
    _check_options(build, info.name, engine_options)
    return AsyncLM(
        lambda: with_first_row(build(model, **engine_options), info.name, model),
        name=info.name,
        output_cache=output_cache,
        max_batch_size=max_batch_size,
        max_wait_s=max_wait_s,
        max_pending=max_pending,
    )


load_model_by_name = load_model
"""The name under which genlm-backend published it."""


def with_first_row(engine: Engine, backend: str, model: object) -> Engine:
    """Compute one row with a new engine and return the engine.

    Args:
        engine: Not yet used; called on the thread that owns it.
        backend: Its name, for the message.
        model: What was asked for, for the message.

    Raises:
        ModelLoadError: The row could not be computed or is not a distribution. The engine
            is closed.
    """
    try:
        row = _first_row(engine)
        problem = invalid_rows([row], engine.vocabulary.size).get(0)
        if problem is not None:
            raise problem
    except Exception as error:
        engine.close()
        raise ModelLoadError(
            f"asked {backend!r} for the model {model!r}; it was loaded, but its first row "
            f"failed: {type(error).__name__}: {error}"
        ) from error
    except BaseException:  # Ctrl-C
        engine.close()
        raise
    return engine


def _first_row(engine: Engine) -> Any:
    """Compute the row of a few tokens, each the first one that the model can embed."""
    length = min(_FIRST_ROW_TOKENS, engine.max_context or _FIRST_ROW_TOKENS)
    for token_id in _token_ids(engine.vocabulary):
        try:
            engine.submit(Query(_FIRST_ROW_ID, (token_id,) * length))
        except TokenIdError:
            continue
        return _row_of(engine, _FIRST_ROW_ID)
    raise ValueError("the model embeds none of the tokenizer's ids")


def _row_of(engine: Engine, query_id: int) -> Any:
    for _ in range(_MAX_STEPS):
        for completion in engine.step():
            if completion.query_id == query_id:
                if completion.error is not None:
                    raise completion.error
                return completion.result
    raise RuntimeError(f"no row after {_MAX_STEPS} steps of the engine")


def _token_ids(vocabulary: Vocabulary) -> Iterator[int]:
    """Yield the ids of tokens, those that begin and end texts first."""
    missing = set(vocabulary.missing_ids)
    known = [token_id for token_id in range(vocabulary.size) if token_id not in missing]
    for name in ("bos_token_id", "eos_token_id"):
        token_id = getattr(vocabulary.tokenizer, name, None)
        if token_id in known:
            yield token_id
    yield from known


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
