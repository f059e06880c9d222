"""Computation of the requested outputs of queries from their rows or logits."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from genlm.core.base.error_handling import errors_of, result_count_error
from genlm.core.base.errors import GenlmError
from genlm.core.queries.query import Reduced
from genlm.core.rows.logits import (
    copied_rows,
    invalid_rows,
    known_logits,
    moved,
    row_parts,
    rows_from_logits,
    scratch_memory,
)

if TYPE_CHECKING:
    from genlm.core.queries.query import Outputs
    from genlm.core.vocab import Vocabulary

_NUMBERS = frozenset({int, float, bool})

_NO_REDUCTION = type(None)
"""Type of the output that stands for the row."""

_Compute: TypeAlias = Callable[[torch.Tensor, Sequence[Any]], Sequence[Any] | None]
"""`Reduction.compute` or `compute_from_logits` of a class."""

_Place: TypeAlias = tuple[int, int]
"""Index of a query, and place of an output among those of the query."""


def reduce_rows(rows: torch.Tensor, outputs: Sequence[Outputs]) -> list[Reduced | Exception]:
    """Compute the outputs of queries from their rows, with few calls per class of reductions.

    On a CPU, a few rows are computed at a time, so that they stay in its caches.

    Args:
        rows: Natural-log probabilities, shape `(n, vocab_size)`, float32; not changed.
        outputs: Requested outputs of each query: `Query.outputs`.

    Returns:
        The `Reduced` of each query, or the error of a row that is not a distribution. Rows
        among the values are copies.
    """
    return _reduce(rows, outputs, None)


def reduce_logits(
    logits: torch.Tensor,
    vocabulary: Vocabulary,
    outputs: Sequence[Outputs],
) -> list[Reduced | Exception]:
    """Compute the outputs of queries from logits, as `reduce_rows` of `rows_from_logits`.

    Rows are computed only for outputs that need them: see `Reduction.reads_logits`.

    On CUDA, logits are not copied to main memory. Requested rows are written twice: normalised
    in float32 by one operation for up to 2**27 entries, then copied into the memory of each
    caller by another. Reductions transfer their results, one number for each row says whether
    it is a distribution, and nothing else leaves the device.

    Args:
        logits: Logits as for `rows_from_logits`; not changed.
        vocabulary: As `rows_from_logits`.
        outputs: As `reduce_rows`.
    """
    return _reduce(logits, outputs, vocabulary)


def _reduce(
    values: torch.Tensor, outputs: Sequence[Outputs], vocabulary: Vocabulary | None
) -> list[Reduced | Exception]:
    """Compute outputs from rows, or from logits over a vocabulary."""
    results: list[Reduced | Exception] = []
    for begin, end in row_parts(len(values), values.shape[1], values.device):
        results += _reduce_part(values[begin:end], outputs[begin:end], vocabulary)
    return results


def _reduce_part(
    values: torch.Tensor, outputs: Sequence[Outputs], vocabulary: Vocabulary | None
) -> list[Reduced | Exception]:
    results: list[list[Any]] = [[None] * len(row_outputs) for row_outputs in outputs]
    places_of: dict[type, list[_Place]] = {}
    logits_places: dict[type, list[_Place]] = {}
    for row, row_outputs in enumerate(outputs):
        for place, output in enumerate(row_outputs):
            reads_logits = vocabulary is not None and getattr(output, "reads_logits", False)
            by_kind = logits_places if reads_logits else places_of
            by_kind.setdefault(type(output), []).append((row, place))

    def reduce(compute: _Compute, places: list[_Place], rows: torch.Tensor) -> None:
        requests = [outputs[row][place] for row, place in places]
        reduced = _compute(compute, _select_rows(rows, [row for row, _ in places]), requests)
        for (row, place), value in zip(places, reduced, strict=True):
            results[row][place] = value

    def copy(places: list[_Place], rows: torch.Tensor) -> None:
        copies = copied_rows(_select_rows(rows, [row for row, _ in places]))
        for (row, place), row_copy in zip(places, copies, strict=True):
            results[row][place] = row_copy

    if vocabulary is not None:
        for kind, places in logits_places.items():
            logits = known_logits(values, vocabulary)
            if logits.shape[1] == vocabulary.size:
                reduce(kind.compute_from_logits, places, logits)  # type: ignore[attr-defined]
            # Whether a request needs its row depends on this request alone.
            missing = [
                (row, place)
                for row, place in places
                if results[row][place] is None or isinstance(results[row][place], Exception)
            ]
            if missing:
                places_of.setdefault(kind, []).extend(missing)
    invalid: dict[int, Exception] = {}
    if places_of:
        if vocabulary is None:
            rows, is_normalised = values, False
        else:
            memory = _row_memory(values, places_of, vocabulary.size)
            rows, is_normalised = rows_from_logits(values, vocabulary, out=memory), True
        invalid = invalid_rows(rows, rows.shape[1], normalised=is_normalised)
        for kind, places in places_of.items():
            valid = [place for place in places if place[0] not in invalid]
            if valid and kind is _NO_REDUCTION:
                copy(valid, rows)
            elif valid:
                reduce(kind.compute, valid, rows)  # type: ignore[attr-defined]
    return [
        invalid.get(row) or Reduced(tuple(row_results))
        for row, row_results in enumerate(results)
    ]


def _row_memory(
    logits: torch.Tensor, kinds: Collection[type], size: int
) -> torch.Tensor | None:
    """Return memory for rows that are copied for their callers; None for new memory."""
    if logits.device.type != "cpu" or logits.shape[1] < size:
        return None
    # Results of other reductions may refer to the rows.
    return scratch_memory("rows", len(logits), size) if set(kinds) == {_NO_REDUCTION} else None


def _select_rows(rows: torch.Tensor, indices: list[int]) -> torch.Tensor:
    """Return rows by index: a view of consecutive rows, else a copy."""
    first, count = indices[0], len(indices)
    if indices == list(range(first, first + count)):
        return rows[first : first + count]
    return rows[moved(torch.tensor(indices), rows.device)]


def _own_copy(value: Any, rows: torch.Tensor) -> Any:
    """Copy values that share memory with the rows or are views of larger tensors or arrays."""
    if type(value) in _NUMBERS:  # the most frequent results, with tuples of numbers
        return value
    if isinstance(value, (tuple, list)) and not _NUMBERS.issuperset(map(type, value)):
        parts = [_own_copy(part, rows) for part in value]
        if not all(map(operator.is_, parts, value)):
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    elif isinstance(value, dict):
        return {key: _own_copy(part, rows) for key, part in value.items()}
    elif isinstance(value, torch.Tensor) and _is_view(value, rows):
        return value.clone()
    elif isinstance(value, np.ndarray) and value.base is not None:
        return value.copy()
    return value


def _is_view(tensor: torch.Tensor, rows: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    is_part = storage.nbytes() > tensor.nbytes
    return is_part or storage.data_ptr() == rows.untyped_storage().data_ptr()


def _compute(compute: _Compute, values: torch.Tensor, requests: Sequence[Any]) -> list[Any]:
    """Return the results of requests of one class, computed one by one if that fails.

    The result of a request that also fails alone is its error.
    """
    kind, name = type(requests[0]), getattr(compute, "__name__", "compute")
    try:
        with errors_of(f"{kind.__name__}.{name}"):
            results = compute(values, requests)
            if results is not None and len(results) == len(requests):
                return [_own_copy(result, values) for result in results]
        count = 0 if results is None else len(results)
        problem: GenlmError = result_count_error(kind, count, len(requests))
    except GenlmError as error:
        problem = error
    if len(requests) == 1:
        return [problem]
    return [
        result
        for index, request in enumerate(requests)
        for result in _compute(compute, values[index : index + 1], [request])
    ]
