"""A trie comes back from its file as it was, without pickle."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from trie_oracle import EOS, vocabularies

from genlm import Token, TokenCharacterTrie, VocabularyError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tries")


@settings(max_examples=30)
@given(items=vocabularies())
def test_a_loaded_trie_is_the_saved_one(folder, items) -> None:
    saved = TokenCharacterTrie(items)
    saved.save(folder / "trie")
    assert [path.name for path in folder.iterdir()] == ["trie"]
    plain = all(isinstance(item, bytes) for item in items)
    loaded = TokenCharacterTrie.load(folder / "trie", decode=None if plain else items)
    for field in dataclasses.fields(saved.layout):
        stored = getattr(loaded.layout, field.name)
        original = getattr(saved.layout, field.name)
        assert stored.dtype == original.dtype
        np.testing.assert_array_equal(stored, original)
    assert loaded.word2leaf == saved.word2leaf
    assert list(map(type, loaded.decode)) == list(map(type, items))
    ws = np.arange(len(items), dtype=np.float64)
    np.testing.assert_array_equal(loaded.weight_sum(ws), saved.weight_sum(ws))


def test_plain_bytes_and_tokens_keep_their_kinds(folder) -> None:
    TokenCharacterTrie([b"a", Token(5, b"a"), b""]).save(str(folder / "kinds.npz"))
    loaded = TokenCharacterTrie.load(str(folder / "kinds.npz"))
    assert loaded.word2leaf == {b"a": 0, (b"a", 5): 1, b"": 2}


def test_other_items_need_the_vocabulary_again(folder) -> None:
    TokenCharacterTrie([Token(0, b"a"), EOS]).save(folder / "eos")
    with pytest.raises(VocabularyError, match="items other than bytes; load it with the voc"):
        TokenCharacterTrie.load(folder / "eos")
    with pytest.raises(VocabularyError, match="the trie of another vocabulary"):
        TokenCharacterTrie.load(folder / "eos", decode=[Token(0, b"b"), EOS])


def test_the_saved_vocabulary_is_compared_with_the_one_given(folder) -> None:
    TokenCharacterTrie([Token(0, b"a"), Token(1, b"a")]).save(folder / "two")
    with pytest.raises(VocabularyError, match="another vocabulary"):
        TokenCharacterTrie.load(folder / "two", decode=[Token(1, b"a"), Token(0, b"a")])


def test_a_file_with_pickles_or_of_another_format_is_refused(folder) -> None:
    np.savez(folder / "other.npz", format=np.array(99))
    with pytest.raises(VocabularyError, match="contains a trie in format 99"):
        TokenCharacterTrie.load(folder / "other.npz")
    np.savez(folder / "none.npz", x=np.array(99))
    with pytest.raises(VocabularyError, match="contains a trie in format None"):
        TokenCharacterTrie.load(folder / "none.npz")
    (folder / "pickle").write_bytes(pickle.dumps([1]))
    with pytest.raises(VocabularyError, match=r"was not written by `save`.* pickled"):
        TokenCharacterTrie.load(folder / "pickle")


def test_a_file_that_is_no_trie_is_named(folder) -> None:
    TokenCharacterTrie([b"a"]).save(folder / "whole")
    whole = (folder / "whole").read_bytes()
    np.save(folder / "array.npy", np.zeros(3))
    array = (folder / "array.npy").read_bytes()
    damaged = whole.replace(b"PK\x03\x04", b"PK\x03\x05", 1)
    for content in (b"", b"text", array, whole[: len(whole) // 2], damaged):
        (folder / "wrong").write_bytes(content)
        with pytest.raises(VocabularyError, match="wrong was not written by `save`"):
            TokenCharacterTrie.load(folder / "wrong")
    with pytest.raises(FileNotFoundError):
        TokenCharacterTrie.load(folder / "nowhere")


def test_a_failed_write_leaves_nothing_behind(folder, monkeypatch) -> None:
    def fail(file, **arrays) -> None:
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", fail)
    before = sorted(folder.iterdir())
    with pytest.raises(OSError, match="disk full"):
        TokenCharacterTrie([b"a"]).save(folder / "never")
    assert sorted(folder.iterdir()) == before
