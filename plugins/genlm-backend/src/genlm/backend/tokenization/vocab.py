"""`decode_vocab` as published: tokens and strings of a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import genlm
from genlm.backend.tokenization.token import Token, published_tokens

__all__ = ["bytes_to_strs", "decode_vocab"]


def _own_name(tokenizer: Any, token_id: int, token: bytes) -> str:
    """The tokenizer's name of a token, or its escaped bytes if it has no such method."""
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        return str(tokenizer.convert_ids_to_tokens(token_id))
    return token.decode(errors="backslashreplace")


_FALLBACKS: dict[str, Callable[[Any, int, bytes], str]] = {
    "tokenizer": _own_name,
    "latin1": lambda _tokenizer, _token_id, token: token.decode("latin1"),
    "replace": lambda _tokenizer, _token_id, token: token.decode(errors="replace"),
}


def decode_vocab(
    tokenizer: Any, byte2str_fallback: str = "tokenizer"
) -> tuple[list[Token], list[str]]:
    """Maps to `genlm.decode_vocab`: the exact bytes of every token, and a string of each.

    Args:
        tokenizer: From transformers, `tokenizers`, `sentencepiece` or `tiktoken`.
        byte2str_fallback: The string of a token whose bytes are not UTF-8: `"tokenizer"`
            takes the name that a tokenizer of transformers has for it (other tokenizers:
            the escaped bytes), `"latin1"` one character for each byte, `"replace"` the
            replacement character.

    Returns:
        Tokens and strings; index `i` of both is id `i`. Strings may repeat.

    Raises:
        ValueError: An unknown fallback, or a tokenizer without exact bytes
            (`VocabularyError`).
    """
    _check(byte2str_fallback)
    try:
        tokens, _ = genlm.decode_vocab(tokenizer)
    except genlm.VocabularyError as error:
        raise genlm.VocabularyError(
            f"Could not decode byte representation of the tokens of "
            f"{type(tokenizer).__name__}: {error}"
        ) from error
    byte_vocab = published_tokens(tokens)
    return byte_vocab, bytes_to_strs(tokenizer, byte_vocab, byte2str_fallback)


def bytes_to_strs(
    tokenizer: Any, byte_vocab: Sequence[bytes], byte2str_fallback: str
) -> list[str]:
    """Return the string of each token; see `decode_vocab`.

    Raises:
        ValueError: An unknown fallback.
    """
    _check(byte2str_fallback)
    strings = []
    for token_id, token in enumerate(byte_vocab):
        try:
            strings.append(token.decode())
        except UnicodeDecodeError:
            strings.append(_FALLBACKS[byte2str_fallback](tokenizer, token_id, token))
    return strings


def _check(fallback: str) -> None:
    if fallback not in _FALLBACKS:
        raise ValueError(
            f"byte2str_fallback={fallback!r}: expected one of {', '.join(_FALLBACKS)}"
        )
