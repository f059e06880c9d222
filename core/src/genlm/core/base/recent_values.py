"""The most recently used values of a function, by key."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")

MAX_VALUES = 8
"""Maximum number of stored values."""


def recent_value(values: dict[KeyT, ValueT], key: KeyT, build: Callable[[], ValueT]) -> ValueT:
    """Return the value of a key, which is built unless it is among the stored values.

    The stored values, which are not None, are in the order of their last use. Threads that use
    the same values at the same time may build a value twice.
    """
    value = values.pop(key, None)
    if value is None:
        value = build()
    values[key] = value
    for oldest in list(values)[:-MAX_VALUES]:
        values.pop(oldest, None)
    return value
