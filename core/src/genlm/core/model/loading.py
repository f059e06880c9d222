"""Construction of an engine from a backend name, with a test row."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from genlm.core.base.errors import ModelLoadError, TokenIdError, describe_error
from genlm.core.base.progress import loading_stage
from genlm.core.base.validation import is_model_object
from genlm.core.engine.engine import Engine, checked_completions, checked_engine
from genlm.core.plugins.lookup import find_backend, get_backend
from genlm.core.queries.query import Query, Reduced
from genlm.core.rows.logits import invalid_rows
from genlm.core.vocab import Vocabulary

_FIRST_ROW_ID = -1
"""Query id of the first row; the scheduler's query ids begin at 0."""

_FIRST_ROW_TOKENS = 3

_MAX_STEPS = 10_000
"""Maximum number of steps of the first row, more than any engine needs for a short prompt."""


def engine_builder(
    model: Any,
    backend: str | None,
    options: Mapping[str, Any],
    common_options: Sequence[str],
) -> tuple[str, Callable[[], Engine]]:
    """Return the engine that `load_model` requests, as a function that builds it.

    A model object and the option `tokenizer` are passed to the engine's `from_model`.

    Returns:
        The name of the backend, and a function that builds the engine and computes one row
        with it.
    """
    info = find_backend(backend)
    loading_stage(f"importing {info.name}")
    build = get_backend(info.provider)
    if is_model_object(model):
        build = _model_object_builder(build, info.name, model, options)
    check_options(build, info.name, options, common_options)
    return info.name, lambda: with_first_row(
        checked_engine(build(model, **options)), info.name, model
    )


def with_first_row(engine: Engine, backend: str, model: object) -> Engine:
    """Return a new engine after it has computed one row; close it if that fails."""
    loading_stage("first row")
    try:
        row = _first_row(engine)
        problem = invalid_rows([row], engine.vocabulary.size).get(0)
        if problem is not None:
            raise problem
    except Exception as error:
        engine.close()
        name = type(model).__name__ if is_model_object(model) else str(model)
        raise ModelLoadError(
            f"{backend!r} has loaded the model {name!r}, but its first row failed: "
            f"{describe_error(error)}"
        ) from error
    except BaseException:  # Ctrl-C
        engine.close()
        raise
    return engine


def _first_row(engine: Engine) -> Any:
    """Compute the row of a few equal tokens, with the first id that the model can embed."""
    length = min(_FIRST_ROW_TOKENS, engine.max_context or _FIRST_ROW_TOKENS)
    for token_id in _token_ids(engine.vocabulary):
        try:
            engine.submit(Query(_FIRST_ROW_ID, (token_id,) * length))
        except TokenIdError:
            continue
        return _step_until_complete(engine)
    raise ValueError("the model embeds none of the tokenizer's ids")


def _step_until_complete(engine: Engine) -> Any:
    for _ in range(_MAX_STEPS):
        for completion in checked_completions(engine.step()):
            if completion.query_id == _FIRST_ROW_ID:
                if completion.error is not None:
                    raise completion.error
                result = completion.result
                return result.values[0] if isinstance(result, Reduced) else result
    raise RuntimeError(
        f"{_MAX_STEPS} steps of the engine returned no Completion with query_id "
        f"{_FIRST_ROW_ID}; steps must return one for each submitted query, with its query_id, "
        f"and must wait for results that others compute"
    )


def _token_ids(vocabulary: Vocabulary) -> Iterator[int]:
    """Yield the ids of the vocabulary; the BOS and EOS ids come first."""
    missing = set(vocabulary.missing_ids)
    token_ids = [token_id for token_id in range(vocabulary.size) if token_id not in missing]
    for name in ("bos_token_id", "eos_token_id"):
        token_id = getattr(vocabulary.tokenizer, name, None)
        if token_id in token_ids:
            yield token_id
    yield from token_ids


def _model_object_builder(
    build: Callable[..., Any], backend: str, model: object, options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return the function that builds an engine from a model object and a tokenizer."""
    kind = type(model).__name__
    from_model: Callable[..., Any] | None = getattr(build, "from_model", None)
    if from_model is None:
        raise TypeError(
            f"{backend!r} cannot serve a model object, {kind}; it loads models itself: pass a "
            f"folder or a name"
        )
    tokenizer = options.get("tokenizer")
    if isinstance(tokenizer, (str, os.PathLike)):
        raise TypeError(
            f"tokenizer={str(tokenizer)!r} is a name; pass the tokenizer itself, such as "
            f"transformers.AutoTokenizer.from_pretrained({str(tokenizer)!r})"
        )
    if tokenizer is None:
        raise TypeError(
            f"{backend!r} cannot serve a model object, {kind}, without its tokenizer: "
            f"load_model(model, {backend!r}, tokenizer=tokenizer)"
        )
    return from_model


def check_options(
    build: Callable[..., Any],
    backend: str,
    options: Mapping[str, Any],
    common: Sequence[str] = (),
) -> None:
    """Reject unknown options, and options of type `bool` with other values, before loading.

    Args:
        build: The callable of `get_backend`.
        backend: Name of the backend for messages.
        options: The keyword arguments for `build`.
        common: Further options that the message lists.

    Raises:
        TypeError: `build` does not accept an option, for which the message suggests another; or
            an option that is annotated as `bool` is neither True nor False.
    """
    parameters = list(inspect.signature(build).parameters.values())[1:]
    for parameter in parameters:
        value = options.get(parameter.name, True)
        if parameter.annotation in (bool, "bool") and value not in (True, False):
            raise TypeError(f"{parameter.name}={value!r}; expected True or False")
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    accepted = [parameter.name for parameter in parameters]
    unknown = [option for option in options if option not in accepted]
    if unknown:
        raise TypeError(
            f"backend {backend!r} takes no option {', '.join(map(repr, unknown))}. "
            f"It takes: {', '.join(accepted) or 'none'}"
            + (f". On any backend: {', '.join(common)}" if common else "")
            + _advice(build, unknown[0], options[unknown[0]], [*accepted, *common])
        )


def _advice(build: object, name: str, value: object, accepted: Sequence[str]) -> str:
    """Return advice on an option that the engine does not accept.

    The engine's `option_homes` maps prefixes of option names of its library to the option of
    the engine that accepts them. The first matching prefix counts; `""` matches every name.
    """
    if name == "tokenizer":
        return ". tokenizer= is for model objects; a folder contains its tokenizer"
    if name in {"cache_size", "cache_opts"}:  # of genlm-backend
        return ". Pass output_cache=genlm.OutputCache(...)"
    homes: Mapping[str, str] = getattr(build, "option_homes", {})
    prefixes = (prefix for prefix in homes if prefix and name.startswith(prefix))
    home = next((homes[prefix] for prefix in prefixes), None)
    matches = difflib.get_close_matches(name, accepted, 1) if home is None else []
    if matches:
        return f". Did you mean {matches[0]!r}?"
    if home is None and (name.endswith("opts") or "" not in homes):
        return ""
    if home is None:
        home = homes[""]
        return (
            f". If it is an option of the engine's library, pass {home}={{{name!r}: {value!r}}}"
        )
    argument = f"{{{name!r}: {value!r}}}" if home.endswith("opts") else repr(value)
    return f". Pass {home}={argument}"
