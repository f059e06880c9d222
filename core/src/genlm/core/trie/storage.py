"""Saving and loading tries in numpy's `.npz` format, without pickle.

A file contains the layout and, if all items are tokens or bytes, the vocabulary. A
vocabulary with items of other types is not stored and has to be passed to `load`.
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
from genlm.core.trie.symbols import Symbols, item_key
from genlm.core.vocab import Token

__all__ = ["StoredTrie", "load_trie", "save_trie"]

FORMAT = 1
PLAIN_BYTES = -1
"""The stored id of an item that is plain bytes."""
_STORED_AS = {"symbol": "letter"}
"""Attributes of `TrieLayout` that have another name in the file."""


@dataclasses.dataclass(frozen=True)
class StoredTrie:
    """A loaded trie, which the class of a trie accepts in place of a vocabulary.

    Attributes:
        decode: The vocabulary.
        layout: Its trie as arrays.
        symbol_objects: The symbols other than bytes.
    """

    decode: list[Any]
    layout: TrieLayout
    symbol_objects: tuple[Hashable, ...] = ()


def save_trie(path: str | os.PathLike[str], decode: Sequence[Any], layout: TrieLayout) -> None:
    """Write a trie to exactly this path; the file appears when it is complete."""
    arrays: dict[str, npt.NDArray[Any]] = {
        _STORED_AS.get(field.name, field.name): getattr(layout, field.name)
        for field in dataclasses.fields(layout)
    }
    arrays["format"] = np.array(FORMAT)
    if all(isinstance(item, bytes) for item in decode):
        symbols = Symbols.of(decode)
        ids = (getattr(item, "token_id", PLAIN_BYTES) for item in decode)
        arrays["vocabulary"] = symbols.codes
        arrays["lengths"] = symbols.lengths
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
        path: The file.
        decode: The vocabulary. Required if the file does not contain it, else it must be
            equal to the stored one.

    Raises:
        VocabularyError: The vocabulary is missing or differs from the stored one, or the
            file is not a trie of this format.
    """
    arrays = _arrays(path)
    layout = TrieLayout.from_arrays(
        arrays | {name: arrays[stored] for name, stored in _STORED_AS.items()}
    )
    stored = _stored_items(arrays) if "vocabulary" in arrays else None
    if decode is None and stored is None:
        raise VocabularyError(
            f"{os.fspath(path)} contains a trie with items other than bytes; load it with the "
            f"vocabulary: load(path, decode=[...])"
        )
    if decode is None:
        return StoredTrie(stored or [], layout)
    items = list(decode)
    symbols = Symbols.of(items)
    same = (
        _same_layout(TrieLayout.build(symbols), layout)
        if stored is None
        else [*map(item_key, items)] == [*map(item_key, stored)]
    )
    if not same:
        raise VocabularyError(
            f"{os.fspath(path)} contains the trie of another vocabulary; build it anew"
        )
    return StoredTrie(items, layout, symbols.objects)


def _arrays(path: str | os.PathLike[str]) -> dict[str, npt.NDArray[Any]]:
    try:
        with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as stored:
            found = stored.get("format", np.array(None))
            arrays = dict(stored) if np.array_equal(found, FORMAT) else {}
    except (ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise VocabularyError(
            f"{os.fspath(path)} was not written by `save`, or it is damaged: {error}"
        ) from error
    if not arrays:
        raise VocabularyError(
            f"{os.fspath(path)} contains a trie in format {found}; this version reads {FORMAT}"
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
