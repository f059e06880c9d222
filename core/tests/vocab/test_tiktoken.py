from __future__ import annotations

import pytest
import tiktoken

from genlm.core.vocab import Vocabulary, decode_vocab


def test_every_id_is_what_the_encoding_says(encoding):
    byte_vocab, _ = decode_vocab(encoding)
    for token_id, token in enumerate(byte_vocab):
        try:
            expected = encoding.decode_single_token_bytes(token_id)
        except KeyError:
            expected = b""
        assert token.byte_string == expected
        assert token.token_id == token_id


def test_special_tokens_are_their_text(encoding):
    byte_vocab, str_vocab = decode_vocab(encoding)
    for text in ["<|end|>", "<|日|>"]:
        (token_id,) = encoding.encode(text, allowed_special="all")
        assert byte_vocab[token_id].byte_string == text.encode()
        assert str_vocab[token_id] == text


def test_holes_in_the_id_range_are_missing(encoding):
    vocabulary = Vocabulary.from_tokenizer(encoding)
    first = encoding.max_token_value - 12
    assert vocabulary.size == encoding.n_vocab
    assert vocabulary.missing_ids == (*range(first, first + 10), first + 11)


@pytest.mark.parametrize("text", ["the other  thé 🙂日本", "\x00\x7f\u0080 \U0010ffff"])
def test_the_tokens_of_a_text_join_to_it(encoding, text):
    byte_vocab, _ = decode_vocab(encoding)
    joined = b"".join([byte_vocab[token_id] for token_id in encoding.encode(text)])
    assert joined.decode() == text


def test_an_encoding_without_special_tokens_is_decoded():
    ranks = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding("bytes", pat_str=".", mergeable_ranks=ranks, special_tokens={})
    assert [bytes(token) for token in decode_vocab(encoding)[0]] == list(ranks)


@pytest.mark.parametrize("specials", [{"<|endoftext|>": 260, "<|x|>": 256}, {"<|x|>": 256}])
def test_the_end_of_text_is_that_of_the_encoding(specials):
    ranks = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding(
        "bytes", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens=specials
    )
    vocabulary = Vocabulary.from_tokenizer(encoding)
    assert vocabulary.eos_token_id == specials.get("<|endoftext|>")
    assert vocabulary.bos_token_id is None
