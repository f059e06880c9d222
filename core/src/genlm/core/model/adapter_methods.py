"""The methods of `AsyncLM` that load, unload and select LoRA adapters."""

from __future__ import annotations

import copy
import os
from typing import Self

from genlm.core.base.blocking import blocking, off_loop
from genlm.core.model.requests import Requests


class AdapterMethods:
    """The methods of `AsyncLM` that load, unload and select LoRA adapters."""

    _requests: Requests

    async def aload_lora(
        self,
        lora_path: str | os.PathLike[str],
        lora_name: str = "lora_1",
        *,
        replace: bool = False,
    ) -> None:
        """Load a LoRA adapter. Loading the same folder under the same name has no effect.

        A program that trains an adapter loads each new version with `replace=True`.

        Args:
            lora_path: Adapter folder.
            lora_name: Adapter name for requests.
            replace: Whether the new adapter replaces a loaded adapter of this name, as if
                `unload_lora` had been called for the loaded one. If the engine has its maximum
                number of adapters and no request uses the loaded one, that is unloaded first,
                and remains unloaded if the new one cannot be loaded.

        Raises:
            UnsupportedCapabilityError: The engine serves no adapters.
            AdapterError: The adapter cannot be loaded; its name belongs to another folder, or
                to an earlier version of the files of this folder, and `replace` is false;
                `AdapterLimitError` if the engine has loaded its maximum number of adapters.
            TypeError: The name is not a string, or the folder is not a path.
        """
        await off_loop(self._requests.adapters.load, lora_path, lora_name, replace=replace)

    load_lora = blocking(aload_lora, "load_lora")

    def unload_lora(self, lora_name: str) -> None:
        """Unload an adapter without waiting; its name can be reused at once.

        In-flight requests complete with the adapter. After the last of them, the adapter's
        rows are dropped from the output cache and its weights are freed; for a preloaded
        adapter, only the name is removed. The next token of a `stream` fails with
        `UnknownAdapterError`.

        Raises:
            UnknownAdapterError: `lora_name` is not loaded.
            UnsupportedCapabilityError: The engine serves no adapters, or cannot remove them.
        """
        self._requests.adapters.remove(lora_name)

    @property
    def lora_names(self) -> tuple[str, ...]:
        """Names of the loaded adapters; preloaded adapters come first."""
        return self._requests.adapters.names

    @property
    def lora_name(self) -> str | None:
        """Default adapter of requests, None for the base model."""
        return self._requests.default_lora

    def with_lora(self, lora_name: str | None) -> Self:
        """Return this model with another default adapter, None for the base model.

        Both models share the engine, the caches and the counters, and their requests can share
        a batch. Closing one of them closes both.

        Raises:
            UnknownAdapterError: `lora_name` is not loaded.
            UnsupportedCapabilityError: The engine serves no adapters.
        """
        if lora_name is not None:
            self._requests.adapters.find(lora_name)
        model = object.__new__(type(self))
        vars(model).update(vars(self))
        model._requests = copy.copy(self._requests)
        model._requests.default_lora = lora_name
        return model
