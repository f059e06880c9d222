"""Rows of one engine, computed in a separate process.

The memory of a process is freed when it ends, and an engine that changes or ends its process
does not affect the next one.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import multiprocessing
import os
import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np

from genlm.cli.text_ids import ids_with_text, text_ids
from genlm.core.base.errors import TokenizerError, describe_error
from genlm.core.model.lm import load_model
from genlm.core.plugins.lookup import find_backend, get_backend
from genlm.core.reference.tokenizer import default_text
from genlm.engines.model_facts import ModelFacts
from genlm.testing.comparison import contexts_of, request_rows
from genlm.testing.target import TokenTuple

if TYPE_CHECKING:
    from genlm.core.model.lm import AsyncLM

DEFAULT_LONGEST = 256
MAX_DEFAULT_LONGEST = 8192

_KIB = 1 if sys.platform == "darwin" else 1024  # of `ru_maxrss`


@dataclass(frozen=True)
class Request:
    """A request for the rows of one engine.

    Attributes:
        model: Model id or path.
        backend: Name of the engine.
        dtype: Dtype in which the engine computes.
        options: Options of `load_model`.
        longest: Maximum length of a context; by default it depends on the model.
        texts: Texts to compare on; by default the embedded text.
        ids: Token ids to compare on, in place of texts.
        contexts: Kinds of the contexts to request, by token ids; None makes contexts with the
            vocabulary of this engine.
    """

    model: str
    backend: str
    dtype: str
    options: Mapping[str, Any] = field(default_factory=dict)
    longest: int | None = None
    texts: Sequence[str] | None = None
    ids: Sequence[Sequence[int]] | None = None
    contexts: Mapping[TokenTuple, str] | None = None


@dataclass(frozen=True)
class EngineRows:
    """The rows of one engine.

    Attributes:
        contexts: The contexts; the engine computed those that it supports.
        about: Their maximum length, the limits of the model that no context exceeds, and the
            model's architecture; empty if the request had contexts.
        ids: Token ids of each row; every context occurs twice.
        rows: Shape `(len(ids), vocab_size)`, float32.
        figures: Memory, speed and sizes.
    """

    contexts: Mapping[TokenTuple, str]
    about: Mapping[str, Any]
    ids: Sequence[TokenTuple]
    rows: np.ndarray[Any, Any]
    figures: Mapping[str, Any]


def compute_in_process(request: Request, timeout: float | None) -> EngineRows | str:
    """Compute the rows of a request in a new process.

    Returns:
        The rows, or the error with which loading, computing or the process ended. Output of
        the engine goes to standard error.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_rows, args=(sender, request))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            return f"did not answer within {timeout:g} s"
        result: EngineRows | str = receiver.recv()
    except EOFError:
        process.join()
        return f"its process ended with exit code {process.exitcode}"
    else:
        process.join(timeout)
        return result
    finally:
        process.kill()
        receiver.close()


def _send_rows(sender: Connection, request: Request) -> None:
    os.dup2(2, 1)  # programs read the standard output of the command
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    sender.send(compute_here(request))


def _exit_with_parent() -> None:
    """End this process when the command ends, for example by SIGTERM."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # noqa: S101 - our own mistake
    parent.join()
    os._exit(1)


def compute_here(request: Request) -> EngineRows | str:
    """Compute the rows of a request in this process; return the error if there is one."""
    try:
        return _compute_rows(request)
    except Exception as error:  # noqa: BLE001 - reported; the next engine is not affected
        return describe_error(error)


def _compute_rows(request: Request) -> EngineRows:
    options = _engine_options(request)
    start = time.perf_counter()
    with load_model(request.model, request.backend, **options) as llm:
        loaded_s = time.perf_counter() - start
        if request.contexts is None:
            contexts, about = _contexts(llm, request)
        else:
            contexts, about = dict(request.contexts), {}
        fitting = [ids for ids in contexts if _fits(llm, ids)]
        if not fitting:
            raise ValueError("supports none of the contexts: too long, or of unknown token ids")
        start = time.perf_counter()
        results = asyncio.run(request_rows(llm, fitting))
        seconds = time.perf_counter() - start
        results += asyncio.run(request_rows(llm, fitting[::-1]))
        figures = {
            "load_s": loaded_s,
            "rows": len(fitting),
            "rows_per_s": len(fitting) / seconds,
            "vocab_size": llm.vocab_size,
            "max_context": llm.max_context,
            "device_memory_bytes": device_memory(),
        }
    figures["peak_memory_bytes"] = peak_memory()
    rows = np.stack([row.cpu().numpy() for _, row in results])
    return EngineRows(contexts, about, [ids for ids, _ in results], rows, figures)


def _engine_options(request: Request) -> dict[str, Any]:
    """Add the dtype to an engine's options, if it has such an option."""
    build = get_backend(find_backend(request.backend).provider)
    parameters = inspect.signature(build).parameters
    options = dict(request.options)
    if "dtype" in parameters:
        options.setdefault("dtype", request.dtype)
    elif "engine_opts" in parameters:
        options["engine_opts"] = {"dtype": request.dtype, **options.get("engine_opts", {})}
    return options


def _fits(llm: AsyncLM, ids: Sequence[int]) -> bool:
    is_short = llm.max_context is None or len(ids) <= llm.max_context
    return is_short and max(ids) < llm.vocab_size


# -- contexts -------------------------------------------------------------------------------


def _contexts(llm: AsyncLM, request: Request) -> tuple[dict[TokenTuple, str], dict[str, Any]]:
    """Return contexts with their kinds, and the mapping `EngineRows.about`."""
    facts = _facts(llm, request.model)
    limits = limits_of(facts)
    longest = longest_of(request.longest, limits, llm.max_context)
    not_reached = [name for name, limit in limits.items() if limit >= longest]
    family = None if facts is None else facts.key
    about = {"longest": longest, "not_reached": not_reached, "family": family}
    return contexts_of(*_sequences(llm, request), limits, longest), about


def limits_of(facts: ModelFacts | None) -> dict[str, int]:
    """Return the lengths at which the computation of a model changes, by name."""
    if facts is None:
        return {}
    limits = {f"window of {size}": size for size in facts.sliding_windows}
    if facts.attention_chunk_size is not None:
        limits[f"chunk of {facts.attention_chunk_size}"] = facts.attention_chunk_size
    if facts.rope_types and facts.original_positions is not None:
        limits[f"original context of {facts.original_positions}"] = facts.original_positions
    return limits


def longest_of(
    requested: int | None, limits: Mapping[str, int], max_context: int | None
) -> int:
    """Return the maximum length: beyond every limit, and within the engine's maximum."""
    needed = max([DEFAULT_LONGEST, *(limit + 16 for limit in limits.values())])
    longest = min(needed, MAX_DEFAULT_LONGEST) if requested is None else requested
    return longest if max_context is None else min(longest, max_context)


def _sequences(llm: AsyncLM, request: Request) -> tuple[list[int], Sequence[Sequence[int]]]:
    """Return ids to repeat, and ids to request: of the request, of texts, or random ones."""
    if request.ids is not None:
        base = list(itertools.chain(*request.ids))
        if max(base) >= llm.vocab_size:
            raise ValueError(
                f"token id {max(base)} of --ids is outside the vocabulary; valid ids are 0 to "
                f"{llm.vocab_size - 1}"
            )
        return base, request.ids
    texts = request.texts or default_text().decode().split("\n\n")
    try:
        base = text_ids(llm.vocabulary, "\n".join(texts))
        return base, [text_ids(llm.vocabulary, text) for text in texts]
    except TokenizerError:
        if request.texts:
            raise
    # The vocabulary cannot spell the embedded texts; random tokens replace them.
    token_ids = random.Random(0).choices(ids_with_text(llm.vocabulary), k=DEFAULT_LONGEST)
    return token_ids, []


def _facts(llm: AsyncLM, model: str) -> ModelFacts | None:
    """Return the facts of the model's config; None if transformers finds no config.

    An engine has just loaded the model, so its config is a local file or in the cache, and no
    hub is contacted.
    """
    try:
        from transformers import AutoConfig
    except ImportError:
        return None
    for source in filter(None, (getattr(llm.tokenizer, "name_or_path", None), model)):
        try:
            return ModelFacts.of(AutoConfig.from_pretrained(source, local_files_only=True))
        except (OSError, ValueError, TypeError, AttributeError):
            continue
    return None


# -- memory ---------------------------------------------------------------------------------


def peak_memory() -> int:
    """Return the peak resident memory in bytes of this process and its largest child.

    On Windows, children are not included.
    """
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    this_process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _KIB * (this_process + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


def device_memory() -> int | None:
    """Return the peak GPU memory in bytes that torch allocated here; None without a GPU."""
    import torch

    return torch.cuda.max_memory_allocated() or None  # 0 where torch used no GPU
