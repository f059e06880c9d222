"""Near misses of token sequences, and vocabularies with edge cases as Hypothesis strategies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from genlm import Token
from genlm.testing.target import TokenTuple


def near_misses(sequence: TokenTuple) -> dict[str, TokenTuple]:
    """Sequences that a wrong cache key confuses with this one, by how they were derived.

    They are derived from the sequence because random sequences never collide. None of them is
    empty or the sequence itself.
    """
    changed = {
        "reversed": sequence[::-1],
        "rotated": sequence[1:] + sequence[:1],
        "0 appended": (*sequence, 0),
        "0 put in front": (0, *sequence),
        "first dropped": sequence[1:],
        "last dropped": sequence[:-1],
        "sorted": tuple(sorted(sequence)),
        "doubled": sequence + sequence,
    }
    return {how: miss for how, miss in changed.items() if miss and miss != sequence}


class EndOfSequence:
    """A vocabulary item that is not bytes and has one symbol, itself, as in clients."""

    def __iter__(self) -> Any:
        return iter([self])

    def __repr__(self) -> str:
        return "EndOfSequence()"


EOS = EndOfSequence()


def tokens(*byte_strings: bytes) -> list[Token]:
    """Tokens with these bytes and the ids 0, 1, 2, ..."""
    return [Token(token_id, content) for token_id, content in enumerate(byte_strings)]


SPECIAL: dict[str, Sequence[Any]] = {
    "one token": tokens(b"a"),
    "one empty token": tokens(b""),
    "empty byte strings": tokens(b"", b"a", b"", b"ab"),
    "duplicate byte strings": tokens(b"ab", b"a", b"ab", b"b", b"ab"),
    "prefixes of one another": tokens(*(b"abcdefghij"[:length] for length in range(10, 0, -1))),
    "not UTF-8": tokens(b"\xff", b"\x00", b"\xc3", b"\xc3\xa9", b"\xff\xfe\xfd", b"\x00\x00"),
    "tokens of 1,000 bytes": tokens(b"x" * 1000, b"x" * 999 + b"y", b"x", b"y" * 1000),
    "every byte": tokens(*(bytes([byte]) for byte in range(256))),
    "items that are not tokens": [*tokens(b"a", b"ab"), EOS, ("a", "b"), (97, EOS)],
}
"""Vocabularies that trie implementations often get wrong, by name."""


def vocabularies(
    max_size: int = 24, *, other_items: bool = False
) -> st.SearchStrategy[list[Any]]:
    """Tokens over four symbols, so that they share prefixes; some are duplicate or empty.

    Args:
        max_size: Maximum number of tokens.
        other_items: Whether some vocabularies also contain items that are not tokens.
    """
    symbols = st.sampled_from([b"a", b"b", b"\x00", b"\xff"])
    byte_strings = st.lists(symbols, max_size=18).map(b"".join)  # two sorting keys and more
    lists = st.lists(byte_strings, min_size=1, max_size=max_size)
    found = lists.map(lambda contents: tokens(*contents))
    if not other_items:
        return found
    others = st.lists(st.sampled_from([EOS, "a\u00f1b", (1, EOS), (97, "b")]), unique=True)
    return st.builds(lambda first, last: [*first, *last], found, st.one_of(st.just([]), others))
