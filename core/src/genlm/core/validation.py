"""Checks of what users pass as token ids, before anything is scheduled."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex

from genlm.core.errors import (
    ContextLengthError,
    EmptySequenceError,
    TokenIdError,
    TokenTypeError,
)

if TYPE_CHECKING:
    import numpy as np
    import torch

    TokenIds = Sequence[SupportsIndex] | np.ndarray[Any, Any] | torch.Tensor

__all__ = ["checked_integers", "checked_token_ids"]


def checked_token_ids(
    token_ids: TokenIds, *, vocab_size: int, max_context: int | None
) -> tuple[tuple[int, ...], bytes]:
    """Return token ids as a tuple of Python integers, and packed in 32 bits each.

    Args:
        token_ids: A flat sequence of integers: list, tuple, numpy or torch.
        vocab_size: Ids must be below it.
        max_context: The most ids allowed, None for no limit.

    Raises:
        TokenTypeError: Not a flat sequence of integers.
        EmptySequenceError: No ids.
        ContextLengthError: More than `max_context` ids.
        TokenIdError: An id that is negative or not below `vocab_size`.
    """
    ids = checked_integers(token_ids)
    if not ids:
        raise EmptySequenceError
    if max_context is not None and len(ids) > max_context:
        raise ContextLengthError(len(ids), max_context)
    try:
        packed = array("I", ids)  # of numbers from 0 on
    except OverflowError:
        packed = None
    if packed is None or max(ids) >= vocab_size:
        position = next(i for i, value in enumerate(ids) if not 0 <= value < vocab_size)
        raise TokenIdError(ids[position], position, vocab_size)
    return ids, packed.tobytes()


def checked_integers(values: TokenIds) -> tuple[int, ...]:
    """Return a flat sequence of integers as a tuple of Python integers.

    Sets, mappings and generators are refused: they have no order or give it once. So
    are arrays of booleans, which are masks.

    Raises:
        TokenTypeError: Not a flat sequence of integers.
    """
    if type(values) is list or type(values) is tuple:  # most often, so without more ado
        return _integers(values)
    array_values = getattr(values, "tolist", None)
    if array_values is None and (
        isinstance(values, (str, bytes, bytearray)) or not isinstance(values, Sequence)
    ):
        raise TokenTypeError(_no_sequence(values))
    if str(getattr(values, "dtype", "")) in {"bool", "torch.bool"}:
        raise TokenTypeError("an array of booleans")
    return _integers(values if array_values is None else array_values())


def _integers(values: Any) -> tuple[int, ...]:
    try:
        return tuple(map(index, values))
    except TypeError:
        raise TokenTypeError(_first_wrong(values)) from None


def _no_sequence(values: object) -> str:
    hint = "; llm.tokenizer.encode makes ids of text" if isinstance(values, str) else ""
    return f"{type(values).__name__} {_shortened(values)}{hint}"


def _first_wrong(values: Any) -> str:
    if not isinstance(values, Iterable):
        return f"a single {type(values).__name__}, {_shortened(values)}"
    position, value = next(pair for pair in enumerate(values) if not _is_integer(pair[1]))
    return f"{type(value).__name__} {_shortened(value)} at position {position}"


def _is_integer(value: Any) -> bool:
    try:
        index(value)
    except TypeError:
        return False
    return True


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
