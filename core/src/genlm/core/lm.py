"""`AsyncLM`: the language model that users hold, the same class for every engine.

It validates requests, looks them up in the output cache and passes them to the scheduler, which
runs the engine. `reduction_methods`, `score_methods` and `sample_methods` have the public
methods that build on these. Longer than other modules because rows, contexts and
caches of one model share its private state; half of it is docstrings.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self, cast

import torch

from genlm.core.adapters import Adapters
from genlm.core.cache import OutputCache
from genlm.core.context import Context, Holds
from genlm.core.engine import Capability, Engine, checked_engine, require_capability
from genlm.core.errors import (
    ContextLengthError,
    UnknownAdapterError,
)
from genlm.core.loading import engine_builder
from genlm.core.progress import stages_shown
from genlm.core.query import Query, SamplingParams, TokenScores
from genlm.core.recent_sequences import SHORTEST, RecentSequences
from genlm.core.reduction_methods import ReductionMethods
from genlm.core.reductions import Draw, DrawnToken, Reduction, TargetScore, reduce_rows
from genlm.core.row_results import RowResults
from genlm.core.sample_methods import SampleMethods
from genlm.core.scheduler import Scheduler
from genlm.core.score_methods import ScoreMethods, ScoreRequest, checked_start
from genlm.core.sequence import TokenSequence
from genlm.core.statistics import RequestCounters, Statistics
from genlm.core.text import decode, encode, encode_chat
from genlm.core.validation import (
    checked_batch,
    checked_builder,
    checked_token_ids,
    is_model_object,
)
from genlm.core.vocab import Token, Vocabulary

if TYPE_CHECKING:
    from genlm.core.engine import PrefixCacheEngine
    from genlm.core.validation import Integers, TokenBatch, TokenIds

__all__ = ["AsyncLM", "load_model", "load_model_by_name"]

DEFAULT_CACHE_BYTES = 256 * 2**20
"""A quarter of a gibibyte: 500 rows over 128,000 ids, 65,000 over 1,000."""

DEFAULT_CACHE_ENTRIES = 65_536

RowKey = tuple[object, str | None, bytes]
"""Identifies a request: model, adapter, and the key of the token sequence."""


class AsyncLM(ReductionMethods, ScoreMethods, SampleMethods):
    """A language model: next-token log-probabilities of any number of sequences at once.

    Concurrent calls may share one forward pass; how they are grouped never changes which
    sequence an answer belongs to. Every method may be called from any thread and from
    any number of event loops. Use it as a context manager, or call `close`.

    Rows are natural-log probabilities, shape `(vocab_size,)`, float32, on the engine's
    device, `logsumexp` 0 within 1e-4. They belong to the caller: changing one changes
    neither the cache nor another caller's row.

    Args:
        build_engine: Makes the engine; called on a thread that the engine then owns.
        name: Of the engine, for messages.
        output_cache: Rows to keep; by default up to 65,536 rows and 256 MiB.
            `OutputCache(0)` keeps none.
        max_batch_size: Most queries in the engine at a time, None for no limit.
        max_wait_s: How long an incomplete batch waits for more requests.
        max_pending: Most queries accepted at a time; further requests wait.

    Raises:
        TypeError: `output_cache` is not an `OutputCache`, `build_engine` does not make an
            engine, or a limit is not a number.
        ValueError: A limit below 1, or a wait that is negative or not finite.
        Exception: Whatever `build_engine` raised.
    """

    def __init__(
        self,
        build_engine: Callable[[], Engine],
        *,
        name: str = "engine",
        output_cache: OutputCache | None = None,
        max_batch_size: int | None = None,
        max_wait_s: float = 0.0,
        max_pending: int | None = None,
    ) -> None:
        if output_cache is None:
            output_cache = OutputCache(DEFAULT_CACHE_ENTRIES, max_bytes=DEFAULT_CACHE_BYTES)
        elif not isinstance(output_cache, OutputCache):
            raise TypeError(
                f"output_cache={output_cache!r}; expected an OutputCache, such as "
                f"genlm.OutputCache(1000), which keeps 1000 rows"
            )
        build = checked_builder(build_engine)
        self._cache = output_cache
        self._model = object()  # in every key: models may share one cache
        holds = Holds()
        self._scheduler: Scheduler[Engine] = Scheduler(
            lambda: checked_engine(build()),
            results=RowResults(output_cache, holds),
            max_batch_size=max_batch_size,
            max_wait_s=max_wait_s,
            max_pending=max_pending,
            name=f"genlm-{name}",
        )
        engine = self._scheduler.engine
        self.name = name
        self.model_name: str | None = None  # what `load_model` was asked for
        self.vocabulary: Vocabulary = engine.vocabulary
        self.max_context: int | None = engine.max_context
        self.capabilities: frozenset[Capability] = engine.capabilities
        self._adapters = Adapters(
            self._scheduler,
            getattr(engine, "adapters", ()),  # those that the model came with
            backend=name,
            forget_rows=functools.partial(_drop_rows, output_cache, self._model),
        )
        self._default_lora: str | None = None
        holds.on_drop = self._scheduler.release
        self._holds = holds if hasattr(engine, "release_context") else None
        self._recent = RecentSequences()
        self._counters = RequestCounters()
        self._query_ids = itertools.count()

    @classmethod
    def from_name(
        cls,
        model: Any,
        backend: str | None = None,
        *,
        output_cache: OutputCache | None = None,
        max_batch_size: int | None = None,
        max_wait_s: float = 0.0,
        max_pending: int | None = None,
        progress: bool = False,
        **engine_options: Any,
    ) -> AsyncLM:
        """Load a model with one of the installed engines; `genlm.load_model` is this method.

        The engine computes one row before this returns, so that a model whose kernels fail
        is refused here. Blocks while the model loads; in a coroutine use `asyncio.to_thread`.

        Args:
            model: What the engine calls a model: a hub id, a folder, `"demo"`. Or a model
                object of the engine's library, with `tokenizer=`.
            backend: Name of an engine, see `genlm plugins`; by default the one chosen with
                `use_backend` or `GENLM_BACKEND`, or the only one installed.
            output_cache: Rows to keep; see `AsyncLM`.
            max_batch_size: Most queries in the engine at a time, None for no limit.
            max_wait_s: How long an incomplete batch waits for more requests; 0 for no timer.
            max_pending: Most queries accepted at a time; further requests wait.
            progress: Whether to show on standard error what happens while the model loads:
                reading weights, decoding the vocabulary, the first row.
            **engine_options: Passed to the engine's constructor.

        Returns:
            The model; close it, or use it as a context manager.

        Raises:
            PluginError: The backend is unknown, ambiguous, broken or lacks a library.
            ModelLoadError: The engine cannot serve this model, or its first row fails.
            TypeError: The engine takes no such option, or no model objects.
            ValueError: A limit below 1, or a wait that is negative or not finite.
        """
        common = ("output_cache", "max_batch_size", "max_wait_s", "max_pending", "progress")
        with stages_shown(shown=progress) as stages:
            name, build = engine_builder(model, backend, engine_options, common)
            llm = AsyncLM(
                build if stages is None else stages.around(build),
                name=name,
                output_cache=output_cache,
                max_batch_size=max_batch_size,
                max_wait_s=max_wait_s,
                max_pending=max_pending,
            )
        llm.model_name = type(model).__name__ if is_model_object(model) else str(model)
        return llm

    def __repr__(self) -> str:
        context = "any length" if self.max_context is None else f"{self.max_context} tokens"
        abilities = ", ".join(["rows", *sorted(self.capabilities)])
        lora = "" if self._default_lora is None else f"; lora {self._default_lora!r}"
        model = "" if self.model_name is None else f"{self.model_name!r} on "
        closed = "; closed" if self._scheduler.closed else ""
        return (
            f"<{type(self).__name__} {model}{self.name!r}: {self.vocab_size} token ids, "
            f"context of {context}; {abilities}{lora}{closed}>"
        )

    # -- vocabulary -------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The engine's own tokenizer object."""
        return self.vocabulary.tokenizer

    @property
    def byte_vocab(self) -> list[Token]:
        """One token with its exact bytes per id."""
        return self.vocabulary.byte_vocab

    @property
    def str_vocab(self) -> list[str]:
        """One readable string per id, for display only."""
        return self.vocabulary.str_vocab

    @property
    def vocab_size(self) -> int:
        """Number of ids, the length of every row."""
        return self.vocabulary.size

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """Encode a text as the model wants it.

        A tokenizer that adds special tokens decides what begins a text; an end that it adds is
        left out. Where it adds nothing, `bos_token_id` begins the text if it is also
        `eos_token_id`, which separated the texts that such models were trained on (GPT-2,
        GPT-NeoX), unless the tokenizer was made with `add_bos_token=False`.

        Args:
            text: Names of special tokens in it are read as the tokenizer reads them.
            begin: False for a text that continues another: nothing is put before it.

        Raises:
            TokenizerError: The engine's tokenizer has no `encode`.
            TypeError: `text` is not a string.
        """
        return encode(self.vocabulary, text, begin=begin)

    def decode(self, token_ids: TokenIds, *, special_tokens: bool = False) -> str:
        """Decode ids by the exact bytes of their tokens.

        A continuation keeps its leading space. Bytes that are not UTF-8, as those of a
        character that is not complete yet, become U+FFFD.

        Args:
            token_ids: As `next_token_logprobs` takes them, or none.
            special_tokens: Whether to write special tokens, by their names.

        Raises:
            TokenTypeError: Not a flat sequence of integers.
            TokenIdError: An id outside the vocabulary.
        """
        ids = token_ids.token_ids if isinstance(token_ids, Context) else token_ids
        return decode(self.vocabulary, ids, special_tokens=special_tokens)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], **template_options: Any
    ) -> list[int]:
        """Encode messages by the tokenizer's chat template, up to where the answer begins.

        Args:
            messages: Such as `[{"role": "user", "content": "Hello"}]`.
            **template_options: Passed to the tokenizer's `apply_chat_template`: `tools`,
                `chat_template`, `add_generation_prompt=False` ...

        Raises:
            TokenizerError: The tokenizer lacks a chat template, or the template fails.
            TypeError: `messages` is not a sequence of mappings.
        """
        return encode_chat(self.vocabulary, messages, **template_options)

    # -- next-token log-probabilities -------------------------------------------------

    async def next_token_logprobs(
        self, token_ids: TokenIds, *, lora_name: str | None = None
    ) -> torch.Tensor:
        """Score every possible next token after `token_ids`.

        Args:
            token_ids: Prompt and continuation, oldest first: a list, tuple, numpy or
                torch array of at least one integer.
            lora_name: A loaded adapter; by default the one set with `set_lora`.

        Returns:
            Natural-log probabilities, shape `(vocab_size,)`, float32, on the engine's
            device. The tensor is the caller's.

        Raises:
            EmptySequenceError: `token_ids` is empty.
            ContextLengthError: Longer than `max_context`.
            TokenIdError: An id outside the vocabulary.
            TokenTypeError: Not a flat sequence of integers.
            UnknownAdapterError: `lora_name` was not loaded.
            UnsupportedCapabilityError: An adapter is named, and the engine serves none.
            EvaluationError: The engine raised for this sequence, or computed a row that is
                not a distribution.
            EngineClosedError: Closed before the answer.
            EngineDiedError: The engine's thread ended before the answer.
            QueryResetError: `reset_async_queries` came before the answer.
        """
        query, key = self._request(token_ids, lora_name)
        row = self._cached(query, key)
        if row is None:
            row = await self._scheduler.answer(query, key)
            self._hold(token_ids, query)
        return row

    async def next_token_logprobs_uncached(
        self, token_ids: TokenIds, *, lora_name: str | None = None
    ) -> torch.Tensor:
        """Score the next token as `next_token_logprobs`, never from the output cache."""
        query, key = self._request(token_ids, lora_name)
        self._counters.count(len(query), hit=False)
        row: torch.Tensor = await self._scheduler.answer(query, key)
        self._hold(token_ids, query)
        return row

    async def batch_next_token_logprobs(
        self, token_ids_list: TokenBatch, *, lora_name: str | None = None
    ) -> torch.Tensor:
        """Score the next token after each of several sequences.

        All sequences are checked before any is evaluated.

        Args:
            token_ids_list: A sequence of sequences as `next_token_logprobs` takes them, or,
                if they are equally long, an array with a row for each.
            lora_name: A loaded adapter; by default the one set with `set_lora`.

        Returns:
            Row i for sequence i, shape `(len(token_ids_list), vocab_size)`, float32;
            an empty list gives a tensor of shape `(0, vocab_size)`. The caller's.

        Raises:
            GenlmError: As `next_token_logprobs`, for the first sequence that fails.
        """
        sequences = list(checked_batch(token_ids_list))
        rows, asked = self._cached_and_missing(sequences, lora_name)
        answers = await self._scheduler.answer_all(asked)
        self._hold_all(sequences, rows, asked)
        return self._stacked(rows, answers)

    def next_token_logprobs_uncached_sync(
        self, token_ids: TokenIds, *, lora_name: str | None = None
    ) -> torch.Tensor:
        """Score the next token as `next_token_logprobs_uncached` and wait."""
        query, key = self._request(token_ids, lora_name)
        self._counters.count(len(query), hit=False)
        row: torch.Tensor = self._scheduler.answer_sync([(query, key)])[0]
        self._hold(token_ids, query)
        return row

    def cached_logprobs(
        self, token_ids: TokenIds, *, lora_name: str | None = None
    ) -> torch.Tensor | None:
        """Return a copy of the row if the output cache has it, else None."""
        row: torch.Tensor | None = self._cache.get(self._request(token_ids, lora_name)[1])
        return row

    def next_token_logprobs_sync(
        self, token_ids: TokenIds, *, lora_name: str | None = None
    ) -> torch.Tensor:
        """Score the next token and wait; for threads and programs without an event loop.

        Also works inside a running event loop, which it blocks until the answer. Ctrl-C
        ends the wait at once and drops the request; a step that has begun is not
        interrupted, so the next request waits for its end.
        """
        return self.batch_next_token_logprobs_sync([token_ids], lora_name=lora_name)[0]

    def batch_next_token_logprobs_sync(
        self, token_ids_list: TokenBatch, *, lora_name: str | None = None
    ) -> torch.Tensor:
        """Score several sequences and wait; see `batch_next_token_logprobs`."""
        sequences = list(checked_batch(token_ids_list))
        rows, asked = self._cached_and_missing(sequences, lora_name)
        answers = self._scheduler.answer_sync(asked)
        self._hold_all(sequences, rows, asked)
        return self._stacked(rows, answers)

    # -- contexts ---------------------------------------------------------------------

    def context(self, token_ids: Integers, *, lora_name: str | None = None) -> Context:
        """Return a context: token ids that are extended and asked at a constant cost.

        Computes nothing. Every method that takes token ids takes contexts of this model, which
        then also name the adapter.

        Args:
            token_ids: As `next_token_logprobs` takes them.
            lora_name: A loaded adapter; by default the one set with `set_lora` now.

        Raises:
            EmptySequenceError: `token_ids` is empty.
            ContextLengthError: Longer than `max_context`.
            TokenIdError: An id outside the vocabulary.
            TokenTypeError: Not a flat sequence of integers.
            UnknownAdapterError: `lora_name` was not loaded.
            UnsupportedCapabilityError: An adapter is named, and the engine serves none.
        """
        name = self._default_lora if lora_name is None else lora_name
        adapter = None if name is None else self._adapters.engine_name(name)
        return Context(self, self._sequence(token_ids), name, adapter)

    # -- reductions of rows -----------------------------------------------------------

    async def batch_reduce(
        self,
        contexts: TokenBatch,
        reductions: Sequence[Reduction],
        *,
        lora_name: str | None = None,
    ) -> list[Any]:
        """Return a reduction of the row of each of several contexts.

        Args:
            contexts: Several sequences of token ids, or `Context` objects.
            reductions: One for each context; they may be of different classes.
            lora_name: A loaded adapter; by default the one set with `set_lora`.

        Returns:
            The result of reduction i of the row of context i.

        Raises:
            TypeError: One of them is not a `Reduction`.
            ValueError: Another number of reductions than of contexts.
            GenlmError: As `reduce`, for the first context that fails.
        """
        sequences, values, asked = self._reductions_asked(contexts, reductions, lora_name)
        answers = await self._scheduler.answer_all(asked)
        return self._reduced(sequences, values, asked, answers)

    def batch_reduce_sync(
        self,
        contexts: TokenBatch,
        reductions: Sequence[Reduction],
        *,
        lora_name: str | None = None,
    ) -> list[Any]:
        """Return a reduction of the row of each of several contexts and wait."""
        sequences, values, asked = self._reductions_asked(contexts, reductions, lora_name)
        answers = self._scheduler.answer_sync(asked)
        return self._reduced(sequences, values, asked, answers)

    def _reductions_asked(
        self, contexts: TokenBatch, reductions: Sequence[Reduction], lora_name: str | None
    ) -> tuple[list[TokenIds], list[Any], list[tuple[Query, RowKey, Reduction]]]:
        """Return contexts, what the output cache answers of them, and what to ask for."""
        sequences = list(checked_batch(contexts))
        if len(reductions) != len(sequences):
            raise ValueError(
                f"{len(reductions)} reductions for {len(sequences)} contexts; pass one for each"
            )
        for reduction in reductions:
            if not isinstance(reduction, Reduction):
                raise TypeError(
                    f"expected an object of a subclass of genlm.Reduction; found {reduction!r}"
                )
        requests = [self._request(sequence, lora_name) for sequence in sequences]
        values: list[Any] = []
        asked = []
        for (query, key), reduction in zip(requests, reductions, strict=True):
            value = self._known_reduction(key, reduction)
            self._counters.count(len(query), hit=value is not None)
            values.append(value)
            if value is None:
                asked.append((query, key, reduction))
        return sequences, values, asked

    def _known_reduction(self, key: RowKey, reduction: Reduction) -> Any:
        """Return a reduction if the output cache has it or the row, else None."""
        value = self._cache.get((key, reduction)) if reduction.is_reproducible else None
        if value is None and (row := self._cache.get(key)) is not None:
            [reduced] = reduce_rows(row[None], [(reduction,)])
            value = reduced if isinstance(reduced, Exception) else reduced.values[0]
            if isinstance(value, Exception):
                raise value
        return value

    def _reduced(
        self,
        sequences: list[TokenIds],
        values: list[Any],
        asked: list[tuple[Query, RowKey, Reduction]],
        answers: list[Any],
    ) -> list[Any]:
        """Fill the gaps in what the output cache answered, in order."""
        remaining = iter(zip(asked, answers, strict=True))
        for place, value in enumerate(values):
            if value is None:
                (query, _, _), values[place] = next(remaining)
                self._hold(sequences[place], query)
        return values

    # -- scores of texts --------------------------------------------------------------

    def _score_request(
        self, token_ids: TokenIds, start: int, lora_name: str | None
    ) -> ScoreRequest:
        if isinstance(token_ids, Context):
            adapter = self._adapter_of(token_ids, lora_name)
            token_ids = token_ids.token_ids
        else:
            name = self._default_lora if lora_name is None else lora_name
            adapter = None if name is None else self._adapters.engine_name(name)
        longest = None if self.max_context is None else self.max_context + 1
        ids, packed = checked_token_ids(
            token_ids, vocab_size=self.vocabulary.size, max_context=longest
        )
        start = checked_start(start, len(ids))
        if start == len(ids):
            return ScoreRequest(
                [], TokenScores(torch.empty(0), torch.empty(0, dtype=torch.bool))
            )
        if Capability.SCORE not in self.capabilities:
            return self._scores_by_position(ids, packed, start, adapter)
        query = Query(
            next(self._query_ids), TokenSequence(packed[:-4]), adapter, targets=ids[start:]
        )
        key = (self._model, adapter, query.sequence.key, ("score", start, ids[-1]))
        scores = self._cache.get(key)
        self._counters.count(len(query), hit=scores is not None)
        return ScoreRequest([] if scores is not None else [(query, key)], scores)

    def _scores_by_position(
        self, ids: tuple[int, ...], packed: bytes, start: int, adapter: str | None
    ) -> ScoreRequest:
        sequence = TokenSequence(packed[: 4 * start])
        asked = []
        for place in range(start, len(ids)):
            if place > start:
                sequence = TokenSequence(packed[4 * place - 4 : 4 * place], sequence)
            query, key = self._request_of(sequence, adapter)
            self._counters.count(len(query), hit=False)
            asked.append((query, key, TargetScore(ids[place])))
        return ScoreRequest(asked)

    async def _answers(self, asked: Sequence[Any]) -> list[Any]:
        return await self._scheduler.answer_all(asked)

    def _answers_sync(self, asked: Sequence[Any]) -> list[Any]:
        return self._scheduler.answer_sync(asked)

    # -- continuations ----------------------------------------------------------------

    def _sample_query(self, prompt: TokenIds, lora_name: str | None) -> Query:
        return self._request(prompt, lora_name)[0]

    async def _drawn_token(
        self, sequence: TokenSequence, adapter: str | None, draw: Draw
    ) -> DrawnToken:
        query, key = self._request_of(sequence, adapter)
        drawn: DrawnToken | None = self._known_reduction(key, draw)
        self._counters.count(len(query), hit=drawn is not None)
        if drawn is None:
            drawn = await self._scheduler.answer(query, key, draw)
        return drawn

    async def _drawn_by_the_engine(self, query: Query, params: SamplingParams) -> list[int]:
        self._counters.count(len(query), hit=False)
        drawn: list[int] = await self._scheduler.answer(query.replace(sampling=params))
        return drawn

    def _refuse_own_thread(self) -> None:
        self._scheduler.refuse_own_thread()

    # -- adapters ---------------------------------------------------------------------

    def add_new_lora(
        self,
        lora_path: str | os.PathLike[str],
        lora_name: str = "lora_1",
        *,
        replace: bool = False,
    ) -> None:
        """Load a LoRA adapter. Loading the same folder under its name again does nothing.

        Args:
            lora_path: Folder of the adapter.
            lora_name: The name that requests give.
            replace: Whether a name that is in use changes to the new adapter, as if
                `remove_lora` had been called for the one before.

        Raises:
            UnsupportedCapabilityError: The engine serves no adapters.
            AdapterError: It cannot be loaded, or the name is that of another folder.
            TypeError: The name is not a string, or the folder not a path.
        """
        self._adapters.load(lora_path, lora_name, replace=replace)

    def remove_lora(self, lora_name: str) -> None:
        """Take away an adapter; its name can then be given again.

        Requests under way are answered with the adapter; its rows leave the output cache and
        its weights are freed once the last of them has ended. A continuation that is drawn
        row by row ends with `UnknownAdapterError`. Of an adapter that the model came with
        only the name is taken away.

        Raises:
            UnknownAdapterError: `lora_name` is not loaded.
            UnsupportedCapabilityError: The engine serves no adapters, or cannot remove one.
        """
        self._adapters.remove(lora_name)

    @property
    def lora_names(self) -> tuple[str, ...]:
        """Names of the loaded adapters, those that the model came with first."""
        return self._adapters.names

    @property
    def lora_name(self) -> str | None:
        """The adapter of requests that name none, None for the base model."""
        return self._default_lora

    def with_lora(self, lora_name: str | None) -> AsyncLM:
        """Return this model with another default adapter, None for the base model.

        Both share the engine, the caches and the counters, and their requests can be in
        one batch. Closing either closes both.

        Raises:
            UnknownAdapterError: `lora_name` was not loaded.
            UnsupportedCapabilityError: The engine serves no adapters.
        """
        if lora_name is not None:
            self._adapters.engine_name(lora_name)
        bound = copy.copy(self)
        bound._default_lora = lora_name  # noqa: SLF001 - a copy of this object
        return bound

    def set_lora(self, lora_name: str = "lora_1") -> None:
        """Use an adapter for all later requests of this object that name none.

        Raises:
            UnknownAdapterError: `lora_name` was not loaded.
            UnsupportedCapabilityError: The engine serves no adapters.
        """
        self._adapters.engine_name(lora_name)
        self._default_lora = lora_name

    def clear_lora(self) -> None:
        """Use the base model for all later requests of this object that name no adapter."""
        self._default_lora = None

    # -- parts ------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine. Its own thread calls it; others may read attributes and `statistics`."""
        return self._scheduler.engine

    @property
    def output_cache(self) -> OutputCache:
        """The rows that are kept."""
        return self._cache

    # -- caches, statistics, end ------------------------------------------------------

    def cache_kv(self, prompt: TokenIds, *, lora_name: str | None = None) -> None:
        """Compute a prefix and keep it in the engine until `clear_kv_cache`.

        Raises:
            UnsupportedCapabilityError: The engine does not keep prefixes.
            GenlmError: As `next_token_logprobs`.
        """
        self._require(Capability.PREFIX_CACHE)
        query, _ = self._request(prompt, lora_name)
        self._scheduler.run(
            lambda engine: cast("PrefixCacheEngine", engine).cache_prefix(
                query.token_ids, query.adapter
            )
        )

    def clear_kv_cache(self) -> None:
        """Free the prefixes that the engine keeps. Answers do not change.

        Raises:
            UnsupportedCapabilityError: The engine does not keep prefixes.
        """
        self._require(Capability.PREFIX_CACHE)
        self._scheduler.run(
            lambda engine: cast("PrefixCacheEngine", engine).clear_prefix_cache()
        )

    def clear_cache(self) -> None:
        """Drop this model's rows from the output cache. Answers do not change."""
        _drop_rows(self._cache, self._model)

    def reset_async_queries(self) -> None:
        """End all unanswered requests with `QueryResetError`; the model stays usable."""
        self._scheduler.reset()

    def statistics(self) -> Statistics:
        """Return counters of requests and answers since the model was loaded."""
        engine = self._scheduler.engine.statistics()
        return Statistics(
            **asdict(self._scheduler.statistics()),
            **self._counters.snapshot(),
            cache_entries=len(self._cache),
            cache_bytes=self._cache.nbytes,
            engine=engine.copy() if isinstance(engine, dict) else dict(engine),
        )

    def close(self) -> None:
        """End all unanswered requests with `EngineClosedError` and free the engine.

        Waits for the engine's current step. Closing twice is allowed; any later request
        raises `EngineClosedError`.
        """
        self._scheduler.close()
        _drop_rows(self._cache, self._model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # -- one request ------------------------------------------------------------------

    def _request(self, token_ids: TokenIds, lora_name: str | None) -> tuple[Query, RowKey]:
        if isinstance(token_ids, Context):
            adapter = self._adapter_of(token_ids, lora_name)
            return self._request_of(token_ids.sequence, adapter)
        name = self._default_lora if lora_name is None else lora_name
        adapter = None if name is None else self._adapters.engine_name(name)
        return self._request_of(self._sequence(token_ids), adapter)

    def _request_of(self, sequence: TokenSequence, adapter: str | None) -> tuple[Query, RowKey]:
        """Make the query of a checked sequence; `adapter` is the engine's name."""
        if self.max_context is not None and len(sequence) > self.max_context:
            raise ContextLengthError(len(sequence), self.max_context)
        query = Query(next(self._query_ids), sequence, adapter)
        return query, (self._model, adapter, sequence.key)

    def _sequence(self, token_ids: Integers) -> TokenSequence:
        """Check token ids and pack them, or find that they extend what was asked before."""
        kind = type(token_ids)
        is_long = (kind is list or kind is tuple) and len(token_ids) >= SHORTEST
        if is_long:
            listed: list[Any] = token_ids if kind is list else list(token_ids)  # type: ignore[assignment]
            known = self._recent.find(listed, self.vocabulary.size)
            if known is not None:
                return known
        ids, packed = checked_token_ids(
            token_ids, vocab_size=self.vocabulary.size, max_context=self.max_context
        )
        sequence = TokenSequence(packed)
        if is_long:
            self._recent.add(list(ids), sequence)
        return sequence

    def _adapter_of(self, context: Context, lora_name: str | None) -> str | None:
        """Return the engine's name of a context's adapter, if this model can answer it."""
        if not context.is_of(self._model):
            raise ValueError(
                f"{context!r} is a context of another model than {self!r}; make it with this "
                f"model's method context"
            )
        if lora_name is not None and lora_name != context.lora_name:
            raise ValueError(
                f"lora_name={lora_name!r} for {context!r}, which has the adapter "
                f"{context.lora_name!r}; make a context of the other adapter"
            )
        if context.lora_name is None:
            return None
        adapter = context.adapter
        if self._adapters.engine_name(context.lora_name) != adapter:
            raise UnknownAdapterError(context.lora_name, self._adapters.names)
        return adapter

    def _hold(self, token_ids: object, query: Query) -> None:
        """Keep what the engine has for a context while the context is referred to."""
        if self._holds is not None and isinstance(token_ids, Context):
            token_ids.hold(self._holds.of((query.adapter, query.sequence.key)))

    def _hold_all(
        self,
        sequences: Sequence[object],
        rows: Sequence[torch.Tensor | None],
        asked: Sequence[tuple[Query, RowKey]],
    ) -> None:
        remaining = iter(asked)
        for token_ids, row in zip(sequences, rows, strict=True):
            if row is None:
                self._hold(token_ids, next(remaining)[0])

    def _cached(self, query: Query, key: RowKey) -> torch.Tensor | None:
        row: torch.Tensor | None = self._cache.get(key)
        self._counters.count(len(query), hit=row is not None)
        return row

    def _cached_and_missing(
        self, sequences: Sequence[TokenIds], lora_name: str | None
    ) -> tuple[list[torch.Tensor | None], list[tuple[Query, RowKey]]]:
        asked = [self._request(token_ids, lora_name) for token_ids in sequences]
        rows = [self._cached(*one) for one in asked]
        return rows, [one for one, row in zip(asked, rows, strict=True) if row is None]

    def _stacked(
        self, rows: Sequence[torch.Tensor | None], answers: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Fill the gaps in `rows` with the answers, in order."""
        if not rows:
            return torch.empty(0, self.vocabulary.size, dtype=torch.float32)
        remaining = iter(answers)
        return torch.stack([next(remaining) if row is None else row for row in rows])

    def _require(self, capability: Capability) -> None:
        require_capability(self._scheduler.engine, capability, self.name)


def _drop_rows(cache: OutputCache, model: object, *adapter: str) -> None:
    """Drop the results of a model from an output cache, or those of one of its adapters."""

    def is_dropped(key: Any) -> bool:
        of_row = key[0] if isinstance(key, tuple) and len(key) == 2 else key
        own = isinstance(of_row, tuple) and of_row != () and of_row[0] is model
        return own and (not adapter or of_row[1] == adapter[0])

    cache.clear(is_dropped)


load_model = AsyncLM.from_name

load_model_by_name = load_model
"""The name under which genlm-backend published it."""
