"""Published function `decode_vocab`: tokens and strings of a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import genlm
from genlm.backend.tokenization.token import Token, published_tokens

__all__ = ["bytes_to_strs", "decode_vocab"]


def _tokenizer_name(tokenizer: Any, token_id: int, token: bytes) -> str:
    """Return the tokenizer's name of a token, or the escaped bytes if names are unavailable."""
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        return str(tokenizer.convert_ids_to_tokens([token_id])[0])
    return token.decode(errors="backslashreplace")


_FALLBACKS: dict[str, Callable[[Any, int, bytes], str]] = {
    "tokenizer": _tokenizer_name,
    "latin1": lambda _tokenizer, _token_id, token: token.decode("latin1"),
    "replace": lambda _tokenizer, _token_id, token: token.decode(errors="replace"),
}


def decode_vocab(
    tokenizer: Any, byte2str_fallback: str = "tokenizer"
) -> tuple[list[Token], list[str]]:
    """Return the exact bytes and a string of every token; maps to `genlm.decode_vocab`.

    Args:
        tokenizer: A tokenizer of transformers, `tokenizers`, `sentencepiece` or `tiktoken`.
        byte2str_fallback: String of a token whose bytes are not UTF-8: `"tokenizer"` is its
            name in a tokenizer of transformers (the escaped bytes for other tokenizers),
            `"latin1"` has one character per byte, and `"replace"` the replacement character.

    Returns:
        Lists of tokens and strings, indexed by id. Strings may occur several times.

    Raises:
        ValueError: The fallback is unknown, or the exact bytes are (`VocabularyError`).
    """
    if byte2str_fallback not in _FALLBACKS:
        raise ValueError(
            f"byte2str_fallback={byte2str_fallback!r}: expected one of {', '.join(_FALLBACKS)}"
        )
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
    """Return the string of each token; see `decode_vocab`."""
    strings = []
    for token_id, token in enumerate(byte_vocab):
        try:
            strings.append(token.decode())
        except UnicodeDecodeError:
            strings.append(_FALLBACKS[byte2str_fallback](tokenizer, token_id, token))
    return strings
