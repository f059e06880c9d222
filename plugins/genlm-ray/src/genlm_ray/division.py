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
computing some of these sequences again, in another replica, all sequences are assigned to
parts anew. The rows that exceed equal shares and the recomputed tokens then cost about twice as
much, at most, as if the best time for it had been known before.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

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
    """

    parts: list[Generation]
    part_of: _Integers64
    places: _Integers64
    excess: int = 0

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


def division_of(
    generation: Generation, wanted: _Integers64, sessions: Collection[int], replicas: int
) -> Division:
    """Return the division of a generation for a request.

    Args:
        generation: The generation.
        wanted: Indices of the sequences whose rows are requested, shape `(d,)`.
        sessions: Sessions of the replicas that are up.
        replicas: Number of replicas that the population may use, apart from those that it uses.
    """
    root, lineage = generation.root, generation.lineage
    count = min(replicas, len(wanted) // MIN_ROWS)
    if isinstance(root.state, Division):
        division = root.state.extended(generation, root)
        return _balanced(division, generation, wanted, sessions, count)
    if count > 1:
        return _new_division(generation, wanted, sessions, count)
    base = Generation(root.lineage)
    base.joined = placed_sources(root)
    part = base if lineage is root.lineage else Generation(lineage, base)
    members = np.arange(len(lineage))
    return Division([part], np.zeros_like(members), members)


def _balanced(
    division: Division,
    generation: Generation,
    wanted: _Integers64,
    sessions: Collection[int],
    count: int,
) -> Division:
    """Return the division of an extended generation, or a division into `count` other parts."""
    holders = [holder_of(part, sessions) for part in division.parts]
    # The part of a lost replica counts as that of another one.
    keys = [-1 - i if session is None else session for i, session in enumerate(holders)]
    used = list(dict.fromkeys(keys))
    replica_of = np.array([used.index(key) for key in keys])[division.part_of[wanted]]
    rows = np.bincount(replica_of, minlength=len(used))
    count = max(count, min(len(used), len(wanted) // MIN_ROWS), 1)
    share = -(-len(wanted) // count)
    excess = int(rows.max()) - share
    if excess <= 0:
        return division
    excess += division.excess
    above = [wanted[replica_of == replica][share:] for replica in range(len(used))]
    room = share - (int(rows.min()) if len(used) >= count else 0)
    moved = np.sort(np.concatenate(above))[:room]  # to the replica with most room
    cost = _moving_cost(generation.lineage, moved, excess)
    if excess < max(cost, share // 8):  # a small excess is not worth it
        return replace(division, excess=excess)
    return _new_division(generation, wanted, sessions, count)


def _moving_cost(lineage: Lineage, places: _Integers64, limit: int) -> float:
    """Return the cost of computing sequences in a replica, in rows.

    Tokens that they have in common count once, and a prompt of all sequences does not count.

    Args:
        lineage: The sequences.
        places: Indices of some of them.
        limit: Cost above which the result may be too small.
    """
    tokens = 0
    while lineage.parent is not None and TOKEN_COST * tokens <= limit:
        places = np.unique(places)
        tokens += int(np.count_nonzero(lineage.token_ids[places] >= 0))
        places, lineage = lineage.ancestors[places], lineage.parent
    if lineage.parent is None and len(lineage) > 1:
        tokens += int(lineage.lengths[np.unique(places)].sum())
    return TOKEN_COST * tokens


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


def _new_division(
    generation: Generation, wanted: _Integers64, sessions: Collection[int], count: int
) -> Division:
    """Return `count` parts with equal numbers of rows, which continue what replicas have."""
    lineage = generation.lineage
    by_session: dict[int, list[Source]] = {}
    for source in placed_sources(generation):
        session = holder_of(source.generation, sessions)
        if session is not None:
            by_session.setdefault(session, []).append(source)
    sources = list(by_session.values())
    holder = np.full(len(lineage), -1)  # index in `sources`, or -1
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
    places, parts = np.empty(len(lineage), np.int64), []
    for part in range(count):
        members = np.flatnonzero(part_of == part)
        places[members] = np.arange(len(members))
        continued = Generation(Lineage.of_sequences(lineage.sequences(members)))
        held_sources = sources[kept[part]] if part < len(kept) else []
        common = [source.of(members) for source in held_sources]
        continued.joined = [source for source in common if len(source.places)]
        parts.append(continued)
    return Division(parts, part_of, places)
