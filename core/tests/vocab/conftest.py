"""Tokenizers of every family, trained on a few lines, nothing downloaded."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GemmaTokenizer, LlamaTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_sentencepiece import SentencePieceExtractor

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? I'm sure!",
    "héllo wörld, naïve café; 日本語 テキスト и русский текст 🙂👩‍👩‍👧",
    "def f(x):\n\treturn  x + 1   # comment\n",
] * 20
ADDED = ["éé", "日本x", "Ġxyz", "<0x4G>", "▁▁y", " spaced ", "new"]
SPECIAL = ["<|end|>", "<\N{FULLWIDTH VERTICAL LINE}begin▁of▁text>"]


def extend(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in ADDED])
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


@pytest.fixture(scope="session")
def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return extend(tokenizer)


@pytest.fixture(scope="session")
def word_piece() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]", "[CLS]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return extend(tokenizer)


def _sentencepiece(kind: str) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        # A character that is rare enough is left to the byte pieces.
        sentence_iterator=iter(line for line in [*CORPUS, "€"] for line in line.splitlines()),
        model_writer=model,
        model_type=kind,
        vocab_size=420,
        hard_vocab_limit=False,
        byte_fallback=True,
        character_coverage=0.999,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<sep>", "▁▁"],
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


@pytest.fixture(scope="session", params=["bpe", "unigram"])
def sentencepiece_file(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sentencepiece") / f"{request.param}.model"
    path.write_bytes(_sentencepiece(request.param))
    return path


@pytest.fixture(scope="session")
def bpe_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sentencepiece_bpe") / "bpe.model"
    path.write_bytes(_sentencepiece("bpe"))
    return path


@pytest.fixture(scope="session")
def llama(bpe_file) -> PreTrainedTokenizerFast:
    vocab, _, merges = SentencePieceExtractor(str(bpe_file)).extract()
    tokenizer = LlamaTokenizer(vocab=vocab, merges=merges)
    extend(tokenizer.backend_tokenizer)
    return tokenizer


@pytest.fixture(scope="session")
def gemma(bpe_file) -> PreTrainedTokenizerFast:
    vocab, _, merges = SentencePieceExtractor(str(bpe_file)).extract()
    tokenizer = GemmaTokenizer(vocab=vocab, merges=merges)
    # As Gemma's own file does: pieces of the model that are also added tokens.
    tokenizer.backend_tokenizer.add_tokens(
        [tokenizers.AddedToken("▁▁", normalized=False), "\n\n"]
    )
    return tokenizer


@pytest.fixture(scope="session")
def unigram() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never"), decoders.Fuse()]
    )
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    learned = [(piece, -float(rank)) for rank, piece in enumerate(_pieces_in_order(tokenizer))]
    scores = [*learned, *((piece, -1000.0) for piece in byte_pieces)]
    tokenizer.model = models.Unigram(scores, unk_id=0, byte_fallback=True)
    return tokenizer


def _pieces_in_order(tokenizer: tokenizers.Tokenizer) -> list[str]:
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    return sorted(vocab, key=vocab.__getitem__)


@pytest.fixture(scope="session")
def encoding() -> tiktoken.Encoding:
    words = [b"the", b" the", b"\xe6\x97", b"\xf0\x9f\x99", b"  "]
    pieces = [*(bytes([byte]) for byte in range(256)), *words, b"th", b"he"]
    return tiktoken.Encoding(
        "hand-made",
        pat_str=r"\s+|\S+",
        mergeable_ranks={piece: rank for rank, piece in enumerate(pieces)},
        # A hole of ten ids before the special tokens, another one between them.
        special_tokens={"<|end|>": len(pieces) + 10, "<|日|>": len(pieces) + 12},
    )


@pytest.fixture(scope="session")
def added_text():
    """`(tokenizer) -> {id: content}` of what every tokenizer here was extended with."""

    def read(tokenizer) -> dict[int, str]:
        return {tokenizer.token_to_id(content): content for content in [*ADDED, *SPECIAL]}

    return read


@pytest.fixture(scope="session")
def text_in_context():
    """What decoding says a token adds between two copies of a word."""

    def decoded(decode, word: int, token_id: int) -> str:
        # The difference of two decodings cancels what happens at the ends of a text.
        head = len(decode([word, word]))
        tail = len(decode([word, word, word])) - head
        around = decode([word, word, token_id, word])
        return around[head : len(around) - tail]

    return decoded
