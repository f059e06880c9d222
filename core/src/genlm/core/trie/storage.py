"""Tries in files: arrays in numpy's `.npz`, nothing pickled.

A file holds the layout and, if all items are tokens or bytes, the vocabulary. Items of
other kinds have no bytes to store; who loads such a file gives the vocabulary again.
"""

from __future__ import annotations

import dataclasses
import os
import zipfile
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from genlm.core.errors import VocabularyError
from genlm.core.trie.layout import TrieLayout
from genlm.core.trie.letters import Letters, item_key
from genlm.core.vocab import Token

__all__ = ["StoredTrie", "load_trie", "save_trie"]

FORMAT = 1
PLAIN_BYTES = -1
"""Stands for the id of an item that is bytes and no token."""


@dataclasses.dataclass(frozen=True)
class StoredTrie:
    """What a file gives back; a trie's class takes it in place of a vocabulary.

    Attributes:
        decode: The vocabulary.
        layout: Its trie as arrays.
        letter_objects: The letters that are no bytes.
    """

    decode: list[Any]
    layout: TrieLayout
    letter_objects: tuple[Hashable, ...] = ()


def save_trie(path: str | os.PathLike[str], decode: Sequence[Any], layout: TrieLayout) -> None:
    """Write a trie; the file has exactly the name given and appears when it is complete."""
    arrays: dict[str, npt.NDArray[Any]] = {
        field.name: getattr(layout, field.name) for field in dataclasses.fields(layout)
    }
    arrays["format"] = np.array(FORMAT)
    if all(isinstance(item, bytes) for item in decode):
        letters = Letters.of(decode)
        ids = (getattr(item, "token_id", PLAIN_BYTES) for item in decode)
        arrays["vocabulary"] = letters.codes
        arrays["lengths"] = letters.lengths
        arrays["token_ids"] = np.fromiter(ids, np.int64, len(decode))
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def load_trie(path: str | os.PathLike[str], decode: Sequence[Any] | None) -> StoredTrie:
    """Read a trie.

    Args:
        path: Of the file.
        decode: The vocabulary, needed if the file has none; else it must be equal.

    Raises:
        VocabularyError: The file has no vocabulary and none is given, or another one is;
            or the file is no trie of this format.
    """
    arrays = _arrays(path)
    layout = TrieLayout.from_arrays(arrays)
    stored = _stored_items(arrays) if "vocabulary" in arrays else None
    if decode is None and stored is None:
        raise VocabularyError(
            f"{os.fspath(path)} holds a trie with items that are no bytes; load it with the "
            f"vocabulary: load(path, decode=[...])"
        )
    if decode is None:
        return StoredTrie(stored or [], layout)
    items = list(decode)
    letters = Letters.of(items)
    same = (
        _same_layout(TrieLayout.build(letters), layout)
        if stored is None
        else [*map(item_key, items)] == [*map(item_key, stored)]
    )
    if not same:
        raise VocabularyError(
            f"{os.fspath(path)} holds the trie of another vocabulary; build it anew"
        )
    return StoredTrie(items, layout, letters.objects)


def _arrays(path: str | os.PathLike[str]) -> dict[str, npt.NDArray[Any]]:
    try:
        with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as stored:
            found = stored.get("format", np.array(None))
            arrays = dict(stored) if np.array_equal(found, FORMAT) else {}
    except (ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise VocabularyError(
            f"{os.fspath(path)} is no file that `save` wrote, or it is damaged: {error}"
        ) from error
    if not arrays:
        raise VocabularyError(
            f"{os.fspath(path)} holds format {found} of a trie; this version reads {FORMAT}"
        )
    return arrays


def _stored_items(arrays: dict[str, npt.NDArray[Any]]) -> list[Any]:
    blob = arrays["vocabulary"].tobytes()
    ends = np.cumsum(arrays["lengths"])
    starts = (ends - arrays["lengths"]).tolist()
    rows = zip(starts, ends.tolist(), arrays["token_ids"].tolist(), strict=True)
    return [
        blob[start:end] if key == PLAIN_BYTES else Token(key, blob[start:end])
        for start, end, key in rows
    ]


def _same_layout(built: TrieLayout, stored: TrieLayout) -> bool:
    return all(
        np.array_equal(getattr(built, field.name), getattr(stored, field.name))
        for field in dataclasses.fields(built)
    )
