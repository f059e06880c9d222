"""The base class of the immutable objects of a loaded model."""

from __future__ import annotations

from typing import Any, ClassVar, Self


class Immutable:
    """An immutable object of a loaded model; copies are itself, and it cannot be pickled."""

    __slots__ = ()

    _pickling_error: ClassVar[str]
    """Why the object cannot be pickled, and what to pickle in its place."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _memo: object) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(self._pickling_error)
