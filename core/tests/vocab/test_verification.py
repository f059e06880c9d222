from __future__ import annotations

import pytest

from genlm.core.base.errors import VocabularyError
from genlm.core.vocab.verification import check_added, check_decoding

BYTES = {byte: bytes([byte]) for byte in range(256)}
WORDS = {300: b"the", 301: " é".encode(), 302: b"", 303: b" "}
PIECES = {
    310: b"\xe6\x97",
    311: b"\xa5x",
    312: b"x\xf0\x9f\x99",
    313: b"\x99\x82",
    314: b"\xff",
}
VOCAB = BYTES | WORDS | PIECES


class Tok:
    """Named in errors."""


def decoding(vocab: dict[int, bytes]):
    return lambda ids: b"".join([vocab[key] for key in ids]).decode(errors="replace")


def test_the_decoding_of_the_same_bytes_is_accepted():
    check_decoding(VOCAB, decoding(VOCAB), Tok())


def test_a_space_stripped_at_the_start_of_the_text_is_accepted():
    vocab = {1: b" the", 2: b" a"}
    check_decoding(vocab, lambda ids: decoding(vocab)(ids).removeprefix(" "), Tok())


@pytest.mark.parametrize("token_id", [0, 65, 223, 300, 301, 303, 310, 311, 312, 313])
def test_one_wrong_byte_in_one_token_is_found(token_id):
    believed = dict(VOCAB)
    value = believed[token_id]
    believed[token_id] = value[:-1] + bytes([value[-1] ^ 1])
    with pytest.raises(VocabularyError, match=rf"Tok decodes the ids .*\b{token_id}\b"):
        check_decoding(believed, decoding(VOCAB), Tok())


@pytest.mark.parametrize("wrong", [b"", b"the ", b"th"])
def test_a_token_of_another_length_is_found(wrong):
    with pytest.raises(VocabularyError, match=r"Tok decodes the ids .*\b300\b"):
        check_decoding(VOCAB | {300: wrong}, decoding(VOCAB), Tok())


def test_bytes_moved_from_one_token_to_the_next_are_found():
    believed = VOCAB | {300: b"th", 301: "e é".encode()}
    with pytest.raises(VocabularyError, match=r"\b300\b"):
        check_decoding(believed, decoding(VOCAB), Tok())


@pytest.mark.parametrize("first", [b"", b"b"])
def test_the_only_token_is_checked_to_its_last_byte(first):
    true = {1: b"ab", 2: b"x"}
    with pytest.raises(VocabularyError, match=r"\b2\b"):
        check_decoding(true | {2: first}, decoding(true), Tok())


def test_a_tokenizer_that_cannot_decode_its_ids_is_an_error():
    def failing(ids):
        raise KeyError("no such id")

    with pytest.raises(VocabularyError, match="Tok raised KeyError"):
        check_decoding(VOCAB, failing, Tok())


def test_an_added_token_must_be_read_from_its_content():
    check_added(lambda text: [7], 7, "<x>", Tok())
    with pytest.raises(VocabularyError, match=r"Tok has the added token '<x>' \(id 7\)"):
        check_added(lambda text: [1, 2], 7, "<x>", Tok())


@pytest.mark.parametrize(
    ("true", "believed"),
    [
        (b"\x82xy", b"\x83xy"),
        (b"\x82\x80xy", b"\x82\x81xy"),
        (b"\x82\x80\x80xy", b"\x83\x80\x80xy"),
        (b"xy\xf2", b"xy\xf3"),
        (b"xy\xe0", b"xy\xe1"),
        (b"xy\xf0", b"xy\xf1"),
    ],
)
def test_pieces_that_replacement_characters_would_hide_are_compared_exactly(true, believed):
    assert true.decode(errors="replace") == believed.decode(errors="replace")
    with pytest.raises(VocabularyError, match=r"\b400\b"):
        check_decoding(VOCAB | {400: believed}, decoding(VOCAB | {400: true}), Tok())
