"""One engine's answers, in a process of its own: `python -m genlm.cli.comparison.engine_run`.

The memory of a process is freed when it ends, and an engine that changes or ends its process
affects no other one. The request is a file of JSON; rows and figures go to files beside it.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import random
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from genlm.cli.comparison.contexts import (
    DEFAULT_LONGEST,
    Context,
    contexts_of,
    limits_of,
    longest_of,
)
from genlm.cli.text_ids import text_ids
from genlm.core.errors import TokenizerError
from genlm.core.lm import load_model
from genlm.core.plugins import find_backend, get_backend
from genlm.core.reference.tokenizer import default_text
from genlm.engines.model_facts import ModelFacts

if TYPE_CHECKING:
    from genlm.core.lm import AsyncLM

__all__ = ["device_memory", "engine_options", "main", "peak_memory"]

_KIB = 1 if sys.platform == "darwin" else 1024  # of `ru_maxrss`


def main() -> None:
    """Answer the request that is named on the command line."""
    path = Path(sys.argv[1])
    request = json.loads(path.read_text("utf-8"))
    folder = path.parent
    try:
        figures = _answer(request, folder)
    except Exception as error:  # noqa: BLE001 - reported; the other engines go on
        figures = {"error": f"{type(error).__name__}: {error}"}
    (folder / f"{request['number']}.json").write_text(json.dumps(figures, default=str), "utf-8")


def engine_options(backend: str, dtype: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Add the dtype to an engine's options, wherever it takes one."""
    build = get_backend(find_backend(backend).provider)
    parameters = inspect.signature(build).parameters
    options = dict(given)
    if "dtype" in parameters:
        options.setdefault("dtype", dtype)
    elif "engine_opts" in parameters:
        options["engine_opts"] = {"dtype": dtype, **options.get("engine_opts", {})}
    return options


def _answer(request: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    options = engine_options(request["backend"], request["dtype"], request["options"])
    start = time.perf_counter()
    with load_model(request["model"], request["backend"], **options) as llm:
        loaded_s = time.perf_counter() - start
        asked = _contexts(llm, request, folder / "contexts.json")
        fitting = [i for i, context in enumerate(asked) if _fits(llm, context)]
        if not fitting:
            raise ValueError("takes none of the contexts: too long, or of unknown token ids")
        start = time.perf_counter()
        rows = asyncio.run(_rows(llm, [asked[i].ids for i in fitting]))
        seconds = time.perf_counter() - start
        again = asyncio.run(_rows(llm, [asked[i].ids for i in reversed(fitting)]))[::-1]
        figures = {
            "load_s": loaded_s,
            "rows": len(rows),
            "rows_per_s": len(rows) / seconds,
            "fitting": fitting,
            "vocab_size": llm.vocab_size,
            "max_context": llm.max_context,
            "device_memory_bytes": device_memory(),
        }
    figures["peak_memory_bytes"] = peak_memory()
    np.save(folder / f"{request['number']}.npy", np.stack([rows, again]))
    return figures


async def _rows(llm: AsyncLM, sequences: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
    """Ask for all at once, and of the engine, not of the output cache."""
    asked = [llm.next_token_logprobs(ids, use_cache=False) for ids in sequences]
    return np.stack([row.cpu().numpy() for row in await asyncio.gather(*asked)])


def _contexts(llm: AsyncLM, request: Mapping[str, Any], path: Path) -> list[Context]:
    """Read the contexts, or make them with what the first engine has."""
    if path.exists():
        return [Context(*context) for context in json.loads(path.read_text("utf-8"))["all"]]
    facts = _facts(llm, request["model"])
    limits = limits_of(facts)
    longest = longest_of(request["longest"], limits.values(), llm.max_context)
    made = contexts_of(*_sequences(llm, request), limits, longest)
    missed = [name for name, limit in limits.items() if limit >= longest]
    model = None if facts is None else facts.key
    found = {"all": made, "longest": longest, "beyond": missed, "family": model}
    path.write_text(json.dumps(found), "utf-8")
    return made


def _sequences(
    llm: AsyncLM, request: Mapping[str, Any]
) -> tuple[list[int], list[Sequence[int]]]:
    """Return ids to repeat, and ids to ask for: those given, of texts, or of the vocabulary."""
    if request["ids"] is not None:
        return list(itertools.chain(*request["ids"])), request["ids"]
    texts = request["texts"] or default_text().decode().split("\n\n")
    try:
        base = text_ids(llm.vocabulary, "\n".join(texts))
        return base, [text_ids(llm.vocabulary, text) for text in texts]
    except TokenizerError:
        if request["texts"]:
            raise
    # No tokens spell our own texts; any tokens will do.
    missing = {*llm.vocabulary.missing_ids, *llm.vocabulary.special_ids}
    known = [token_id for token_id in range(llm.vocab_size) if token_id not in missing]
    return random.Random(0).choices(known, k=DEFAULT_LONGEST), []


def _facts(llm: AsyncLM, model: str) -> ModelFacts | None:
    """Read the model's config, None where transformers finds none."""
    try:
        from transformers import AutoConfig
    except ImportError:
        return None
    for source in (getattr(llm.tokenizer, "name_or_path", None), model):
        try:
            return ModelFacts.of(AutoConfig.from_pretrained(source))
        except (OSError, ValueError, TypeError, AttributeError):
            continue
    return None


def _fits(llm: AsyncLM, context: Context) -> bool:
    short = llm.max_context is None or len(context.ids) <= llm.max_context
    return short and max(context.ids) < llm.vocab_size


def peak_memory() -> int:
    """Resident memory at its peak: of this process and the largest that it started."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _KIB * (own + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


def device_memory() -> int | None:
    """Memory of the GPU at its peak, as far as this process allocated it with torch."""
    import torch

    return torch.cuda.max_memory_allocated() or None  # 0 where torch used no GPU


if __name__ == "__main__":
    main()
