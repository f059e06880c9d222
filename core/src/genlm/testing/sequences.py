"""Hypothesis strategies for token sequences, and the near misses of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

__all__ = ["TokenTuple", "batches", "near_misses", "sequences"]

TokenTuple = tuple[int, ...]


def sequences(token_ids: Sequence[int], max_length: int) -> st.SearchStrategy[TokenTuple]:
    """Sequences of at least one token, half of them long.

    Left alone, Hypothesis makes lists of about six, which no window or block notices.
    """
    ids = st.sampled_from(token_ids)
    long = st.lists(ids, min_size=max(1, max_length // 2), max_size=max_length)
    return st.one_of(st.lists(ids, min_size=1, max_size=max_length), long).map(tuple)


def batches(
    token_ids: Sequence[int], max_length: int, max_size: int = 6
) -> st.SearchStrategy[list[TokenTuple]]:
    """Ragged batches of sequences, not necessarily different."""
    return st.lists(sequences(token_ids, max_length), min_size=1, max_size=max_size)


def near_misses(sequence: TokenTuple) -> dict[str, TokenTuple]:
    """Sequences that a careless cache key takes for this one, by what was done.

    Made from the very sequence: random ones never collide. None is empty or the
    sequence itself.
    """
    changed = {
        "reversed": sequence[::-1],
        "rotated": sequence[1:] + sequence[:1],
        "0 appended": (*sequence, 0),
        "0 put in front": (0, *sequence),
        "first dropped": sequence[1:],
        "last dropped": sequence[:-1],
        "sorted": tuple(sorted(sequence)),
        "doubled": sequence + sequence,
    }
    return {how: miss for how, miss in changed.items() if miss and miss != sequence}
