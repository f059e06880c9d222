"""Bytes of tokens, from the core's exact decoding or a byte decoder of the caller."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import genlm

__all__ = [
    "ByteDecoderError",
    "ByteVocabError",
    "check_byte_decoder",
    "get_byte_tokens_from_byte_decoder",
    "get_byte_tokens_from_sp",
    "get_byte_vocab",
]

_TRIAL = "naïve Ωμέγα, 日本語 🦜"
"""Text with characters of one to four bytes in UTF-8."""


class ByteDecoderError(Exception):
    """A byte decoder does not fit a tokenizer."""


class ByteVocabError(genlm.VocabularyError):
    """The exact bytes of a tokenizer's tokens are unknown."""


def get_byte_vocab(tokenizer: Any) -> list[bytes]:
    """Return the bytes of every id; maps to `genlm.decode_vocab`.

    Raises:
        ByteVocabError: The tokenizer cannot be decoded.
    """
    try:
        tokens, _ = genlm.decode_vocab(tokenizer)
    except genlm.VocabularyError as error:
        raise ByteVocabError(str(error)) from error
    return [token.byte_string for token in tokens]


def get_byte_tokens_from_byte_decoder(
    tokenizer: Any, byte_decoder: Mapping[str, int]
) -> list[bytes]:
    """Return the bytes of every id by a byte decoder; those of added tokens are their content.

    Args:
        tokenizer: A tokenizer of transformers.
        byte_decoder: Map from characters of tokens to bytes.

    Raises:
        ByteDecoderError: The decoder has no byte for a character.
    """
    added = {token_id: content for content, token_id in tokenizer.get_added_vocab().items()}
    try:
        return [
            added[token_id].encode()
            if token_id in added
            else bytes(byte_decoder[c] for c in tokenizer.convert_ids_to_tokens(token_id))
            for token_id in range(len(tokenizer))
        ]
    except KeyError as error:
        raise ByteDecoderError(
            f"the byte decoder has no byte for the character {error} of a token of "
            f"{type(tokenizer).__name__}"
        ) from error


def get_byte_tokens_from_sp(tokenizer: Any) -> list[bytes]:
    """Return the bytes of every id by SentencePiece's rules.

    `<0x0A>` is the byte 10 and `▁` a space. The bytes of added tokens are their content.
    """
    added = {token_id: content for content, token_id in tokenizer.get_added_vocab().items()}
    byte_strings = []
    for token_id in range(len(tokenizer)):
        piece = added.get(token_id) or tokenizer.convert_ids_to_tokens(token_id)
        byte = None if token_id in added else re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)
        byte_strings.append(
            bytes.fromhex(byte[1]) if byte else piece.replace("▁", " ").encode()
        )
    return byte_strings


def check_byte_decoder(tokenizer: Any, byte_decoder: Mapping[str, int]) -> None:
    """Check that a byte decoder has all characters of a tokenizer and decodes an encoded text.

    Raises:
        ByteDecoderError: The decoder does not fit the tokenizer.
    """
    tokens = get_byte_tokens_from_byte_decoder(tokenizer, byte_decoder)
    ids = tokenizer(_TRIAL, add_special_tokens=False)["input_ids"]
    decoded = b"".join(tokens[token_id] for token_id in ids).decode(errors="replace")
    if decoded != _TRIAL:
        raise ByteDecoderError(f"encoded {_TRIAL!r}; the byte decoder returned {decoded!r}")
