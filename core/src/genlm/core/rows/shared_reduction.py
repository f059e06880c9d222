"""`SharedReduction`: a `genlm.Reduction` as a reduction of populations and texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from genlm.core.base.error_handling import errors_of, result_count_error
from genlm.core.base.errors import EvaluationError
from genlm.core.queries.query import GroupReduction, Reduction
from genlm.core.rows.row_functions import ColumnsOfFunction, RowFunction, is_row_function


class SharedReduction(GroupReduction):
    """A reduction of one row, the same for all members; its results as columns.

    Args:
        reduction: Returns numbers, tensors of one shape, or tuples of these.
    """

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Reduce each distinct row once."""
        del members
        if not len(rows):
            return (torch.empty(0, dtype=torch.float32, device="cpu"),)
        kind, requests = type(self.reduction), [self.reduction] * len(rows)
        with errors_of(f"{kind.__name__}.compute"):
            results = list(kind.compute(rows, requests))
            for result in results:
                if isinstance(result, Exception):
                    raise result
        if len(results) != len(requests):
            raise result_count_error(kind, len(results), len(requests))
        if isinstance(results[0], tuple):
            columns = zip(*results, strict=True)
            return tuple(_column(values, kind)[row_of] for values in columns)
        return (_column(results, kind)[row_of],)


def checked_reduction(reduction: GroupReduction | Reduction | RowFunction) -> GroupReduction:
    """Return a reduction whose results are columns."""
    if isinstance(reduction, Reduction):
        return SharedReduction(reduction)
    if isinstance(reduction, GroupReduction):
        return reduction
    if is_row_function(reduction):
        return ColumnsOfFunction(reduction)
    raise TypeError(
        f"expected a function of rows, a genlm.GroupReduction or a genlm.Reduction; found "
        f"{reduction!r}"
    )


def _column(values: Sequence[Any], kind: type) -> torch.Tensor:
    try:
        if isinstance(values[0], torch.Tensor):
            return torch.stack(list(values)).cpu()
        if isinstance(values[0], np.ndarray):
            return torch.from_numpy(np.stack(values))
        numbers = np.asarray(values)
        is_float = numbers.dtype.kind == "f"
        return torch.from_numpy(numbers.astype(np.float32) if is_float else numbers)
    except (TypeError, ValueError, RuntimeError) as error:
        raise EvaluationError(
            f"{kind.__name__}.compute returned {type(values[0]).__name__} for a row, which "
            f"cannot be part of a column; return numbers or tensors of one shape, or derive "
            f"from genlm.GroupReduction"
        ) from error
