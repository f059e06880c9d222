"""`TextTokens`: the bytes and the stop tokens of a vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from genlm.constraints.protocol import Flags, Integers64
from genlm.core.vocab.per_vocabulary import PerVocabulary

if TYPE_CHECKING:
    from genlm.core.vocab import Vocabulary


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
