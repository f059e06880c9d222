"""Messages of drivers and replicas: sequences by blocks, populations and rows as arrays.

The sequences of a message share their blocks, so that a common prompt is sent once. For a
population, only the columns that its replica does not have are sent. The rows of a message are
one numpy array, which Ray stores and maps without copying.
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
    "pack_group",
    "pack_queries",
    "place_sample",
    "unpack_queries",
]

TRANSPORT = Transport("a replica", ray.cloudpickle.dumps)
"""Packs reductions and results; classes of a program's main module are sent by value."""

_ROW_ONLY = (None,)

_Int32Array = np.ndarray[Any, np.dtype[np.int32]]

Lease = Callable[[list[tuple[str | None, bytes]]], object]
"""Type of `GroupQuery.lease`."""


class PackedGroup(NamedTuple):
    """Columns of the query of a population.

    Attributes:
        query_id: Id of the query.
        number: Number of the query's generation, under which the replica stores it.
        base: Number of a generation that the replica has and that the query's generation equals
            or extends; -1 if there is none.
        first: Sequences of the first lineage if `base` is -1.
        steps: Ancestors and token ids of each lineage after that of `base` or the first, int32.
        wanted: `GroupQuery.wanted`, int32.
        row_of: `GroupQuery.row_of`, int32.
        output: The packed reduction, or the pickled `GroupQuery.sampling`.
        adapter: `GroupQuery.adapter`.
        sampled: Number of the generation of the result, under which the replica stores it; -1
            without `sampling`.
    """

    query_id: int
    number: int
    base: int
    first: PackedSequences
    steps: list[tuple[_Int32Array, _Int32Array]]
    wanted: _Int32Array
    row_of: _Int32Array
    output: bytes
    adapter: str | None
    sampled: int

    @property
    def size(self) -> int:
        """Number of sequences that the replica stores for the query."""
        return len(self.first.tails) + sum(len(tokens) for _, tokens in self.steps)


@dataclass
class ReplicaRequest:
    """A message to a replica.

    Attributes:
        queries: Pickled columns of single queries: ids, sequences, numbers of outputs, the
            packed outputs of all queries, and by place the adapter and targets of the queries
            that have either.
        count: Number of single queries.
        groups: Queries of populations.
        aborted: Ids of queries to drop.
        dropped: Numbers of generations that later messages do not use.
        released: Sequences whose state the engine may drop, and their adapters.
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
        packed: Completions of finished queries.
        statistics: Statistics of the engine.
    """

    packed: PackedCompletions
    statistics: dict[str, Any]


# -- single queries -------------------------------------------------------------------


def pack_queries(queries: Sequence[Query]) -> ReplicaRequest:
    """Pack queries for single sequences."""
    counts: list[int] = []
    packed = b""
    outputs = [query.outputs for query in queries]
    if any(query_outputs != _ROW_ONLY for query_outputs in outputs):
        counts = list(map(len, outputs))
        packed = TRANSPORT.pack_outputs(list(itertools.chain(*outputs)))
    extras = {
        place: (query.adapter, query.targets)
        for place, query in enumerate(queries)
        if query.adapter is not None or query.targets
    }
    sequences = pack_sequences(query.sequence for query in queries)
    # Pickling few objects is faster than pickling many.
    columns = [query.query_id for query in queries], sequences, counts, packed, extras
    return ReplicaRequest(pickle.dumps(columns, pickle.HIGHEST_PROTOCOL), len(queries))


def unpack_queries(message: ReplicaRequest) -> list[Query]:
    """Unpack the queries for single sequences."""
    if not message.queries:
        return []
    query_ids, sequences, counts, packed, extras = pickle.loads(message.queries)  # noqa: S301 - Ray pickles messages too
    outputs: list[Any] = [_ROW_ONLY] * len(query_ids)
    if counts:
        flat = iter(TRANSPORT.unpack_outputs(packed))
        outputs = [tuple(itertools.islice(flat, count)) for count in counts]
    queries = []
    rows = zip(query_ids, sequences.unpack(), outputs, strict=True)
    for place, (query_id, sequence, query_outputs) in enumerate(rows):
        adapter, targets = extras.get(place, (None, ()))
        queries.append(
            Query(query_id, sequence, adapter, outputs=query_outputs, targets=targets)
        )
    return queries


# -- populations ----------------------------------------------------------------------


class PlacedGeneration:
    """State of a generation in the driver: its replica, and its number in that replica.

    It is deleted on any thread, with the last population that refers to it. The number is then
    appended to `dropped`, whose `append` is atomic.
    """

    __slots__ = ("_dropped", "number", "replica")

    def __init__(self, replica: int, number: int, dropped: Any) -> None:
        self.replica, self.number, self._dropped = replica, number, dropped

    def __del__(self) -> None:
        self._dropped.append(self.number)


def pack_group(
    group: GroupQuery, number: int, base_state: PlacedGeneration | None, sampled: int
) -> PackedGroup:
    """Pack the query of a population.

    Args:
        group: The query.
        number: Number of the query's generation in later messages.
        base_state: State of the nearest earlier generation that the replica has, or of the
            query's generation; None if there is none.
        sampled: Number of the generation of the result if the query has `sampling`.
    """
    base_lineage: Lineage | None = None
    if base_state is not None:
        base = group.generation.with_state()
        base_lineage = None if base is None else base.lineage
    steps: list[tuple[_Int32Array, _Int32Array]] = []
    lineage = group.generation.lineage
    while lineage is not base_lineage and lineage.parent is not None:
        steps.append((lineage.ancestors.astype(np.int32), lineage.token_ids.astype(np.int32)))
        lineage = lineage.parent
    first = range(0 if lineage is base_lineage else len(lineage))
    steps.reverse()
    if group.sampling is None:
        output = TRANSPORT.pack_outputs([group.reduction])
    else:
        output = pickle.dumps(group.sampling, pickle.HIGHEST_PROTOCOL)
    return PackedGroup(
        group.query_id,
        number,
        -1 if base_state is None else base_state.number,
        pack_sequences(map(lineage.sequence, first)),
        steps,
        group.wanted.astype(np.int32),
        group.row_of.astype(np.int32),
        output,
        group.adapter,
        sampled,
    )


def place_sample(
    group: GroupQuery, sample: SampledGroup, state: PlacedGeneration
) -> SampledGroup:
    """Add the generation of continuations to a replica's result, with its state."""
    sampling = group.sampling
    assert sampling is not None  # noqa: S101 - the result is a sample
    generation, places = group.generation.extended(sampling.places, sample.token_ids.numpy())
    generation.keep(state)
    return sample._replace(generation=generation, places=places)


class Generations:
    """A driver's generations in a replica, by the driver's numbers.

    Attributes:
        sequences: Number of their sequences.
    """

    def __init__(self) -> None:
        self._by_number: dict[int, tuple[Generation, int]] = {}
        self._sampling: dict[int, tuple[int, GroupQuery]] = {}  # by query id
        self.sequences = 0

    def group(self, packed: PackedGroup, adapter: str | None, lease: Lease) -> GroupQuery:
        """Unpack the query of a population.

        Args:
            packed: The query.
            adapter: The engine's name of its adapter.
            lease: `GroupQuery.lease` of the query.

        Raises:
            KeyError: A generation is unknown.
        """
        if packed.number != packed.base:
            self._add(packed.number, self._unpack_generation(packed), packed.size)
        reduction: Any = None
        sampling: GroupSampling | None = None
        if packed.sampled >= 0:
            sampling = pickle.loads(packed.output)  # noqa: S301 - see `unpack_queries`
        else:
            [reduction] = TRANSPORT.unpack_outputs(packed.output)
        group = GroupQuery(
            packed.query_id,
            self._by_number[packed.number][0],
            packed.wanted.astype(np.int64),
            packed.row_of.astype(np.int64),
            reduction,
            adapter,
            lease,
            sampling,
        )
        if packed.sampled >= 0:
            self._sampling[packed.query_id] = packed.sampled, group
        return group

    def finish(self, query_id: int, result: Any = None) -> Any:
        """Store the generation of a sample; return a query's result without it."""
        number, group = self._sampling.pop(query_id, (0, None))
        if group is None or not isinstance(result, SampledGroup):
            return result
        generation, lineage = result.generation, result.generation.lineage
        while lineage is not group.generation.lineage and lineage.parent is not None:
            lineage = lineage.parent
        if lineage is not group.generation.lineage:  # not an extension of the group's
            assert group.sampling is not None  # noqa: S101 - the result is a sample
            ids = result.token_ids.numpy()
            generation, _ = group.generation.extended(group.sampling.places, ids)
        self._add(number, generation, result.token_ids.numel())
        unset: Any = None  # the driver extends its generation in the same way
        return result._replace(generation=unset, places=unset)

    def drop(self, number: int) -> None:
        """Drop a generation if it is known; generations that extend it stay valid."""
        _, size = self._by_number.pop(number, (None, 0))
        self.sequences -= size

    def _add(self, number: int, generation: Generation, size: int) -> None:
        self._by_number[number] = generation, size
        self.sequences += size

    def _unpack_generation(self, packed: PackedGroup) -> Generation:
        base: Generation | None = None
        if packed.base >= 0:
            base, _ = self._by_number[packed.base]
            lineage = base.lineage
        else:
            lineage = Lineage.of_sequences(packed.first.unpack())
        for ancestors, token_ids in packed.steps:
            parents = ancestors.astype(np.int64)
            lengths = lineage.lengths[parents] + (token_ids >= 0)
            lineage = Lineage(lineage, parents, token_ids.astype(np.int64), lengths)
        return Generation(lineage, base)
