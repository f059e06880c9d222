"""Joined, the tokens of any text are the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genlm.core.vocab import decode_vocab

# Surrogates are no text.
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(scope="session")
def decoded(byte_level, llama, gemma, unigram, encoding):
    tokenizers = {"gemma": gemma, "llama": llama}
    encode = {
        "byte_level": lambda text: byte_level.encode(text, add_special_tokens=False).ids,
        "unigram": lambda text: unigram.encode(text, add_special_tokens=False).ids,
        "tiktoken": encoding.encode_ordinary,
    } | {
        name: lambda text, t=tokenizer: t.encode(text, add_special_tokens=False)
        for name, tokenizer in tokenizers.items()
    }
    built_here = {
        "byte_level": byte_level,
        "unigram": unigram,
        "tiktoken": encoding,
    } | tokenizers
    return {name: (encode[name], decode_vocab(built_here[name])[0]) for name in built_here}


def joined(decoded, name: str, text: str) -> bytes:
    encode, byte_vocab = decoded[name]
    return b"".join([byte_vocab[token_id] for token_id in encode(text)])


@pytest.mark.parametrize("name", ["byte_level", "tiktoken"])
@given(text=ANY_TEXT)
def test_bytes_are_kept_to_the_last(decoded, name, text):
    assert joined(decoded, name, text) == text.encode()


@pytest.mark.parametrize(("name", "prefix"), [("gemma", ""), ("unigram", ""), ("llama", " ")])
@given(text=ANY_TEXT.filter(lambda text: "▁" not in text and "<" not in text))
def test_all_text_but_the_space_symbol_is_kept(decoded, name, prefix, text):
    text_of_tokens = joined(decoded, name, text).decode()
    # Llama puts a space before texts that do not start with one.
    assert text_of_tokens in (text, prefix + text)
