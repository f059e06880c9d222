"""`Mask`: a set of token ids, in any form in which programs have one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from genlm.core.errors import TokenIdError, TokenTypeError
from genlm.core.validation import checked_integers

if TYPE_CHECKING:
    from genlm.core.validation import Integers

    MaskLike: TypeAlias = "Mask | Integers | Sequence[bool]"

__all__ = ["Mask", "unpacked"]

_Words = np.ndarray[Any, np.dtype[np.uint8]]

_FORMS = (
    "booleans, one for each token, or token ids, or int32 words of packed bits "
    "(llm.vocabulary.mask(condition) makes one)"
)


class Mask:
    """A set of token ids of a vocabulary: immutable, hashable, one bit for each id.

    Methods that take a mask take what this takes. To use one mask in many requests make it
    once: comparing and hashing it then costs nothing.

    Args:
        allowed: One of
            - booleans, one for each id of the vocabulary: a list, numpy or torch;
            - ids: a list, tuple or set of integers, or an array of any integer type but 32
              bits;
            - packed bits: an int32 array of shape `(ceil(vocab_size / 32),)`, id i in bit
              `i % 32` of word `i // 32`, as a row of xgrammar's and llguidance's bitmasks;
            - a `Mask`.
        vocab_size: Number of ids in the vocabulary.

    Raises:
        ValueError: Booleans, words or a mask for another number of ids.
        TokenIdError: An id outside the vocabulary.
        TokenTypeError: None of these forms.
    """

    __slots__ = ("_bytes", "_hash", "vocab_size")

    def __init__(self, allowed: MaskLike, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._bytes = _packed(allowed, vocab_size).tobytes()
        self._hash = hash(self._bytes)

    @property
    def packed(self) -> _Words:
        """The bits, eight ids in a byte, the lowest id in the lowest bit; read-only."""
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

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mask):
            return NotImplemented
        return self.vocab_size == other.vocab_size and self._bytes == other._bytes

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        return _restored, (self._bytes, self.vocab_size)  # hashes differ between processes

    def __repr__(self) -> str:
        return f"<Mask of {len(self)} of {self.vocab_size} token ids>"


def _restored(packed: bytes, vocab_size: int) -> Mask:
    mask = object.__new__(Mask)
    mask.vocab_size, mask._bytes, mask._hash = vocab_size, packed, hash(packed)
    return mask


def unpacked(masks: Sequence[Mask | None], device: torch.device) -> torch.Tensor:
    """Return masks as booleans, those of None all true.

    Returns:
        Shape `(len(masks), vocab_size)`, or `(1, vocab_size)` if all are the same object;
        bool, on `device`.
    """
    distinct = {id(mask): mask for mask in masks}
    size = next(mask.vocab_size for mask in distinct.values() if mask is not None)
    full: _Words = np.full(-(-size // 8), 255, np.uint8)

    def packed(shown: Iterable[Mask | None]) -> _Words:
        return np.stack([full if each is None else each.packed for each in shown])

    if device.type == "cpu":
        shown = masks if len(distinct) > 1 else masks[:1]
        bits = np.unpackbits(packed(shown), axis=1, count=size, bitorder="little")
        return torch.from_numpy(bits).view(torch.bool)
    words = torch.from_numpy(packed(distinct.values())).to(device)  # each mask once
    if 1 < len(distinct) < len(masks):
        places = {key: place for place, key in enumerate(distinct)}
        words = words[torch.tensor([places[id(mask)] for mask in masks]).to(device)]
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    return ((words[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :size]


def _packed(allowed: Any, size: int) -> _Words:
    if isinstance(allowed, Mask):
        _check_length("a mask over", allowed.vocab_size, size)
        return allowed.packed
    values: Any = allowed.cpu().numpy() if isinstance(allowed, torch.Tensor) else allowed
    if isinstance(values, (list, tuple)) and values and isinstance(values[0], bool):
        values = np.asarray(values)
    kind = getattr(values, "dtype", None)
    if kind == np.bool_:
        _check_shape("booleans", values.shape, size)
        return np.packbits(values, bitorder="little")
    if kind == np.int32:
        _check_shape("packed bits (32 in each word)", values.shape, -(-size // 32))
        bits = np.ascontiguousarray(values).astype("<i4").view(np.uint8)
        unpacked = np.unpackbits(bits, count=size, bitorder="little")  # drops bits beyond
        return np.packbits(unpacked, bitorder="little")
    if isinstance(values, (set, frozenset)):
        values = list(values)
    try:
        ids = np.asarray(checked_integers(values), dtype=np.int64)
    except TokenTypeError as error:
        raise TokenTypeError(error.found, "a mask", _FORMS) from None
    outside = np.flatnonzero((ids < 0) | (ids >= size))
    if len(outside):
        position = int(outside[0])
        raise TokenIdError(int(ids[position]), position, size, "a mask")
    flags = np.zeros(size, np.bool_)
    flags[ids] = True
    return np.packbits(flags, bitorder="little")


def _check_shape(what: str, shape: tuple[int, ...], length: int) -> None:
    if shape != (length,):
        raise ValueError(
            f"a mask of {what} has shape {tuple(shape)}; expected ({length},) for this "
            f"vocabulary"
        )


def _check_length(what: str, found: int, size: int) -> None:
    if found != size:
        raise ValueError(f"{what} {found} token ids for a vocabulary of {size}")
