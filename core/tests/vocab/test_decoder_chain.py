from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import decoders

from genlm.core.vocab.decoder_chain import DecoderChain, UnknownStepError

TOKENS = [
    *("a", " a", "▁a", "▁▁", "a▁", "##a", "##", "a##", "Ġa", "é", "日", "ab</w>", "</w>", " ."),
    *("<0x41>", "<0x0a>", "<0x+A>", "<0xZZ>", "<0x4>", "<0x041>", "'s", " do not", "n't", "."),
]
DECODERS = [
    decoders.Fuse(),
    decoders.ByteLevel(),
    decoders.ByteFallback(),
    decoders.Metaspace(),
    decoders.Metaspace(replacement="_", prepend_scheme="never"),
    decoders.WordPiece(),
    decoders.WordPiece(prefix="@@", cleanup=False),
    decoders.BPEDecoder(),
    decoders.BPEDecoder(suffix="▁"),
    decoders.Replace("▁", " "),
    decoders.Replace("a", ""),
    decoders.Strip(" ", 1, 0),
    decoders.Strip("▁", 1, 1),
    decoders.Strip(">", 0, 1),
    decoders.Sequence([]),
    decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    ),
    decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]),
    decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]),
    decoders.Sequence([decoders.Sequence([decoders.WordPiece()]), decoders.Fuse()]),
    decoders.Sequence([decoders.Strip("#", 2, 0), decoders.ByteLevel()]),
    decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 1)]),
]


def chain_of(decoder: decoders.Decoder) -> DecoderChain:
    return DecoderChain(json.loads(decoder.__getstate__()))


@pytest.mark.parametrize("decoder", DECODERS, ids=repr)
@pytest.mark.parametrize("token", TOKENS)
def test_a_token_is_what_the_library_adds_between_two_others(decoder, token):
    (value,) = chain_of(decoder).decode([token])
    head = len(decoder.decode(["xy", "xy"]))
    tail = len(decoder.decode(["xy", "xy", "xy"])) - head
    around = decoder.decode(["xy", "xy", token, "xy"])
    assert around[head : len(around) - tail] == value.decode(errors="replace")


def test_many_tokens_are_decoded_in_order():
    chain = chain_of(decoders.ByteFallback())
    assert chain.decode(["a", "<0xE9>", "b"]) == [b"a", b"\xe9", b"b"]


def test_without_a_decoder_tokens_are_preceded_by_a_space():
    assert DecoderChain(None).decode(["a", "b"]) == [b" a", b" b"]


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (decoders.CTC(), "CTC"),
        (decoders.Replace(tokenizers.Regex("a+"), "b"), "Replace with the pattern"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "")]), "Replace of 'ab'"),
        (decoders.Sequence([decoders.Fuse(), decoders.WordPiece()]), "WordPiece"),
        (decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]), "ByteFallback"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Metaspace()]), "Metaspace"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Replace(" ", "")]), "Replace"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]), "Strip"),
    ],
    ids=repr,
)
def test_a_step_that_looks_at_neighbours_is_refused(decoder, named):
    with pytest.raises(UnknownStepError, match=named):
        chain_of(decoder)
