from __future__ import annotations

import copy
import operator
import pickle
import random

import pytest

from genlm.core.vocab import Token


def test_a_token_is_its_bytes():
    token = Token(7, b"abc")
    assert isinstance(token, bytes)
    assert token.token_id == 7
    assert token.byte_string == b"abc"
    assert type(token.byte_string) is bytes
    assert (token[0], token[1:], len(token), list(token)) == (97, b"bc", 3, [97, 98, 99])
    assert token.startswith(b"ab")
    assert b"".join([token, token]) == b"abcabc"
    assert token.decode() == "abc"


@pytest.mark.parametrize(
    "derived", [lambda t: t[:], lambda t: t + b"", lambda t: b"".join([t]), bytes]
)
def test_what_is_derived_from_a_token_is_plain_bytes(derived):
    assert type(derived(Token(7, b"abc"))) is bytes


def test_tokens_that_share_bytes_stay_apart():
    first, second = Token(1, b"a"), Token(2, b"a")
    assert first != second
    assert operator.eq(first, second) is False
    assert len({first, second}) == 2
    assert {first: "x", second: "y"}[Token(2, b"a")] == "y"


def test_identity_is_the_id_alone():
    assert Token(1, b"a") == Token(1, b"b")
    assert operator.ne(Token(1, b"a"), Token(1, b"b")) is False
    assert hash(Token(5, b"a")) == hash(5)


@pytest.mark.parametrize("other", [b"a", bytearray(b"a"), memoryview(b"a"), "a", 1, None])
def test_a_token_equals_nothing_but_tokens(other):
    assert operator.eq(Token(1, b"a"), other) is False
    assert operator.ne(Token(1, b"a"), other) is True


def test_plain_bytes_on_the_left_do_not_equal_a_token_either():
    assert operator.eq(b"a", Token(1, b"a")) is False
    assert operator.ne(b"a", Token(1, b"a")) is True
    assert b"a" not in {Token(1, b"a"), Token(hash(b"a"), b"a")}


def test_tokens_sort_by_id():
    tokens = [Token(token_id, bytes([255 - token_id])) for token_id in range(50)]
    shuffled = random.Random(0).sample(tokens, len(tokens))
    assert [token.token_id for token in sorted(shuffled)] == list(range(50))
    assert max(shuffled).token_id == 49


@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge"])
def test_order_is_that_of_the_ids(name):
    compare = getattr(operator, name)
    for left, right in [(1, 2), (2, 2), (3, 2)]:
        # The bytes are in the opposite order of the ids.
        answer = compare(Token(left, bytes([9 - left])), Token(right, bytes([9 - right])))
        assert answer is compare(left, right)


@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge"])
@pytest.mark.parametrize("other", [b"a", "a", 1])
def test_tokens_have_no_order_relative_to_anything_else(name, other):
    compare = getattr(operator, name)
    with pytest.raises(TypeError, match="ordered by id"):
        compare(Token(1, b"a"), other)
    with pytest.raises(TypeError, match="ordered by id"):
        compare(other, Token(1, b"a"))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_token_survives_pickling(protocol):
    token = pickle.loads(pickle.dumps(Token(7, b"\xff\x00"), protocol))
    assert (type(token), token.token_id, token.byte_string) == (Token, 7, b"\xff\x00")


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_token_survives_copying(duplicate):
    token = duplicate(Token(7, b"\xff\x00"))
    assert (type(token), token.token_id, token.byte_string) == (Token, 7, b"\xff\x00")


def test_the_representation_shows_id_and_bytes():
    assert repr(Token(7, b"\xffa")) == "Token(7, b'\\xffa')"
    assert str(Token(7, b"a")) == "Token(7, b'a')"
