"""The exact bytes of every token, from the tables of GGUF files of each kind."""

from __future__ import annotations

import gguf
import pytest

from genlm import VocabularyError
from genlm_llamacpp import vocabulary
from genlm_llamacpp.vocabulary import GgufTokenizer, read_vocabulary

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6


def written(file, model, tokens, *, scores=True, **flags):
    """Write a file with a vocabulary alone, which is all that the tokenizer reads."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(8)
    writer.add_embedding_length(32)
    writer.add_head_count(1)
    writer.add_feed_forward_length(32)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre("default")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    if scores:
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
    for name, value in flags.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufTokenizer(file)


SENTENCEPIECE = [
    ("<unk>", _UNKNOWN),
    ("<s>", _CONTROL),
    ("</s>", _CONTROL),
    *((f"<0x{byte:02X}>", _BYTE) for byte in range(256)),
    ("\u2581the", _NORMAL),
    ("the", _NORMAL),
    ("\u2581", _NORMAL),
    ("\u65e5", _NORMAL),
    ("<tool>", _USER),
    ("<reserved>", _UNUSED),
    ("[PAD265]", _UNUSED),
    ("t", _NORMAL),
    ("h", _NORMAL),
    ("e", _NORMAL),
]


def test_sentencepiece_with_byte_fallback(tmp_path):
    flags = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, "add_bos_token": True}
    tokenizer = written(tmp_path / "spm.gguf", "llama", SENTENCEPIECE, **flags)
    found = read_vocabulary(tokenizer)
    assert found.byte_vocab[3 + 0x0A].byte_string == b"\n"
    assert [found.byte_vocab[i].byte_string for i in range(259, 265)] == [
        *(b" the", b"the", b" ", "\u65e5".encode(), b"<tool>", b"<reserved>")
    ]
    assert found.missing_ids == (265,)
    assert {0, 1, 2, 264} <= found.special_ids
    assert 263 not in found.special_ids
    assert tokenizer.encode(" the") == [1, *tokenizer.encode(" the", False)]
    assert tokenizer.init_kwargs == {"add_bos_token": True}


def test_byte_level_bpe(tmp_path):
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    letters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    tokens = [("<|end|>", _CONTROL), *((letter, _NORMAL) for letter in letters)]
    tokens.append(("\u0120a", _NORMAL))
    flags = {"token_merges": ["\u0120 a"], "eos_token_id": 0, "bos_token_id": 0}
    tokenizer = written(tmp_path / "bpe.gguf", "gpt2", tokens, scores=False, **flags)
    found = read_vocabulary(tokenizer)
    assert [token.byte_string for token in found.byte_vocab[1:257]] == [
        bytes([byte]) for byte in range(256)
    ]
    assert found.byte_vocab[257].byte_string == b" a"
    assert tokenizer.decode(tokenizer.encode("na\u00efve .a \u65e5")) == "na\u00efve .a \u65e5"
    assert tokenizer.init_kwargs == {}


def test_begin_and_end_tokens_that_the_file_lacks_are_no_tokens_of_text(tmp_path):
    """llama.cpp has the default id 11 for both."""
    tokens = [*((letter, _NORMAL) for letter in "abcdefghijklmnop"), ("<|end|>", _CONTROL)]
    flags = {"token_merges": ["a b"]}
    tokenizer = written(tmp_path / "bpe.gguf", "gpt2", tokens, scores=False, **flags)
    found = read_vocabulary(tokenizer)
    assert (found.bos_token_id, found.eos_token_id) == (None, None)
    assert found.special_ids == {16}
    flags |= {"eos_token_id": 3}
    tokenizer = written(tmp_path / "eos.gguf", "gpt2", tokens, scores=False, **flags)
    assert read_vocabulary(tokenizer).eos_token_id == 3


def test_wordpiece(tmp_path):
    """llama.cpp's converter writes word starts with U+2581, and continuations without ##."""
    tokens = [("[UNK]", _UNKNOWN), ("[CLS]", _CONTROL), ("[SEP]", _CONTROL)]
    tokens += [("\u2581the", _NORMAL), ("re", _NORMAL), ("\u2581.", _NORMAL)]
    flags = {"unk_token_id": 0, "sep_token_id": 2, "eos_token_id": 2, "bos_token_id": 1}
    tokenizer = written(tmp_path / "wpm.gguf", "bert", tokens, **flags)
    found = read_vocabulary(tokenizer)
    assert [token.byte_string for token in found.byte_vocab[3:]] == [b" the", b"re", b" ."]


def test_bytes_that_llama_cpp_decodes_otherwise_are_refused(tmp_path, monkeypatch):
    tokenizer = written(tmp_path / "spm.gguf", "llama", SENTENCEPIECE, unk_token_id=0)
    monkeypatch.setattr(vocabulary, "_spelling_decoder", lambda _: lambda text: text.upper())
    with pytest.raises(VocabularyError, match="decodes the ids"):
        read_vocabulary(tokenizer)


def test_tables_that_are_not_byte_level_are_refused(tmp_path):
    tokens = [("<|end|>", _CONTROL), ("a b", _NORMAL), *((c, _NORMAL) for c in "abc")]
    flags = {"token_merges": ["a b"], "eos_token_id": 0}
    tokenizer = written(tmp_path / "odd.gguf", "gpt2", tokens, scores=False, **flags)
    with pytest.raises(VocabularyError, match="its bytes are unknown"):
        read_vocabulary(tokenizer)


def test_the_tokenizer_outlives_the_engine_and_renders_chats(llama):
    engine = llama.engine()
    tokenizer = engine.vocabulary.tokenizer
    ids = tokenizer.encode("Once upon")
    engine.close()
    assert tokenizer.decode(ids) == "Once upon"
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    found = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Once"}], chat_template=template
    )
    assert tokenizer.decode(found) == "[user] Once"
    with pytest.raises(ValueError, match="the file has no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Once"}])


@pytest.mark.parametrize("token_id", [-1, -100, 10**6])
def test_ids_outside_the_vocabulary_are_an_error(llama, token_id):
    tokenizer = llama.engine().vocabulary.tokenizer
    for ask in (tokenizer.piece, tokenizer.text, tokenizer.attributes):
        with pytest.raises(IndexError, match=f"token id {token_id} of a vocabulary of"):
            ask(token_id)
    with pytest.raises(IndexError, match=f"token id {token_id}"):
        tokenizer.decode([5, token_id])
