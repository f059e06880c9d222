"""The rows that predict the tokens of continuations of a population."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from genlm.core.base.arrays import ranges
from genlm.core.queries.generations import NO_TOKEN, Generation, Integers64


class ScoredRows(NamedTuple):
    """Distinct rows that predict the tokens of the continuations of n members.

    Attributes:
        generation: The sequences, continued by all tokens but the last of each member.
        places: Index of the sequence of each member in the generation, shape `(n,)`.
        wanted: Index of the sequence of each row, ascending, shape `(d,)`.
        dropped: Number of last tokens of this sequence that the row does not follow, descending
            for the rows of a sequence, shape `(d,)`.
        members: Member of each token of the continuations, one member after the other, shape
            `(t,)`.
        row_of: Index of the row that predicts each of these tokens, shape `(t,)`.
        last_ids: Last token of each member, `NO_TOKEN` for an empty continuation, shape `(n,)`.
    """

    generation: Generation
    places: Integers64
    wanted: Integers64
    dropped: Integers64
    members: Integers64
    row_of: Integers64
    last_ids: Integers64


def scored_rows(
    generation: Generation, places: Integers64, token_ids: Integers64
) -> ScoredRows:
    """Return the rows that predict the tokens of continuations.

    Args:
        generation: The sequences that are continued.
        places: Index of the sequence of each member, shape `(n,)`.
        token_ids: The continuations, shape `(n, k)`, at least one token in all, with `NO_TOKEN`
            after the end of shorter ones.
    """
    counts = (token_ids >= 0).sum(axis=1)
    lasts = np.arange(len(places)), counts - 1  # of an empty continuation, any `NO_TOKEN`
    last_ids, inputs = token_ids[lasts], token_ids.copy()
    inputs[lasts] = NO_TOKEN
    lineage, levels, sizes = generation.lineage, [places], [len(generation.lineage)]
    for column in inputs[:, : counts.max() - 1].T:
        lineage, continued = lineage.extended(levels[-1], column)
        levels.append(continued)
        sizes.append(len(lineage))
    members = np.arange(len(places)).repeat(counts)
    positions = ranges(0, counts)
    # The sequences of a level, which precede the tokens of one position, are distinct.
    keys = (np.cumsum(sizes) - sizes)[positions] + np.stack(levels)[positions, members]
    _, firsts, row_of = np.unique(keys, return_index=True, return_inverse=True)
    wanted = levels[-1][members[firsts]]
    dropped = (counts[members] - 1 - positions)[firsts]
    order = np.lexsort([-dropped, wanted])
    last = generation if lineage is generation.lineage else Generation(lineage, generation)
    return ScoredRows(
        last,
        levels[-1],
        wanted[order],
        dropped[order],
        members,
        order.argsort()[row_of],
        last_ids,
    )
