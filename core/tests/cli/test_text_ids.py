"""Texts become ids for engines without a tokenizer."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from genlm import Token, TokenizerError, Vocabulary
from genlm.cli.text_ids import fewest_token_ids


def test_bytes_are_spelled_with_the_fewest_tokens() -> None:
    tokens = [b"<s>", b"a", b"b", b"ab", b"abb", b"bba", b"a"]
    byte_vocab = [Token(i, token) for i, token in enumerate(tokens)]
    tokenizer = SimpleNamespace(bos_token_id=0)
    vocabulary = Vocabulary(tokenizer, byte_vocab, [repr(piece) for piece in tokens])
    pieces = tokens[1:6]
    for size in range(1, 6):
        for letters in itertools.product((97, 98), repeat=size):
            data = bytes(letters)
            ids = fewest_token_ids(vocabulary, data)
            assert b"".join(tokens[i] for i in ids) == data
            shorter = itertools.product(pieces, repeat=len(ids) - 1)
            assert data not in map(b"".join, shorter)
    assert fewest_token_ids(vocabulary, b"a") == [1], "the first of equal tokens"
    assert fewest_token_ids(vocabulary, b"") == []
    for impossible in (b"c", b"<s>"):
        with pytest.raises(TokenizerError, match="no tokens of the vocabulary have the bytes"):
            fewest_token_ids(vocabulary, impossible)
