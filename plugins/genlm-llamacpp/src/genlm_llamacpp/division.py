"""Chooses between a shared cache and a cache that is divided into one part per sequence.

In a shared cache, the attention of every token iterates over the cells of all sequences. In a
divided cache, it iterates over those of its sequence, but common tokens are stored and read
once per sequence. `benchmarks/bench_llamacpp.py` compares both.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from genlm.plugin import TokenSequence
from genlm_llamacpp.batch import common_length
from genlm_llamacpp.context import LlamaContext, cells_of_part
from genlm_llamacpp.sequences import Sequences

_MIN_RATIO = 4
"""With ratios of 4 and above, a divided cache was faster, with 3 and below slower
(docs/decisions/0024)."""


class CacheDivision:
    """Divides an empty cache among sequences with few common tokens, and shares it again.

    Args:
        context: The context.
        sequences: Its sequences.
        is_automatic: False if the cache stays as it was created.
    """

    def __init__(
        self, context: LlamaContext, sequences: Sequences, *, is_automatic: bool
    ) -> None:
        self._context, self._sequences = context, sequences
        self._max_parts = context.n_seq_max if is_automatic and context.can_divide else 0

    def adapt(self, sequences: Sequence[TokenSequence]) -> None:
        """Divide or share the cache for the sequences of a step.

        A divided cache is shared again if there are more sequences than parts, or if the
        longest sequence does not fit into a part.
        """
        if not self._max_parts:
            return
        parts = self._context.parts
        if self._sequences.used:
            longest = max(map(len, sequences))
            if len(sequences) > parts or longest > self._context.max_context:
                self.share()
            return
        token_ids = [sequence.token_ids for sequence in sequences]
        new_parts = choose_parts(token_ids, self._context.all_cells, self._max_parts)
        if new_parts != parts or not self._context.is_open:
            self._sequences.divide(new_parts)

    def share(self) -> None:
        """Share the cache if it is divided; its sequences are evicted."""
        if self._context.parts:
            self._sequences.divide(0)


def choose_parts(population: Sequence[Sequence[int]], cells: int, max_parts: int) -> int:
    """Return the number of parts of a divided cache, or 0 to share it.

    The cache is divided into one part per sequence if the sequences have at least four times as
    many distinct tokens as the longest of them, and a part has room for 1.5 times the tokens of
    the longest.
    """
    unique = sorted(set(map(tuple, population)))
    count = len(unique)
    if not _MIN_RATIO <= count <= max_parts:
        return 0
    longest = max(map(len, unique))
    if cells_of_part(cells, count) < longest + longest // 2:
        return 0
    distinct = len(unique[0])
    for before, ids in itertools.pairwise(unique):
        distinct += len(ids) - common_length(before, ids)
    return count if distinct >= _MIN_RATIO * longest else 0
