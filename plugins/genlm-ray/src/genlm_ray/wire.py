"""Messages of drivers and replicas: sequences by blocks, populations and rows as arrays.

The sequences of a message share their blocks, so that a common prompt is sent once. Of a
population the columns are sent that its replica does not have. Rows of a message are one numpy
array, which Ray stores and maps without copying.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import ray.cloudpickle

from genlm.plugin import (
    Generation,
    GroupQuery,
    GroupSampling,
    Lineage,
    PackedCompletions,
    PackedSequences,
    Query,
    SampledGroup,
    Transport,
    pack_sequences,
)

__all__ = [
    "TRANSPORT",
    "Generations",
    "Lease",
    "PackedGroup",
    "PlacedGeneration",
    "ReplicaRequest",
    "ReplicaResponse",
    "packed_group",
    "packed_queries",
    "placed_sample",
    "unpacked_queries",
]

TRANSPORT = Transport("a replica", ray.cloudpickle.dumps)
"""Packs reductions and answers; classes of a program's main module are sent by value."""

_ROW_ONLY = (None,)

_Ints = np.ndarray[Any, np.dtype[np.int32]]

Lease = Callable[[list[tuple[str | None, bytes]]], object]
"""As `GroupQuery.lease`."""


class PackedGroup(NamedTuple):
    """The query of a population, as columns.

    Attributes:
        query_id: Id of the query.
        number: Number of its generation, which the replica then stores.
        known: The number of a generation that the replica knows and that this one extends, or
            is; -1 for none.
        first: The sequences of the first lineage, if `known` is -1.
        steps: Ancestors and token ids of each lineage after the known one, or the first, int32.
        wanted: As `GroupQuery.wanted`, int32.
        row_of: As `GroupQuery.row_of`, int32.
        requested: The packed reduction, or the pickled `GroupQuery.sampling`.
        adapter: As `GroupQuery.adapter`.
        sampled: Number of the generation of its result, which the replica then stores; -1
            without `sampling`.
    """

    query_id: int
    number: int
    known: int
    first: PackedSequences
    steps: list[tuple[_Ints, _Ints]]
    wanted: _Ints
    row_of: _Ints
    requested: bytes
    adapter: str | None
    sampled: int

    @property
    def size(self) -> int:
        """Number of sequences that the replica keeps for it."""
        return len(self.first.tails) + sum(len(tokens) for _, tokens in self.steps)


@dataclass
class ReplicaRequest:
    """A message to a replica.

    Attributes:
        queries: Pickled columns of single queries: their ids and sequences, the number of
            outputs of each, all outputs, packed, and by place the adapter and targets of those
            that have any.
        count: Number of these queries.
        groups: Queries of populations.
        aborted: Ids of queries to drop.
        dropped: Numbers of generations that are not named again.
        released: Sequences whose state the engine may drop, and the adapter of each.
    """

    queries: bytes = b""
    count: int = 0
    groups: list[PackedGroup] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    released: tuple[list[str | None], PackedSequences] | None = None


class ReplicaResponse(NamedTuple):
    """A message from a replica.

    Attributes:
        packed: The answers of finished queries.
        statistics: The engine's.
    """

    packed: PackedCompletions
    statistics: dict[str, Any]


# -- single queries -------------------------------------------------------------------


def packed_queries(queries: Sequence[Query]) -> ReplicaRequest:
    """Pack queries for single sequences."""
    counts: list[int] = []
    packed = b""
    outputs = [query.outputs for query in queries]
    if any(each != _ROW_ONLY for each in outputs):
        counts = list(map(len, outputs))
        packed = TRANSPORT.pack_outputs([output for each in outputs for output in each])
    others = {
        place: (query.adapter, query.targets)
        for place, query in enumerate(queries)
        if query.adapter is not None or query.targets
    }
    sequences = pack_sequences(query.sequence for query in queries)
    # Few objects are faster to pickle than many.
    columns = [query.query_id for query in queries], sequences, counts, packed, others
    return ReplicaRequest(pickle.dumps(columns, pickle.HIGHEST_PROTOCOL), len(queries))


def unpacked_queries(message: ReplicaRequest) -> list[Query]:
    """Unpack the queries for single sequences."""
    if not message.queries:
        return []
    query_ids, sequences, counts, packed, others = pickle.loads(message.queries)  # noqa: S301 - Ray pickles all it sends
    outputs: list[Any] = [_ROW_ONLY] * len(query_ids)
    if counts:
        flat = iter(TRANSPORT.unpack_outputs(packed))
        outputs = [tuple(itertools.islice(flat, count)) for count in counts]
    queries = []
    unpacked = zip(query_ids, sequences.unpack(), outputs, strict=True)
    for place, (query_id, sequence, wanted) in enumerate(unpacked):
        adapter, targets = others.get(place, (None, ()))
        queries.append(Query(query_id, sequence, adapter, outputs=wanted, targets=targets))
    return queries


# -- populations ----------------------------------------------------------------------


class PlacedGeneration:
    """The state of a generation in the driver: its replica, and its number there.

    It is dropped on any thread, when the last population that refers to it is. The number is
    then added to `dropped`, whose `append` is atomic.
    """

    __slots__ = ("_dropped", "number", "replica")

    def __init__(self, replica: int, number: int, dropped: Any) -> None:
        self.replica, self.number, self._dropped = replica, number, dropped

    def __del__(self) -> None:
        self._dropped.append(self.number)


def packed_group(
    group: GroupQuery, number: int, known: PlacedGeneration | None, sampled: int
) -> PackedGroup:
    """Pack the query of a population.

    Args:
        group: The query.
        number: Number of its generation in later messages.
        known: The state of the nearest generation before it that the replica has.
        sampled: Number of the generation of its result, if it has `sampling`.
    """
    lineage: Lineage | None = None
    if known is not None:
        base = group.generation.with_state()
        lineage = None if base is None else base.lineage
    steps: list[tuple[_Ints, _Ints]] = []
    each = group.generation.lineage
    while each is not lineage and each.parent is not None:
        steps.append((each.ancestors.astype(np.int32), each.token_ids.astype(np.int32)))
        each = each.parent
    first = range(0 if each is lineage else len(each))
    steps.reverse()
    if group.sampling is None:
        requested = TRANSPORT.pack_outputs([group.reduction])
    else:
        requested = pickle.dumps(group.sampling, pickle.HIGHEST_PROTOCOL)
    return PackedGroup(
        group.query_id,
        number,
        -1 if known is None else known.number,
        pack_sequences(map(each.sequence, first)),
        steps,
        group.wanted.astype(np.int32),
        group.row_of.astype(np.int32),
        requested,
        group.adapter,
        sampled,
    )


def placed_sample(
    group: GroupQuery, found: SampledGroup, state: PlacedGeneration
) -> SampledGroup:
    """Return a replica's continuations with their generation, whose state the replica has."""
    sampling = group.sampling
    assert sampling is not None  # noqa: S101 - it has a result of this kind
    generation, places = group.generation.extended(sampling.places, found.token_ids.numpy())
    generation.keep(state)
    return found._replace(generation=generation, places=places)


class Generations:
    """The generations that a driver names by number, in a replica."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Generation, int]] = {}
        self._sampled: dict[int, tuple[int, GroupQuery]] = {}  # by query id
        self.sequences = 0

    def group(self, packed: PackedGroup, adapter: str | None, lease: Lease) -> GroupQuery:
        """Unpack the query of a population, under the replica's name of its adapter.

        Raises:
            KeyError: A generation is not known here.
        """
        if packed.number != packed.known:
            self._add(packed.number, self._generation(packed), packed.size)
        reduction: Any = None
        sampling: GroupSampling | None = None
        if packed.sampled >= 0:
            sampling = pickle.loads(packed.requested)  # noqa: S301 - as above
        else:
            [reduction] = TRANSPORT.unpack_outputs(packed.requested)
        group = GroupQuery(
            packed.query_id,
            self._known[packed.number][0],
            packed.wanted.astype(np.int64),
            packed.row_of.astype(np.int64),
            reduction,
            adapter,
            lease,
            sampling,
        )
        if packed.sampled >= 0:
            self._sampled[packed.query_id] = packed.sampled, group
        return group

    def finish(self, query_id: int, result: Any = None) -> Any:
        """Store the generation of a query's result, if any; return what is sent of it."""
        number, group = self._sampled.pop(query_id, (0, None))
        if group is None or not isinstance(result, SampledGroup):
            return result
        generation, lineage = result.generation, result.generation.lineage
        while lineage is not group.generation.lineage and lineage.parent is not None:
            lineage = lineage.parent
        if lineage is not group.generation.lineage:  # it does not extend the group's
            assert group.sampling is not None  # noqa: S101 - it has a result of this kind
            ids = result.token_ids.numpy()
            generation, _ = group.generation.extended(group.sampling.places, ids)
        self._add(number, generation, result.token_ids.numel())
        nothing: Any = None  # the driver extends its generation in the same way
        return result._replace(generation=nothing, places=nothing)

    def drop(self, number: int) -> None:
        """Drop a generation, if it is known; those that extend it do not need it."""
        _, size = self._known.pop(number, (None, 0))
        self.sequences -= size

    def _add(self, number: int, generation: Generation, size: int) -> None:
        self._known[number] = generation, size
        self.sequences += size

    def _generation(self, packed: PackedGroup) -> Generation:
        base: Generation | None = None
        if packed.known >= 0:
            base, _ = self._known[packed.known]
            lineage = base.lineage
        else:
            lineage = Lineage.of_sequences(packed.first.unpack())
        for ancestors, token_ids in packed.steps:
            parents = ancestors.astype(np.int64)
            lengths = lineage.lengths[parents] + (token_ids >= 0)
            lineage = Lineage(lineage, parents, token_ids.astype(np.int64), lengths)
        return Generation(lineage, base)
