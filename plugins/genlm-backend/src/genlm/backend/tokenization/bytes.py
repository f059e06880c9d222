"""The bytes of tokens, by the core's exact decoding or by a decoder that the caller gives."""

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
"""Characters of one to four bytes in UTF-8."""


class ByteDecoderError(Exception):
    """A byte decoder does not fit a tokenizer."""


class ByteVocabError(genlm.VocabularyError):
    """The exact bytes of a tokenizer's tokens are unknown."""


def get_byte_vocab(tokenizer: Any) -> list[bytes]:
    """Maps to `genlm.decode_vocab`: the bytes of every id, without the ids.

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
    """The bytes of every id by a decoder that the caller gives; added tokens are their content.

    Args:
        tokenizer: From transformers.
        byte_decoder: The byte that each character of a token stands for.

    Raises:
        ByteDecoderError: The decoder lacks a character.
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
            f"the byte decoder has no byte for the character {error}, which a token of "
            f"{type(tokenizer).__name__} has"
        ) from error


def get_byte_tokens_from_sp(tokenizer: Any) -> list[bytes]:
    """The bytes of every id by SentencePiece's own rules, for tokenizers that follow them.

    `<0x0A>` is that byte, `▁` a space; added tokens are their content.
    """
    added = {token_id: content for content, token_id in tokenizer.get_added_vocab().items()}
    found = []
    for token_id in range(len(tokenizer)):
        piece = added.get(token_id) or tokenizer.convert_ids_to_tokens(token_id)
        byte = None if token_id in added else re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)
        found.append(bytes.fromhex(byte[1]) if byte else piece.replace("▁", " ").encode())
    return found


def check_byte_decoder(tokenizer: Any, byte_decoder: Mapping[str, int]) -> None:
    """Compare a byte decoder with the tokenizer: all characters, and a text and back.

    Raises:
        ByteDecoderError: It does not fit.
    """
    tokens = get_byte_tokens_from_byte_decoder(tokenizer, byte_decoder)
    ids = tokenizer(_TRIAL, add_special_tokens=False)["input_ids"]
    found = b"".join(tokens[token_id] for token_id in ids).decode(errors="replace")
    if found != _TRIAL:
        raise ByteDecoderError(f"encoded {_TRIAL!r}; the byte decoder gave {found!r} back")
