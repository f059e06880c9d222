"""`TextTokens`: the bytes and the stop tokens of a vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, NamedTuple, SupportsIndex, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from genlm.constraints.protocol import Flags, Integers64
from genlm.core.base.recent_values import recent_value
from genlm.core.base.validation import checked_stop

if TYPE_CHECKING:
    from genlm.core.base.validation import Integers
    from genlm.core.vocab import Vocabulary

T = TypeVar("T")


class TextTokens(NamedTuple):
    """The bytes and the stop tokens of a vocabulary.

    Attributes:
        texts: Bytes of each token id; empty for special tokens, ids without a token and tokens
            without bytes, which are not part of any text.
        stop: Token ids that end a text, ascending, int64.
        is_stop: Whether each token id ends a text, and False for -1, shape `(vocab_size + 1,)`.
    """

    texts: list[bytes]
    stop: Integers64
    is_stop: Flags


class PerVocabulary(Generic[T]):
    """A value for a vocabulary and stop tokens, stored for the most recently used stop tokens.

    Args:
        build: Function of the vocabulary and the stop tokens, ascending, that computes it.
    """

    def __init__(self, build: Callable[[Vocabulary, Integers64], T]) -> None:
        self._build = build
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
        values = self._values.setdefault(vocabulary, {})
        return recent_value(values, ids.tobytes(), lambda: self._build(vocabulary, ids))


def _text_tokens(vocabulary: Vocabulary, stop: Integers64) -> TextTokens:
    without_text = vocabulary.special_ids.union(vocabulary.missing_ids, stop.tolist())
    texts = [
        b"" if token.token_id in without_text else bytes(token.byte_string)
        for token in vocabulary.byte_vocab
    ]
    is_stop = np.zeros(len(texts) + 1, np.bool_)
    is_stop[stop] = True
    return TextTokens(texts, stop, is_stop)


text_tokens = PerVocabulary(_text_tokens)
