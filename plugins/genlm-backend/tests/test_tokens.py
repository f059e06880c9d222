"""`Token`, vocabularies and the functions about bytes, as published."""

from __future__ import annotations

import copy
import pickle

import pytest

import genlm
from genlm.backend import Token, TokenCharacterTrie, decode_vocab
from genlm.backend.tokenization.bytes import (
    ByteDecoderError,
    ByteVocabError,
    check_byte_decoder,
    get_byte_tokens_from_byte_decoder,
    get_byte_tokens_from_sp,
    get_byte_vocab,
)
from genlm.backend.tokenization.vocab import bytes_to_strs

from .tiny import SIZE

A, B = Token(1, b"a"), Token(2, b"a")


def test_tokens_are_compared_by_id_among_themselves():
    assert A != B
    assert Token(1, b"other") == A
    assert A < B
    assert B >= A
    assert sorted([B, A]) == [A, B]
    assert len({A, B, Token(1, b"a")}) == 2
    assert (genlm.Token(1, b"x") == A) is (genlm.Token(1, b"x") == A) is True
    assert genlm.Token(1, b"x") < B


def test_a_token_equals_plain_bytes_of_its_content():
    assert A == b"a"
    assert b"a" == A  # noqa: SIM300 - the other side
    assert A != b"b"
    assert A < b"b"
    assert b"b" > A  # noqa: SIM300 - the other side
    assert [A].index(b"a") == 0


def test_a_token_is_bytes():
    assert b"".join([A, B]) == b"aa"
    assert (A + b"b", A[0], len(A), A.decode()) == (b"ab", 97, 1, "a")
    assert type(A.byte_string) is bytes
    assert A.token_id == 1
    assert repr(A) == "Token(token_id=1, byte_string=b'a')"


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))]
)
def test_a_token_can_be_copied_and_pickled(make):
    again = make(B)
    assert (type(again), again.token_id, again.byte_string) == (Token, 2, b"a")


@pytest.mark.parametrize(("token_id", "content"), [("1", b"a"), (1, "a"), (1, 5), (None, b"")])
def test_what_makes_no_token_is_refused(token_id, content):
    with pytest.raises(TypeError, match="expected an int and bytes"):
        Token(token_id, content)


def test_the_cores_tokens_count_as_tokens():
    core = genlm.Token(1, b"a")
    assert isinstance(core, Token)
    assert not isinstance(b"a", Token)
    assert Token.as_bytes(core) == Token.as_bytes(A) == Token.as_bytes(b"a") == b"a"
    assert Token.is_plain_bytes(b"a")
    assert not Token.is_plain_bytes(core)
    assert not Token.is_plain_bytes(A)
    assert not Token.is_plain_bytes("a")


def test_a_subclass_has_only_its_own():
    class Special(Token):
        pass

    assert isinstance(Special(1, b"a"), Token)
    assert not isinstance(A, Special)


def test_a_vocabulary_has_the_exact_bytes(tokenizer):
    byte_vocab, str_vocab = decode_vocab(tokenizer)
    assert {type(token) for token in byte_vocab} == {Token}
    assert [token.token_id for token in byte_vocab] == list(range(SIZE))
    assert byte_vocab[0] == b"<s>"
    assert sorted(token.byte_string for token in byte_vocab[2:]) == [
        bytes([b]) for b in range(256)
    ]
    assert str_vocab[0] == "<s>"
    assert get_byte_vocab(tokenizer) == [token.byte_string for token in byte_vocab]


@pytest.mark.parametrize(
    ("fallback", "expected"), [("latin1", "\xff"), ("replace", "\ufffd"), ("tokenizer", "ÿ")]
)
def test_strings_of_bytes_that_are_not_utf_8(tokenizer, fallback, expected):
    byte_vocab, str_vocab = decode_vocab(tokenizer, byte2str_fallback=fallback)
    place = byte_vocab.index(b"\xff")
    assert str_vocab[place] == expected
    assert str_vocab[byte_vocab.index(b"a")] == "a"
    assert bytes_to_strs(tokenizer, byte_vocab, fallback) == str_vocab


def test_names_of_a_tokenizer_that_takes_lists_only():
    class Names:  # as vLLM's tokenizer of mistral-common
        def convert_ids_to_tokens(self, token_ids):
            return [f"name {token_id}" for token_id in token_ids]

    assert bytes_to_strs(Names(), [b"a", b"\xff"], "tokenizer") == ["a", "name 1"]


def test_an_unknown_fallback_is_refused(tokenizer):
    with pytest.raises(ValueError, match="expected one of tokenizer, latin1, replace"):
        decode_vocab(tokenizer, byte2str_fallback="utf-16")


def test_the_strings_of_a_tokenizer_of_another_library_are_escaped_bytes(tokenizer):
    byte_vocab, str_vocab = decode_vocab(tokenizer.backend_tokenizer)
    assert byte_vocab == decode_vocab(tokenizer)[0]
    assert str_vocab[byte_vocab.index(b"\xff")] == r"\xff"
    assert str_vocab[byte_vocab.index(b"a")] == "a"


def test_what_is_no_tokenizer_is_an_error():
    with pytest.raises(ValueError, match=r"Could not decode byte representation .* of object"):
        decode_vocab(object())
    with pytest.raises(ByteVocabError):
        get_byte_vocab(object())


def gpt2_alphabet(tokenizer):
    return {
        tokenizer.convert_ids_to_tokens(token_id): content[0]
        for token_id, content in enumerate(get_byte_vocab(tokenizer))
        if len(content) == 1
    }


def test_a_byte_decoder_of_ones_own_is_honoured(tokenizer):
    decoder = gpt2_alphabet(tokenizer)
    check_byte_decoder(tokenizer, decoder)
    assert get_byte_tokens_from_byte_decoder(tokenizer, decoder) == get_byte_vocab(tokenizer)


def test_a_byte_decoder_that_does_not_fit_is_an_error(tokenizer):
    decoder = gpt2_alphabet(tokenizer)
    with pytest.raises(ByteDecoderError, match="returned"):
        check_byte_decoder(tokenizer, decoder | {"a": 98})
    del decoder["a"]
    with pytest.raises(ByteDecoderError, match="'a'"):
        check_byte_decoder(tokenizer, decoder)


def test_pieces_are_decoded_by_sentencepieces_rules():
    class Pieces:
        pieces = ("<s>", "▁the", "<0x0A>", "a▁b", "<0xZZ>", "a<0x0A>")

        def __len__(self):
            return len(self.pieces)

        def get_added_vocab(self):
            return {"<s>": 0}

        def convert_ids_to_tokens(self, token_id):
            return self.pieces[token_id]

    expected = [b"<s>", b" the", b"\n", b"a b", b"<0xZZ>", b"a<0x0A>"]
    assert get_byte_tokens_from_sp(Pieces()) == expected


def test_plain_bytes_in_a_trie_are_deprecated():
    published = "^Passing plain bytes to TokenCharacterTrie is deprecated"
    with pytest.warns(DeprecationWarning, match=published) as warned:
        trie = TokenCharacterTrie(iter([b"a", A, b"ab"]))
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert trie.word2leaf == {b"a": 0, (b"a", 1): 1, b"ab": 2}


def test_plain_bytes_that_occur_twice_warn_before_they_are_refused():
    with (
        pytest.warns(DeprecationWarning, match="plain bytes"),
        pytest.raises(ValueError, match="Duplicate word in vocabulary: items 0 and 1 are both"),
    ):
        TokenCharacterTrie([b"a", b"a"])
    with pytest.raises(ValueError, match="Duplicate word in vocabulary"):
        TokenCharacterTrie([A, Token(2, b"b"), A])


def test_what_is_no_vocabulary_is_refused_without_a_warning():
    with pytest.raises(ValueError, match="a trie is built from"):
        TokenCharacterTrie(None)
