"""The n-gram formula computed directly, as an oracle for `NgramModel`.

It scans the whole training text for every row and shares only constants with `NgramModel`.
The formula is in `ngram.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from genlm.core.reference.ngram import END_OF_TEXT, SYMBOLS, Floats

__all__ = ["exact_row"]


def exact_row(documents: Sequence[bytes], context: Sequence[int], order: int) -> Floats:
    """Compute one next-symbol distribution by counting in the text itself.

    Args:
        documents: The training text.
        context: Symbols 0-256, oldest first, possibly none.
        order: Length of the longest n-gram; 0 gives the uniform distribution.

    Returns:
        Probabilities, shape `(257,)`, float64, sum 1 up to rounding.
    """
    if order == 0:
        return np.full(SYMBOLS, 1 / SYMBOLS)
    lower = exact_row(documents, context, order - 1)
    if len(context) < order - 1:
        return lower
    history = tuple(context[len(context) - (order - 1) :])
    counts = np.zeros(SYMBOLS)
    for document in documents:
        symbols = (END_OF_TEXT, *document, END_OF_TEXT)
        for end in range(max(1, order - 1), len(symbols)):
            if symbols[end - (order - 1) : end] == history:
                counts[symbols[end]] += 1
    total, distinct = counts.sum(), np.count_nonzero(counts)
    if total == 0:
        return lower
    row: Floats = (counts + distinct * lower) / (total + distinct)
    return row
