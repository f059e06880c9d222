"""Token i is byte i, in the tokenizer, the vocabulary and the documents."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from genlm.core.reference.tokenizer import (
    ByteTokenizer,
    byte_vocabulary,
    default_text,
    split_documents,
)


@given(st.text())
def test_text_comes_back(text: str) -> None:
    text = text.encode(errors="replace").decode()
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.binary())
def test_the_bytes_of_the_tokens_are_the_bytes_encoded(data: bytes) -> None:
    byte_vocab = byte_vocabulary().byte_vocab
    assert b"".join(byte_vocab[index] for index in ByteTokenizer().encode(data)) == data


def test_the_end_of_text_is_an_id_of_its_own() -> None:
    tokenizer = ByteTokenizer()
    vocabulary = byte_vocabulary()
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == 256
    assert len(tokenizer) == tokenizer.vocab_size == vocabulary.size == 257
    assert [token.token_id for token in vocabulary.byte_vocab] == list(range(257))
    assert len(vocabulary.str_vocab) == 257
    assert tokenizer.decode([*b"a", 256]) == "a<|endoftext|>"
    assert 256 not in tokenizer.encode("<|endoftext|>")


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert ByteTokenizer().decode([0x61, 0xFF]) == "a\ufffd"


def test_blank_lines_and_nothing_else_end_documents() -> None:
    text = "\n one\ntwo \n\n\n three\r\n \t\r\nfour\n"
    assert split_documents(text) == [b"one\ntwo", b"three", b"four"]
    assert split_documents(" \n\n") == []


def test_the_shipped_text_is_plain_and_has_many_documents() -> None:
    documents = split_documents(default_text())
    assert len(documents) >= 30
    assert all(byte == 10 or 32 <= byte < 127 for byte in default_text())
    assert not any(b"\n" in document for document in documents)
