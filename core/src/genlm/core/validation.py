"""Checks of what users pass as token ids, before anything is scheduled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import TYPE_CHECKING, Any

from genlm.core.errors import (
    ContextLengthError,
    EmptySequenceError,
    TokenIdError,
    TokenTypeError,
)

if TYPE_CHECKING:
    import numpy as np
    import torch

    TokenIds = Sequence[int] | np.ndarray[Any, Any] | torch.Tensor

__all__ = ["checked_token_ids"]


def checked_token_ids(
    token_ids: TokenIds, *, vocab_size: int, max_context: int | None
) -> tuple[int, ...]:
    """Return token ids as a tuple of Python integers.

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
    if isinstance(token_ids, (str, bytes, bytearray)) or not isinstance(token_ids, Iterable):
        raise TokenTypeError(f"{type(token_ids).__name__} {_shortened(token_ids)}")
    array_values = getattr(token_ids, "tolist", None)
    values: Any = token_ids if array_values is None else array_values()
    try:
        ids = tuple(map(index, values))
    except TypeError:
        raise TokenTypeError(_first_wrong(values)) from None
    if not ids:
        raise EmptySequenceError
    if max_context is not None and len(ids) > max_context:
        raise ContextLengthError(len(ids), max_context)
    if min(ids) < 0 or max(ids) >= vocab_size:
        position = next(i for i, value in enumerate(ids) if not 0 <= value < vocab_size)
        raise TokenIdError(ids[position], position, vocab_size)
    return ids


def _first_wrong(values: Any) -> str:
    if not isinstance(values, Iterable):
        return f"a single {type(values).__name__}, {_shortened(values)}"
    for position, value in enumerate(values):
        if not hasattr(value, "__index__"):
            return f"{type(value).__name__} {_shortened(value)} at position {position}"
    return "an array that is not one-dimensional"


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
