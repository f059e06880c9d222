"""`PerVocabulary`: values that are computed once for a vocabulary and its stop tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, SupportsIndex, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from genlm.core.base.validation import Integers, checked_stop
from genlm.core.vocab.vocabulary import Vocabulary

T = TypeVar("T")

MAX_VALUES = 8
"""Maximum number of stored values of a vocabulary."""


class PerVocabulary(Generic[T]):
    """A value for a vocabulary and stop tokens, stored for the most recently used stop tokens.

    Threads that request a value at the same time may compute it twice.

    Args:
        build: Function of the vocabulary and the stop tokens, ascending, that computes it; the
            value is not None.
    """

    def __init__(self, build: Callable[[Vocabulary, npt.NDArray[np.int64]], T]) -> None:
        self._build = build
        # The values of each vocabulary, in the order of their last use.
        self._values: WeakKeyDictionary[Vocabulary, dict[bytes, T]] = WeakKeyDictionary()

    def get(self, vocabulary: Vocabulary, stop: Integers | SupportsIndex | None) -> T:
        """Return the value for a vocabulary.

        Args:
            vocabulary: The vocabulary.
            stop: Token ids that end a text; None for the end of text of the tokenizer, if
                it has one.

        Raises:
            TypeError: `stop` is not token ids.
            TokenIdError: An id of `stop` is outside the vocabulary.
        """
        stop_ids, stop_texts = checked_stop(stop, vocabulary.size, vocabulary.eos_token_id)
        if stop_texts:
            raise TypeError(f"stop={stop!r}; expected token ids, not texts")
        ids = np.array(sorted(stop_ids), np.int64)
        values, key = self._values.setdefault(vocabulary, {}), ids.tobytes()
        value = values.pop(key, None)
        if value is None:
            value = self._build(vocabulary, ids)
        values[key] = value
        for oldest in list(values)[:-MAX_VALUES]:
            values.pop(oldest, None)
        return value
