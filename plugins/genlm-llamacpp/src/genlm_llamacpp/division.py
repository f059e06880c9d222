"""Chooses whether sequences share the cells of the cache or each has a part of them.

In a shared cache the attention of every token goes over the cells of all sequences; in a
divided one over those of its sequence, but shared tokens are stored and read for each.
`benchmarks/bench_llamacpp.py` compares both.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from genlm_llamacpp.batch import common_length

__all__ = ["CELLS_ROUNDED_TO", "parts_for"]

CELLS_ROUNDED_TO = 256
"""llama.cpp rounds the cells of a sequence up to this."""

_LEAST_RATIO = 4
"""At 4 and above a divided cache was faster, at 3 and below slower (docs/decisions/0024)."""


def parts_for(population: Sequence[Sequence[int]], cells: int, most: int) -> int:
    """Return the number of parts of a divided cache, or 0 to share it.

    It is divided, one part for each sequence, if together they have at least four times as many
    distinct tokens as the longest of them, and a part has room for half as many tokens again.

    Args:
        population: Token ids of the sequences that are computed together.
        cells: Cells of the cache.
        most: Maximum number of sequences.
    """
    unique = sorted(set(map(tuple, population)))
    count = len(unique)
    if not _LEAST_RATIO <= count <= most:
        return 0
    longest = max(map(len, unique))
    part = cells // count // CELLS_ROUNDED_TO * CELLS_ROUNDED_TO
    if part < longest + longest // 2:
        return 0
    distinct = len(unique[0])
    for before, ids in itertools.pairwise(unique):
        distinct += len(ids) - common_length(before, ids)
    return count if distinct >= _LEAST_RATIO * longest else 0
