"""`RowResults`: what becomes of rows and reductions when an engine has computed them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from genlm.core.cache import OutputCache, copied
from genlm.core.context import Holds
from genlm.core.engine import Engine
from genlm.core.query import Reduced
from genlm.core.reductions import Reduction, reduce_rows
from genlm.core.rows import invalid_rows
from genlm.core.scheduler import ResultHandler

__all__ = ["RowResults"]


class RowResults(ResultHandler):
    """Checks that rows are distributions, reduces them, and keeps results in an output cache.

    Args:
        cache: Where results go.
        holds: Releases what the engine keeps for contexts without references.
    """

    def __init__(self, cache: OutputCache, holds: Holds) -> None:
        self._cache = cache
        self._holds = holds

    def find_invalid(self, engine: Engine, results: Sequence[Any]) -> Mapping[int, Exception]:
        """Find the rows among the results that are not distributions."""
        places = [i for i, result in enumerate(results) if isinstance(result, torch.Tensor)]
        invalid = invalid_rows([results[i] for i in places], engine.vocabulary.size)
        return {places[position]: error for position, error in invalid.items()}

    def reduce(
        self, results: Sequence[Any], outputs: Sequence[tuple[Any, ...]]
    ) -> Sequence[Reduced | Exception]:
        """Reduce rows, all at once."""
        return reduce_rows(torch.stack(list(results)), outputs)

    def store(self, key: Any, result: Any) -> None:
        """Keep a result that may answer later requests."""
        output = key[-1]
        if not isinstance(output, Reduction) or output.is_reproducible:
            self._cache.put(key, result)

    def copy(self, result: Any) -> Any:
        """Return a copy that shares no memory with the result."""
        return copied(result)

    def release(self, engine: Engine, items: list[Any]) -> None:
        """Have the engine release what it keeps for contexts."""
        self._holds.release(engine, items)
