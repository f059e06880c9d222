"""Messages of drivers and replicas: queries by their new tokens, rows as one array.

A query names a sequence that the replica knows and the ids that follow it, so that a message
does not grow with the contexts. Rows of a message are one numpy array, which Ray stores and
maps without copying. Reductions and their results are pickled by class, tensors as arrays. An
object that cannot be pickled, or whose class the other process lacks, fails alone.
"""

from __future__ import annotations

import copyreg
import io
import itertools
import pickle
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import ray.cloudpickle
import torch

from genlm.plugin import (
    Completion,
    EvaluationError,
    Generation,
    GroupQuery,
    GroupReduction,
    GroupResult,
    Lineage,
    Query,
    Reduced,
    Reduction,
    TokenSequence,
)
from genlm_ray.router import RoutedQuery

__all__ = [
    "Lease",
    "PackedGroup",
    "ReplicaRequest",
    "ReplicaResponse",
    "Sequences",
    "completions",
    "packed_group",
    "packed_queries",
    "packed_response",
    "picklable_error",
]

_ROW_ONLY = (None,)

_Rows = np.ndarray[Any, np.dtype[np.float32]]

_Ints = np.ndarray[Any, np.dtype[np.int32]]

_Column = list[tuple[list[int], bytes]]
"""Values that are not None: their places, and the pickled list of them."""

_PLAIN = frozenset({bool, bytes, float, int, str, np.ndarray, torch.Tensor})

_RESULT, _ERROR = -1, -2

Lease = Callable[[list[tuple[str | None, bytes]]], object]
"""As `GroupQuery.lease`."""


class _QueryColumns(NamedTuple):
    """The queries of a message, by column: few objects are faster to pickle than many.

    Attributes:
        query_ids: Id of each query.
        numbers: Number of each query's sequence.
        known: The number of a sequence that the replica knows, -1 for none.
        added: The packed ids that follow it.
        counts: The number of outputs of each; empty if all request their rows.
        others: By place, the adapter, sampling and targets of queries that have any.
    """

    query_ids: list[int]
    numbers: list[int]
    known: list[int]
    added: list[bytes]
    counts: list[int]
    others: dict[int, tuple[str | None, Any, tuple[int, ...]]]


_NO_OTHERS: tuple[None, None, tuple[int, ...]] = (None, None, ())


class _CompletionColumns(NamedTuple):
    """The completions of a message, by column.

    Attributes:
        query_ids: Query id of each completion.
        counts: Number of values of each completion: that of a `Reduced`, or `_RESULT` or
            `_ERROR` for a single result or error.
        rows: The places of rows among the values, in the order of `ReplicaResponse.rows`.
        length: Number of values.
    """

    query_ids: list[int]
    counts: list[int]
    rows: list[int]
    length: int


@dataclass(frozen=True)
class _Refused(Reduction):
    """Stands for a reduction that could not be sent."""

    error: EvaluationError

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Self]) -> Sequence[Any]:
        """Return the errors."""
        del rows
        return [each.error for each in requests]


class _RefusedGroup(GroupReduction):
    """Stands for the reduction of a population that could not be sent."""

    def __init__(self, error: EvaluationError) -> None:
        self.error = error

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Raise the error."""
        del rows, row_of, members
        raise self.error


class PackedGroup(NamedTuple):
    """The query of a population, as columns.

    Attributes:
        query_id: Id of the query.
        number: Number of its generation, which the replica then stores.
        known: The number of a generation that the replica knows and that this one extends, or
            is; -1 for none.
        first: The packed ids of the sequences of the first lineage, if `known` is -1.
        steps: Ancestors and token ids of each lineage after the known one, or the first, int32.
        wanted: As `GroupQuery.wanted`, int32.
        row_of: As `GroupQuery.row_of`, int32.
        reduction: The pickled reduction.
        adapter: As `GroupQuery.adapter`.
    """

    query_id: int
    number: int
    known: int
    first: list[bytes]
    steps: list[tuple[_Ints, _Ints]]
    wanted: _Ints
    row_of: _Ints
    reduction: _Column
    adapter: str | None

    @property
    def size(self) -> int:
        """Number of sequences that the replica keeps for it."""
        return len(self.first) + sum(len(tokens) for _, tokens in self.steps)


@dataclass
class ReplicaRequest:
    """A message to a replica.

    Attributes:
        queries: Pickled `_QueryColumns`, as a tuple.
        outputs: Outputs of the queries, concatenated.
        count: Number of queries.
        groups: Queries of populations.
        aborted: Ids of queries to drop.
        forgotten: Numbers of sequences that are not named again.
        dropped: Numbers of generations that are not named again.
    """

    queries: bytes = b""
    outputs: _Column = field(default_factory=list)
    count: int = 0
    groups: list[PackedGroup] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)


class ReplicaResponse(NamedTuple):
    """A message from a replica.

    Attributes:
        finished: Pickled `_CompletionColumns`, as a tuple.
        values: Values of the completions, concatenated, without rows.
        rows: Shape `(n, vocab_size)`, float32.
        statistics: Statistics of the engine.
    """

    finished: bytes
    values: _Column
    rows: _Rows | None
    statistics: dict[str, Any]


def packed_queries(routed: Sequence[RoutedQuery], replica: int) -> ReplicaRequest:
    """Pack queries for a replica, which then knows their sequences by number."""
    asked = _QueryColumns([], [], [], [], [], {})
    packed: _Column = []
    outputs = [each.query.outputs for each in routed]
    if any(each != _ROW_ONLY for each in outputs):
        asked.counts.extend(map(len, outputs))
        packed = _packed([output for each in outputs for output in each], _not_sent)
    for place, each in enumerate(routed):
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
    columns = pickle.dumps(tuple(asked), pickle.HIGHEST_PROTOCOL)
    return ReplicaRequest(columns, packed, len(routed))


def packed_group(
    group: GroupQuery, number: int, known: int, lineage: Lineage | None
) -> PackedGroup:
    """Pack the query of a population.

    Args:
        group: The query.
        number: Names its generation in later messages.
        known: The number of a generation that the replica knows, -1 for none.
        lineage: The sequences of that generation; None for none.
    """
    steps: list[tuple[_Ints, _Ints]] = []
    first: list[bytes] = []
    each = group.generation.lineage
    while each is not lineage and each.parent is not None:
        steps.append((each.ancestors.astype(np.int32), each.token_ids.astype(np.int32)))
        each = each.parent
    if each is not lineage:
        sequences = map(each.sequence, range(len(each)))
        first = [array("I", sequence.token_ids).tobytes() for sequence in sequences]
    steps.reverse()
    return PackedGroup(
        group.query_id,
        number,
        known,
        first,
        steps,
        group.wanted.astype(np.int32),
        group.row_of.astype(np.int32),
        _packed([group.reduction], _group_not_sent),
        group.adapter,
    )


class Sequences:
    """The sequences and generations of one driver, by number, in a replica."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str | None, TokenSequence]] = {}
        self._generations: dict[int, tuple[Generation, int]] = {}
        self._in_generations = 0

    def __len__(self) -> int:
        return len(self._known) + self._in_generations

    def group(self, packed: PackedGroup, adapter: str | None, lease: Lease) -> GroupQuery:
        """Unpack the query of a population, under the replica's name of its adapter.

        Raises:
            KeyError: A generation is not known here.
        """
        if packed.number != packed.known:
            self._generations[packed.number] = self._generation(packed), packed.size
            self._in_generations += packed.size
        [reduction] = _unpacked(packed.reduction, 1, _group_not_received)
        return GroupQuery(
            packed.query_id,
            self._generations[packed.number][0],
            packed.wanted.astype(np.int64),
            packed.row_of.astype(np.int64),
            reduction,
            adapter,
            lease,
        )

    def drop(self, number: int) -> None:
        """Drop a generation, if it is known; those that extend it do not need it."""
        _, count = self._generations.pop(number, (None, 0))
        self._in_generations -= count

    def _generation(self, packed: PackedGroup) -> Generation:
        base: Generation | None = None
        if packed.known >= 0:
            base, _ = self._generations[packed.known]
            lineage = base.lineage
        else:
            lineage = Lineage.of_sequences([TokenSequence(each, None) for each in packed.first])
        for ancestors, token_ids in packed.steps:
            parents = ancestors.astype(np.int64)
            lengths = lineage.lengths[parents] + (token_ids >= 0)
            lineage = Lineage(lineage, parents, token_ids.astype(np.int64), lengths)
        return Generation(lineage, base)

    def queries(self, message: ReplicaRequest) -> list[Query]:
        """Unpack the queries.

        Raises:
            KeyError: A sequence is not known here.
        """
        if not message.queries:
            return []
        asked = _QueryColumns(*pickle.loads(message.queries))  # noqa: S301 - Ray pickles all it sends
        outputs: list[Any] = [_ROW_ONLY] * len(asked.query_ids)
        if asked.counts:
            flat = iter(_unpacked(message.outputs, sum(asked.counts), _not_received))
            outputs = [tuple(itertools.islice(flat, count)) for count in asked.counts]
        queries = []
        for place, (query_id, number, known, added, wanted) in enumerate(
            zip(*asked[:4], outputs, strict=True)
        ):
            adapter, sampling, targets = asked.others.get(place, _NO_OTHERS)
            sequence = self._sequence(number, known, added, adapter)
            queries.append(
                Query(query_id, sequence, adapter, sampling, outputs=wanted, targets=targets)
            )
        return queries

    def forget(self, number: int) -> tuple[str | None, TokenSequence] | None:
        """Drop a sequence; return its adapter and the sequence."""
        return self._known.pop(number, None)

    def _sequence(
        self, number: int, known: int, added: bytes, adapter: str | None
    ) -> TokenSequence:
        sequence = None if known < 0 else self._known[known][1]
        if sequence is None or added:
            sequence = TokenSequence(added, sequence)
        self._known[number] = adapter, sequence
        return sequence


def packed_response(
    finished: Sequence[Completion], statistics: dict[str, Any], vocab_size: int
) -> ReplicaResponse:
    """Pack completions: rows into one array, the rest by class.

    A completion that cannot be packed becomes an `EvaluationError`.
    """
    try:
        return _packed_response(finished, statistics, vocab_size)
    except Exception:  # noqa: BLE001 - whatever torch raises; it must not cost the others
        packable = [_packable(each, vocab_size) for each in finished]
        return _packed_response(packable, statistics, vocab_size)


def _packable(completion: Completion, vocab_size: int) -> Completion:
    try:
        _packed_response([completion], {}, vocab_size)
    except Exception as error:  # noqa: BLE001 - as above
        cause = EvaluationError(
            f"the result cannot be sent from the replica: packing it raised "
            f"{type(error).__name__}"
        )
        cause.__cause__ = error
        return Completion(completion.query_id, error=cause)
    return completion


def _packed_response(
    finished: Sequence[Completion], statistics: dict[str, Any], vocab_size: int
) -> ReplicaResponse:
    rows: list[torch.Tensor] = []
    values: list[Any] = []
    packed_rows: list[int] = []
    counts: list[int] = []

    def add(value: Any) -> None:
        # Tensors of other shapes and dtypes are results of reductions.
        is_tensor = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        if is_tensor and value.shape == (vocab_size,):
            rows.append(value)
            packed_rows.append(len(values))
            value = None
        elif isinstance(value, Exception):
            value = picklable_error(value)
        elif isinstance(value, GroupResult):
            errors = {place: picklable_error(each) for place, each in value.errors.items()}
            value = GroupResult(value.columns, errors)
        values.append(value)

    for _, result, error in finished:
        if error is not None:
            counts.append(_ERROR)
            add(error)
        elif type(result) is Reduced:
            counts.append(len(result.values))
            for value in result.values:
                add(value)
        else:
            counts.append(_RESULT)
            add(result)
    stacked: _Rows | None = None
    if rows:
        stacked = torch.stack([row.detach() for row in rows]).cpu().numpy()
    packed = _CompletionColumns(
        [each.query_id for each in finished], counts, packed_rows, len(values)
    )
    index = pickle.dumps(tuple(packed), pickle.HIGHEST_PROTOCOL)
    return ReplicaResponse(index, _packed(values, _not_returned), stacked, statistics)


def completions(response: ReplicaResponse) -> list[Completion]:
    """Unpack completions; each row is a copy, which its receiver owns."""
    packed = _CompletionColumns(*pickle.loads(response.finished))  # noqa: S301
    values, begin = _unpacked(response.values, packed.length, _not_read), 0
    for index, place in enumerate(packed.rows):
        assert response.rows is not None  # noqa: S101 - there are rows
        values[place] = row = torch.empty(response.rows.shape[1])
        row.numpy()[:] = response.rows[index]
    found = []
    for query_id, count in zip(packed.query_ids, packed.counts, strict=True):
        if count >= 0:
            end = begin + count
            found.append(Completion(query_id, Reduced(tuple(values[begin:end]))))
        else:
            end = begin + 1
            value = values[begin]
            if isinstance(value, Exception):
                found.append(Completion(query_id, error=value))
            else:
                found.append(Completion(query_id, value))
        begin = end
    return found


def picklable_error(error: Exception) -> Exception:
    """Return an exception that another process can unpickle, itself if it can."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    except Exception:  # noqa: BLE001 - whatever its constructor or attributes raise
        return EvaluationError(f"{type(error).__name__}: {error}")
    return error


def _not_sent(output: Any, error: Exception) -> _Refused:
    return _Refused(_sending_error(output, error))


def _group_not_sent(reduction: Any, error: Exception) -> _RefusedGroup:
    return _RefusedGroup(_sending_error(reduction, error))


def _sending_error(reduction: Any, error: Exception) -> EvaluationError:
    return EvaluationError(
        f"the reduction {type(reduction).__name__} cannot be sent to a replica: {error!r}"
    )


def _not_received(error: Exception) -> _Refused:
    return _Refused(_receiving_error(error))


def _group_not_received(error: Exception) -> _RefusedGroup:
    return _RefusedGroup(_receiving_error(error))


def _receiving_error(error: Exception) -> EvaluationError:
    return EvaluationError(
        f"the reduction cannot be imported at the replica: {error!r}; install its module there"
    )


def _not_returned(value: Any, error: Exception) -> EvaluationError:
    return EvaluationError(
        f"the result, of type {type(value).__name__}, cannot be sent from the replica: "
        f"{error!r}"
    )


def _not_read(error: Exception) -> EvaluationError:
    return EvaluationError(f"what the replica returned cannot be read here: {error!r}")


def _packed(values: Sequence[Any], refused: Callable[[Any, Exception], Any]) -> _Column:
    """Pickle the values that every process can read together, and others by class.

    Args:
        values: Those that are None are omitted.
        refused: Returns the replacement of a value that cannot be pickled.
    """
    plain: tuple[list[int], list[Any]] = ([], [])
    groups = {type(None): plain}
    for place, value in enumerate(values):
        if value is None:
            continue
        kind = type(value)
        group = groups.get(kind)
        if group is None:
            is_known = kind in _PLAIN or kind.__module__.startswith("genlm.")
            group = groups[kind] = plain if is_known else ([], [])
        group[0].append(place)
        group[1].append(value)
    packed: _Column = []
    for places, members in {id(each): each for each in groups.values() if each[0]}.values():
        try:
            packed.append((places, _dumps(members)))
        except Exception:  # noqa: BLE001 - whatever an object raises when it is pickled
            packed += [
                ([place], _dumps_alone(value, refused))
                for place, value in zip(places, members, strict=True)
            ]
    return packed


def _unpacked(column: _Column, length: int, refused: Callable[[Exception], Any]) -> list[Any]:
    """Unpack values; `refused` returns replacements of unreadable ones."""
    values: list[Any] = [None] * length
    for places, pickled in column:
        try:
            members = pickle.loads(pickled)  # noqa: S301 - Ray pickles all it sends
        except Exception as error:  # noqa: BLE001 - a module that is not installed here
            members = [refused(error)] * len(places)
        for place, value in zip(places, members, strict=True):
            values[place] = value
    return values


def _dumps_alone(value: Any, refused: Callable[[Any, Exception], Any]) -> bytes:
    try:
        return _dumps([value])
    except Exception as error:  # noqa: BLE001 - as above
        return _dumps([refused(value, error)])


def _array_of(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().cpu()
    try:
        return torch.from_numpy, (tensor.contiguous().numpy(),)
    except (RuntimeError, TypeError):  # numpy has no bfloat16, and no sparse arrays
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]


class _Pickler(pickle.Pickler):
    """Pickler of tensors as numpy arrays, which takes a tenth of the time."""

    dispatch_table = copyreg.dispatch_table | {torch.Tensor: _array_of}


def _dumps(values: list[Any]) -> bytes:
    """Pickle values of a kind; classes of a program's main module by value."""
    if type(values[0]).__module__ != "__main__":
        buffer = io.BytesIO()
        try:
            _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(values)
            return buffer.getvalue()
        except (pickle.PicklingError, AttributeError, TypeError):
            pass  # for example a local class, which only cloudpickle supports
    packed: bytes = ray.cloudpickle.dumps(values)
    return packed
