from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from genlm.core.base.errors import VocabularyError
from genlm.core.vocab import decode_vocab


def spelled(token: str) -> bytes:
    """The GPT-2 alphabet, written independently of the code under test."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    other_bytes = iter(sorted(set(range(256)) - printable))
    byte_of = {chr(256 + n): byte for n, byte in enumerate(other_bytes)}
    byte_of |= {chr(byte): byte for byte in printable}
    return bytes(byte_of[character] for character in token)


def is_text(value: bytes) -> bool:
    return bytes(value) == value.decode(errors="ignore").encode()


def test_byte_level_tokens_are_the_bytes_that_their_characters_spell(byte_level, added_text):
    byte_vocab, _ = decode_vocab(byte_level)
    added = added_text(byte_level)
    for name, token_id in byte_level.get_vocab().items():
        expected = name.encode() if token_id in added else spelled(name)
        assert byte_vocab[token_id].byte_string == expected
    assert any(not is_text(token) for token in byte_vocab)


@pytest.mark.parametrize("family", ["byte_level", "word_piece", "llama", "unigram"])
def test_every_token_is_what_decoding_adds_in_mid_text(
    family, request, added_text, text_in_context
):
    tokenizer = request.getfixturevalue(family)
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    byte_vocab, _ = decode_vocab(tokenizer)
    word = next(n for n, token in enumerate(byte_vocab) if len(token) > 1 and token.isalpha())
    added = set(backend.get_added_tokens_decoder())

    def decode(ids):
        return backend.decode(ids, skip_special_tokens=False)

    checked = 0
    for token_id, token in enumerate(byte_vocab):
        if token_id not in added and is_text(token):
            assert text_in_context(decode, word, token_id).encode() == token.byte_string
            checked += 1
    assert checked > 100


@pytest.mark.parametrize("family", ["byte_level", "word_piece", "llama"])
def test_added_and_special_tokens_are_their_content(family, request, added_text):
    tokenizer = request.getfixturevalue(family)
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    byte_vocab, str_vocab = decode_vocab(tokenizer)
    added = added_text(backend)
    assert len(added) == 9
    for token_id, content in added.items():
        assert byte_vocab[token_id].byte_string == content.encode()
        assert str_vocab[token_id] == content
        # That text is where the token comes from, whatever the decoder makes of it.
        assert backend.encode(content, add_special_tokens=False).ids == [token_id]


def test_the_decoder_of_the_library_misreads_an_added_token_in_the_alphabet(byte_level):
    token_id = byte_level.token_to_id("éé")
    assert byte_level.decode([token_id]) == 2 * "\N{REPLACEMENT CHARACTER}"
    assert decode_vocab(byte_level)[0][token_id].byte_string == "éé".encode()


def test_an_added_token_that_is_also_a_byte_of_the_model_is_an_error(byte_level):
    copy = tokenizers.Tokenizer.from_str(byte_level.to_str())
    copy.add_tokens(["é"])
    # "é" is now read as the id of byte E9, which "驚" begins with.
    assert copy.encode("é").ids[0] == copy.encode("驚").ids[0]
    with pytest.raises(VocabularyError, match="has no exact bytes"):
        decode_vocab(copy)


def test_a_literal_that_looks_like_a_byte_piece_stays_apart_from_the_byte(llama):
    byte_vocab, _ = decode_vocab(llama)
    vocab = llama.get_vocab()
    assert byte_vocab[vocab["<0x0A>"]].byte_string == b"\n"
    tokenizer = tokenizers.Tokenizer(models.BPE({"<0x41>": 0, "A": 1}, []))
    tokenizer.decoder = decoders.Fuse()
    assert [token.byte_string for token in decode_vocab(tokenizer)[0]] == [b"<0x41>", b"A"]


def test_an_added_token_that_looks_like_a_byte_piece_is_its_text():
    tokenizer = tokenizers.Tokenizer(models.BPE({"A": 0, "bc": 1}, []))
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.add_tokens(["<0x41>"])
    assert tokenizer.encode("<0x41>").ids == [2]
    assert tokenizer.decode([2]) == "A"
    assert decode_vocab(tokenizer)[0][2].byte_string == b"<0x41>"


def test_tokens_that_share_bytes_are_all_there(llama):
    byte_vocab, _ = decode_vocab(llama)
    vocab = llama.get_vocab()
    byte_piece, letter = byte_vocab[vocab["<0x78>"]], byte_vocab[vocab["x"]]
    assert byte_piece.byte_string == letter.byte_string == b"x"
    assert byte_piece != letter


def test_the_models_pieces_that_are_also_added_tokens_are_decoded(gemma):
    byte_vocab, _ = decode_vocab(gemma)
    (token_id,) = gemma.encode("▁▁", add_special_tokens=False)
    assert gemma.encode("x  x", add_special_tokens=False)[1] == token_id
    assert byte_vocab[token_id].byte_string == b"  "
    assert byte_vocab[gemma.convert_tokens_to_ids("\n\n")].byte_string == b"\n\n"


def test_word_pieces_carry_the_space_before_a_word(word_piece):
    byte_vocab, _ = decode_vocab(word_piece)
    vocab = word_piece.get_vocab()
    assert byte_vocab[vocab["fox"]].byte_string == b" fox"
    assert byte_vocab[vocab["##o"]].byte_string == b"o"
    assert byte_vocab[vocab["[CLS]"]].byte_string == b"[CLS]"


def test_word_pieces_with_cleanup_lose_the_spaces_that_the_decoder_removes():
    names = ["[UNK]", "it", ".", "?", "n't", "'s", "##.", "a", "'", "do not", "…", "dog"]
    model = models.WordPiece({name: n for n, name in enumerate(names)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    assert [token.byte_string for token in decode_vocab(tokenizer)[0]] == [
        *(b" [UNK]", b" it", b".", b"?", b"n't", b"'s", b".", b" a", b" '", b" don't"),
        *(" …".encode(), b" dog"),
    ]


def test_a_transformers_tokenizer_and_its_backend_give_the_same(byte_level):
    wrapped = PreTrainedTokenizerFast(tokenizer_object=byte_level, eos_token="<|end|>")
    assert decode_vocab(wrapped) == decode_vocab(byte_level)
    assert [bytes(token) for token in decode_vocab(wrapped)[0]] == [
        bytes(token) for token in decode_vocab(byte_level)[0]
    ]


def test_padding_and_truncation_settings_change_nothing(byte_level):
    copy = tokenizers.Tokenizer.from_str(byte_level.to_str())
    copy.enable_padding(length=8)
    copy.enable_truncation(4)
    assert [bytes(token) for token in decode_vocab(copy)[0]] == [
        bytes(token) for token in decode_vocab(byte_level)[0]
    ]


def test_words_without_a_decoder_are_joined_with_spaces_as_the_library_does():
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert tokenizer.decode([0, 1]) == "a b"
    assert [token.byte_string for token in decode_vocab(tokenizer)[0]] == [b" a", b" b"]


def test_ids_without_a_token_are_empty():
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 3}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    byte_vocab, str_vocab = decode_vocab(tokenizer)
    assert [token.byte_string for token in byte_vocab] == [b"a", b"", b"", b"b"]
    assert str_vocab == ["a", "", "", "b"]


def test_a_string_that_two_ids_share_is_both_their_bytes():
    pieces = [("a", 0.0), ("dup", -1.0), ("dup", -2.0)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.decoder = decoders.Fuse()
    assert [token.byte_string for token in decode_vocab(tokenizer)[0]] == [b"a", b"dup", b"dup"]


@pytest.mark.parametrize("model", [models.BPE({"a": 0}, []), models.Unigram([("a", 0.0)], 0)])
def test_pieces_without_a_decoder_are_an_error(model):
    with pytest.raises(VocabularyError, match=r"Tokenizer has a \w+ model and no decoder"):
        decode_vocab(tokenizers.Tokenizer(model))


def test_a_decoder_written_in_python_is_an_error(byte_level):
    class Shouting:
        def decode_chain(self, tokens):
            return [token.upper() for token in tokens]

    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.Decoder.custom(Shouting())
    with pytest.raises(VocabularyError, match="Tokenizer has the decoder"):
        decode_vocab(tokenizer)


def test_a_mark_that_the_decoder_leaves_in_the_text_is_an_error():
    model = models.BPE({"a": 0, "b</w>": 1}, [], end_of_word_suffix="</w>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()
    with pytest.raises(VocabularyError, match="marks parts of words with '</w>'"):
        decode_vocab(tokenizer)
    tokenizer.decoder = decoders.BPEDecoder()
    assert [token.byte_string for token in decode_vocab(tokenizer)[0]] == [b"a", b"b "]


def test_byte_pieces_that_the_decoder_leaves_in_the_text_are_an_error():
    byte_pieces = {f"<0x{byte:02X}>": byte for byte in range(256)}
    model = models.BPE(byte_pieces | {"ab": 256}, [], byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = decoders.Metaspace()
    with pytest.raises(VocabularyError, match="spells unknown characters as <0x"):
        decode_vocab(tokenizer)


def test_decoding_that_differs_from_the_decoder_is_an_error_naming_the_class(byte_level):
    class Rewriting(PreTrainedTokenizerFast):
        def _decode(self, *args, **kwargs):
            return super()._decode(*args, **kwargs).replace("fox", "FOX")

    wrapped = Rewriting(tokenizer_object=byte_level)
    with pytest.raises(VocabularyError, match=r"Rewriting decodes the ids .*FOX"):
        decode_vocab(wrapped)


def test_an_added_token_that_is_neither_decoded_nor_read_is_an_error():
    tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0, "bc": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["é"])
    tokenizer.encode_special_tokens = True
    with pytest.raises(VocabularyError, match="added token 'é'"):
        decode_vocab(tokenizer)
