"""Vocabulary items as sequences of symbols, and their sorted order.

The symbols of `bytes` are their bytes; the symbols of another item are the hashable objects
over which it iterates: the characters of a string, or an end-of-sequence object that yields
itself. The code of a byte is its value; other symbols have codes from 256 on, in order of
appearance.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from genlm.core.base.errors import VocabularyError

FIRST_OBJECT = 256
"""Code of the first symbol other than a byte."""


@dataclass(frozen=True)
class Symbols:
    """The symbols of all items, concatenated.

    Attributes:
        codes: Code of every symbol; uint8 if all symbols are bytes, else uint16 or uint32.
        lengths: Number of symbols of each item, int64, `(items,)`.
        objects: The symbols other than bytes; the first has code 256.
    """

    codes: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]
    objects: tuple[Hashable, ...] = ()

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Index in `codes` of each item's first symbol."""
        return np.concatenate([[0], np.cumsum(self.lengths)[:-1]])

    @classmethod
    def of(cls, items: Sequence[Any]) -> Symbols:
        """Read the symbols of items."""
        # Of other buffers, such as arrays of numpy, the bytes are not the symbols.
        if not all(issubclass(kind, bytes | bytearray) for kind in set(map(type, items))):
            return cls._of_mixed(items)
        lengths = np.fromiter(map(len, items), dtype=np.int64, count=len(items))
        return cls(np.frombuffer(b"".join(items), dtype=np.uint8), lengths)

    @classmethod
    def _of_mixed(cls, items: Sequence[Any]) -> Symbols:
        code_of: dict[Hashable, int] = {}
        words: list[bytes | list[int]] = []
        for position, item in enumerate(items):
            if isinstance(item, bytes):
                words.append(item)
            else:
                words.append([_code(code_of, symbol) for symbol in _symbols_of(item, position)])
        lengths = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
        dtype = np.uint16 if FIRST_OBJECT + len(code_of) <= 1 << 16 else np.uint32
        codes = np.empty(int(lengths.sum()), dtype)
        is_bytes = np.array([isinstance(word, bytes) for word in words], dtype=bool)
        is_byte_code = np.repeat(is_bytes, lengths)
        codes[is_byte_code] = np.frombuffer(
            b"".join(word for word in words if isinstance(word, bytes)), dtype=np.uint8
        )
        codes[~is_byte_code] = [
            code for word in words if not isinstance(word, bytes) for code in word
        ]
        return cls(codes, lengths, tuple(code_of))


def is_byte(symbol: Any) -> bool:
    """Whether a symbol is a byte, whose code is its value."""
    return isinstance(symbol, int | np.integer) and 0 <= int(symbol) < FIRST_OBJECT


def _symbols_of(item: Any, position: int) -> list[Any]:
    """Return the symbols of an item that is not `bytes`."""
    try:
        symbols = list(item)
        hash(tuple(symbols))
    except TypeError as error:
        raise VocabularyError(
            f"item {position} of the vocabulary is {item!r}; expected a Token, bytes or an "
            f"iterable of hashable symbols ({error})"
        ) from error
    return symbols


def _code(code_of: dict[Hashable, int], symbol: Any) -> int:
    if is_byte(symbol):
        return int(symbol)
    return code_of.setdefault(symbol, FIRST_OBJECT + len(code_of))


def sorted_order(symbols: Symbols) -> npt.NDArray[np.int64]:
    """Sort the items by their symbols' codes; the sort is stable.

    As many symbols as fit are packed into one 64-bit key, with their number in the low bits, so
    that a shorter item sorts before its extensions. Items with equal keys are compared by their
    next symbols.
    """
    width = symbols.codes.itemsize
    per_key = 8 // width - 1
    starts, lengths = symbols.starts, symbols.lengths
    group = np.zeros(len(lengths), dtype=np.int64)  # rank of the first item that ties
    order = np.arange(len(lengths))
    tied = np.arange(len(lengths))  # places in `order` that are still tied
    offset = 0
    while len(tied):
        items = order[tied]
        keys = _pack_keys(symbols, starts[items] + offset, lengths[items] - offset, per_key)
        inner = np.lexsort((items, keys, group[tied]))
        order[tied], keys, groups = items[inner], keys[inner], group[tied]
        starts_group = np.ones(len(tied), dtype=bool)
        starts_group[1:] = (keys[1:] != keys[:-1]) | (groups[1:] != groups[:-1])
        first = np.flatnonzero(starts_group)
        sizes = np.diff(np.append(first, len(tied)))
        group[tied] = np.repeat(tied[first], sizes)
        offset += per_key
        is_tied = np.repeat(sizes > 1, sizes) & (lengths[order[tied]] > offset)
        tied = tied[is_tied]
    return order


def _pack_keys(
    symbols: Symbols,
    starts: npt.NDArray[np.int64],
    remaining: npt.NDArray[np.int64],
    per_key: int,
) -> npt.NDArray[np.uint64]:
    """Pack up to `per_key` symbols from each start, most significant first, and their number.

    For items with more symbols the number is `per_key + 1`.
    """
    bits = 8 * symbols.codes.itemsize
    count = np.minimum(remaining, per_key + 1)
    keys = np.zeros(len(starts), dtype=np.uint64)
    last = max(len(symbols.codes) - 1, 0)
    for place in range(per_key):
        keys <<= np.uint64(bits)
        if not len(symbols.codes):
            continue
        code = symbols.codes[np.minimum(starts + place, last)].astype(np.uint64)
        keys |= np.where(place < count, code, np.uint64(0))
    return (keys << np.uint64(bits)) | count.astype(np.uint64)


def symbols_of_codes(codes: Iterable[int], objects: Sequence[Hashable]) -> list[Any]:
    """Map codes back to symbols."""
    return [code if code < FIRST_OBJECT else objects[code - FIRST_OBJECT] for code in codes]
