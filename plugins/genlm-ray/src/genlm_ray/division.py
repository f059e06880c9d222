"""`Division`: the sequences of a population in parts, each of which one replica computes.

Each part is a separate generation. The next generation of a population extends the parts of the
generation before it, so each sequence is computed by the replica that has its prefix::

    sequences of a generation      0  1  2  3  4  5
    part_of                        0  0  0  1  1  1
    places                         0  1  2  0  1  2

    the next one: ancestors        0  1  1  2  2  4
    part_of                        0  0  0  0  0  1
    places                         0  1  2  3  4  0

Resampling thus makes some parts larger than others, and a request takes longer by the rows of
the largest part that exceed an equal share. When the sum of these rows reaches the cost of
computing the prefixes of some sequences again, in other replicas, all sequences are assigned to
parts anew. The rows that exceed equal shares and the recomputed tokens then cost about twice as
much, at most, as if the best time for it had been known before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from genlm.plugin import Generation, Lineage, Source
from genlm_ray.wire import holder_of

_Integers64 = npt.NDArray[np.int64]

TOKEN_COST = 0.25
"""Cost of computing a prompt token, in rows. The tokens of a prompt share matrix products, so
engines compute them at several times the rate of rows."""

MIN_ROWS = 32
"""Minimum number of rows of a part, on average."""


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """The parts of a generation; its state in the driver.

    Attributes:
        parts: Generations of a part of the sequences each.
        part_of: Index of the part of each sequence, shape `(n,)`.
        places: Index of each sequence in its part, shape `(n,)`.
        excess: Sum, over the requests since the sequences were assigned, of the rows of the
            largest part that exceed an equal share.
        next_check: Excess from which on it is compared with the cost of moving sequences.
    """

    parts: list[Generation]
    part_of: _Integers64
    places: _Integers64
    excess: int = 0
    next_check: int = 0

    def split(self, places: _Integers64) -> list[_Integers64]:
        """Divide an array of indices of sequences; return positions in it for each part."""
        part_of = self.part_of[places]
        order = np.argsort(part_of, kind="stable")
        return np.split(order, np.searchsorted(part_of[order], np.arange(1, len(self.parts))))

    def extended(self, generation: Generation, earlier: Generation) -> Division:
        """Return the division of a generation that extends the divided one, `earlier`."""
        lineage = generation.lineage
        if lineage is earlier.lineage:
            return self
        members = np.arange(len(lineage))
        origins, columns = lineage.suffixes(members, earlier.lineage)
        [part, *others] = self.parts
        if not others and part.lineage is earlier.lineage:
            parts = [Generation(lineage, part)]
            return replace(self, parts=parts, part_of=np.zeros_like(members), places=members)
        parts, part_of, places = [], members.copy(), members.copy()
        for part, chosen in zip(self.parts, self.split(origins), strict=True):
            if len(chosen):  # otherwise no sequence continues one of this part
                before = self.places[origins[chosen]]
                extended, places[chosen] = part.extended(before, columns[chosen])
                part_of[chosen] = len(parts)
                parts.append(extended)
        return replace(self, parts=parts, part_of=part_of, places=places)


class Request(NamedTuple):
    """A request for rows of a population.

    Attributes:
        generation: The generation.
        wanted: Indices of the sequences whose rows are requested, shape `(d,)`.
        sessions: Sessions of the replicas that are up.
        replicas: Number of replicas that the population may use, apart from those that it uses.
    """

    generation: Generation
    wanted: _Integers64
    sessions: Collection[int]
    replicas: int


def division_of(request: Request) -> Division:
    """Return the division of a generation for a request."""
    generation = request.generation
    root, lineage = generation.root, generation.lineage
    count = min(request.replicas, len(request.wanted) // MIN_ROWS)
    if isinstance(root.state, Division):
        return _balanced(root.state.extended(generation, root), request, count)
    if count > 1:
        return _assigned(request, _assignment(request, count))
    base = Generation(root.lineage)
    base.joined = placed_sources(root)
    part = base if lineage is root.lineage else Generation(lineage, base)
    members = np.arange(len(lineage))
    return Division([part], np.zeros_like(members), members)


def placed_sources(generation: Generation) -> list[Source]:
    """Return the nearest earlier generations that replicas have, and their common sequences."""
    placed = []
    for source in generation.sources():
        division = source.generation.state
        for part, chosen in zip(division.parts, division.split(source.origins), strict=True):
            for earlier in part.sources():
                found = earlier.of(division.places[source.origins[chosen]])
                if len(found.places):
                    later = chosen[found.places]
                    lengths = np.minimum(found.lengths, source.lengths[later])
                    places = source.places[later]
                    placed.append(found._replace(places=places, lengths=lengths))
    return placed


class _Assignment(NamedTuple):
    """Sequences of a generation in new parts with equal numbers of requested rows.

    Attributes:
        part_of: Index of the part of each sequence, shape `(n,)`.
        sources: Generations that the replica of each part has, none for a part of any replica.
        is_moved: Which of the requested sequences are moved from a replica to another one,
            shape `(d,)`.
    """

    part_of: _Integers64
    sources: list[list[Source]]
    is_moved: npt.NDArray[np.bool_]


def _balanced(division: Division, request: Request, count: int) -> Division:
    """Return the division of an extended generation, or a division into `count` other parts."""
    wanted = request.wanted
    sizes = np.bincount(division.part_of[wanted], minlength=len(division.parts)).tolist()
    rows: Counter[int] = Counter()  # by session
    for index, part in enumerate(division.parts):
        session = holder_of(part, request.sessions)
        # The part of a lost replica counts as that of another one.
        rows[-1 - index if session is None else session] += sizes[index]
    count = max(count, min(len(rows), len(wanted) // MIN_ROWS), 1)
    share = -(-len(wanted) // count)
    excess = max(rows.values()) - share
    if excess <= 0:
        return division
    excess += division.excess
    if excess < max(division.next_check, len(wanted) // 16):  # not worth it
        return replace(division, excess=excess)
    assignment = _assignment(request, count)
    if not _reaches_cost(excess, request, assignment):
        return replace(division, excess=excess, next_check=int(1.25 * excess) + 1)
    return _assigned(request, assignment)


def _reaches_cost(excess: int, request: Request, assignment: _Assignment) -> bool:
    """Whether the excess has reached the cost of moving sequences to other replicas.

    The cost is that of the part with most tokens to compute again. In a part, tokens that
    sequences have in common are computed once.

    Args:
        excess: Number of rows.
        request: The request.
        assignment: The sequences in other parts.
    """
    lineage, wanted = request.generation.lineage, request.wanted
    part_of, _, is_moved = assignment
    places, parts = wanted[is_moved], part_of[wanted[is_moved]]
    # The tokens of prompts that a part does not have.
    lengths = lineage.first.lengths
    prompts = lineage.origins(wanted, lineage.first) + part_of[wanted] * len(lengths)
    missing = np.setdiff1d(prompts[is_moved], prompts[~is_moved])
    count = int(part_of.max()) + 1
    tokens = np.bincount(missing // len(lengths), lengths[missing % len(lengths)], count)
    while TOKEN_COST * tokens.max() <= excess:
        if lineage.parent is None:
            return True
        _, index = np.unique(parts * len(lineage) + places, return_index=True)
        parts, places = parts[index], places[index]
        tokens += np.bincount(parts[lineage.token_ids[places] >= 0], minlength=count)
        places, lineage = lineage.ancestors[places], lineage.parent
    return False


def _assignment(request: Request, count: int) -> _Assignment:
    """Assign the sequences of a generation to `count` parts, each of one replica."""
    wanted = request.wanted
    by_session: dict[int, list[Source]] = {}
    for source in placed_sources(request.generation):
        session = holder_of(source.generation, request.sessions)
        if session is not None:
            by_session.setdefault(session, []).append(source)
    sources = list(by_session.values())
    holder = np.full(len(request.generation.lineage), -1)  # index in `sources`, or -1
    for index, held in enumerate(sources):
        for source in held:
            holder[source.places] = index
    rows = np.bincount(holder[wanted] + 1, minlength=len(sources) + 1)[1:]
    kept = np.argsort(-rows, kind="stable")[:count]
    part_of_holder = np.full(len(sources) + 1, -1)  # the last is that of sequences without one
    part_of_holder[kept] = np.arange(len(kept))
    part_of = part_of_holder[holder]
    sizes = len(wanted) // count + (np.arange(count) < len(wanted) % count)
    for part, size in enumerate(sizes.tolist()):
        part_of[wanted[part_of[wanted] == part][size:]] = -1
    free = wanted[part_of[wanted] < 0]
    room = sizes - np.bincount(part_of[wanted] + 1, minlength=count + 1)[1:]
    part_of[free] = np.repeat(np.arange(count), room)  # neighbours often share a prefix
    part_of[part_of < 0] = 0  # sequences that are not requested
    holder_of_part = np.append(kept, np.full(count - len(kept), -1))
    return _Assignment(
        part_of,
        [sources[index] if index >= 0 else [] for index in holder_of_part.tolist()],
        holder_of_part[part_of[wanted]] != holder[wanted],
    )


def _assigned(request: Request, assignment: _Assignment) -> Division:
    """Return the division of an assignment, whose parts continue what their replicas have."""
    lineage, part_of = request.generation.lineage, assignment.part_of
    places, parts = np.empty(len(lineage), np.int64), []
    for part, sources in enumerate(assignment.sources):
        members = np.flatnonzero(part_of == part)
        places[members] = np.arange(len(members))
        generation = Generation(Lineage.of_sequences(lineage.sequences(members)))
        common = [source.of(members) for source in sources]
        generation.joined = [source for source in common if len(source.places)]
        parts.append(generation)
    return Division(parts, part_of, places)
