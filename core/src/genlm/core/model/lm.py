"""`AsyncLM`: the public language model, the same class for every engine.

`Requests` checks arguments, reads the output cache and submits queries to the scheduler, which
runs the engine. The modules `text_methods`, `reduction_methods`, `score_methods`,
`sample_methods`, `adapter_methods` and `weight_methods` contain the other public methods. Every
method that waits is a coroutine method with a blocking twin, derived by `blocking`:
`..._sync`, or the name without `a`.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Self, cast, overload

import torch

from genlm.core.base.blocking import blocking, off_loop
from genlm.core.base.method_names import name_methods
from genlm.core.base.progress import show_stages
from genlm.core.base.statistics import Statistics
from genlm.core.base.validation import Integers, checked_builder, is_model_object
from genlm.core.engine.engine import (
    Capability,
    Engine,
    PrefixCacheEngine,
    checked_engine,
    require_capability,
)
from genlm.core.engine.group_engine import GroupEngine, with_groups
from genlm.core.model.adapter_methods import AdapterMethods
from genlm.core.model.cached_results import COPIED_ON_LOOP
from genlm.core.model.context import Context, TokenBatch, TokenIds
from genlm.core.model.leases import LeaseTable
from genlm.core.model.loading import engine_builder
from genlm.core.model.members import initial_members
from genlm.core.model.population import Population
from genlm.core.model.reduction_methods import ReductionMethods
from genlm.core.model.requests import Requests
from genlm.core.model.sample_methods import SampleMethods
from genlm.core.model.score_methods import ScoreMethods
from genlm.core.model.text_methods import TextMethods
from genlm.core.model.weight_methods import WeightMethods
from genlm.core.rows.output_cache import OutputCache, entry_copy
from genlm.core.scheduler import Scheduler
from genlm.core.vocab import Vocabulary

DEFAULT_CACHE_BYTES = 256 * 2**20
"""256 MiB: 500 rows over 128,000 ids, 65,000 rows over 1,000 ids."""

DEFAULT_CACHE_ENTRIES = 65_536


class AsyncLM(
    TextMethods,
    ReductionMethods,
    ScoreMethods,
    SampleMethods,
    AdapterMethods,
    WeightMethods,
):
    """A language model that computes next-token log-probabilities of many sequences at once.

    Concurrent calls may share one forward pass. Every method may be called from any thread and
    from any number of event loops. Use the model as a context manager, or call `close`.

    Rows are natural-log probabilities, shape `(vocab_size,)`, float32, on the engine's
    device, `logsumexp` 0 within 1e-4. They belong to the caller: changing one changes
    neither the cache nor another caller's row.

    Args:
        build_engine: Function that returns the engine; called on the engine's thread.
        name: Engine name for messages.
        output_cache: Cache of results; by default up to 65,536 rows and 256 MiB.
            `OutputCache(0)` stores nothing.
        max_batch_size: Maximum number of concurrent queries, None for no limit.
        max_pending: Maximum number of accepted queries; further requests wait.

    Attributes:
        name: Engine name.
        model_name: Argument of `load_model`, or the class of a model object; otherwise None.
        vocabulary: Tokens with their exact bytes, and special ids such as `eos_token_id`.
        max_context: Maximum number of tokens of a requested sequence, None for no limit.
        capabilities: Optional abilities of the engine, such as `Capability.LORA`.

    Raises:
        TypeError: `output_cache` is not an `OutputCache`, `build_engine` does not return an
            engine, or a limit is not a number.
        ValueError: A limit, or the engine's `max_context`, is below 1.
        Exception: The error that `build_engine` raised.
    """

    def __init__(
        self,
        build_engine: Callable[[], Engine],
        *,
        name: str = "engine",
        output_cache: OutputCache | None = None,
        max_batch_size: int | None = None,
        max_pending: int | None = None,
    ) -> None:
        if output_cache is None:
            output_cache = OutputCache(DEFAULT_CACHE_ENTRIES, max_bytes=DEFAULT_CACHE_BYTES)
        elif not isinstance(output_cache, OutputCache):
            raise TypeError(
                f"output_cache={output_cache!r}; expected an OutputCache, such as "
                f"genlm.OutputCache(1000), which stores 1000 rows"
            )
        build = checked_builder(build_engine)
        leases = LeaseTable()
        self._scheduler: Scheduler[Engine] = Scheduler(
            lambda: with_groups(checked_engine(build())),
            cache=output_cache,
            release=leases.release,
            max_batch_size=max_batch_size,
            max_pending=max_pending,
            name=f"genlm-{name}",
        )
        engine = self._scheduler.engine
        self.name = name
        self.model_name: str | None = None  # the argument of `load_model`
        self.vocabulary: Vocabulary = engine.vocabulary
        self.max_context: int | None = engine.max_context
        self.capabilities: frozenset[Capability] = engine.capabilities
        leases.on_drop = self._scheduler.release
        self._requests = Requests(self._scheduler, output_cache, leases, backend=name)

    @classmethod
    def from_name(
        cls,
        model: Any,
        backend: str | None = None,
        *,
        output_cache: OutputCache | None = None,
        max_batch_size: int | None = None,
        max_pending: int | None = None,
        progress: bool = False,
        **engine_options: Any,
    ) -> Self:
        """Load a model with one of the installed engines; `genlm.load_model` is this method.

        The engine computes one row before this method returns, so that a model whose kernels
        fail is rejected here. The call blocks while the model loads; in a coroutine use
        `asyncio.to_thread`.

        Args:
            model: Model id or path: a hub id, a folder or `"demo"`; or a model object of the
                engine's library, with `tokenizer=`, which `genlm.decode_vocab` takes.
            backend: Engine name, see `genlm plugins`; by default the engine chosen with
                `use_backend` or `GENLM_BACKEND`, or the only installed engine.
            output_cache: Cache of results; see `AsyncLM`.
            max_batch_size: Maximum number of concurrent queries, None for no limit.
            max_pending: Maximum number of accepted queries; further requests wait.
            progress: Whether to show the stages of loading on standard error: reading
                weights, decoding the vocabulary, computing the first row.
            **engine_options: Passed to the engine's constructor; `genlm plugins NAME` lists
                them with their defaults.

        Returns:
            The model; close it, or use it as a context manager.

        Raises:
            PluginError: The backend is unknown, ambiguous, broken or lacks a library.
            ModelLoadError: The engine cannot serve this model, or its first row fails.
            TypeError: The engine does not accept an option, or does not accept model objects.
            ValueError: A limit is below 1.
        """
        common = ("output_cache", "max_batch_size", "max_pending", "progress")
        with show_stages(enabled=progress):
            name, build = engine_builder(model, backend, engine_options, common)
            llm = cls(
                functools.partial(contextvars.copy_context().run, build),
                name=name,
                output_cache=output_cache,
                max_batch_size=max_batch_size,
                max_pending=max_pending,
            )
        llm.model_name = type(model).__name__ if is_model_object(model) else str(model)
        return llm

    def __repr__(self) -> str:
        context = "any length" if self.max_context is None else f"{self.max_context} tokens"
        abilities = ", ".join(["rows", *sorted(self.capabilities)])
        lora = "" if self.lora_name is None else f"; lora {self.lora_name!r}"
        model = "" if self.model_name is None else f"{self.model_name!r} on "
        closed = "; closed" if self._scheduler.closed else ""
        return (
            f"<{type(self).__name__} {model}{self.name!r}: {self.vocab_size} token ids, "
            f"context of {context}; {abilities}{lora}{closed}>"
        )

    # -- next-token log-probabilities -------------------------------------------------

    async def next_token_logprobs(
        self, token_ids: TokenIds, *, lora_name: str | None = None, use_cache: bool = True
    ) -> torch.Tensor:
        """Return the log-probabilities of every possible next token after `token_ids`.

        Args:
            token_ids: Prompt and continuation, oldest first: a list, tuple, numpy or
                torch array of at least one integer.
            lora_name: Name of a loaded adapter; by default the adapter of `with_lora`.
            use_cache: Whether the row may come from the output cache. A computed row is stored
                in the cache in both cases.

        Returns:
            Natural-log probabilities, shape `(vocab_size,)`, float32, on the engine's
            device. The tensor is the caller's.

        Raises:
            EmptySequenceError: `token_ids` is empty.
            ContextLengthError: `token_ids` is longer than `max_context`.
            TokenIdError: An id is outside the vocabulary.
            TokenTypeError: `token_ids` is not a flat sequence of integers.
            UnknownAdapterError: `lora_name` is not loaded.
            UnsupportedCapabilityError: An adapter is named, but the engine serves no adapters.
            EvaluationError: The engine raised for this sequence, or computed a row that is
                not a distribution.
            EngineClosedError: The model was closed before the result.
            EngineDiedError: The engine's thread ended before the result.
            QueryResetError: `cancel_all` was called before the result.
        """
        row: torch.Tensor = await self._requests.result(
            token_ids, None, lora_name, use_cache=use_cache
        )
        return row

    next_token_logprobs_sync = blocking(next_token_logprobs)

    async def batch_next_token_logprobs(
        self, token_ids_list: TokenBatch, *, lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the next-token log-probabilities of several sequences.

        All sequences are checked before any is evaluated.

        Args:
            token_ids_list: Sequences as for `next_token_logprobs`, or one array of shape
                `(n, length)` for sequences of equal length.
            lora_name: Name of a loaded adapter; by default the adapter of `with_lora`.

        Returns:
            Row i for sequence i, shape `(len(token_ids_list), vocab_size)`, float32;
            shape `(0, vocab_size)` for an empty list. The tensor is the caller's.

        Raises:
            GenlmError: As `next_token_logprobs`, for the first sequence that fails; its
                `places` are the indices of all sequences that fail.
        """
        rows = await self._requests.batch(token_ids_list, None, lora_name)
        if not rows:
            return torch.empty(0, self.vocab_size, dtype=torch.float32, device="cpu")
        if 4 * self.vocab_size * len(rows) <= COPIED_ON_LOOP:
            return torch.stack(rows)
        return await off_loop(torch.stack, rows)

    batch_next_token_logprobs_sync = blocking(batch_next_token_logprobs)

    def cached_logprobs(
        self, token_ids: TokenIds, *, lora_name: str | None = None
    ) -> torch.Tensor | None:
        """Return a copy of the row if the output cache contains it, else None."""
        _, key = self._requests.build_query(token_ids, lora_name)
        [cached] = self._requests.results.find([(key, None)])
        row: torch.Tensor | None = None if cached is None else entry_copy(cached[0])
        return row

    # -- contexts ---------------------------------------------------------------------

    def context(self, token_ids: Integers, *, lora_name: str | None = None) -> Context:
        """Return a handle to a token sequence, which is extended in constant time.

        No row is computed. Every method that accepts token ids also accepts contexts of this
        model; a context determines the adapter, too.

        Args:
            token_ids: Token ids as for `next_token_logprobs`.
            lora_name: Name of a loaded adapter; by default the adapter of `with_lora`.

        Raises:
            EmptySequenceError: `token_ids` is empty.
            ContextLengthError: `token_ids` is longer than `max_context`.
            TokenIdError: An id is outside the vocabulary.
            TokenTypeError: `token_ids` is not a flat sequence of integers.
            UnknownAdapterError: `lora_name` is not loaded.
            UnsupportedCapabilityError: An adapter is named, but the engine serves no adapters.
        """
        return Context(self, *self._requests.context_parts(token_ids, lora_name))

    @overload
    def population(
        self, prompts: TokenIds, size: int, *, lora_name: str | None = None
    ) -> Population: ...
    @overload
    def population(
        self, prompts: TokenBatch, size: None = None, *, lora_name: str | None = None
    ) -> Population: ...
    def population(
        self,
        prompts: TokenIds | TokenBatch,
        size: int | None = None,
        *,
        lora_name: str | None = None,
    ) -> Population:
        """Return a population: many token sequences that are stored and processed as arrays.

        No row is computed.

        Args:
            prompts: With `size`, one sequence for all members: token ids or a `Context`;
                without `size`, one sequence for each member, also as an array of shape
                `(n, longest)`, in which -1 stands for no token.
            size: Number of members.
            lora_name: Name of a loaded adapter; by default the adapter of the contexts or of
                `with_lora`.

        Raises:
            TypeError: `size` is not an integer.
            ValueError: `size` is negative, or contexts have different adapters.
            GenlmError: As `context`.
        """
        return Population(self, *initial_members(self._requests, prompts, size, lora_name))

    # -- components -------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine. Only its attributes and `statistics` may be used by other threads.

        Raises:
            EngineClosedError: The model was closed, which frees the engine.
        """
        engine = self._scheduler.engine
        return engine.engine if isinstance(engine, GroupEngine) else engine

    @property
    def output_cache(self) -> OutputCache:
        """The cache of rows and reductions."""
        return self._requests.results.cache

    # -- caches, statistics, closing --------------------------------------------------

    async def apin_prefix(self, prompt: TokenIds, *, lora_name: str | None = None) -> None:
        """Compute a prefix and pin it in the engine's cache until `clear_kv_cache`.

        Raises:
            UnsupportedCapabilityError: The engine has no prefix cache.
            GenlmError: As `next_token_logprobs`.
        """
        self._require(Capability.PREFIX_CACHE)
        query, _ = self._requests.build_query(prompt, lora_name)
        await off_loop(
            self._scheduler.run,
            lambda engine: cast("PrefixCacheEngine", engine).cache_prefix(
                query.token_ids, query.adapter
            ),
        )

    pin_prefix = blocking(apin_prefix, "pin_prefix")

    async def aclear_kv_cache(self) -> None:
        """Free all prefixes in the engine's cache. Results do not change.

        Raises:
            UnsupportedCapabilityError: The engine has no prefix cache.
        """
        self._require(Capability.PREFIX_CACHE)
        await off_loop(
            self._scheduler.run,
            lambda engine: cast("PrefixCacheEngine", engine).clear_prefix_cache(),
        )

    clear_kv_cache = blocking(aclear_kv_cache, "clear_kv_cache")

    def clear_output_cache(self) -> None:
        """Drop this model's entries from the output cache. Results do not change."""
        self._requests.results.drop()

    def cancel_all(self) -> None:
        """Fail all in-flight requests with `QueryResetError`; the model stays usable."""
        self._scheduler.reset()

    def statistics(self) -> Statistics:
        """Return counters of requests and results since the model was loaded."""
        engine = self._scheduler.engine_statistics()
        if not isinstance(engine, Mapping):
            raise TypeError(
                f"the engine's statistics returned {type(engine).__name__}; expected a "
                f"mapping, which is empty if nothing is counted"
            )
        return Statistics(
            **asdict(self._scheduler.statistics()),
            **self._requests.counters.snapshot(),
            cache_entries=len(self.output_cache),
            cache_bytes=self.output_cache.nbytes,
            engine=engine.copy() if isinstance(engine, dict) else dict(engine),
        )

    async def aclose(self) -> None:
        """Fail all in-flight requests with `EngineClosedError` and free the engine.

        The call waits for the engine's current step. Closing twice is allowed; later requests
        raise `EngineClosedError`. The model drops its reference to the engine.

        The exit of the interpreter closes open models. Exit handlers (`atexit`) that were
        registered after a model was loaded are called before, and may use it.
        """
        await off_loop(self._scheduler.close)
        self._requests.results.drop()

    close = blocking(aclose, "close")

    def __reduce__(self) -> Any:
        raise TypeError(
            "a loaded model cannot be pickled or copied; load it in each process, or share one "
            "between processes with genlm-ray"
        )

    def __enter__(self) -> Self:
        self._scheduler.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def _require(self, capability: Capability) -> None:
        require_capability(self._scheduler.engine, capability, self.name)


name_methods(AsyncLM, AsyncLM.__bases__)


def checked_model(llm: object) -> AsyncLM:
    """Return a loaded model unchanged; reject other objects, such as a name or an engine."""
    if not isinstance(llm, AsyncLM):
        raise TypeError(
            f"llm={llm!r:.80}; expected a loaded model, such as genlm.load_model('demo', 'hf')"
        )
    return llm


load_model = AsyncLM.from_name

load_model_by_name = load_model
"""Name of `load_model` in genlm-backend."""
