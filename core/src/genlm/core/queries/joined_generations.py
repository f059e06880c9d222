"""Generations of concatenated and truncated populations, with the state of earlier ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from genlm.core.queries.generations import Generation, Integers64, Source, first_generation


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
        sequence
        for generation, places in parts
        for sequence in generation.lineage.sequences(places)
    ]
    if lengths is not None:
        pairs = zip(sequences, lengths.tolist(), strict=True)
        sequences = [sequence.prefix(length) for sequence, length in pairs]
    joined, indices = first_generation(sequences)
    sources, end = [], 0
    for generation, members in parts:
        begin, end = end, end + len(members)
        # One member of each of the distinct sequences.
        distinct, first = np.unique(indices[begin:end], return_index=True)
        for source in generation.sources():
            found = source.of(members[first])
            places = distinct[found.places]
            lengths_shared = np.minimum(found.lengths, joined.lineage.lengths[places])
            sources.append(found._replace(places=places, lengths=lengths_shared))
    # Otherwise programs that concatenate without end would keep all earlier generations.
    joined.joined = _longest_sources(sources, len(joined.lineage))
    return joined, indices


def _longest_sources(sources: Sequence[Source], count: int) -> list[Source]:
    """Return for each of `count` sequences the source with which it shares most tokens."""
    longest = np.zeros(count, np.int64)
    for source in sources:
        longest[source.places] = np.maximum(longest[source.places], source.lengths)
    kept = []
    for generation, origins, places, lengths in sources:
        is_longest = lengths == longest[places]
        if is_longest.any():
            kept.append(
                Source(generation, origins[is_longest], places[is_longest], lengths[is_longest])
            )
            longest[places[is_longest]] = 0  # no further source is that of these sequences
    return kept
