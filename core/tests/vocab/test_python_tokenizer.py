from __future__ import annotations

import pytest
import sentencepiece
import tiktoken
from tokenizers import AddedToken
from transformers import BertGenerationTokenizer, PreTrainedTokenizer
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from genlm.core.base.errors import VocabularyError
from genlm.core.vocab import Vocabulary, decode_vocab


class GPT2Style(PreTrainedTokenizer):
    """Byte-level BPE as GPT-2's Python code had it, without merges."""

    def __init__(self, extra: dict[str, int] | None = None, **options):
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        other_bytes = [byte for byte in range(256) if byte not in printable]
        self.byte_encoder = {byte: chr(byte) for byte in printable}
        self.byte_encoder |= {byte: chr(256 + n) for n, byte in enumerate(other_bytes)}
        self.byte_decoder = {char: byte for byte, char in self.byte_encoder.items()}
        self.encoder = {char: n for n, char in enumerate(self.byte_decoder)}
        self.encoder |= {"Ġthe": 256, "æĹ": 257} | (extra or {})
        self.decoder = {n: name for name, n in self.encoder.items()}
        super().__init__(**options)

    @property
    def vocab_size(self):
        return len(self.encoder)

    def get_vocab(self):
        return self.encoder | self.added_tokens_encoder

    def _tokenize(self, text, **_):
        return [self.byte_encoder[byte] for byte in text.encode()]

    def _convert_token_to_id(self, token):
        return self.encoder.get(token)

    def _convert_id_to_token(self, index):
        return self.decoder[index]

    def convert_tokens_to_string(self, tokens):
        spelled = bytes(self.byte_decoder[char] for char in "".join(tokens))
        return spelled.decode(errors="replace")


class AroundTiktoken(PreTrainedTokenizer):
    """As remote code does: the encoding does the work, keys of the vocabulary are bytes."""

    def __init__(self, encoding, **options):
        self.tokenizer = encoding
        ranks = [(encoding.decode_single_token_bytes(n), n) for n in range(263)]
        self.ranks = dict(ranks)
        super().__init__(**options)

    @property
    def vocab_size(self):
        return self.tokenizer.n_vocab

    def __len__(self):
        return self.tokenizer.n_vocab

    def get_vocab(self):
        return dict(self.ranks)

    def _decode(self, token_ids, **_):
        return self.tokenizer.decode(token_ids)


class OfBytes:
    """A vocabulary of bytes and special strings, and nothing known inside."""

    def __init__(self, vocab, special_tokens):
        self.vocab = vocab
        self.special_tokens = special_tokens
        self.byte_of = {n: name for name, n in vocab.items()}

    def get_vocab(self):
        return self.vocab | self.special_tokens

    def encode(self, text, add_special_tokens):
        return [self.special_tokens[text]]

    def decode(self, ids, **_):
        return b"".join([self.byte_of[n] for n in ids]).decode(errors="replace")


def test_byte_level_tokens_are_read_through_the_byte_decoder():
    tokenizer = GPT2Style(eos_token="<|é|>")
    tokenizer.add_tokens([AddedToken("new", special=True)])
    byte_vocab, _ = decode_vocab(tokenizer)
    assert sorted(bytes(token) for token in byte_vocab[:256]) == [
        bytes([n]) for n in range(256)
    ]
    assert byte_vocab[256].byte_string == b" the"
    assert byte_vocab[257].byte_string == b"\xe6\x97"
    assert byte_vocab[tokenizer.eos_token_id].byte_string == "<|é|>".encode()
    assert byte_vocab[tokenizer.convert_tokens_to_ids("new")].byte_string == b"new"


def test_byte_level_tokens_that_are_no_bytes_are_an_error():
    with pytest.raises(VocabularyError, match=r"GPT2Style has 1 tokens .*'日' \(id 258\)"):
        decode_vocab(GPT2Style(extra={"日": 258}))


def test_byte_level_decoding_that_differs_is_an_error():
    class Odd(GPT2Style):
        def convert_tokens_to_string(self, tokens):
            return super().convert_tokens_to_string(tokens).replace(" the", " THE")

    with pytest.raises(VocabularyError, match="Odd decodes the ids"):
        decode_vocab(Odd())


def test_a_wrapped_sentencepiece_model_gives_the_models_bytes(sentencepiece_file):
    tokenizer = BertGenerationTokenizer(str(sentencepiece_file))
    tokenizer.add_tokens(["▁▁x", "new"])
    processor = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file))
    expected = [bytes(token) for token in decode_vocab(processor)[0]]
    byte_vocab = [bytes(token) for token in decode_vocab(tokenizer)[0]]
    assert byte_vocab[: len(expected)] == expected
    assert byte_vocab[tokenizer.convert_tokens_to_ids("▁▁x")] == "▁▁x".encode()
    assert byte_vocab[tokenizer.convert_tokens_to_ids("new")] == b"new"


def test_a_wrapper_that_moves_the_ids_gives_each_id_its_piece(sentencepiece_file):
    class Shifted(BertGenerationTokenizer):
        def get_vocab(self):
            pieces = map(self.sp_model.id_to_piece, range(3, self.vocab_size))
            return {"<s>": 0, "</s>": 1} | {piece: n for n, piece in enumerate(pieces, 10)}

    tokenizer = Shifted(str(sentencepiece_file))
    byte_vocab, _ = decode_vocab(tokenizer)
    (token_id,) = [n for piece, n in tokenizer.get_vocab().items() if piece == "<0x0A>"]
    assert token_id == 10 + tokenizer.sp_model.piece_to_id("<0x0A>") - 3
    assert byte_vocab[token_id].byte_string == b"\n"


def test_pieces_that_the_model_does_not_know_are_an_error(sentencepiece_file):
    class Extended(BertGenerationTokenizer):
        def get_vocab(self):
            return super().get_vocab() | {"<mystery>": 5000}

    with pytest.raises(
        VocabularyError, match=r"Extended has 1 tokens .*'<mystery>' \(id 5000\)"
    ):
        decode_vocab(Extended(str(sentencepiece_file)))


def test_word_pieces_carry_the_space_before_a_word(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "##the", ".", "é"]
    (tmp_path / "vocab.txt").write_text("\n".join(words), "utf-8")
    tokenizer = BertTokenizerLegacy(str(tmp_path / "vocab.txt"))
    tokenizer.add_tokens(["newword"])
    assert [token.byte_string for token in decode_vocab(tokenizer)[0]] == [
        *(b"[PAD]", b"[UNK]", b"[CLS]", b"[SEP]", b"[MASK]"),
        *(b" the", b"the", b" .", " é".encode(), b"newword"),
    ]


def test_a_tokenizer_around_a_tiktoken_encoding_gives_the_encodings_bytes(encoding):
    tokenizer = AroundTiktoken(encoding)
    vocabularies, expected = (Vocabulary.from_tokenizer(t) for t in (tokenizer, encoding))
    assert list(map(bytes, vocabularies.byte_vocab)) == list(map(bytes, expected.byte_vocab))
    assert vocabularies.missing_ids == expected.missing_ids


def test_a_tokenizer_that_moves_the_ids_of_its_encoding_is_an_error(encoding):
    class Moved(AroundTiktoken):
        def _decode(self, token_ids, **_):
            return self.tokenizer.decode([n ^ 1 if n < 256 else n for n in token_ids])

    with pytest.raises(VocabularyError, match="Moved decodes the ids"):
        decode_vocab(Moved(encoding))


def test_a_vocabulary_of_bytes_is_taken_as_it_is():
    tokenizer = OfBytes({b"ab": 0, b"\xe6": 1, b" the": 2}, {"<|é|>": 3})
    assert [bytes(token) for token in decode_vocab(tokenizer)[0]] == [
        *(b"ab", b"\xe6", b" the", "<|é|>".encode()),
    ]


def test_strings_among_bytes_that_are_not_special_are_an_error():
    tokenizer = OfBytes({b"ab": 0, "odd": 1}, {})
    with pytest.raises(VocabularyError, match=r"'odd' \(id 1\)"):
        decode_vocab(tokenizer)


class Characters(PreTrainedTokenizer):
    def __init__(self, *names):
        self.vocab = {
            name: n for n, name in enumerate(["<end>", "a", "é", "\N{FAMILY}", *names])
        }
        super().__init__(eos_token="<end>")

    @property
    def vocab_size(self):
        return len(self.vocab)

    def get_vocab(self):
        return self.vocab

    def _tokenize(self, text, **_):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.vocab[token]

    def _convert_id_to_token(self, index):
        return [*self.vocab][index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


def test_tokens_of_another_kind_are_texts():
    tokenizer = Characters(" ", "the")
    assert [token.decode() for token in decode_vocab(tokenizer)[0]] == [*tokenizer.vocab]


def test_tokens_that_are_decoded_as_other_texts_are_an_error():
    class Words(Characters):
        def convert_tokens_to_string(self, tokens):
            return " ".join(tokens)

    with pytest.raises(VocabularyError, match="Words decodes the ids"):
        decode_vocab(Words())
    with pytest.raises(VocabularyError, match="Characters decodes the ids"):
        decode_vocab(Characters("\ud800"))
    with pytest.raises(VocabularyError, match=r"neither special nor texts: '\ufffd' \(id 4\)"):
        decode_vocab(Characters("\ufffd"))


def test_a_tokenizer_of_no_known_kind_is_an_error_naming_its_class():
    with pytest.raises(VocabularyError, match=r"builtins.object is not a supported tokenizer"):
        decode_vocab(object())


def test_encodings_are_recognised_before_wrappers():
    ranks = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding("b", pat_str=".", mergeable_ranks=ranks, special_tokens={})
    assert bytes(decode_vocab(encoding)[0][233]) == b"\xe9"
