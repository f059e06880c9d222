"""Texts become the ids that a model wants, and ids exact texts, with any tokenizer or none."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from scripted import ScriptedEngine
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import genlm
from genlm import Token, TokenizerError, Vocabulary
from genlm.core.vocab import text as text_module
from genlm.core.vocab.text import encode, encode_chat, encode_continuation

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
PIECES = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_level(**options: Any) -> Vocabulary:
    """As GPT-2: a token for each byte and the end of text, which the tokenizer never adds."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pieces = {piece: n for n, piece in enumerate(["<|end|>", *sorted(alphabet)])}
    backend = tokenizers.Tokenizer(models.BPE(pieces, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = {"bos_token": "<|end|>", "eos_token": "<|end|>"} | options
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    return Vocabulary.from_tokenizer(tokenizer)


def sentencepiece_like(ends: bool = False, **options: Any) -> Vocabulary:
    """As Llama: a space is put before every text, and the tokenizer adds `<s>` itself."""
    pieces = {piece: n for n, piece in enumerate(PIECES)}
    backend = tokenizers.Tokenizer(
        models.BPE(pieces, [("▁", "a")], byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if ends else "<s> $A", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **NAMES, **options)
    return Vocabulary.from_tokenizer(tokenizer)


def of_bytes(tokenizer: Any, tokens: Sequence[bytes] = ()) -> Vocabulary:
    pieces = list(tokens) or [bytes([byte]) for byte in range(256)]
    byte_vocab = [Token(n, piece) for n, piece in enumerate(pieces)]
    return Vocabulary(tokenizer, byte_vocab, [repr(piece) for piece in pieces])


class Engine(ScriptedEngine):
    """Any vocabulary in front of scripted rows."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(16)
        self.vocabulary = vocabulary

    def evaluate(self, queries: Sequence[Any]) -> torch.Tensor:
        size = self.vocabulary.size
        return torch.full((len(queries), size), 1 / size).log()


def spelled(vocabulary: Vocabulary, ids: Sequence[int]) -> list[bytes]:
    return [bytes(vocabulary.byte_vocab[token_id]) for token_id in ids]


def test_the_methods_of_a_model_are_the_functions_over_its_vocabulary() -> None:
    vocabulary = byte_level(chat_template=TEMPLATE)
    with genlm.AsyncLM(lambda: Engine(vocabulary)) as llm:
        ids = llm.encode("a b")
        assert spelled(vocabulary, ids) == [b"<|end|>", b"a", b" ", b"b"]
        assert llm.encode("a b", begin=False) == ids[1:]
        assert llm.decode(ids) == llm.decode(llm.context(ids)) == "a b"
        assert llm.decode(torch.tensor(ids), special_tokens=True) == "<|end|>a b"
        assert llm.batch_decode([ids], special_tokens=True) == ["<|end|>a b"]
        assert llm.decode_bytes(ids, special_tokens=True) == b"<|end|>a b"
        assert llm.decode([]) == ""
        chat = llm.encode_chat([{"role": "user", "content": "Hi"}])
        assert llm.decode(chat) == "user:Hi\nassistant:"
        assert chat[0] == vocabulary.bos_token_id


def test_several_sequences_are_decoded_and_bytes_may_end_within_a_character() -> None:
    vocabulary = of_bytes(None)
    with genlm.AsyncLM(lambda: Engine(vocabulary)) as llm:
        lists = [*map(list, ("é".encode(), b"a", "né".encode()[:2], b""))]
        texts = ["é", "a", "n\ufffd", ""]
        assert llm.batch_decode(lists) == llm.batch_decode(iter(lists)) == texts
        assert [*map(llm.decode_bytes, lists)] == [*map(bytes, lists)]
        padded = np.array([[0xC3, 0xA9], [97, -1], [ord("n"), 0xC3], [-1, -1]])
        assert llm.batch_decode(padded) == llm.batch_decode(torch.from_numpy(padded)) == texts
        population = llm.population(lists[:3])
        assert llm.batch_decode(population) == llm.batch_decode([*population]) == texts[:3]
        assert llm.decode_bytes(population[2]) == b"n\xc3"
        assert llm.batch_decode([]) == []
        with pytest.raises(genlm.TokenIdError, match="token id 999") as caught:
            llm.batch_decode([[97], [999], [98, 999]])
        assert caught.value.places == (1, 2)
        with pytest.raises(genlm.TokenTypeError, match=r"pass \[ids\], or call decode"):
            llm.batch_decode([97, 98])
        with pytest.raises(genlm.TokenTypeError, match="methods with `batch` in their name"):
            llm.decode(population)


def test_the_separator_of_training_texts_begins_a_text() -> None:
    vocabulary = byte_level()
    assert spelled(vocabulary, encode(vocabulary, "")) == [b"<|end|>"]
    assert spelled(vocabulary, encode(vocabulary, "<|end|>a")) == [b"<|end|>", b"a"]


def test_a_separator_that_the_tokenizer_puts_before_a_text_begins_an_empty_one() -> None:
    vocabulary = byte_level()  # as OPT
    vocabulary.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 0)]
    )
    assert encode(vocabulary, "") == [0]
    assert spelled(vocabulary, encode(vocabulary, "a")) == [b"<|end|>", b"a"]


def test_a_tokenizer_made_to_add_nothing_is_believed() -> None:
    vocabulary = byte_level(add_bos_token=False)
    assert spelled(vocabulary, encode(vocabulary, "a")) == [b"a"]


def test_a_beginning_that_is_not_the_separator_is_left_to_the_tokenizer() -> None:
    vocabulary = byte_level(bos_token="!")
    assert spelled(vocabulary, encode(vocabulary, "a")) == [b"a"]
    vocabulary = sentencepiece_like()
    assert spelled(vocabulary, encode(vocabulary, "a")) == [b"<s>", b" a"]
    assert spelled(vocabulary, encode(vocabulary, "a", begin=False)) == [b" a"]


def test_an_end_that_the_tokenizer_adds_is_left_out() -> None:
    vocabulary = sentencepiece_like(ends=True)
    assert spelled(vocabulary, encode(vocabulary, "a")) == [b"<s>", b" a"]
    assert spelled(vocabulary, encode(vocabulary, "a</s>")) == [b"<s>", b" a", b"</s>"]


def word_piece() -> Vocabulary:
    """As BERT: `[CLS]` begins and `[SEP]` ends every text."""
    pieces = {piece: n for n, piece in enumerate(["[UNK]", "[CLS]", "[SEP]", "a", "##a"])}
    backend = tokenizers.Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return Vocabulary.from_tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **names))


def test_a_separator_that_the_tokenizer_adds_is_left_out() -> None:
    vocabulary = word_piece()
    assert spelled(vocabulary, encode(vocabulary, "")) == [b"[CLS]"]
    assert spelled(vocabulary, encode(vocabulary, "aa")) == [b"[CLS]", b" a", b"a"]
    assert spelled(vocabulary, encode(vocabulary, "a[SEP]")) == [b"[CLS]", b" a", b"[SEP]"]


@pytest.mark.parametrize(
    ("vocabulary", "begin"),
    [
        (byte_level(), [b"<|end|>"]),
        (byte_level(bos_token=None), [b"<|end|>"]),
        (sentencepiece_like(), [b"<s>"]),
        (word_piece(), [b"[CLS]"]),
    ],
    ids=["GPT-2", "Qwen", "Llama", "BERT"],
)
def test_a_text_is_encoded_after_the_begin_token_or_a_prompt(
    vocabulary: Vocabulary, begin: list[bytes]
) -> None:
    with genlm.AsyncLM(lambda: Engine(vocabulary)) as llm:
        ids, start = llm.encode_continuation("", "a a")
        assert spelled(vocabulary, ids[:start]) == begin
        assert llm.decode(ids) == "a a"
        ids, start = llm.encode_continuation("a", " aa")
        assert spelled(vocabulary, ids[: len(begin)]) == begin
        assert (llm.decode(ids[:start]), llm.decode(ids[start:])) == ("a", " aa")
        ids, start = llm.encode_continuation("a", "")
        assert len(ids) == start


def test_a_name_of_the_begin_token_in_a_text_is_encoded_as_by_encode() -> None:
    vocabulary = sentencepiece_like()
    assert encode_continuation(vocabulary, "", "<s>a") == (encode(vocabulary, "<s>a"), 1)
    assert encode(vocabulary, "<s>a")[:2] == [0, 0]


def test_the_first_token_follows_nothing_if_there_is_no_begin_token() -> None:
    vocabulary = byte_level(bos_token=None, eos_token=None)
    assert encode_continuation(vocabulary, "", "a") == (encode(vocabulary, "a"), 1)
    assert encode_continuation(vocabulary, "aa", "a") == (encode(vocabulary, "aaa"), 2)
    for texts in (("a", None), (None, "a"), ("a", ["a"])):
        with pytest.raises(TypeError, match=r"encode takes a string; found (NoneType|list)"):
            encode_continuation(vocabulary, *texts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ta", [b"ta"]),  # the tokenizer adds a token for a space
        ("ab", [b"a", b"b"]),  # its first token is " a"
        (" ab", [b" a", b"b"]),  # it adds no space
        ("bt", [b"b", b"t"]),  # no token is "bt"
        ("cb", [b" cb"]),  # no tokens are "cb"
    ],
)
def test_a_text_after_a_prompt_has_no_space_that_the_tokenizer_adds(
    text: str, expected: list[bytes]
) -> None:
    merges = ["xt", "xa", "xb", "x▁", "▁a", "ta", "▁b"]
    pairs = [*map(tuple, merges), ("▁b", "t")]
    pieces = ["<unk>", *"▁abtx", *merges, "▁bt"]
    if text == "cb":
        model = models.WordLevel({"<unk>": 0, "▁x": 1, "▁cb": 2, "▁xcb": 3}, "<unk>")
    else:
        model = models.BPE({piece: i for i, piece in enumerate(pieces)}, pairs)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.decoder = decoders.Metaspace()
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    # The prompt and the text have a token in common, so they are encoded separately.
    ids, start = encode_continuation(vocabulary, "x", text)
    assert spelled(vocabulary, ids[start:]) == expected
    assert b"".join(spelled(vocabulary, ids[:start])) == b" x"


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
@pytest.mark.parametrize("text", ["a", " a", "", "a\n b", "naïve 日本 \U0001f98a"])
def test_decoding_an_encoded_text_gives_the_text(make: Any, text: str) -> None:
    vocabulary = make()
    assert text_module.decode(vocabulary, encode(vocabulary, text)) == text


def test_a_continuation_keeps_its_space_and_incomplete_characters_are_marked() -> None:
    vocabulary = sentencepiece_like()
    ids = encode(vocabulary, "a é")
    assert text_module.decode(vocabulary, ids[1:]) == " a é"
    assert text_module.decode(vocabulary, ids[:-1]) == "a \ufffd"


def test_rows_of_padded_arrays_are_decoded() -> None:
    vocabulary = of_bytes(None)
    rows = np.array([[104, 105, -1], [-1, 33, 63], [-1, -1, -1]])
    for given_as in (rows, torch.from_numpy(rows), rows.tolist()):
        assert [text_module.decode(vocabulary, row) for row in given_as] == ["hi", "!?", ""]


def test_wrong_ids_are_refused_when_decoding() -> None:
    vocabulary = of_bytes(None)
    assert text_module.decode(vocabulary, [104, 105]) == "hi"
    for wrong in (256, -2):
        with pytest.raises(genlm.TokenIdError, match=f"{wrong} at position 1"):
            text_module.decode(vocabulary, [1, wrong])
    with pytest.raises(genlm.TokenTypeError):
        text_module.decode(vocabulary, "hi")  # type: ignore[arg-type]


class Bytes:
    """The smallest tokenizer; it adds what it likes."""

    bos_token_id = 2

    def encode(self, text: str) -> list[int]:
        return [2, *text.encode()]


def test_a_tokenizer_with_nothing_but_encode_suffices() -> None:
    vocabulary = of_bytes(Bytes())
    assert encode(vocabulary, "hi") == [2, 104, 105]
    assert encode(vocabulary, "hi", begin=False) == [104, 105]
    assert text_module.decode(vocabulary, encode(vocabulary, "hi")) == "hi"
    returns_ids = SimpleNamespace(encode=lambda text: SimpleNamespace(ids=[7]))
    assert encode(of_bytes(returns_ids), "hi") == [7]


def test_the_continuation_of_a_text_is_encoded_once() -> None:
    calls = []

    def encode_bytes(text: str, add_special_tokens: bool = True) -> list[int]:
        calls.append(add_special_tokens)
        return [*text.encode()]

    vocabulary = of_bytes(SimpleNamespace(encode=encode_bytes))
    assert encode(vocabulary, "hi", begin=False) == [104, 105]
    assert calls == [False]


def test_special_ids_outside_the_vocabulary_are_ignored() -> None:
    tokenizer = SimpleNamespace(bos_token_id=300, eos_token_id=None, all_special_ids=[1])
    vocabulary = of_bytes(tokenizer)
    assert (vocabulary.bos_token_id, vocabulary.eos_token_id) == (None, None)
    assert vocabulary.special_ids == {1}


def test_what_a_tokenizer_lacks_is_named() -> None:
    with pytest.raises(TokenizerError, match="asked for encode; the engine has no tokenizer"):
        encode(of_bytes(None), "hi")
    with pytest.raises(TokenizerError, match="a tokenizer, object, without encode"):
        encode(of_bytes(object()), "hi")
    with pytest.raises(TokenizerError, match="Bytes, without apply_chat_template"):
        encode_chat(of_bytes(Bytes()), [])
    with pytest.raises(TokenizerError, match=r"chat_template is not set and no template"):
        encode_chat(byte_level(), [{"role": "user", "content": "Hi"}])
    with pytest.raises(
        TokenizerError, match=r"encode of .* returned no ids .* 300 at position"
    ):
        encode(of_bytes(SimpleNamespace(encode=lambda text: [300])), "hi")


def test_a_template_may_be_passed_and_its_failure_is_the_cause() -> None:
    vocabulary = byte_level()
    message = {"role": "user", "content": "Hi"}
    ids = encode_chat(
        vocabulary, [message], chat_template=TEMPLATE, add_generation_prompt=False
    )
    assert text_module.decode(vocabulary, ids) == "user:Hi\n"
    with pytest.raises(
        TokenizerError,
        match=r"the chat template of .* failed: .*no roles; chat_template= passes",
    ) as at:
        encode_chat(vocabulary, [message], chat_template="{{ raise_exception('no roles') }}")
    assert at.value.__cause__ is not None


def test_arguments_of_another_kind_name_the_method_that_takes_them() -> None:
    vocabulary = byte_level(chat_template=TEMPLATE)
    messages: Any = [{"role": "user", "content": "Hi"}]
    with pytest.raises(
        TypeError, match=r"encode takes a string; found list\. encode_chat takes"
    ):
        encode(vocabulary, messages)
    with pytest.raises(ValueError, match=r"found the surrogate '\\ud83d' at position 1"):
        encode(vocabulary, "a\ud83d")
    for wrong in ("Hi", messages[0], ["Hi"]):
        with pytest.raises(TypeError, match="encode_chat takes messages, such as"):
            encode_chat(vocabulary, wrong)
