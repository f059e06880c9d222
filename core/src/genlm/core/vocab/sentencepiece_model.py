"""SentencePiece models through their own processor."""

from __future__ import annotations

from typing import Any

from genlm.core.vocab.verification import check_decoding

__all__ = ["SPACE_SYMBOL", "sentencepiece_bytes"]

SPACE_SYMBOL = "\N{LOWER ONE EIGHTH BLOCK}"
"""Stands for a space in every piece."""


def sentencepiece_bytes(processor: Any) -> dict[int, bytes]:
    """Derive the bytes of every id of a `SentencePieceProcessor`.

    Byte pieces are their byte; a piece that merely looks like one (`<0x41>` as a
    user-defined symbol) is its text. Control and unknown pieces are their name. All
    other pieces are their text with spaces for the space symbol.

    Raises:
        VocabularyError: The model's own decoding disagrees.
    """
    ids = list(range(processor.get_piece_size()))
    pieces = dict(zip(ids, processor.id_to_piece(ids)))
    derived: dict[int, bytes] = {}
    named: dict[int, bytes] = {}
    for token_id, piece in pieces.items():
        if processor.is_control(token_id) or processor.is_unknown(token_id):
            named[token_id] = piece.encode()
        elif processor.is_byte(token_id):
            derived[token_id] = bytes([int(piece[3:5], 16)])
        else:
            derived[token_id] = piece.replace(SPACE_SYMBOL, " ").encode()
    check_decoding(derived, processor.decode, processor)
    return derived | named
