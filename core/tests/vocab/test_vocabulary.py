from __future__ import annotations

import dataclasses

import pytest
import tokenizers
from programs import run_code
from tokenizers import decoders, models

from genlm.core.base.errors import VocabularyError
from genlm.core.vocab import Token, Vocabulary, decode_vocab


def words(**ids: int) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def test_index_and_id_agree_in_every_family(byte_level, word_piece, llama, unigram, encoding):
    for tokenizer in (byte_level, word_piece, llama, unigram, encoding):
        byte_vocab, str_vocab = decode_vocab(tokenizer)
        assert [token.token_id for token in byte_vocab] == list(range(len(byte_vocab)))
        assert len(str_vocab) == len(byte_vocab)


@pytest.mark.parametrize(
    ("tokens", "names", "message"),
    [
        ([Token(0, b"a"), Token(1, b"b")], ["a"], "has 2 tokens and str_vocab 1 strings"),
        ([Token(0, b"a"), Token(0, b"a")], ["a", "a"], r"\[1\] is .*; expected Token\(1, "),
        ([Token(1, b"b"), Token(0, b"a")], ["b", "a"], r"\[0\] is .*; expected Token\(0, "),
        ([b"a", b"b"], ["a", "b"], r"byte_vocab\[0\] is b'a'; expected Token\(0, ...\)"),
    ],
)
def test_a_token_that_is_not_that_of_its_index_is_an_error(tokens, names, message):
    with pytest.raises(VocabularyError, match=message):
        Vocabulary(None, tokens, names)


def test_a_vocabulary_knows_the_ids_that_no_token_has():
    tokenizer = words(a=1, b=4)
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    assert vocabulary.tokenizer is tokenizer
    assert vocabulary.size == 5
    assert vocabulary.missing_ids == (0, 2, 3)
    assert [bytes(token) for token in vocabulary.byte_vocab] == [b"", b"a", b"", b"", b"b"]


def test_a_vocabulary_says_what_it_is_in_a_line():
    vocabulary = Vocabulary.from_tokenizer(words(a=0, b=3))
    assert repr(vocabulary) == "<Vocabulary of Tokenizer: 4 ids, 2 of them without a token>"


def test_a_token_with_no_bytes_is_not_missing():
    vocabulary = Vocabulary.from_tokenizer(words(**{"a": 0, "": 1, "b": 2}))
    assert vocabulary.byte_vocab[1].byte_string == b""
    assert vocabulary.missing_ids == ()


def test_a_vocabulary_is_frozen():
    vocabulary = Vocabulary.from_tokenizer(words(a=0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        vocabulary.missing_ids = (1,)


def test_strings_for_display_show_pieces_of_characters(byte_level):
    byte_vocab, str_vocab = decode_vocab(byte_level)
    fragment = next(token for token in byte_vocab if token.byte_string == b"\xe6")
    displayed = str_vocab[fragment.token_id]
    assert displayed == "\\xe6"
    assert str_vocab[byte_level.token_to_id("Ġfox")] == " fox"


@pytest.mark.parametrize("value", [None, "gpt2", object(), 7])
def test_what_is_no_tokenizer_is_an_error_naming_its_class(value):
    with pytest.raises(VocabularyError, match=type(value).__qualname__):
        decode_vocab(value)


def test_a_tokenizer_without_tokens_is_an_error():
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.decoder = decoders.Fuse()
    with pytest.raises(VocabularyError, match="Tokenizer has no tokens"):
        decode_vocab(tokenizer)


def test_importing_the_package_loads_no_tokenizer_library_and_no_torch():
    code = (
        "import sys, genlm.core.vocab; "
        "print(*{'torch', 'transformers', 'tokenizers', 'sentencepiece', 'tiktoken'} "
        "& set(sys.modules))"
    )
    assert run_code(code).stdout.split() == []


def test_bytes_of_an_engines_own_tables_are_compared_with_its_decoding():
    texts = {0: b"<end>", 1: b"a", 2: b" b", 4: b"\xff"}

    def decode(ids: list[int]) -> str:
        return b"".join(texts[i] for i in ids if i).decode(errors="replace")

    vocabulary = Vocabulary.from_bytes(None, texts, decode, names={0})
    assert [token.byte_string for token in vocabulary.byte_vocab] == [
        *(b"<end>", b"a", b" b", b"", b"\xff")
    ]
    assert vocabulary.missing_ids == (3,)
    with pytest.raises(VocabularyError, match="decodes the ids"):
        Vocabulary.from_bytes(None, texts, decode)  # the name of id 0 is not decoded
    with pytest.raises(VocabularyError, match="has no tokens"):
        Vocabulary.from_bytes(None, {}, decode)
