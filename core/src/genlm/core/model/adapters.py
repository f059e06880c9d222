"""`Adapters`: the LoRA adapters of a model, by user-defined names.

The engine knows every adapter by an engine name that is never reused, so that cached rows and
prefixes of a removed adapter are not mistaken for those of its successor.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

from genlm.core.base.errors import (
    AdapterError,
    AdapterLimitError,
    UnknownAdapterError,
    UnsupportedCapabilityError,
)
from genlm.core.engine.engine import Capability, Engine, LoraEngine, require_capability
from genlm.core.scheduler import Scheduler

_PRELOADED = "the model itself"
"""Takes the place of the folder of an adapter that the engine has preloaded."""

_FILE_PREFIX = "adapter_"
"""Prefix of the names of peft's files; trainers write other files to the same folder."""

_Files = frozenset[tuple[str, int, int, int]]
"""Name, inode, size and modification time of each file of an adapter."""


class Adapter(NamedTuple):
    """An adapter that was loaded, or the base model.

    Attributes:
        name: User-defined name, None for the base model.
        engine_name: Name in the engine, None for the base model.
        folder: Folder from which it was loaded.
        files: State of the files in the folder before it was loaded.
    """

    name: str | None
    engine_name: str | None
    folder: str
    files: _Files = frozenset()


BASE_MODEL = Adapter(None, None, _PRELOADED)
"""Takes the place of an adapter in requests for the base model."""


class Adapters:
    """The loaded adapters; every method may be called from any thread.

    Args:
        scheduler: Scheduler of the engine, which loads and removes adapters on its thread, and
            whose `adapters` are the names of those that it has preloaded.
        backend: Engine name for messages.
        drop_rows: Function of an engine name that drops the cached rows of the adapter.
    """

    def __init__(
        self,
        scheduler: Scheduler[Engine],
        *,
        backend: str,
        drop_rows: Callable[[str | None], None],
    ) -> None:
        self._scheduler = scheduler
        self._backend = backend
        self._drop_rows = drop_rows
        preloaded: Iterable[str] = getattr(scheduler.engine, "adapters", ())
        self._by_name = {name: Adapter(name, name, _PRELOADED) for name in preloaded}
        self._plain_names = {*self._by_name}  # engine names without a number
        self._numbers = itertools.count(2)
        self._uses_numbers = False

    @property
    def names(self) -> tuple[str, ...]:
        """User-defined names of the loaded adapters, in the order of loading."""
        return tuple(self._by_name)

    def find(self, name: str) -> Adapter:
        """Return a loaded adapter."""
        _check_name(name)
        adapter = self._by_name.get(name)
        if adapter is None:
            self._require_adapters()
            raise UnknownAdapterError(name, self._by_name)
        return adapter

    def load(self, path: str | os.PathLike[str], name: str, *, replace: bool) -> None:
        """Load an adapter; see `AsyncLM.load_lora`."""
        self._require_adapters()
        _check_name(name)
        if not name:
            raise AdapterError(
                f"cannot load {path!r} under an empty name; an adapter's name has at least one "
                f"character"
            )
        path = os.fsdecode(path)
        folder = os.path.realpath(path)

        def load(engine: Engine) -> None:  # on the engine's thread, so one at a time
            loaded = self._by_name.get(name)
            if loaded is not None and not replace:
                if loaded.folder == folder:
                    if loaded.files == _files(folder):
                        return
                    raise AdapterError(
                        f"adapter {name!r} is loaded from {path!r}, but files of this folder "
                        f"have changed since; pass replace=True to load the new weights"
                    )
                raise AdapterError(
                    f"cannot load {path!r} as adapter {name!r}, which is already loaded "
                    f"from {loaded.folder!r}; choose another name, or pass replace=True"
                )
            engine_name = self._unused_engine_name(name)
            lora_engine = cast("LoraEngine", engine)
            files = _files(folder)  # before loading, so that later changes are detected
            try:
                lora_engine.add_adapter(engine_name, path)
            except AdapterLimitError as error:
                if loaded is None or not self._is_removable(engine, loaded):
                    raise
                if self._is_in_use(loaded):
                    raise AdapterLimitError(
                        f"adapter {name!r} cannot be replaced while requests use it, because "
                        f"the engine has loaded its maximum number of adapters; wait for "
                        f"these requests or cancel them first. The engine: {error}"
                    ) from error
                if self._by_name.pop(name, None) is None:  # another thread has removed it
                    raise
                self._remove_from(engine, loaded)
                lora_engine.add_adapter(engine_name, path)
            if not self._uses_numbers:
                self._plain_names.add(engine_name)
            replaced = self._by_name.get(name)  # it may have been removed in the meantime
            self._by_name[name] = Adapter(name, engine_name, folder, files)
            if replaced is not None:
                self._free(replaced)

        self._scheduler.run(load)

    def remove(self, name: str) -> None:
        """Unload an adapter; see `AsyncLM.unload_lora`."""
        is_preloaded = self.find(name).folder == _PRELOADED
        if not is_preloaded and not hasattr(self._scheduler.engine, "remove_adapter"):
            raise UnsupportedCapabilityError(
                "unload_lora", self._backend, "its engine lacks the method remove_adapter"
            )
        adapter = self._by_name.pop(name, None)
        if adapter is None:  # another thread removed it
            raise UnknownAdapterError(name, self._by_name)
        self._free(adapter)

    def _require_adapters(self) -> None:
        require_capability(self._scheduler.engine, Capability.LORA, self._backend)

    def _unused_engine_name(self, name: str) -> str:
        """Return an engine name that no adapter of this engine has had.

        After the first removal, every name has a number, and no number is used twice. Names of
        earlier adapters need not be stored then: a program may load adapters without end.
        """
        if not self._uses_numbers and name not in self._plain_names:
            return name
        self._uses_numbers = True
        numbered = (f"{name}@{number}" for number in self._numbers)
        return next(candidate for candidate in numbered if candidate not in self._plain_names)

    def _free(self, adapter: Adapter) -> None:
        """Free a removed adapter once the requests that use it have ended."""
        if adapter.folder != _PRELOADED:
            self._scheduler.run_after(
                lambda query: query.adapter == adapter.engine_name,
                lambda engine: self._remove_from(engine, adapter),
            )

    @staticmethod
    def _is_removable(engine: Engine, adapter: Adapter) -> bool:
        return adapter.folder != _PRELOADED and hasattr(engine, "remove_adapter")

    def _is_in_use(self, adapter: Adapter) -> bool:
        return self._scheduler.has_query(lambda query: query.adapter == adapter.engine_name)

    def _remove_from(self, engine: Engine, adapter: Adapter) -> None:
        """Remove an adapter from the engine, and its rows from the output cache."""
        self._uses_numbers = True
        self._drop_rows(adapter.engine_name)
        if hasattr(engine, "remove_adapter"):
            engine.remove_adapter(adapter.engine_name)


def _files(folder: str) -> _Files:
    """Return the state of an adapter's files; empty if the folder is on another machine."""
    try:
        with os.scandir(folder) as entries:
            return frozenset(
                (entry.name, stat.st_ino, stat.st_size, stat.st_mtime_ns)
                for entry in entries
                if entry.name.startswith(_FILE_PREFIX)
                for stat in [entry.stat()]
            )
    except OSError:
        return frozenset()


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"an adapter's name is a string; found {name!r}")
