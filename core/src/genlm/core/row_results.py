"""`RowResults`: post-processing of the rows and reductions that an engine has computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from genlm.core.cache import OutputCache, copied
from genlm.core.context import LeaseTable
from genlm.core.engine import Engine
from genlm.core.errors import EvaluationError
from genlm.core.query import ROW_ONLY, Query, Reduced, Reduction, TokenScores
from genlm.core.reductions import Draw, reduce_rows
from genlm.core.rows import invalid_rows
from genlm.core.scheduler import ResultHandler

__all__ = ["RowResults", "is_cacheable"]


class RowResults(ResultHandler):
    """Checks that rows are distributions, reduces them, and keeps results in an output cache.

    Args:
        cache: Stores results.
        leases: Releases the engine's state of contexts without references.
    """

    def __init__(self, cache: OutputCache, leases: LeaseTable) -> None:
        self._cache = cache
        self._leases = leases

    def find_invalid(
        self, engine: Engine, queries: Sequence[Any], results: Sequence[Any]
    ) -> Mapping[int, Exception]:
        """Find results of another kind than the query's, and rows that are no distributions."""
        errors: dict[int, Exception] = {}
        rows: list[int] = []
        for position, (query, result) in enumerate(zip(queries, results, strict=True)):
            expected = _expected(query) if type(query) is Query else object
            if not isinstance(result, expected):
                errors[position] = _of_another_kind(result, expected)
            elif isinstance(result, torch.Tensor):
                rows.append(position)
        invalid = invalid_rows([results[i] for i in rows], engine.vocabulary.size)
        return errors | {rows[position]: error for position, error in invalid.items()}

    def reduce(
        self, results: Sequence[Any], outputs: Sequence[tuple[Any, ...]]
    ) -> Sequence[Reduced | Exception]:
        """Reduce rows, all at once."""
        return reduce_rows(torch.stack(list(results)), outputs)

    def store(self, key: Any, result: Any) -> None:
        """Keep a result that later requests can find."""
        output = key[-1]
        if not isinstance(output, Reduction) or is_cacheable(output):
            self._cache.put(key, result)

    def copy(self, result: Any) -> Any:
        """Return a copy that shares no memory with the result."""
        return copied(result)

    def release(self, engine: Engine, items: list[Any]) -> None:
        """Have the engine release the state of contexts whose leases were dropped."""
        self._leases.release(engine, items)


def is_cacheable(reduction: Reduction) -> bool:
    """Whether a later request can ask for an equal reduction; each draw has its own number."""
    return reduction.is_reproducible and not isinstance(reduction, Draw)


def _expected(query: Query) -> type | tuple[type, ...]:
    if query.targets:
        return TokenScores if query.outputs == ROW_ONLY else Reduced
    return list if query.sampling is not None else (torch.Tensor, Reduced)


def _of_another_kind(result: Any, expected: type | tuple[type, ...]) -> EvaluationError:
    kinds = expected if isinstance(expected, tuple) else (expected,)
    names = " or ".join(kind.__name__ for kind in kinds)
    return EvaluationError(
        f"the engine returned an object of type {type(result).__name__} for a query that asks "
        f"for {names}"
    )
