"""Selecting tokens by their bytes; special tokens are set by id."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sentencepiece
import torch

import genlm
from genlm.core.vocab import Token, Vocabulary


def by_hand(*texts: bytes, missing: tuple[int, ...] = (), **tokenizer: object) -> Vocabulary:
    tokens = [Token(index, text) for index, text in enumerate(texts)]
    names = [repr(text) for text in texts]
    return Vocabulary(SimpleNamespace(**tokenizer), tokens, names, missing)


def test_a_mask_selects_by_bytes():
    vocabulary = by_hand(b"a", b"12", b"3", b"4b")
    mask = vocabulary.mask(bytes.isdigit)
    assert mask.dtype == torch.bool
    assert mask.tolist() == [False, True, True, False]
    mask[:] = True
    assert vocabulary.mask(bytes.isdigit).tolist() == [False, True, True, False]


def test_the_predicate_gets_plain_bytes_and_may_return_anything():
    vocabulary = by_hand(b"a", b"b", b"")
    assert vocabulary.mask(lambda text: text == b"a").tolist() == [True, False, False]
    assert vocabulary.mask(len).tolist() == [True, True, False]


def test_special_and_missing_tokens_are_apart():
    vocabulary = by_hand(b"<end>", b"x", b"", b"<end>", missing=(2,), eos_token_id=0)
    assert vocabulary.special_ids == {0}
    assert vocabulary.mask(lambda text: True).tolist() == [False, True, False, True]
    assert vocabulary.ids_of(b"<end>") == (3,)
    assert vocabulary.ids_of(b"") == ()


def test_all_ids_with_equal_bytes_are_found_in_order():
    vocabulary = by_hand(b"x", b"the", b"x", b"he", b"x")
    assert vocabulary.ids_of(b"x") == (0, 2, 4)
    assert vocabulary.ids_of(vocabulary.byte_vocab[1]) == (1,)
    assert vocabulary.ids_of(b"th") == ()


@pytest.mark.parametrize("wrong", ["the", ord("t"), [116], None])
def test_what_is_not_bytes_is_refused_with_a_hint(wrong):
    with pytest.raises(TypeError, match=r"expected bytes, such as b'the' or text.encode\(\)"):
        by_hand(b"the").ids_of(wrong)


def test_every_token_is_found_by_its_bytes(byte_level, word_piece, llama, unigram, encoding):
    for tokenizer in (byte_level, word_piece, llama, unigram, encoding):
        vocabulary = Vocabulary.from_tokenizer(tokenizer)
        assert vocabulary.special_ids
        for token in vocabulary.byte_vocab:
            key = token.token_id
            apart = key in vocabulary.special_ids or key in vocabulary.missing_ids
            assert (key in vocabulary.ids_of(token.byte_string)) is not apart


def special_texts(vocabulary: Vocabulary) -> set[str]:
    return {vocabulary.str_vocab[key] for key in vocabulary.special_ids}


def test_special_tokens_are_those_of_each_family(byte_level, llama, encoding):
    added = {"<|end|>", "<\N{FULLWIDTH VERTICAL LINE}begin▁of▁text>"}
    assert special_texts(Vocabulary.from_tokenizer(byte_level)) == added | {"<s>"}
    # Reserved tokens have no role but are special.
    assert special_texts(Vocabulary.from_tokenizer(llama)) >= added | {"<s>", "</s>", "<unk>"}
    assert special_texts(Vocabulary.from_tokenizer(encoding)) == encoding.special_tokens_set


def test_special_pieces_of_sentencepiece_are_its_control_symbols(sentencepiece_file):
    processor = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file))
    vocabulary = Vocabulary.from_tokenizer(processor)
    pieces = {processor.id_to_piece(key) for key in vocabulary.special_ids}
    assert pieces == {"<unk>", "<s>", "</s>"}


def test_a_model_masks_its_rows():
    with genlm.load_model("demo", "reference") as llm:
        digits = llm.vocabulary.mask(bytes.isdigit)
        assert digits.nonzero().flatten().tolist() == [*range(48, 58)]
        assert llm.vocabulary.ids_of(b"T") == (84,)
        row = llm.next_token_logprobs_sync(llm.tokenizer.encode("3.")).masked_fill(~digits, 0)
        assert (row != 0).sum() == 10
