"""Messages of drivers and replicas: queries by their new tokens, rows as one array.

A query names a sequence that the replica knows and the ids that follow it, so that a message
does not grow with the contexts. Rows of a message are one numpy array, which Ray stores and
maps without copying.
"""

from __future__ import annotations

import itertools
import pickle
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import ray.cloudpickle

from genlm.plugin import (
    Generation,
    GroupQuery,
    Lineage,
    PackedCompletions,
    Query,
    TokenSequence,
    Transport,
)
from genlm_ray.router import RoutedQuery

__all__ = [
    "TRANSPORT",
    "Lease",
    "PackedGroup",
    "ReplicaRequest",
    "ReplicaResponse",
    "Sequences",
    "packed_group",
    "packed_queries",
]

TRANSPORT = Transport("a replica", ray.cloudpickle.dumps)
"""Packs reductions and answers; classes of a program's main module are sent by value."""

_ROW_ONLY = (None,)

_Ints = np.ndarray[Any, np.dtype[np.int32]]

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
        reduction: The packed reduction.
        adapter: As `GroupQuery.adapter`.
    """

    query_id: int
    number: int
    known: int
    first: list[bytes]
    steps: list[tuple[_Ints, _Ints]]
    wanted: _Ints
    row_of: _Ints
    reduction: bytes
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
        outputs: Those of the queries, one after the other, packed.
        count: Number of queries.
        groups: Queries of populations.
        aborted: Ids of queries to drop.
        forgotten: Numbers of sequences that are not named again.
        dropped: Numbers of generations that are not named again.
    """

    queries: bytes = b""
    outputs: bytes = b""
    count: int = 0
    groups: list[PackedGroup] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)


class ReplicaResponse(NamedTuple):
    """A message from a replica.

    Attributes:
        packed: The answers of finished queries.
        statistics: The engine's.
    """

    packed: PackedCompletions
    statistics: dict[str, Any]


def packed_queries(routed: Sequence[RoutedQuery], replica: int) -> ReplicaRequest:
    """Pack queries for a replica, which then knows their sequences by number."""
    asked = _QueryColumns([], [], [], [], [], {})
    packed = b""
    outputs = [each.query.outputs for each in routed]
    if any(each != _ROW_ONLY for each in outputs):
        asked.counts.extend(map(len, outputs))
        packed = TRANSPORT.pack_outputs([output for each in outputs for output in each])
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
        TRANSPORT.pack_outputs([group.reduction]),
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
        [reduction] = TRANSPORT.unpack_outputs(packed.reduction)
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
            flat = iter(TRANSPORT.unpack_outputs(message.outputs))
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
