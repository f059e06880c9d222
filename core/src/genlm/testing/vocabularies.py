"""Vocabularies that tries get wrong, by what is special about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from genlm import Token

__all__ = ["SPECIAL", "EndOfSequence", "tokens", "vocabularies"]


class EndOfSequence:
    """An item that is no bytes: its own only letter, as clients define it."""

    def __iter__(self) -> Any:
        return iter([self])

    def __repr__(self) -> str:
        return "EndOfSequence()"


EOS = EndOfSequence()


def tokens(*byte_strings: bytes) -> list[Token]:
    """Tokens with these bytes, their ids in order."""
    return [Token(position, each) for position, each in enumerate(byte_strings)]


SPECIAL: dict[str, Sequence[Any]] = {
    "one token": tokens(b"a"),
    "one empty token": tokens(b""),
    "empty byte strings": tokens(b"", b"a", b"", b"ab"),
    "duplicate byte strings": tokens(b"ab", b"a", b"ab", b"b", b"ab"),
    "prefixes of one another": tokens(*(b"abcdefghij"[:length] for length in range(10, 0, -1))),
    "not UTF-8": tokens(b"\xff", b"\x00", b"\xc3", b"\xc3\xa9", b"\xff\xfe\xfd", b"\x00\x00"),
    "tokens of 1,000 bytes": tokens(b"x" * 1000, b"x" * 999 + b"y", b"x", b"y" * 1000),
    "every byte": tokens(*(bytes([byte]) for byte in range(256))),
    "items that are no tokens": [*tokens(b"a", b"ab"), EOS, ("a", "b"), (97, EOS)],
}
"""Vocabularies by name."""


def vocabularies(max_size: int = 24) -> st.SearchStrategy[list[Token]]:
    """Tokens over few letters, so that they share prefixes; duplicates and empty ones occur."""
    letters = st.sampled_from([b"a", b"b", b"\x00", b"\xff"])
    byte_strings = st.lists(letters, max_size=12).map(b"".join)
    return st.lists(byte_strings, min_size=1, max_size=max_size).map(
        lambda found: tokens(*found)
    )
