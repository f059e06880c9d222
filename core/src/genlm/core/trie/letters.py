"""Vocabulary items as sequences of letters, and their order.

A letter is a byte for bytes-like items and any hashable object for others (an
end-of-sequence object that is its own only letter, the characters of a string). Bytes
are coded as themselves, other letters from 256 on in order of appearance.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from genlm.core.errors import VocabularyError

__all__ = ["Letters", "item_key", "shared_prefixes", "sorted_order", "spell"]

FIRST_OBJECT = 256
"""Code of the first letter that is no byte."""


@dataclass(frozen=True)
class Letters:
    """The letters of all items, one item after the other.

    Attributes:
        codes: Of every letter; uint8 if all are bytes, else uint16 or uint32.
        lengths: Letters of each item, int64, shape `(items,)`.
        objects: The letters that are no bytes; the first has code 256.
    """

    codes: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]
    objects: tuple[Hashable, ...] = ()

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Where each item's letters begin in `codes`."""
        return np.concatenate([[0], np.cumsum(self.lengths)[:-1]])

    @classmethod
    def of(cls, items: Sequence[Any]) -> Letters:
        """Read the letters of items.

        Raises:
            VocabularyError: An item is neither bytes nor an iterable of hashable letters.
        """
        try:
            blob = b"".join(items)  # tokens are bytes: one copy for all of them
        except TypeError:
            return cls._of_mixed(items)
        lengths = np.fromiter(map(len, items), dtype=np.int64, count=len(items))
        return cls(np.frombuffer(blob, dtype=np.uint8), lengths)

    @classmethod
    def _of_mixed(cls, items: Sequence[Any]) -> Letters:
        code_of: dict[Hashable, int] = {}
        words: list[bytes | list[int]] = []
        for position, item in enumerate(items):
            if isinstance(item, bytes):
                words.append(item)
            else:
                words.append([_code(code_of, letter) for letter in _spelt(item, position)])
        lengths = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
        dtype = np.uint16 if FIRST_OBJECT + len(code_of) <= 1 << 16 else np.uint32
        codes = np.empty(int(lengths.sum()), dtype)
        is_bytes = np.array([isinstance(word, bytes) for word in words], dtype=bool)
        of_bytes = np.repeat(is_bytes, lengths)
        codes[of_bytes] = np.frombuffer(
            b"".join(word for word in words if isinstance(word, bytes)), dtype=np.uint8
        )
        codes[~of_bytes] = [c for word in words if not isinstance(word, bytes) for c in word]
        return cls(codes, lengths, tuple(code_of))


def item_key(item: Any) -> Hashable:
    """What names an item in `word2leaf`: `(bytes, id)` for a token, else the item itself."""
    token_id = getattr(item, "token_id", None)
    if isinstance(item, bytes) and token_id is not None:
        return bytes(item), token_id
    key: Hashable = item
    return key


def _spelt(item: Any, position: int) -> list[Any]:
    """The letters of an item that is no `bytes`."""
    try:
        letters = list(item)
        hash(tuple(letters))
    except TypeError as error:
        raise VocabularyError(
            f"item {position} of the vocabulary is {item!r}; expected a Token, bytes or an "
            f"iterable of hashable letters ({error})"
        ) from error
    return letters


def _code(code_of: dict[Hashable, int], letter: Any) -> int:
    if isinstance(letter, int | np.integer) and 0 <= letter < FIRST_OBJECT:
        return int(letter)
    return code_of.setdefault(letter, FIRST_OBJECT + len(code_of))


def sorted_order(letters: Letters) -> npt.NDArray[np.int64]:
    """Positions of the items in the order of their letters' codes; equal items by position.

    As many letters as fit are packed into one 64-bit key, with their number in the low
    bits so that an end sorts before any letter. Items whose keys tie go on to the next.
    """
    width = letters.codes.itemsize
    per_key = 8 // width - 1
    starts, lengths = letters.starts, letters.lengths
    group = np.zeros(len(lengths), dtype=np.int64)  # rank of the first item that ties
    order = np.arange(len(lengths))
    tied = np.arange(len(lengths))  # places in `order` that are not settled
    offset = 0
    while len(tied):
        items = order[tied]
        keys = _packed(letters, starts[items] + offset, lengths[items] - offset, per_key)
        if offset:
            inner = np.lexsort((items, keys, group[tied]))
        else:
            inner = np.argsort(keys, kind="stable")
        order[tied], keys, groups = items[inner], keys[inner], group[tied]
        starts_group = np.ones(len(tied), dtype=bool)
        starts_group[1:] = (keys[1:] != keys[:-1]) | (groups[1:] != groups[:-1])
        first = np.flatnonzero(starts_group)
        sizes = np.diff(np.append(first, len(tied)))
        group[tied] = np.repeat(tied[first], sizes)
        offset += per_key
        unsettled = np.repeat(sizes > 1, sizes) & (lengths[order[tied]] > offset)
        tied = tied[unsettled]
    return order


def _packed(
    letters: Letters,
    starts: npt.NDArray[np.int64],
    remaining: npt.NDArray[np.int64],
    per_key: int,
) -> npt.NDArray[np.uint64]:
    """Up to `per_key` letters from each start, big end first, then their number.

    The number of what goes on after them is `per_key + 1`, whatever its length.
    """
    bits = 8 * letters.codes.itemsize
    count = np.minimum(remaining, per_key + 1)
    keys = np.zeros(len(starts), dtype=np.uint64)
    last = max(len(letters.codes) - 1, 0)
    for place in range(per_key):
        keys <<= np.uint64(bits)
        if not len(letters.codes):
            continue
        code = letters.codes[np.minimum(starts + place, last)].astype(np.uint64)
        keys |= np.where(place < count, code, np.uint64(0))
    return (keys << np.uint64(bits)) | count.astype(np.uint64)


def shared_prefixes(letters: Letters, order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many letters each item, in sorted order, shares with the one before it."""
    starts, lengths = letters.starts[order], letters.lengths[order]
    shared = np.zeros(len(order), dtype=np.int64)
    shortest = np.minimum(lengths[1:], lengths[:-1])
    same = np.arange(1, len(order))  # ranks that agree so far
    depth = 0
    while len(same):
        same = same[shortest[same - 1] > depth]
        agree = letters.codes[starts[same] + depth] == letters.codes[starts[same - 1] + depth]
        same = same[agree]
        depth += 1
        shared[same] = depth
    return shared


def spell(codes: Iterable[int], objects: Sequence[Hashable]) -> list[Any]:
    """The letters that codes stand for."""
    return [code if code < FIRST_OBJECT else objects[code - FIRST_OBJECT] for code in codes]
