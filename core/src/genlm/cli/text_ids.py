"""Token ids of texts for every engine, also for one without a tokenizer."""

from __future__ import annotations

import math

from genlm.core.base.errors import TokenizerError
from genlm.core.vocab import Vocabulary
from genlm.core.vocab.text import encode

__all__ = ["fewest_token_ids", "text_ids"]


def fewest_token_ids(vocabulary: Vocabulary, data: bytes) -> list[int]:
    """Spell bytes with as few tokens as possible, special tokens excepted.

    It is used for vocabularies without a tokenizer. A tokenizer may split a text differently,
    and models compute better rows for texts that are split as in their training.

    Raises:
        TokenizerError: No tokens have these bytes.
    """
    id_of = {
        token.byte_string: token.token_id
        for token in reversed(vocabulary.byte_vocab)
        if token.byte_string and token.token_id not in vocabulary.special_ids
    }
    longest = max(map(len, id_of), default=0)
    counts: list[float] = [0.0]  # minimum number of tokens, by length of a prefix of `data`
    starts = [0]  # start of the last token, by length
    for end in range(1, len(data) + 1):
        count, start = math.inf, end
        for first in range(max(0, end - longest), end):
            if counts[first] + 1 < count and data[first:end] in id_of:
                count, start = counts[first] + 1, first
        counts.append(count)
        starts.append(start)
    if counts[-1] == math.inf:
        raise TokenizerError(f"no tokens of the vocabulary have the bytes {data!r}")
    ids = []
    end = len(data)
    while end:
        ids.append(id_of[data[starts[end] : end]])
        end = starts[end]
    return ids[::-1]


def text_ids(vocabulary: Vocabulary, text: str, *, begin: bool = True) -> list[int]:
    """Encode a text for any engine: as `encode`, or without a tokenizer by `fewest_token_ids`.

    Raises:
        TokenizerError: The text cannot be encoded.
    """
    if callable(getattr(vocabulary.tokenizer, "encode", None)):
        return encode(vocabulary, text, begin=begin)
    return fewest_token_ids(vocabulary, text.encode())
