"""Texts become ids for engines without a tokenizer."""

from __future__ import annotations

import pytest

from genlm import Token, TokenizerError, Vocabulary
from genlm.cli.text_ids import text_ids


def test_without_a_tokenizer_every_byte_of_a_text_is_a_token() -> None:
    tokens = [b"<s>", b"a", b"b", b"ab", b"a", b"\xc3", b"\xa9"]
    byte_vocab = [Token(i, token) for i, token in enumerate(tokens)]
    vocabulary = Vocabulary(None, byte_vocab, [repr(token) for token in tokens])
    assert text_ids(vocabulary, "ab\u00e9") == [1, 2, 5, 6], "the first of equal tokens"
    assert text_ids(vocabulary, "") == []
    for impossible in ("c", "a<s>"):
        with pytest.raises(TokenizerError, match="lacks a token for a single byte"):
            text_ids(vocabulary, impossible)
