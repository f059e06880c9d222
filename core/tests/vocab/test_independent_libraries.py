"""llguidance and xgrammar decode vocabularies too, with code of their own."""

from __future__ import annotations

import llguidance.hf
import pytest
import xgrammar
from transformers import PreTrainedTokenizerFast

from genlm.core.vocab import decode_vocab


@pytest.fixture(params=["byte_level", "llama", "gemma"])
def tokenizer(request):
    value = request.getfixturevalue(request.param)
    if isinstance(value, PreTrainedTokenizerFast):
        return value
    return PreTrainedTokenizerFast(tokenizer_object=value, eos_token="<|end|>")


def ordinary_ids(tokenizer) -> list[int]:
    """Ids of the model: the libraries give added tokens markers of their own."""
    added = set(tokenizer.backend_tokenizer.get_added_tokens_decoder())
    return [n for n in range(len(tokenizer)) if n not in added]


def test_llguidance_decodes_every_token_of_the_model_to_the_same_bytes(tokenizer):
    byte_vocab, _ = decode_vocab(tokenizer)
    other = llguidance.hf.from_tokenizer(tokenizer)
    assert other.vocab_size == len(byte_vocab)
    for token_id in ordinary_ids(tokenizer):
        # llguidance marks special tokens with byte FF and takes that byte for one.
        if byte_vocab[token_id].byte_string == b"\xff":
            continue
        assert other.decode_bytes([token_id]) == byte_vocab[token_id].byte_string


def test_xgrammar_decodes_every_token_of_the_model_to_the_same_bytes(tokenizer):
    byte_vocab, _ = decode_vocab(tokenizer)
    decoded = xgrammar.TokenizerInfo.from_huggingface(tokenizer).decoded_vocab
    assert len(decoded) == len(byte_vocab)
    for token_id in ordinary_ids(tokenizer):
        assert decoded[token_id] == byte_vocab[token_id].byte_string
