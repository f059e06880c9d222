"""Generations of concatenated and truncated populations, with the state of earlier ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from genlm.core.queries.generations import (
    Generation,
    Integers64,
    Source,
    first_generation,
)


def joined_generation(
    parts: Sequence[tuple[Generation, Integers64]],
    lengths: Integers64 | None = None,
) -> tuple[Generation, Integers64]:
    """Return a generation of the distinct sequences of members of several generations.

    Args:
        parts: Generations, and the index of the sequence of each member.
        lengths: Number of first tokens of each member's sequence, at most all; by default all.

    Returns:
        The generation, and the index of the sequence of each member of all parts.
    """
    sequences = [
        generation.lineage.sequence(place)
        for generation, places in parts
        for place in places.tolist()
    ]
    if lengths is not None:
        pairs = zip(sequences, lengths.tolist(), strict=True)
        sequences = [sequence.prefix(length) for sequence, length in pairs]
    joined, indices = first_generation(sequences)
    sources, end = [], 0
    for generation, members in parts:
        begin, end = end, end + len(members)
        for source, origins, places, shared in generation.sources():
            index_of = np.full(len(generation.lineage), -1)
            index_of[places] = np.arange(len(places))
            index = index_of[members]
            # One member of each of the distinct sequences.
            distinct, first = np.unique(indices[begin:end], return_index=True)
            index, distinct = index[first], distinct[index[first] >= 0]
            index = index[index >= 0]
            shared_lengths = np.minimum(shared[index], joined.lineage.lengths[distinct])
            sources.append(Source(source, origins[index], distinct, shared_lengths))
    # Otherwise programs that concatenate without end would keep all earlier generations.
    joined.joined = _longest_sources(sources, len(joined.lineage))
    return joined, indices


def _longest_sources(sources: Sequence[Source], count: int) -> list[Source]:
    """Return for each of `count` sequences the source with which it shares most tokens."""
    longest, owner = np.zeros(count, np.int64), np.full(count, -1)
    for number, (_, _, places, lengths) in enumerate(sources):
        is_longer = lengths > longest[places]
        longest[places[is_longer]] = lengths[is_longer]
        owner[places[is_longer]] = number
    kept = []
    for number, (generation, origins, places, lengths) in enumerate(sources):
        is_owned = owner[places] == number
        if is_owned.any():
            indices = origins[is_owned], places[is_owned]
            kept.append(Source(generation, *indices, lengths[is_owned]))
    return kept
