"""Chooses between a shared cache and a cache that is divided into one part per sequence.

In a shared cache, the attention of every token iterates over the cells of all sequences. In a
divided cache, it iterates over those of its sequence, but common tokens are stored and read
once per sequence. `benchmarks/bench_llamacpp.py` compares both.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from genlm_llamacpp.batch import common_length

__all__ = ["CELLS_ROUNDED_TO", "choose_parts"]

CELLS_ROUNDED_TO = 256
"""llama.cpp rounds the number of cells of a sequence up to a multiple of this."""

_MIN_RATIO = 4
"""With ratios of 4 and above, a divided cache was faster, with 3 and below slower
(docs/decisions/0024)."""


def choose_parts(population: Sequence[Sequence[int]], cells: int, max_parts: int) -> int:
    """Return the number of parts of a divided cache, or 0 to share it.

    The cache is divided into one part per sequence if the sequences have at least four times as
    many distinct tokens as the longest of them, and a part has room for 1.5 times the tokens of
    the longest.

    Args:
        population: Token ids of the sequences of a step.
        cells: Number of cells of the cache.
        max_parts: Maximum number of parts.
    """
    unique = sorted(set(map(tuple, population)))
    count = len(unique)
    if not _MIN_RATIO <= count <= max_parts:
        return 0
    longest = max(map(len, unique))
    part = cells // count // CELLS_ROUNDED_TO * CELLS_ROUNDED_TO
    if part < longest + longest // 2:
        return 0
    distinct = len(unique[0])
    for before, ids in itertools.pairwise(unique):
        distinct += len(ids) - common_length(before, ids)
    return count if distinct >= _MIN_RATIO * longest else 0
