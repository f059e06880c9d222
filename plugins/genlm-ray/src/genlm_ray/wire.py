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
    """A query as it is sent: the sequence is `known` (-1: nothing) and `added` ids."""

    query_id: int
    number: int
    known: int
    added: bytes
    adapter: str | None
    sampling: Any
    targets: tuple[int, ...]


@dataclass
class Questions:
    """A message to a replica.

    Attributes:
        queries: Pickled `_Asked` tuples.
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
        values: Pickled `(query_id, value, error)`; a value is a place in `rows`, or another
            value in a tuple of one.
        rows: Shape `(n, vocab_size)`, float32.
        statistics: The engine's.
    """

    values: bytes
    rows: _Rows | None
    statistics: dict[str, Any]


def packed_queries(placed: Sequence[Placed], replica: int) -> tuple[bytes, bytes | None]:
    """Pack queries for a replica, which then knows their sequences by number."""
    asked = []
    for each in placed:
        query, context, parent = each.query, each.context, each.parent
        known, begin = -1, 0
        if replica in context.sent:
            known, begin = context.number, context.length
        elif parent is not None and replica in parent.sent:
            known, begin = parent.number, parent.length
        context.sent.add(replica)
        length = len(query)
        added = array("I", query.sequence.ids_from(begin)).tobytes() if begin < length else b""
        asked.append(
            (
                query.query_id, context.number, known, added, query.adapter, query.sampling,
                query.targets,
            )
        )  # fmt: skip
    outputs = [each.query.outputs for each in placed]
    packed = None
    if any(each != _ROW_ONLY for each in outputs):
        packed = _dumps(outputs)
    return pickle.dumps(asked, pickle.HIGHEST_PROTOCOL), packed


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
        asked = pickle.loads(message.queries)  # noqa: S301 - Ray pickles all it sends
        outputs: list[Any] = [_ROW_ONLY] * len(asked)
        problem: Exception | None = None
        if message.outputs is not None:
            try:
                outputs = pickle.loads(message.outputs)  # noqa: S301
            except Exception as error:  # noqa: BLE001 - a module that is not installed here
                problem = error
        queries = []
        for one, wanted in zip(asked, outputs, strict=True):
            each = _Asked(*one)
            sequence = self._sequence(each)
            queries.append(
                Query(
                    each.query_id, sequence, each.adapter, each.sampling,
                    outputs=wanted, targets=each.targets,
                )
            )  # fmt: skip
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

    def _sequence(self, asked: _Asked) -> TokenSequence:
        known = None if asked.known < 0 else self._known[asked.known][1]
        if known is not None and not asked.added:
            sequence = known
        else:
            sequence = TokenSequence(asked.added, known)
        self._known[asked.number] = asked.adapter, sequence
        return sequence


def packed_answers(
    finished: Sequence[Completion], statistics: dict[str, Any], vocab_size: int
) -> Answers:
    """Pack completions: rows into one array, the rest into one pickle."""
    rows: list[torch.Tensor] = []

    def place(value: Any) -> Any:
        # Tensors of other shapes and dtypes are what reductions returned.
        is_tensor = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        if is_tensor and value.shape == (vocab_size,):
            rows.append(value)
            return len(rows) - 1
        return (value,)

    packed: list[tuple[int, Any, Any]] = []
    for query_id, result, error in finished:
        if error is not None:
            packed.append((query_id, None, picklable_error(error)))
        elif type(result) is Reduced:
            values = [
                (picklable_error(one),) if isinstance(one, Exception) else place(one)
                for one in result.values
            ]
            packed.append((query_id, values, None))
        else:
            packed.append((query_id, place(result), None))
    stacked: _Rows | None = None
    if rows:
        stacked = torch.stack([row.detach() for row in rows]).cpu().numpy()
    return Answers(_tensors_as_arrays(packed), stacked, statistics)


def completions(answers: Answers) -> list[Completion]:
    """Unpack completions; each row is a copy, which its receiver owns."""
    rows = answers.rows

    def value_of(packed: Any) -> Any:
        if isinstance(packed, tuple):
            return packed[0]
        assert rows is not None  # noqa: S101 - a place in them
        row = torch.empty(rows.shape[1])
        row.numpy()[:] = rows[packed]
        return row

    found = []
    for query_id, packed, error in pickle.loads(answers.values):  # noqa: S301
        result: Any = None
        if isinstance(packed, list):
            result = Reduced(tuple(map(value_of, packed)))
        elif error is None:
            result = value_of(packed)
        found.append(Completion(query_id, result, error))
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
