"""Vocabularies of tokenizers, by the core's exact decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import genlm
from genlm.backend.tokenization.bytes import ByteVocabError, get_byte_vocab
from genlm.backend.tokenization.token import Token

__all__ = ["Fallback", "bytes_to_strs", "decode_vocab"]

Fallback: TypeAlias = Literal["tokenizer", "latin1", "replace"]


def decode_vocab(
    tokenizer: Any, byte2str_fallback: Fallback = "tokenizer"
) -> tuple[list[Token], list[str]]:
    """Maps to `genlm.decode_vocab`: the exact bytes of every token, and a string of each.

    Args:
        tokenizer: From transformers, `tokenizers`, `sentencepiece` or `tiktoken`.
        byte2str_fallback: The string of a token whose bytes are not UTF-8:
            `"tokenizer"` takes the tokenizer's own name of it, `"latin1"` one character
            for each byte, `"replace"` the replacement character.

    Returns:
        Tokens and strings; index `i` of both is id `i`. Strings may repeat.

    Raises:
        ValueError: An unknown fallback, or a tokenizer without exact bytes
            (`VocabularyError`).
    """
    _check(byte2str_fallback)
    try:
        contents = get_byte_vocab(tokenizer)
    except ByteVocabError as error:
        raise genlm.VocabularyError(
            f"Could not decode byte representation of the tokens of "
            f"{type(tokenizer).__name__}: {error}"
        ) from error
    byte_vocab = [Token(token_id, content) for token_id, content in enumerate(contents)]
    return byte_vocab, bytes_to_strs(tokenizer, byte_vocab, byte2str_fallback)


def bytes_to_strs(
    tokenizer: Any, byte_vocab: Sequence[bytes], byte2str_fallback: Fallback
) -> list[str]:
    """The string of each token; see `decode_vocab`.

    Raises:
        ValueError: An unknown fallback.
    """
    _check(byte2str_fallback)
    return [
        _string(tokenizer, token_id, token, byte2str_fallback)
        for token_id, token in enumerate(byte_vocab)
    ]


def _string(tokenizer: Any, token_id: int, token: bytes, fallback: Fallback) -> str:
    try:
        return token.decode()
    except UnicodeDecodeError:
        if fallback == "tokenizer":
            return str(_own_name(tokenizer, token_id, token))
        return (
            token.decode("latin1") if fallback == "latin1" else token.decode(errors="replace")
        )


def _own_name(tokenizer: Any, token_id: int, token: bytes) -> str:
    """The tokenizer's name of a token, or its escaped bytes if the library has no names."""
    for method in ("convert_ids_to_tokens", "id_to_token", "id_to_piece"):
        if hasattr(tokenizer, method):
            return str(getattr(tokenizer, method)(token_id))
    return token.decode(errors="backslashreplace")


def _check(fallback: str) -> None:
    if fallback not in get_args(Fallback):
        raise ValueError(
            f"byte2str_fallback={fallback!r}: expected one of {', '.join(get_args(Fallback))}"
        )
