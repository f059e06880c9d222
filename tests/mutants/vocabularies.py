"""Faults of engines whose vocabulary does not match their rows."""

from __future__ import annotations

import dataclasses

from genlm import Token

from .attention import MISSING, SIZE
from .cached_engine import PlainEngine
from .mutant import engine_mutant
from .vocabulary import PIECES, LongestMatch, small_vocabulary


class _WithPieces(PlainEngine):
    def __init__(self):
        super().__init__()
        tokens = [Token(i, piece) for i, piece in enumerate(self.pieces())]
        self.vocabulary = dataclasses.replace(small_vocabulary(), byte_vocab=tokens)

    def pieces(self):
        return PIECES


@engine_mutant(killed_by="texts-are-encoded-and-decoded")
class SpaceMarks(_WithPieces):
    """Leaves the tokenizer's mark for a space in the bytes."""

    def pieces(self):
        return [piece.replace(b" ", "\u0120".encode()) for piece in PIECES]


@engine_mutant(killed_by="texts-are-encoded-and-decoded")
class DecodedAndEncoded(_WithPieces):
    """Makes bytes from decoded text, where half a character is U+FFFD."""

    def pieces(self):
        return [piece.decode(errors="replace").encode() for piece in PIECES]


@engine_mutant(killed_by="vocabulary-matches-the-rows")
class BytesForMissingIds(_WithPieces):
    """Makes up bytes for an id that no token has."""

    def pieces(self):
        return [piece or b"<unused>" for piece in PIECES]


class _WithTokenizer(PlainEngine):
    def __init__(self):
        super().__init__()
        self.vocabulary = dataclasses.replace(self.vocabulary, tokenizer=self.Tokenizer())


@engine_mutant(killed_by="texts-are-encoded-and-decoded")
class EndOfAnotherVocabulary(_WithTokenizer):
    """Names as end of text an id of the vocabulary before it was cut."""

    class Tokenizer(LongestMatch):
        eos_token_id = SIZE


@engine_mutant(killed_by="texts-are-encoded-and-decoded")
class EndsEveryText(_WithTokenizer):
    """Adds an end to every text and does not name it."""

    class Tokenizer(LongestMatch):
        def encode(self, text):
            return [*super().encode(text), PIECES.index(b"<end>")]


assert not PIECES[MISSING]
