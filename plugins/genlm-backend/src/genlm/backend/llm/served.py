"""`ServedLM`: base of the published model classes that use the core's `AsyncLM`.

The core validates, caches and batches requests and runs the engine. `ServedLM` adds the
published names and argument orders, adapters that replace others of the same name, and cache
methods that do nothing for engines without a prefix cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch

import genlm
from genlm.backend.cache import OutputCache
from genlm.backend.llm.base import AsyncLM
from genlm.backend.llm.engine_control import EngineControl, run_burst
from genlm.backend.llm.prefix_rows import PrefixScores, common_text
from genlm.backend.tokenization import Token
from genlm.backend.tokenization.token import published_tokens
from genlm.backend.tokenization.vocab import bytes_to_strs
from genlm.plugin import Completion, Engine, Reduced, get_backend

if TYPE_CHECKING:
    from genlm.core.base.validation import Integers
    from genlm.core.model.context import TokenBatch, TokenIds

__all__ = [
    "ServedLM",
    "checked_builder",
    "installed_engine",
    "output_cache",
    "with_rows_on_cpu",
]


class ServedLM(genlm.AsyncLM, AsyncLM):
    """Subclass of `genlm.AsyncLM` with the published interface.

    Args:
        build_engine: As for `genlm.AsyncLM`.
        name: Name of the engine.
        cache: Output cache; None for the core's default.
        batch_size: Maximum number of queries in a batch; None for the engine's limit.
    """

    supports_burst = True

    def __init__(
        self,
        build_engine: Callable[[], Engine],
        *,
        name: str,
        cache: genlm.OutputCache | None = None,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(build_engine, name=name, output_cache=cache, max_batch_size=batch_size)
        self.cache = self.output_cache
        self._prefix_scores = PrefixScores()

    @cached_property
    def byte_vocab(self) -> list[Token]:  # type: ignore[override]
        """Tokens with their exact bytes, indexed by id."""
        return published_tokens(self.vocabulary.byte_vocab)

    @cached_property
    def str_vocab(self) -> list[str]:  # type: ignore[override]
        """Strings of the tokens, indexed by id; names of tokens whose bytes are not UTF-8."""
        return bytes_to_strs(self.tokenizer, self.vocabulary.byte_vocab, "tokenizer")

    @cached_property
    def device(self) -> torch.device:
        """Device of the rows, determined by a request."""
        return self.next_token_logprobs_sync([0]).device

    # -- rows and samples, with the adapter as a positional argument ------------------

    async def next_token_logprobs(
        self, token_ids: TokenIds, lora_name: str | None = None, *, use_cache: bool = True
    ) -> torch.Tensor:
        """Return a row; see `genlm.AsyncLM.next_token_logprobs`."""
        lora_name = self._check_adapter(lora_name)
        return await super().next_token_logprobs(
            token_ids, lora_name=lora_name, use_cache=use_cache
        )

    def next_token_logprobs_sync(
        self, token_ids: TokenIds, lora_name: str | None = None, *, use_cache: bool = True
    ) -> torch.Tensor:
        """Blocking form of `next_token_logprobs`."""
        lora_name = self._check_adapter(lora_name)
        return super().next_token_logprobs_sync(
            token_ids, lora_name=lora_name, use_cache=use_cache
        )

    async def batch_next_token_logprobs(
        self, token_ids_list: TokenBatch, lora_name: str | None = None
    ) -> torch.Tensor:
        """Return rows; see `genlm.AsyncLM.batch_next_token_logprobs`.

        For successive prefixes of one text, the result is a `PrefixRows`, which computes only
        the entries that are read.
        """
        lora_name = self._check_adapter(lora_name)
        if self._prefix_scores.useful and genlm.Capability.SCORE in self.capabilities:
            prefixes = common_text(token_ids_list)
            if prefixes is not None:
                return await self._prefix_scores.rows(self, *prefixes, lora_name)
        return await super().batch_next_token_logprobs(token_ids_list, lora_name=lora_name)

    def batch_next_token_logprobs_sync(
        self, token_ids_list: TokenBatch, lora_name: str | None = None
    ) -> torch.Tensor:
        """Blocking form of `batch_next_token_logprobs`."""
        return super().batch_next_token_logprobs_sync(
            token_ids_list, lora_name=self._check_adapter(lora_name)
        )

    async def sample(  # type: ignore[override]  # published with other names
        self,
        prompt_token_ids: TokenIds,
        max_tokens: int,
        eos_token_ids: Integers = (),
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
        **options: Any,
    ) -> list[int]:
        """Draw a continuation; see `genlm.AsyncLM.sample`."""
        return await super().sample(
            prompt_token_ids,
            max_tokens,
            stop=eos_token_ids,
            temperature=temperature,
            seed=seed,
            lora_name=self._check_adapter(lora_name),
            **options,
        )

    async def batch_sample(  # type: ignore[override]
        self,
        prompt_token_ids_list: TokenBatch,
        max_tokens: int,
        eos_token_ids: Integers = (),
        temperature: float = 1.0,
        seed: int | None = None,
        lora_name: str | None = None,
        **options: Any,
    ) -> list[list[int]]:
        """Draw continuations of prompts; see `genlm.AsyncLM.batch_sample`."""
        return await super().batch_sample(
            prompt_token_ids_list,
            max_tokens,
            stop=eos_token_ids,
            temperature=temperature,
            seed=seed,
            lora_name=self._check_adapter(lora_name),
            **options,
        )

    def run_burst(self, control: EngineControl, max_steps: int) -> None:
        """Extend sequences by tokens of `control`; see `engine_control.run_burst`."""
        run_burst(self, control, max_steps)

    # -- adapters, which replace others of the same name -------------------------------

    def add_new_lora(
        self,
        lora_path: str | os.PathLike[str],
        lora_name: str = "lora_1",
        *,
        replace: bool = True,
    ) -> None:
        """Load a LoRA adapter; see `genlm.AsyncLM.load_lora`.

        Args:
            lora_path: Folder or hub id of the adapter.
            lora_name: Name of the adapter in requests.
            replace: Whether the adapter replaces one of the same name; in-flight requests
                complete with the previous adapter.

        Raises:
            UnsupportedCapabilityError: The engine does not support adapters.
            AdapterError: The adapter cannot be found or loaded.
        """
        if genlm.Capability.LORA in self.capabilities:  # else `load_lora` raises
            lora_path = _adapter_folder(lora_path)
        self.load_lora(lora_path, lora_name, replace=replace)

    def with_lora(self, lora_name: str | None) -> Self:
        """Return this model with another default adapter; see `genlm.AsyncLM.with_lora`."""
        return super().with_lora(self._check_adapter(lora_name))

    def lora_view(self, lora_name: str | None) -> Self:
        """Return a model that uses an adapter by default, or this model for None."""
        return self if lora_name is None else self.with_lora(lora_name)

    def remove_lora(self, lora_name: str) -> None:
        """Unload an adapter; see `genlm.AsyncLM.unload_lora`."""
        self._check_adapter(lora_name)
        self.unload_lora(lora_name)

    def _check_adapter(self, lora_name: str | None) -> str | None:
        """Raise the published `ValueError` for unknown adapters, with every engine."""
        if lora_name is not None and lora_name not in self.lora_names:
            raise genlm.UnknownAdapterError(lora_name, self.lora_names)
        return lora_name

    # -- caches and closing -----------------------------------------------------------

    def cache_kv(self, prompt_tokens: TokenIds, lora_name: str | None = None) -> None:
        """Compute and cache a prefix, if the engine has a prefix cache."""
        if genlm.Capability.PREFIX_CACHE in self.capabilities:
            self.pin_prefix(prompt_tokens, lora_name=self._check_adapter(lora_name))

    def clear_kv_cache(self) -> None:
        """Free the cached prefixes of the engine, if any."""
        if genlm.Capability.PREFIX_CACHE in self.capabilities:
            super().clear_kv_cache()

    def clear_cache(self) -> None:
        """Drop this model's rows from the output cache, and the scores of prefixes."""
        self.clear_output_cache()
        self._prefix_scores.clear()

    def reset_async_queries(self) -> None:
        """End all pending requests with `QueryResetError`; the model remains usable."""
        self.cancel_all()

    def cleanup(self) -> None:
        """Close the model; see `close`."""
        self.close()


def installed_engine(backend: str, class_name: str) -> Any:
    """Return the callable that builds an installed engine.

    Raises:
        MissingRequirementError: The plugin or its library is not installed.
    """
    try:
        return get_backend(backend)
    except genlm.UnknownBackendError as error:
        plugin = f"a plugin for the engine {backend!r}"
        # pip would replace genlm-backend[extra] by 0.3.1 of the index if it lacks the plugin.
        name = f"genlm-{backend}"
        install = f"pip install {name}, or pip install ./plugins/{name} in a clone"
        raise genlm.MissingRequirementError(class_name, [plugin], install) from error


def checked_builder(engine: Any, model_class: str) -> Callable[[], Engine]:
    """Return a function that builds an engine; existing engines are rejected.

    Raises:
        TypeError: The object is not callable.
    """
    if not callable(engine):
        raise TypeError(
            f"{model_class} got a {type(engine).__name__}; engines are built by genlm, "
            f"with the same options: {model_class}.from_name(name, engine_opts=...)"
        )
    build_engine: Callable[[], Engine] = engine
    return build_engine


def with_rows_on_cpu(engine: Any) -> Any:
    """Make an engine return rows on the CPU, as published."""
    step = engine.step

    def step_to_cpu() -> Iterable[Completion]:
        for completion in step():
            result = completion.result
            if isinstance(result, torch.Tensor):
                result = result.cpu()
            elif isinstance(result, Reduced):  # a row may be among the values
                result = Reduced(tuple(map(_on_cpu, result.values)))
            yield completion._replace(result=result)

    engine.step = step_to_cpu
    return engine


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def output_cache(cache_size: int, cache_opts: dict[str, Any] | None) -> OutputCache:
    """Create the output cache from published options."""
    return OutputCache(cache_size, **(cache_opts or {}))


def _adapter_folder(lora_path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the folder of an adapter, which is downloaded for a hub id."""
    if os.path.isdir(lora_path):  # noqa: PTH112 - may be a hub id
        return lora_path
    import huggingface_hub

    try:
        return huggingface_hub.snapshot_download(os.fspath(lora_path))
    except Exception as error:
        raise genlm.AdapterError(
            f"no adapter {os.fspath(lora_path)!r}: there is no such folder, and the hub raised "
            f"{type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
