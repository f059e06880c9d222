from __future__ import annotations

import base64
import json
import random
import shutil
from types import SimpleNamespace

import pytest

from genlm.core.vocab import Vocabulary
from genlm.core.vocab.text import encode, encode_chat

pytest.importorskip("mistral_common")
from transformers.tokenization_mistral_common import MistralCommonBackend

CONTROL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]"]
CONTROL += ["[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "<pad>"]
CONTROL += ["[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
CONTROL += ["[TOOL_CONTENT]"]
UNNAMED = 3
"""Number of special tokens that the file does not name."""


@pytest.fixture
def tekken(tmp_path) -> MistralCommonBackend:
    pieces = [bytes([byte]) for byte in range(256)]
    pieces += [b"th", b"the", b" the", b"\xe6\x97", b"\xf0\x9f\x99"]
    count = len(CONTROL) + UNNAMED
    content = {
        "config": {
            "pattern": r"\s?\S+|\s+",
            "num_vocab_tokens": len(pieces),
            "default_vocab_size": len(pieces) + count,
            "default_num_special_tokens": count,
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
            for rank, piece in enumerate(pieces)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": name, "is_control": True}
            for rank, name in enumerate(CONTROL)
        ],
    }
    file = tmp_path / "tekken.json"
    file.write_text(json.dumps(content))
    return MistralCommonBackend(tokenizer_path=str(file))


def test_tekken_tokens_have_the_bytes_to_which_they_decode(tekken):
    vocabulary = Vocabulary.from_tokenizer(tekken)
    assert vocabulary.special_ids == set(range(len(CONTROL) + UNNAMED))
    assert (vocabulary.bos_token_id, vocabulary.eos_token_id) == (1, 2)
    assert vocabulary.size == len(tekken)
    random_ids = random.Random(0).choices(range(vocabulary.size), k=1000)
    for start in range(0, 1000, 5):
        ids = random_ids[start : start + 5]
        if vocabulary.special_ids.isdisjoint(ids):
            data = b"".join(vocabulary.byte_vocab[token_id] for token_id in ids)
            assert data.decode(errors="replace") == tekken.decode(ids)
    for token_id in vocabulary.special_ids:
        assert vocabulary.byte_vocab[token_id].decode() == tekken.decode([token_id])


def test_texts_and_messages_are_encoded_by_mistral_common(tekken):
    vocabulary = Vocabulary.from_tokenizer(tekken)
    [the] = vocabulary.ids_of(b"the")
    assert encode(vocabulary, "the") == [1, the]
    assert encode(vocabulary, "the", begin=False) == [the]
    assert encode_chat(vocabulary, [{"role": "user", "content": "the"}]) == [1, 3, the, 4]


def test_the_wrapper_of_vllm_has_the_same_tokens(tekken):
    part = tekken.tokenizer.instruct_tokenizer.tokenizer
    wrapper = SimpleNamespace(tokenizer=part, all_special_ids=tekken.all_special_ids)
    vocabulary, expected = map(Vocabulary.from_tokenizer, (wrapper, tekken))
    assert vocabulary.byte_vocab == expected.byte_vocab
    assert vocabulary.str_vocab == expected.str_vocab
    assert vocabulary.special_ids == expected.special_ids


def test_sentencepiece_models_of_mistral_have_the_bytes_of_the_model(bpe_file, tmp_path):
    file = shutil.copy(bpe_file, tmp_path / "tokenizer.model.v3")
    tokenizer = MistralCommonBackend(tokenizer_path=str(file))
    processor = tokenizer.tokenizer.instruct_tokenizer.tokenizer._model
    vocabulary, expected = map(Vocabulary.from_tokenizer, (tokenizer, processor))
    assert vocabulary.str_vocab == expected.str_vocab
    assert vocabulary.special_ids == expected.special_ids
