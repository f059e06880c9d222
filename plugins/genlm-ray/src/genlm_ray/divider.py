"""`Divider`: queries of populations become queries for parts, one for each replica.

The engine's thread divides queries and joins their results. The driver and its router know the
queries for parts only, and send, abort and repeat them like those of other populations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from genlm import PopulationError
from genlm.plugin import (
    Columns,
    Completion,
    GroupQuery,
    GroupResult,
    SampledGroup,
    query_ids,
)
from genlm_ray.division import Division, division_of
from genlm_ray.wire import AnyQuery

_Integers64 = npt.NDArray[np.int64]


class _PartQuery(NamedTuple):
    """A query for a part of a population.

    Attributes:
        part: Index of the part.
        wanted: Index of each of its sequences in `wanted` of the population's query.
        members: Index of each of its members in `row_of` of the population's query.
    """

    part: int
    wanted: _Integers64
    members: _Integers64


@dataclass(slots=True, eq=False)
class _DividedQuery:
    """The query of a population, and the results of its parts.

    Attributes:
        group: The query.
        division: Division of its generation.
        columns: Columns of the members of completed parts.
        pending: Unanswered queries for parts, by id.
        samples: Continuations of completed parts, by part.
        errors: Errors of sequences, by their index in `group.wanted`.
    """

    group: GroupQuery
    division: Division
    columns: Columns
    pending: dict[int, _PartQuery] = field(default_factory=dict)
    samples: dict[int, SampledGroup] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)

    def parts(self) -> Iterator[GroupQuery]:
        """Yield the queries for parts with requested sequences."""
        group, division, count = self.group, self.division, len(self.group.row_of)
        members_of = division.split(group.wanted[group.row_of])
        for part, unsorted in enumerate(division.split(group.wanted)):
            if not len(unsorted):
                continue
            wanted = unsorted[np.argsort(division.places[group.wanted[unsorted]])]
            place_of = np.empty(len(group.wanted), np.int64)
            place_of[wanted] = np.arange(len(wanted))
            query_id, members = next(query_ids), members_of[part]
            self.pending[query_id] = _PartQuery(part, wanted, members)
            reduction, sampling = group.reduction, group.sampling
            if sampling is not None:
                drawn = division.split(sampling.places)[part]
                sampling = sampling.of(drawn, division.places[sampling.places[drawn]])
            elif len(members) < count:
                reduction = reduction.of(members)
            yield replace(
                group,
                query_id=query_id,
                generation=division.parts[part],
                wanted=division.places[group.wanted[wanted]],
                row_of=place_of[group.row_of[members]],
                reduction=reduction,
                sampling=sampling,
            )

    def add(self, part: _PartQuery, result: Any) -> None:
        """Add the `GroupResult` or `SampledGroup` of a part."""
        if isinstance(result, SampledGroup):
            self.samples[part.part] = result
            return
        columns, errors = result
        if columns:  # otherwise all members failed
            self.columns.add(part.members, columns)
        self.errors |= {int(part.wanted[place]): error for place, error in errors.items()}

    def error(self, part: _PartQuery, error: Exception) -> Exception:
        """Return the error of the population for that of a part."""
        sampling = self.group.sampling
        if sampling is None or not isinstance(error, PopulationError):
            return error
        members = self.division.split(sampling.places)[part.part][list(error.members)]
        return PopulationError(members.tolist(), len(sampling.places), error.error)

    def result(self) -> GroupResult | SampledGroup:
        """Return the result for all members, and set the state of its generation."""
        group = self.group
        if group.generation.state is None:
            group.generation.keep(self.division)
        if group.sampling is None:
            return GroupResult(self.columns.result(), self.errors)
        return self._joined_samples(group.sampling.places, group.sampling.finished.copy())

    def _joined_samples(
        self, places: _Integers64, finished: npt.NDArray[np.bool_]
    ) -> SampledGroup:
        """Return the continuations of all members.

        Args:
            places: Index of each member's sequence in the generation.
            finished: Flags of the finished members; changed.
        """
        division, count = self.division, len(places)
        longest = max(sample.token_ids.shape[1] for sample in self.samples.values())
        token_ids = torch.full((count, longest), -1, device="cpu")
        logprobs, draw_logprob = torch.zeros(
            2, count, longest, dtype=torch.float32, device="cpu"
        )
        parts, part_places = division.parts.copy(), division.places[places]
        for part, members in enumerate(division.split(places)):
            if part in self.samples:  # otherwise all its members are finished
                sample, chosen = self.samples[part], torch.from_numpy(members)
                width = sample.token_ids.shape[1]
                token_ids[chosen, :width] = sample.token_ids
                logprobs[chosen, :width] = sample.logprobs
                draw_logprob[chosen, :width] = sample.draw_logprob
                finished[members], part_places[members] = sample.finished, sample.places
                parts[part] = sample.generation
        generation, new_places = self.group.generation.extended(places, token_ids.numpy())
        if generation.state is None:
            part_of, places_in_parts = np.empty((2, len(generation.lineage)), np.int64)
            part_of[new_places] = division.part_of[places]
            places_in_parts[new_places] = part_places
            generation.keep(
                replace(division, parts=parts, part_of=part_of, places=places_in_parts)
            )
        return SampledGroup(token_ids, logprobs, draw_logprob, generation, new_places, finished)


class Divider:
    """Divides queries of populations and joins the results of their parts.

    Args:
        sessions: Function that returns the sessions of the replicas that are up.
        abort: Function that makes the driver drop a query.
    """

    def __init__(
        self, sessions: Callable[[], Collection[int]], abort: Callable[[int], object]
    ) -> None:
        self._sessions = sessions
        self._abort = abort
        self._queries: dict[int, _DividedQuery] = {}  # by id of the population's query
        self._owners: dict[int, int] = {}  # that id, by the id of a query for a part

    def divide(self, queries: Sequence[AnyQuery]) -> list[AnyQuery]:
        """Return queries with queries for parts in place of those of populations."""
        groups = sum(isinstance(query, GroupQuery) for query in queries)
        if not groups:
            return list(queries)
        sessions = self._sessions()
        replicas = len(sessions) // (groups + len(self._queries))
        divided: list[AnyQuery] = []
        for query in queries:
            if not isinstance(query, GroupQuery):
                divided.append(query)
                continue
            division = division_of(query.generation, query.wanted, sessions, replicas)
            columns = Columns(query.reduction, len(query.row_of))
            self._queries[query.query_id] = _DividedQuery(query, division, columns)
            parts = list(self._queries[query.query_id].parts())
            self._owners |= dict.fromkeys((part.query_id for part in parts), query.query_id)
            divided += parts
        return divided

    def join(self, completions: Iterable[Completion]) -> list[Completion]:
        """Return completions with those of populations in place of those of their parts."""
        joined = []
        for completion in completions:
            query_id = self._owners.pop(completion.query_id, None)
            if query_id is None:
                joined.append(completion)
                continue
            query = self._queries[query_id]
            part = query.pending.pop(completion.query_id)
            if completion.error is not None:
                self.abort(query_id)
                joined.append(Completion(query_id, error=query.error(part, completion.error)))
                continue
            query.add(part, completion.result)
            if not query.pending:
                del self._queries[query_id]
                joined.append(Completion(query_id, query.result()))
        return joined

    def abort(self, query_id: int) -> None:
        """Drop a query, or the unanswered queries for the parts of a population."""
        query = self._queries.pop(query_id, None)
        for part_id in [query_id] if query is None else query.pending:
            self._owners.pop(part_id, None)
            self._abort(part_id)
