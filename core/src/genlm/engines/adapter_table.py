"""`AdapterTable`: the loaded adapters of an engine."""

from __future__ import annotations

import abc
from pathlib import Path
from typing import Generic, TypeVar

from genlm.core.base.errors import AdapterError, UnknownAdapterError

T = TypeVar("T")


class AdapterTable(abc.ABC, Generic[T]):
    """The loaded adapters of an engine, by name.

    Subclasses implement `_load(name, path)`, which returns an object for the adapter in the
    `Path`, or raises `AdapterError` and changes nothing, and, if resources must be freed,
    `_unload(name, adapter)`. This class handles names and their errors.

    Attributes:
        loaded: Results of `_load` by adapter name, oldest first.
    """

    def __init__(self) -> None:
        self.loaded: dict[str, T] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the loaded adapters, oldest first."""
        return tuple(self.loaded)

    def check_loaded(self, name: str | None) -> None:
        """Raise `UnknownAdapterError` unless an adapter is loaded; None is the base model."""
        if name is not None and name not in self.loaded:
            raise UnknownAdapterError(name, self.loaded)

    def load(self, name: str, path: str) -> None:
        """Load the adapter in `path` under a name.

        Args:
            name: Name that queries use.
            path: A folder or file; `~` is the user's home directory.

        Raises:
            AdapterError: The name is in use, or the adapter cannot be loaded. The loaded
                adapters are unchanged.
        """
        if name in self.loaded:
            raise AdapterError(
                f"an adapter named {name!r} is loaded already; choose another name"
            )
        self.loaded[name] = self._load(name, Path(path).expanduser())

    def remove(self, name: str) -> None:
        """Unload an adapter.

        Raises:
            UnknownAdapterError: The adapter is not loaded.
        """
        self.check_loaded(name)
        self._unload(name, self.loaded[name])
        del self.loaded[name]

    @abc.abstractmethod
    def _load(self, name: str, path: Path) -> T:
        """Load an adapter into the engine, or raise `AdapterError` and change nothing."""

    def _unload(self, name: str, adapter: T) -> None:
        """Free the result of `_load`. The adapter remains in the table if this raises."""
