"""What a driver and a replica send each other: queries by their new tokens, rows as one array.

A query names a sequence that the replica knows and the ids that follow it, so that a message
does not grow with the contexts. Rows of a message are one numpy array, which Ray stores and
maps without copying; everything else is pickled once for the whole message, tensors as arrays.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import ray.cloudpickle
import torch

from genlm.plugin import Completion, EvaluationError, Query, Reduced, TokenSequence
from genlm_ray.router import Placed

__all__ = [
    "Answers",
    "Questions",
    "Sequences",
    "completions",
    "packed_answers",
    "packed_queries",
    "picklable_error",
]

_ROW_ONLY = (None,)

_Rows = np.ndarray[Any, np.dtype[np.float32]]


class _Asked(NamedTuple):
    """The queries of a message, by column: few objects are faster to pickle than many.

    Attributes:
        query_ids: Of each query.
        numbers: Of the sequence of each.
        known: The number of a sequence that the replica knows, -1 for none.
        added: The packed ids that follow it.
        others: By place, the adapter, sampling and targets of queries that have any.
    """

    query_ids: list[int]
    numbers: list[int]
    known: list[int]
    added: list[bytes]
    others: dict[int, tuple[str | None, Any, tuple[int, ...]]]


_NO_OTHERS: tuple[None, None, tuple[int, ...]] = (None, None, ())


class _Finished(NamedTuple):
    """The completions of a message, by column.

    Attributes:
        query_ids: Of each completion.
        counts: How many of `values` are its: -1 for one that is the result itself, otherwise
            the number of values of a `Reduced`; 0 with an error.
        values: Of all completions; None for rows.
        rows: The places of rows in `values`, in the order of `Answers.rows`.
        errors: By the place of the completion.
    """

    query_ids: list[int]
    counts: list[int]
    values: list[Any]
    rows: list[int]
    errors: dict[int, Exception]


@dataclass
class Questions:
    """A message to a replica.

    Attributes:
        queries: Pickled `_Asked`, as a tuple.
        outputs: Pickled outputs of each query; None if all ask for their rows.
        aborted: Ids of queries to drop.
        forgotten: Numbers of sequences that are not named again.
    """

    queries: bytes = b""
    outputs: bytes | None = None
    aborted: list[int] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)


class Answers(NamedTuple):
    """A message from a replica.

    Attributes:
        values: Pickled `_Finished`, as a tuple.
        rows: Shape `(n, vocab_size)`, float32.
        statistics: The engine's.
    """

    values: bytes
    rows: _Rows | None
    statistics: dict[str, Any]


def packed_queries(placed: Sequence[Placed], replica: int) -> tuple[bytes, bytes | None]:
    """Pack queries for a replica, which then knows their sequences by number."""
    asked = _Asked([], [], [], [], {})
    for place, each in enumerate(placed):
        query, context, parent = each.query, each.context, each.parent
        known, begin = -1, 0
        if replica in context.sent:
            known, begin = context.number, context.length
        elif parent is not None and replica in parent.sent:
            known, begin = parent.number, parent.length
        context.sent.add(replica)
        length = len(query)
        added = array("I", query.sequence.ids_from(begin)).tobytes() if begin < length else b""
        asked.query_ids.append(query.query_id)
        asked.numbers.append(context.number)
        asked.known.append(known)
        asked.added.append(added)
        others = (query.adapter, query.sampling, query.targets)
        if others != _NO_OTHERS:
            asked.others[place] = others
    outputs = [each.query.outputs for each in placed]
    packed = None
    if any(each != _ROW_ONLY for each in outputs):
        packed = _dumps(outputs)
    return pickle.dumps(tuple(asked), pickle.HIGHEST_PROTOCOL), packed


def _dumps(outputs: list[Any]) -> bytes:
    """Pickle outputs; classes of the program's own main module by value."""
    kinds = {type(output) for each in outputs for output in each}
    if all(kind.__module__ != "__main__" for kind in kinds):
        try:
            return pickle.dumps(outputs, pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError):
            pass  # a class inside a function, which only the other pickles
    packed: bytes = ray.cloudpickle.dumps(outputs)
    return packed


class Sequences:
    """The sequences of one driver, by number, in a replica."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str | None, TokenSequence]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def queries(self, message: Questions) -> tuple[list[Query], list[Completion]]:
        """Unpack the queries, and errors for those that this process cannot unpack.

        Raises:
            KeyError: A sequence is not known here.
        """
        if not message.queries:
            return [], []
        asked = _Asked(*pickle.loads(message.queries))  # noqa: S301 - Ray pickles all it sends
        outputs: list[Any] = [_ROW_ONLY] * len(asked.query_ids)
        problem: Exception | None = None
        if message.outputs is not None:
            try:
                outputs = pickle.loads(message.outputs)  # noqa: S301
            except Exception as error:  # noqa: BLE001 - a module that is not installed here
                problem = error
        queries = []
        for place, (query_id, number, known, added, wanted) in enumerate(
            zip(*asked[:4], outputs, strict=True)
        ):
            adapter, sampling, targets = asked.others.get(place, _NO_OTHERS)
            sequence = self._sequence(number, known, added, adapter)
            queries.append(
                Query(query_id, sequence, adapter, sampling, outputs=wanted, targets=targets)
            )
        if problem is None:
            return queries, []
        refused = EvaluationError(
            f"the reductions of this batch cannot be imported at the replica: {problem!r}; "
            f"install their module there"
        )
        return [], [Completion(query.query_id, error=refused) for query in queries]

    def forget(self, number: int) -> tuple[str | None, TokenSequence] | None:
        """Drop a sequence; returns its adapter and itself."""
        return self._known.pop(number, None)

    def _sequence(
        self, number: int, known: int, added: bytes, adapter: str | None
    ) -> TokenSequence:
        sequence = None if known < 0 else self._known[known][1]
        if sequence is None or added:
            sequence = TokenSequence(added, sequence)
        self._known[number] = adapter, sequence
        return sequence


def packed_answers(
    finished: Sequence[Completion], statistics: dict[str, Any], vocab_size: int
) -> Answers:
    """Pack completions: rows into one array, the rest into one pickle."""
    rows: list[torch.Tensor] = []
    packed = _Finished([], [], [], [], {})

    def add(value: Any) -> None:
        # Tensors of other shapes and dtypes are what reductions returned.
        is_tensor = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        if is_tensor and value.shape == (vocab_size,):
            rows.append(value)
            packed.rows.append(len(packed.values))
            value = None
        elif isinstance(value, Exception):
            value = picklable_error(value)
        packed.values.append(value)

    for place, (query_id, result, error) in enumerate(finished):
        packed.query_ids.append(query_id)
        if error is not None:
            packed.counts.append(0)
            packed.errors[place] = picklable_error(error)
        elif type(result) is Reduced:
            packed.counts.append(len(result.values))
            for value in result.values:
                add(value)
        else:
            packed.counts.append(-1)
            add(result)
    stacked: _Rows | None = None
    if rows:
        stacked = torch.stack([row.detach() for row in rows]).cpu().numpy()
    return Answers(_tensors_as_arrays(tuple(packed)), stacked, statistics)


def completions(answers: Answers) -> list[Completion]:
    """Unpack completions; each row is a copy, which its receiver owns."""
    packed = _Finished(*pickle.loads(answers.values))  # noqa: S301
    values, begin = packed.values, 0
    for index, place in enumerate(packed.rows):
        assert answers.rows is not None  # noqa: S101 - there are rows
        values[place] = row = torch.empty(answers.rows.shape[1])
        row.numpy()[:] = answers.rows[index]
    found = []
    for place, (query_id, count) in enumerate(
        zip(packed.query_ids, packed.counts, strict=True)
    ):
        result: Any = None
        if count < 0:
            result, begin = values[begin], begin + 1
        elif place not in packed.errors:
            result, begin = Reduced(tuple(values[begin : begin + count])), begin + count
        found.append(Completion(query_id, result, packed.errors.get(place)))
    return found


def picklable_error(error: Exception) -> Exception:
    """Return an exception that another process can unpickle, itself if it can."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    except Exception:  # noqa: BLE001 - whatever its constructor or attributes raise
        return EvaluationError(f"{type(error).__name__}: {error}")
    return error


def _array_of(tensor: torch.Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return torch.from_numpy, (tensor.detach().cpu().contiguous().numpy(),)


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table | {torch.Tensor: _array_of}


def _tensors_as_arrays(values: object) -> bytes:
    """Pickle with tensors as numpy arrays, which takes a tenth of the time."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(values)
    return buffer.getvalue()
