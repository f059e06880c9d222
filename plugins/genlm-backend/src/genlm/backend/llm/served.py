"""`ServedLM`: a published model class on the core's `AsyncLM`.

The core validates, caches, batches and runs the engine; this adds the published spellings
and what they promised beyond the core's: names of adapters that can be given again, and
calls that are harmless with engines to which they mean nothing.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

import genlm
from genlm.backend.llm.base import AsyncLM
from genlm.backend.tokenization import Token
from genlm.backend.tokenization.token import published_tokens
from genlm.backend.tokenization.vocab import bytes_to_strs

if TYPE_CHECKING:
    from genlm.core.lm import RowKey
    from genlm.core.validation import TokenBatch, TokenIds

__all__ = ["ServedLM", "installed_engine", "output_cache"]


class ServedLM(genlm.AsyncLM, AsyncLM):
    """Maps to `genlm.AsyncLM`, of which it has everything.

    Args:
        build_engine: As for `genlm.AsyncLM`.
        name: Of the engine.
        cache: The output cache; None takes the core's default.
        batch_size: Most queries in one batch; None leaves it to the engine.
    """

    def __init__(
        self,
        build_engine: Callable[[], genlm.Engine],
        *,
        name: str,
        cache: genlm.OutputCache | None = None,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(build_engine, name=name, output_cache=cache, max_batch_size=batch_size)
        self.cache = self._cache
        # Of adapters, to what the engine calls them; a model may come with some.
        self._names = {name: name for name in self._adapters}
        self._numbers = itertools.count(1)

    @cached_property
    def byte_vocab(self) -> list[Token]:  # type: ignore[override]
        """One token with its exact bytes per id."""
        return published_tokens(self.vocabulary.byte_vocab)

    @cached_property
    def str_vocab(self) -> list[str]:  # type: ignore[override]
        """One string per id; the tokenizer's name of a token whose bytes are not UTF-8."""
        return bytes_to_strs(self.tokenizer, self.vocabulary.byte_vocab, "tokenizer")

    @cached_property
    def device(self) -> torch.device:
        """Where rows are, found by asking for one when this is first read."""
        return self.next_token_logprobs_sync([0]).device

    # -- rows and samples: the adapter may be given by position -----------------------

    async def next_token_logprobs(
        self, token_ids: TokenIds, lora_name: str | None = None
    ) -> torch.Tensor:
        """Score every possible next token; see `genlm.AsyncLM.next_token_logprobs`."""
        return await super().next_token_logprobs(token_ids, lora_name=lora_name)

    def next_token_logprobs_sync(
        self, token_ids: TokenIds, lora_name: str | None = None
    ) -> torch.Tensor:
        """Score every possible next token and wait."""
        return super().next_token_logprobs_sync(token_ids, lora_name=lora_name)

    async def batch_next_token_logprobs(
        self, token_ids_list: TokenBatch, lora_name: str | None = None
    ) -> torch.Tensor:
        """Score several sequences; see `genlm.AsyncLM.batch_next_token_logprobs`."""
        return await super().batch_next_token_logprobs(token_ids_list, lora_name=lora_name)

    def batch_next_token_logprobs_sync(
        self, token_ids_list: TokenBatch, lora_name: str | None = None
    ) -> torch.Tensor:
        """Score several sequences and wait."""
        return super().batch_next_token_logprobs_sync(token_ids_list, lora_name=lora_name)

    async def sample(
        self,
        prompt_token_ids: TokenIds,
        max_tokens: int,
        eos_token_ids: TokenIds = (),
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> list[int]:
        """Draw a continuation; see `genlm.AsyncLM.sample`."""
        return await super().sample(
            prompt_token_ids, max_tokens, eos_token_ids, temperature, seed, lora_name=lora_name
        )

    async def batch_sample(
        self,
        prompt_token_ids_list: TokenBatch,
        max_tokens: int,
        eos_token_ids: TokenIds = (),
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
    ) -> list[list[int]]:
        """Draw a continuation of each prompt; see `genlm.AsyncLM.batch_sample`."""
        return await super().batch_sample(
            prompt_token_ids_list,
            max_tokens,
            eos_token_ids,
            temperature,
            seed,
            lora_name=lora_name,
        )

    # -- adapters: a name may be given again, and taken away --------------------------

    def add_new_lora(
        self, lora_path: str | os.PathLike[str], lora_name: str = "lora_1"
    ) -> None:
        """Load a LoRA adapter; a name that is known stands for the new one from now on.

        Requests under way finish with the adapter that they were asked for. What a name
        stood for before stays in the engine until the model is closed.

        Args:
            lora_path: Folder of the adapter, or its hub id.
            lora_name: How requests ask for it.

        Raises:
            UnsupportedCapability: The engine serves no adapters.
            AdapterError: It cannot be found or loaded.
        """
        inner = f"{lora_name}@{next(self._numbers)}"
        super().add_new_lora(_adapter_folder(lora_path), inner)
        if lora_name in self._names:
            self.remove_lora(lora_name)
        self._names[lora_name] = inner

    def remove_lora(self, lora_name: str) -> None:
        """Forget an adapter's name; see `add_new_lora`.

        Raises:
            UnknownAdapterError: There is no such adapter.
        """
        if lora_name not in self._names:
            raise genlm.UnknownAdapterError(lora_name, self._names)
        del self._adapters[self._names.pop(lora_name)]

    def set_lora(self, lora_path: str | None = None, lora_name: str = "lora_1") -> None:  # type: ignore[override]
        """Use an adapter for all later requests, with a `DeprecationWarning`.

        Args:
            lora_path: Not read; `add_new_lora` has loaded the adapter.
            lora_name: Which.

        Raises:
            UnknownAdapterError: There is no such adapter.
        """
        _warn_of_state("set_lora")
        super().set_lora(self._inner(lora_name))

    def clear_lora(self) -> None:
        """Use the base model for all later requests, with a `DeprecationWarning`."""
        _warn_of_state("clear_lora")
        super().clear_lora()

    def _inner(self, lora_name: str) -> str:
        return self._names.get(lora_name, lora_name)

    def _asked(self, token_ids: TokenIds, lora_name: str | None) -> tuple[genlm.Query, RowKey]:
        inner = None if lora_name is None else self._inner(lora_name)
        return super()._asked(token_ids, inner)

    def with_lora(self, lora_name: str | None) -> genlm.AsyncLM:
        """Return this model with another default adapter; see `genlm.AsyncLM.with_lora`."""
        return super().with_lora(None if lora_name is None else self._inner(lora_name))

    def _check_adapter(self, lora_name: str) -> None:
        if lora_name not in self._adapters:
            raise genlm.UnknownAdapterError(lora_name, self._names)

    # -- caches and the end: harmless where they mean nothing -------------------------

    def cache_kv(self, prompt_tokens: TokenIds, lora_name: str | None = None) -> None:
        """Compute a prefix and keep it, if the engine keeps prefixes."""
        if genlm.Capability.PREFIX_CACHE in self.capabilities:
            super().cache_kv(prompt_tokens, lora_name=lora_name)

    def clear_kv_cache(self) -> None:
        """Free the prefixes that the engine keeps, if any."""
        if genlm.Capability.PREFIX_CACHE in self.capabilities:
            super().clear_kv_cache()

    def cleanup(self) -> None:
        """Close the model; the same as `close`."""
        self.close()


def installed_engine(backend: str, asked_for: str, install: str) -> Any:
    """What a plugin registers under a name: a callable that makes the engine.

    Raises:
        MissingRequirementError: No plugin does, or its library is missing.
    """
    try:
        return genlm.get_backend(backend)
    except genlm.UnknownBackendError as error:
        plugin = f"a plugin for the engine {backend!r}"
        raise genlm.MissingRequirementError(asked_for, [plugin], install) from error


def output_cache(cache_size: int, cache_opts: dict[str, Any] | None) -> Any:
    """The output cache of published options."""
    from genlm.backend.cache import OutputCache

    return OutputCache(cache_size, **(cache_opts or {}))


def _adapter_folder(lora_path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The folder of an adapter that may be given by its hub id."""
    if os.path.isdir(lora_path):  # noqa: PTH112 - may be a hub id
        return lora_path
    import huggingface_hub

    try:
        return huggingface_hub.snapshot_download(os.fspath(lora_path))
    except Exception as error:
        raise genlm.AdapterError(
            f"asked for adapter {os.fspath(lora_path)!r}; there is no such folder, and the hub "
            f"gave {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def _warn_of_state(name: str) -> None:
    warnings.warn(
        f"{name} is deprecated; pass lora_name= to each call, or ask with_lora(name) for a "
        f"model that does",
        DeprecationWarning,
        stacklevel=3,
    )
