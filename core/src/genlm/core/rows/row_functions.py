"""Functions of rows as reductions: `llm.reduce(context, function)` and `population.reduce`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from genlm.core.base.error_handling import errors_of
from genlm.core.base.errors import EvaluationError
from genlm.core.queries.query import GroupReduction, Reduction
from genlm.core.rows.logits import device_index, moved

RowFunction: TypeAlias = Callable[[torch.Tensor], "torch.Tensor | tuple[torch.Tensor, ...]"]
"""Function of rows, shape `(n, vocab_size)`, float32, which it must not change; it returns a
tensor whose first dimension is n, or a tuple of such tensors."""


def is_row_function(value: object) -> bool:
    """Whether a value is to be called with rows; reductions and their classes are not."""
    return callable(value) and not isinstance(value, Reduction | GroupReduction | type)


@dataclass(frozen=True)
class ReductionOfFunction(Reduction):
    """A function of rows for single contexts; its results are not cached."""

    function: RowFunction

    is_cacheable = False

    @classmethod
    def compute(
        cls, rows: torch.Tensor, requests: Sequence[ReductionOfFunction]
    ) -> Sequence[torch.Tensor | tuple[torch.Tensor, ...]]:
        """Call each function once."""
        places_of: dict[RowFunction, list[int]] = {}
        for place, request in enumerate(requests):
            places_of.setdefault(request.function, []).append(place)
        results: list[Any] = [None] * len(requests)
        for function, places in places_of.items():
            selected = rows[device_index(places, rows.device)]
            is_tuple, columns = _columns(function, selected)
            entries = zip(*(column.cpu() for column in columns), strict=True)
            for place, entry in zip(places, entries, strict=True):
                results[place] = entry if is_tuple else entry[0]
        return results


class ColumnsOfFunction(GroupReduction):
    """A function of rows for populations and texts, called with each distinct row once."""

    def __init__(self, function: RowFunction) -> None:
        self.function = function

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Call the function, and select the entry of each member's row."""
        del members
        _, columns = _columns(self.function, rows)
        return tuple(column[moved(row_of, column.device)] for column in columns)


def _columns(
    function: RowFunction, rows: torch.Tensor
) -> tuple[bool, tuple[torch.Tensor, ...]]:
    """Return whether a function returns a tuple, and its tensors.

    Raises:
        EvaluationError: The function raised, or returned something else.
    """
    name = getattr(function, "__name__", repr(function))
    with errors_of(name):
        result = function(rows)
    columns = result if isinstance(result, tuple) else (result,)
    for column in columns:
        if not isinstance(column, torch.Tensor) or column.shape[:1] != (len(rows),):
            found = type(column).__name__
            if isinstance(column, torch.Tensor):
                found = f"a tensor of shape {tuple(column.shape)}"
            raise EvaluationError(
                f"{name} returned {found} for {len(rows)} rows; expected a tensor whose first "
                f"dimension has an entry for each row, or a tuple of such tensors"
            )
    return isinstance(result, tuple), columns
