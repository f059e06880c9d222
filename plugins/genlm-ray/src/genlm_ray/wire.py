"""Messages of drivers and replicas: sequences by blocks, populations and rows as arrays.

The sequences of a message share their blocks, so that a common prompt is sent once. For a part
of a population, only the columns that its replica does not have are sent. The rows of a message
are one numpy array, which Ray stores and maps without copying. The modules of drivers and those
of replicas have only this module and `spec` in common.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import ray.cloudpickle

from genlm.plugin import (
    Generation,
    GroupQuery,
    Lineage,
    PackedSequences,
    Query,
    SampledGroup,
    Transport,
    pack_sequences,
)

TRANSPORT = Transport("a replica", ray.cloudpickle.dumps)
"""Packs reductions and results; classes of a program's main module are sent by value."""

AnyQuery = Query | GroupQuery

Prefix = tuple[tuple[int, ...], str | None]
"""Token ids and the driver's name of the adapter."""

_Integers64 = npt.NDArray[np.int64]


def row_count(query: AnyQuery) -> int:
    """Return the number of rows that are computed for a query, without those of its context."""
    if isinstance(query, GroupQuery):
        length = 1 if query.sampling is None else int(np.max(query.sampling.max_tokens))
        return len(query.wanted) * length
    return 1 + len(query.targets)


# -- single queries -------------------------------------------------------------------


class PackedQueries(NamedTuple):
    """Columns of queries for single sequences.

    Attributes:
        query_ids: Ids of the queries.
        sequences: Their sequences.
        adapters: `Query.adapter`.
        targets: `Query.targets`.
        turns: Their turns in the program.
        counts: Number of outputs of each query.
        outputs: The packed outputs of all queries.
    """

    query_ids: list[int]
    sequences: PackedSequences
    adapters: list[str | None]
    targets: list[tuple[int, ...]]
    turns: list[int]
    counts: list[int]
    outputs: Any


def pack_queries(queries: Sequence[Query], turns: list[int] | None = None) -> PackedQueries:
    """Pack queries for single sequences, with other turns if they are given."""
    outputs = [query.outputs for query in queries]
    return PackedQueries(
        [query.query_id for query in queries],
        pack_sequences(query.sequence for query in queries),
        [query.adapter for query in queries],
        [query.targets for query in queries],
        [query.turn for query in queries] if turns is None else turns,
        list(map(len, outputs)),
        TRANSPORT.pack_outputs(list(itertools.chain(*outputs))),
    )


def unpack_queries(packed: PackedQueries) -> list[Query]:
    """Unpack queries for single sequences."""
    query_ids, sequences, adapters, targets, turns, counts, outputs = packed
    unpacked = iter(TRANSPORT.unpack_outputs(outputs))
    return [
        Query(
            query_id,
            sequence,
            adapter,
            outputs=tuple(itertools.islice(unpacked, count)),
            targets=query_targets,
            turn=turn,
        )
        for query_id, sequence, adapter, query_targets, turn, count in zip(
            query_ids, sequences.unpack(), adapters, targets, turns, counts, strict=True
        )
    ]


# -- populations ----------------------------------------------------------------------


class PackedGroup(NamedTuple):
    """The query of a population for transfer to a replica.

    Attributes:
        query: The query without its generation, reduction and lease.
        number: Number of the query's generation, under which the replica stores it.
        base: Number of a generation that the replica has and that the query's generation equals
            or extends; None if there is none.
        first: Sequences of the first lineage if `base` is None.
        joined: `Generation.joined` of the first lineage, of generations that the replica has,
            with their numbers in place of the generations.
        steps: Ancestors and token ids of each lineage after that of `base` or the first.
        reduction: The packed `GroupQuery.reduction`, None with `sampling`.
    """

    query: GroupQuery
    number: int
    base: int | None
    first: PackedSequences
    joined: Sequence[Any]
    steps: list[tuple[_Integers64, _Integers64]]
    reduction: Any

    @property
    def size(self) -> int:
        """Number of sequences of the generation; 0 if the replica has it."""
        if self.number == self.base:
            return 0
        return len(self.steps[-1][1]) if self.steps else len(self.first.tails)


class PlacedGeneration:
    """State of a generation in the driver: the session of its replica, and its number there.

    The number is the id of the query with which the generation was sent, or `~id` for the
    generation of the result of a query with `sampling`. The state exists when the query is
    completed. It is deleted on any thread, with the last population that refers to it. The
    number is then appended to `dropped`, whose `append` is atomic.
    """

    __slots__ = ("_dropped", "number", "session")

    def __init__(self, session: int, number: int, dropped: deque[int]) -> None:
        self.session, self.number, self._dropped = session, number, dropped

    def __del__(self) -> None:
        self._dropped.append(self.number)


def session_of(generation: Generation) -> int | None:
    """Return the session of the replica that has a generation, None if none has it."""
    state = generation.state
    return state.session if isinstance(state, PlacedGeneration) else None


def holder_of(generation: Generation, sessions: Container[int | None]) -> int | None:
    """Return the session that has the state of most of the sequences, None if none has any.

    Args:
        generation: The generation.
        sessions: Sessions of replicas that are up.
    """
    root = generation.root
    sizes = [(1, root), *((len(source.places), source.generation) for source in root.joined)]
    held = [(size, session_of(each)) for size, each in sizes if session_of(each) in sessions]
    return max(held)[1] if held else None


def pack_group(group: GroupQuery, session: int) -> PackedGroup:
    """Pack the query of a population, with what the replica of a session does not have."""
    unset: Any = None  # the replica has another generation, and unpacks the reduction
    root, lineage = group.generation.root, group.generation.lineage
    base: Any = root.state.number if session_of(root) == session else None
    known = None if base is None else root.lineage
    steps: list[tuple[_Integers64, _Integers64]] = []
    while lineage is not known and lineage.parent is not None:
        steps.append((lineage.ancestors, lineage.token_ids))
        lineage = lineage.parent
    first = np.arange(0 if lineage is known else len(lineage))
    steps.reverse()
    return PackedGroup(
        replace(group, generation=unset, reduction=unset, lease=None),
        base if session_of(group.generation) == session else group.query_id,
        base,
        pack_sequences(lineage.sequences(first)),
        [
            source._replace(generation=source.generation.state.number)
            for source in root.joined
            if session_of(source.generation) == session
        ],
        steps,
        TRANSPORT.pack_outputs([group.reduction if group.sampling is None else None]),
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
    """A driver's generations in a replica, by the driver's numbers."""

    def __init__(self) -> None:
        self._by_number: dict[int, Generation] = {}

    @property
    def sequences(self) -> int:
        """Number of their sequences."""
        return sum(len(generation.lineage) for generation in self._by_number.values())

    def group(self, packed: PackedGroup, adapter: str | None, lease: Any) -> GroupQuery | None:
        """Unpack the query of a population, and store its generation if it is new.

        Args:
            packed: The query.
            adapter: The engine's name of its adapter.
            lease: `GroupQuery.lease` of the query.

        Returns:
            None if `packed.base` was dropped, as the query was aborted, by a later message.
        """
        if packed.base is not None and packed.base not in self._by_number:
            return None
        if packed.number != packed.base:
            self._by_number[packed.number] = self._unpack_generation(packed)
        [reduction] = TRANSPORT.unpack_outputs(packed.reduction)
        return replace(
            packed.query,
            generation=self._by_number[packed.number],
            reduction=reduction,
            adapter=adapter,
            lease=lease,
        )

    def finish(self, query_id: int, result: Any) -> Any:
        """Store the generation of a sample; return a query's result without it."""
        if not isinstance(result, SampledGroup):
            return result
        self._by_number[~query_id] = result.generation
        unset: Any = None  # the driver extends its generation in the same way
        return result._replace(generation=unset, places=unset)

    def drop(self, number: int) -> None:
        """Drop a generation if it is known; generations that extend it stay valid."""
        self._by_number.pop(number, None)

    def _unpack_generation(self, packed: PackedGroup) -> Generation:
        base: Generation | None = None
        if packed.base is not None:
            base = self._by_number[packed.base]
            lineage = base.lineage
        else:
            lineage = Lineage.of_sequences(packed.first.unpack())
            base = Generation(lineage)
            base.joined = [
                source._replace(generation=self._by_number[source.generation])
                for source in packed.joined
                if source.generation in self._by_number
            ]
        for ancestors, token_ids in packed.steps:
            lengths = lineage.lengths[ancestors] + (token_ids >= 0)
            lineage = Lineage(lineage, ancestors, token_ids, lengths)
        return Generation(lineage, base)


# -- messages -------------------------------------------------------------------------


@dataclass
class ReplicaRequest:
    """A message to a replica.

    Attributes:
        queries: Queries for single sequences.
        groups: Queries of populations.
        dropped: Ids of aborted queries, and numbers of generations that later messages do not
            use.
        released: Sequences whose state the engine may drop, and their adapters.
        turn: The program's current turn, which is that of `groups`.
    """

    queries: PackedQueries = field(default_factory=lambda: pack_queries(()))
    groups: list[PackedGroup] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    released: tuple[list[str | None], PackedSequences] | None = None
    turn: int = 0
