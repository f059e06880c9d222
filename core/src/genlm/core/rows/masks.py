"""`Mask`: a set of token ids, from booleans, ids or packed bitmasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import index
from typing import Any, TypeAlias

import numpy as np
import torch

from genlm.core.base.arrays import host_array
from genlm.core.base.errors import TokenTypeError
from genlm.core.base.validation import Integers, checked_ids, checked_integer

MaskLike: TypeAlias = "Mask | Integers | Sequence[bool]"

_Words = np.ndarray[Any, np.dtype[np.uint8]]

_FORMS = (
    "booleans, one for each token, or token ids (llm.vocabulary.mask(condition) returns one; "
    "Mask.from_packed takes bits)"
)


class Mask:
    """A set of token ids of a vocabulary: immutable, hashable, one bit per id.

    Methods with a mask argument accept the forms of `allowed`. A mask for many requests should
    be created once, so that it is compared and hashed quickly. `a | b`, `a & b`, `a - b` and
    `a ^ b` are set operations, and `~a` contains all ids that are not in `a`.

    A mask contains the EOS id only if it is passed explicitly:
    `llm.vocabulary.mask(...) | Mask([llm.tokenizer.eos_token_id], llm.vocab_size)` allows the
    end of a text. `~a` contains EOS and all other special tokens unless they are in `a`.

    Args:
        allowed: One of
            - booleans, one per id of the vocabulary: a list, numpy or torch;
            - ids: a list, tuple or set of integers, or an array of any integer dtype except 32
              bits;
            - packed bits: an int32 array of shape `(1, ceil(vocab_size / 32))`, as for
              `from_packed`;
            - a `Mask`.
        vocab_size: Number of ids in the vocabulary.

    Raises:
        ValueError: Booleans, words or a mask are for another number of ids, or an int32 array
            has one dimension and may be ids or packed bits.
        TokenIdError: An id is outside the vocabulary.
        TokenTypeError: `allowed` has none of these forms, or is one integer, 0 or 1, per id.
        TypeError: `vocab_size` is not an integer.
    """

    __slots__ = ("_bytes", "_hash", "vocab_size")

    def __init__(self, allowed: MaskLike, vocab_size: int) -> None:
        self.vocab_size = vocab_size = checked_integer("vocab_size", vocab_size, 0)
        self._bytes = _pack(allowed, vocab_size).tobytes()
        self._hash = hash(self._bytes)

    @classmethod
    def from_packed(cls, words: np.ndarray[Any, Any] | torch.Tensor, vocab_size: int) -> Mask:
        """Create a mask from packed bits, such as a row of a bitmask of xgrammar or llguidance.

        Args:
            words: int32, shape `(ceil(vocab_size / 32),)`, id i in bit `i % 32` of word
                `i // 32`; numpy or torch. Bits beyond the vocabulary are ignored. Grammar
                libraries set the bit of the EOS token if the text may end.
            vocab_size: Number of ids in the vocabulary.

        Raises:
            ValueError: `words` has another shape or dtype.
        """
        vocab_size = checked_integer("vocab_size", vocab_size, 0)
        array = host_array(words, "a mask")
        shape = (-(-vocab_size // 32),)
        if array.dtype != np.int32 or array.shape != shape:
            raise ValueError(
                f"packed bits of a mask are int32 words of shape {shape} for this vocabulary; "
                f"found {array.dtype}, shape {array.shape}"
            )
        return _from_bytes(_pack_words(array, vocab_size).tobytes(), vocab_size)

    @property
    def packed(self) -> _Words:
        """The bits, eight ids per byte, the lowest id in the lowest bit; read-only."""
        return np.frombuffer(self._bytes, np.uint8)

    @property
    def nbytes(self) -> int:
        """Memory of the bits."""
        return len(self._bytes)

    def __len__(self) -> int:
        return int.from_bytes(self._bytes).bit_count()

    def __bool__(self) -> bool:
        return any(self._bytes)

    def __iter__(self) -> Iterator[int]:
        bits = np.unpackbits(self.packed, count=self.vocab_size, bitorder="little")
        return iter(np.flatnonzero(bits).tolist())

    def __contains__(self, token_id: object) -> bool:
        try:
            number = index(token_id)  # type: ignore[arg-type]
        except TypeError:
            return False
        return 0 <= number < self.vocab_size and bool(
            self._bytes[number >> 3] >> (number & 7) & 1
        )

    def __or__(self, other: Mask) -> Mask:
        return self._combine(other, np.bitwise_or)

    def __and__(self, other: Mask) -> Mask:
        return self._combine(other, np.bitwise_and)

    def __sub__(self, other: Mask) -> Mask:
        return self._combine(other, lambda mine, theirs: mine & ~theirs)

    def __xor__(self, other: Mask) -> Mask:
        return self._combine(other, np.bitwise_xor)

    def __invert__(self) -> Mask:
        all_ids = np.packbits(np.ones(self.vocab_size, np.bool_), bitorder="little")
        return _from_bytes((all_ids ^ self.packed).tobytes(), self.vocab_size)

    def _combine(self, other: Mask, operation: Callable[[_Words, _Words], _Words]) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        _check_length(other, self.vocab_size)
        return _from_bytes(operation(self.packed, other.packed).tobytes(), self.vocab_size)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        return self.vocab_size == other.vocab_size and self._bytes == other._bytes

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        return _from_bytes, (self._bytes, self.vocab_size)  # hashes differ between processes

    def __repr__(self) -> str:
        return f"<Mask of {len(self)} of {self.vocab_size} token ids>"


def _from_bytes(packed: bytes, vocab_size: int) -> Mask:
    mask = object.__new__(Mask)
    mask.vocab_size, mask._bytes, mask._hash = vocab_size, packed, hash(packed)
    return mask


def _pack(allowed: Any, size: int) -> _Words:
    if isinstance(allowed, Mask):
        _check_length(allowed, size)
        return allowed.packed
    values: Any = host_array(allowed, "a mask") if hasattr(allowed, "detach") else allowed
    if isinstance(values, (list, tuple)) and values and isinstance(values[0], bool):
        values = np.asarray(values)
    kind = getattr(values, "dtype", None)
    if kind == np.bool_:
        _check_shape("booleans", values.shape, (size,))
        return np.packbits(values, bitorder="little")
    if kind == np.int32:
        if values.ndim == 1:
            raise ValueError(
                "an int32 array of one dimension may be token ids or packed bits: pass "
                "Mask.from_packed(words, vocab_size) for bits, or ids as int64"
            )
        _check_shape("packed bits (32 in each word)", values.shape, (1, -(-size // 32)))
        return _pack_words(values, size)
    if isinstance(values, (set, frozenset)):
        values = list(values)
    try:
        ids = checked_ids(values, size, "a mask")
    except TokenTypeError as error:
        raise TokenTypeError(error.found, "a mask", _FORMS) from None
    if len(ids) == size > 2 and set(ids) <= {0, 1}:
        raise TokenTypeError(
            f"{size} integers, all 0 or 1; convert them to booleans", "a mask", _FORMS
        )
    flags = np.zeros(size, np.bool_)
    flags[np.array(ids, np.int64)] = True
    return np.packbits(flags, bitorder="little")


def _pack_words(words: _Words, size: int) -> _Words:
    bytes_ = words.astype("<i4").reshape(-1).view(np.uint8)  # a copy, which is contiguous
    bits = np.unpackbits(bytes_, count=size, bitorder="little")  # drops bits beyond
    return np.packbits(bits, bitorder="little")


def _check_shape(form: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise ValueError(
            f"a mask of {form} has shape {tuple(shape)}; expected {expected} for this "
            f"vocabulary"
        )


def _check_length(mask: Mask, size: int) -> None:
    if mask.vocab_size != size:
        raise ValueError(f"a mask over {mask.vocab_size} token ids for a vocabulary of {size}")
