"""Exact bytes of every id of a tokenizer, whatever library it comes from.

Chooses the family and leaves the bytes to its module. The rule is the same in all
of them: a token's bytes are what it adds in the middle of a text by the tokenizer's
own decoding; added and special tokens are their content.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from genlm.core.errors import VocabularyError
from genlm.core.vocab.fast_tokenizer import fast_tokenizer_bytes
from genlm.core.vocab.python_tokenizer import python_tokenizer_bytes
from genlm.core.vocab.sentencepiece_model import sentencepiece_bytes
from genlm.core.vocab.tiktoken_encoding import tiktoken_bytes
from genlm.core.vocab.token import Token

__all__ = ["decode_vocab", "token_bytes", "tokens_and_strings"]


def decode_vocab(tokenizer: Any) -> tuple[list[Token], list[str]]:
    r"""Give the exact bytes of every token, and a readable string of each.

    A token's bytes are what it adds in mid-text by the tokenizer's own decoding: a
    SentencePiece `▁the` is `b" the"` and `<0x0A>` is `b"\n"`; a WordPiece that
    starts a word has a space before it and `##ing` has none; with the WordPiece
    decoder's `cleanup`, punctuation before which it removes the space has none
    either. Joined, the tokens of a sequence give its decoding, up to the space that
    some tokenizers drop at the start of a text. Added and special tokens are their
    content in UTF-8. Derived bytes are checked against the tokenizer's own decoding.

    Args:
        tokenizer: From transformers (fast or Python), `tokenizers`, `sentencepiece`
            or `tiktoken`. Not changed.

    Returns:
        The tokens and, for display, their text with `\x..` for bytes that are not
        UTF-8; index `i` of both is id `i`. Ids that no token has hold no bytes.

    Raises:
        VocabularyError: The tokenizer is of no known kind, or its tokens have no
            bytes of their own.
    """
    return tokens_and_strings(token_bytes(tokenizer))


def token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """The exact bytes of each id that a token has; see `decode_vocab`."""
    found = _family_bytes(tokenizer)
    if not found:
        raise VocabularyError(
            f"{type(tokenizer).__name__} has no tokens; train or load it first"
        )
    return found


def tokens_and_strings(found: Mapping[int, bytes]) -> tuple[list[Token], list[str]]:
    """One token and one readable string per id up to the largest."""
    ordered = [found.get(key, b"") for key in range(max(found) + 1)]
    byte_vocab = [Token(key, value) for key, value in enumerate(ordered)]
    return byte_vocab, [value.decode(errors="backslashreplace") for value in ordered]


def _family_bytes(tokenizer: Any) -> dict[int, bytes]:
    if hasattr(tokenizer, "decode_single_token_bytes"):
        return tiktoken_bytes(tokenizer)
    if hasattr(tokenizer, "get_piece_size"):
        return sentencepiece_bytes(tokenizer)
    if hasattr(tokenizer, "get_added_tokens_decoder"):
        return fast_tokenizer_bytes(
            tokenizer,
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
            tokenizer,
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if hasattr(backend, "get_added_tokens_decoder"):
        return fast_tokenizer_bytes(
            backend,
            lambda ids: str(
                tokenizer.decode(
                    ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
            ),
            tokenizer,
        )
    return python_tokenizer_bytes(tokenizer)
