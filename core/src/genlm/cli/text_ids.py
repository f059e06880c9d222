"""Token ids of texts for every engine, also for one without a tokenizer."""

from __future__ import annotations

from genlm.core.base.errors import TokenizerError
from genlm.core.vocab import Vocabulary
from genlm.core.vocab.text import encode


def text_ids(vocabulary: Vocabulary, text: str, *, begin: bool = True) -> list[int]:
    """Encode a text as `encode` does; without a tokenizer, as one token for each byte.

    Raises:
        TokenizerError: The text cannot be encoded.
    """
    if callable(getattr(vocabulary.tokenizer, "encode", None)):
        return encode(vocabulary, text, begin=begin)
    ids = [vocabulary.ids_of(bytes([byte]))[:1] for byte in text.encode()]
    if () in ids:
        raise TokenizerError(
            f"the engine has no tokenizer, and its vocabulary lacks a token for a single byte "
            f"of {text!r}"
        )
    return [token_id for (token_id,) in ids]


def ids_with_text(vocabulary: Vocabulary) -> list[int]:
    """Return the ids of the vocabulary that are neither missing nor special, ascending."""
    others = vocabulary.special_ids.union(vocabulary.missing_ids)
    return [token_id for token_id in range(vocabulary.size) if token_id not in others]
