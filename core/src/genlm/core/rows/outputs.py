"""Computation of the requested outputs of queries from their rows or logits."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from genlm.core.base.error_handling import errors_of, result_count_error
from genlm.core.base.errors import GenlmError
from genlm.core.queries.query import Outputs, Reduced
from genlm.core.rows.logits import (
    copied_rows,
    device_index,
    invalid_rows,
    known_logits,
    row_parts,
    rows_from_logits,
)
from genlm.core.vocab import Vocabulary

_NUMBERS = frozenset({int, float, bool})

_SMALL_BYTES = 448
"""Maximum size of tensors that are stored as byte strings between parts. With its header, such
a string has at most 512 bytes, and Python allocates it from its pools of small objects."""

_NO_REDUCTION = type(None)
"""Type of the output that stands for the row."""

_Compute: TypeAlias = Callable[[torch.Tensor, Sequence[Any]], Sequence[Any] | None]
"""`Reduction.compute` or `compute_from_logits` of a class."""


def reduce_rows(
    rows: torch.Tensor | Sequence[torch.Tensor], outputs: Sequence[Outputs]
) -> list[Reduced | Exception]:
    """Compute the outputs of queries from their rows, with few calls per class of reductions.

    On a CPU, a few rows are computed at a time, so that they stay in its caches.

    Args:
        rows: Natural-log probabilities, shape `(n, vocab_size)`, float32, or n rows of one
            device; not changed.
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
    caller by another. Reductions transfer their results, one flag says whether all rows are
    distributions, and nothing else leaves the device.

    Args:
        logits: Logits as for `rows_from_logits`; not changed.
        vocabulary: As `rows_from_logits`.
        outputs: As `reduce_rows`.
    """
    return _reduce(logits, outputs, vocabulary)


@torch.inference_mode(False)  # results are normal tensors, also of engines that use it
def _reduce(
    values: torch.Tensor | Sequence[torch.Tensor],
    outputs: Sequence[Outputs],
    vocabulary: Vocabulary | None,
) -> list[Reduced | Exception]:
    """Compute outputs from rows, or from logits over a vocabulary."""
    results: list[Any] = []
    if not len(values):
        return results
    first = values[0]
    parts = row_parts(len(values), len(first), first.device)
    for begin, end in parts:
        part = values[begin:end]
        part = part if isinstance(part, torch.Tensor) else torch.stack(list(part))
        results += _reduce_part(part, outputs[begin:end], vocabulary)
        if len(parts) > 1:
            results[begin:] = _mapped(results[begin:], _small_bytes)
    return results if len(parts) == 1 else _mapped(results, _tensor_of_bytes)


def _reduce_part(
    values: torch.Tensor, outputs: Sequence[Outputs], vocabulary: Vocabulary | None
) -> list[Reduced | Exception]:
    part = _PartOutputs(outputs)
    if vocabulary is None:
        part.compute_from_rows(values, is_normalised=False)
    else:
        part.compute_from_logits(values, vocabulary)
        if part.remaining:
            # Results of reductions may refer to the rows; those for callers are copied.
            are_copied = set(part.remaining) == {_NO_REDUCTION}
            rows = rows_from_logits(values, vocabulary, reuses_memory=are_copied)
            part.compute_from_rows(rows, is_normalised=True)
    return part.results()


class _PartOutputs:
    """The outputs of some rows in one list, and their values.

    Attributes:
        remaining: Indices of the outputs that have no value yet, by the class of the output.
    """

    def __init__(self, outputs: Sequence[Outputs]) -> None:
        self._counts = [len(row_outputs) for row_outputs in outputs]
        self._outputs = [output for row_outputs in outputs for output in row_outputs]
        self._row_of = [row for row, count in enumerate(self._counts) for _ in range(count)]
        self._values: list[Any] = [None] * len(self._outputs)
        self._invalid: dict[int, Exception] = {}
        self.remaining: dict[type, list[int]] = {}
        for index, output in enumerate(self._outputs):
            self.remaining.setdefault(type(output), []).append(index)

    def compute_from_logits(self, values: torch.Tensor, vocabulary: Vocabulary) -> None:
        """Compute the outputs that read logits; those that need their rows remain."""
        outputs, unknown = self._outputs, self.remaining
        self.remaining = {}
        for kind, indices in unknown.items():
            reading = [i for i in indices if getattr(outputs[i], "reads_logits", False)]
            if not reading:
                self.remaining[kind] = indices
                continue
            logits = known_logits(values, vocabulary)
            if logits.shape[1] == vocabulary.size:
                self._reduce(kind.compute_from_logits, reading, logits)  # type: ignore[attr-defined]
            # Whether an output needs its row depends on this output alone.
            if missing := [i for i in indices if not self._has_value(i)]:
                self.remaining[kind] = missing

    def compute_from_rows(self, rows: torch.Tensor, *, is_normalised: bool) -> None:
        """Compute the remaining outputs of the rows that are distributions."""
        self._invalid = invalid_rows(rows, rows.shape[1], normalised=is_normalised)
        for kind, indices in self.remaining.items():
            valid = [i for i in indices if self._row_of[i] not in self._invalid]
            if valid and kind is _NO_REDUCTION:
                self._store(valid, copied_rows(self._select(rows, valid)))
            elif valid:
                self._reduce(kind.compute, valid, rows)  # type: ignore[attr-defined]

    def results(self) -> list[Reduced | Exception]:
        """Return the values of each row, or the error of a row that is not a distribution."""
        values = iter(self._values)
        row_values = [tuple(itertools.islice(values, count)) for count in self._counts]
        return [
            self._invalid.get(row) or Reduced(outputs) for row, outputs in enumerate(row_values)
        ]

    def _has_value(self, index: int) -> bool:
        value = self._values[index]
        return value is not None and not isinstance(value, Exception)

    def _reduce(self, compute: _Compute, indices: list[int], values: torch.Tensor) -> None:
        requests = [self._outputs[i] for i in indices]
        self._store(indices, _compute(compute, self._select(values, indices), requests))

    def _select(self, values: torch.Tensor, indices: list[int]) -> torch.Tensor:
        """Return the rows of outputs: a view of consecutive rows, else a copy."""
        rows = [self._row_of[i] for i in indices]
        first, count = rows[0], len(rows)
        if rows == list(range(first, first + count)):
            return values[first : first + count]
        return values[device_index(rows, values.device)]

    def _store(self, indices: list[int], values: Sequence[Any]) -> None:
        for index, value in zip(indices, values, strict=True):
            self._values[index] = value


class _SmallTensor:
    """The content of a small tensor between two parts of a batch.

    Small tensors that stay allocated fragment the heap: see `joined_parts`. Python allocates
    small byte strings from separate pools.
    """

    __slots__ = ("content", "dtype", "shape")

    def __init__(self, tensor: torch.Tensor) -> None:
        values = tensor.resolve_conj().resolve_neg().reshape(-1)
        self.content = values.view(torch.uint8).numpy().tobytes()
        self.dtype, self.shape = tensor.dtype, tensor.shape


def _small_bytes(value: Any) -> Any:
    """Return the content of a small tensor in main memory; other values unchanged."""
    is_small = type(value) is torch.Tensor and 0 < value.nbytes <= _SMALL_BYTES
    if not is_small or value.device.type != "cpu" or value.requires_grad:
        return value
    return _SmallTensor(value)


def _tensor_of_bytes(value: Any) -> Any:
    """Return the tensor of `_small_bytes`."""
    if type(value) is not _SmallTensor:
        return value
    return torch.frombuffer(bytearray(value.content), dtype=value.dtype).view(value.shape)


def _own_copy(value: Any, rows: torch.Tensor) -> Any:
    """Copy values that share memory with the rows or are views of larger tensors or arrays."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.clone() if _is_view(leaf, rows) else leaf
        return leaf.copy() if leaf.base is not None else leaf

    return _mapped(value, copied)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to the tensors and arrays in tuples, lists and dictionaries."""
    if type(value) in _NUMBERS:  # the most frequent results, with tuples of numbers
        return value
    if isinstance(value, (tuple, list)) and not _NUMBERS.issuperset(map(type, value)):
        parts = [_mapped(part, function) for part in value]
        if not all(map(operator.is_, parts, value)):
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    elif isinstance(value, dict):
        return {key: _mapped(part, function) for key, part in value.items()}
    elif isinstance(value, (torch.Tensor, np.ndarray, _SmallTensor)):
        return function(value)
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
