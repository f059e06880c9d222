"""Ten tokens: prefixes of one another, half of a character, one id without a token."""

from __future__ import annotations

from genlm import Token, Vocabulary

from .attention import MISSING, SIZE

PIECES = (b"a", b"b", b"ab", b" ", b"\xc3", b"\xa9", b"", b"c", b"<end>", b"aab")
TEXTS = ("ab ba", "cab \u00e9 aab", "caab")


class LongestMatch:
    """A tokenizer that takes the longest token that fits."""

    def encode(self, text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            fits = [i for i, piece in enumerate(PIECES) if piece and data.startswith(piece)]
            ids.append(max(fits, key=lambda i: len(PIECES[i])))
            data = data[len(PIECES[ids[-1]]) :]
        return ids

    def decode(self, token_ids: list[int]) -> str:
        return b"".join(PIECES[i] for i in token_ids).decode(errors="replace")


def small_vocabulary() -> Vocabulary:
    """The vocabulary of the model in `attention`."""
    assert len(PIECES) == SIZE
    tokens = [Token(i, piece) for i, piece in enumerate(PIECES)]
    names = [repr(piece)[2:-1] for piece in PIECES]
    return Vocabulary(LongestMatch(), tokens, names, missing_ids=(MISSING,))
