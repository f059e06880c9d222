"""`Requests`: builds the requests of a model and returns their results.

All arguments of callers are checked here, before a request reaches the scheduler. Results are
read from the output cache if possible; operations on rows do not run on the event loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import torch

from genlm.core.base.error_handling import map_batch, with_places
from genlm.core.base.errors import ContextLengthError, UnknownAdapterError
from genlm.core.base.statistics import RequestCounters
from genlm.core.base.validation import Integers, checked_batch, checked_token_ids
from genlm.core.engine.engine import Engine
from genlm.core.engine.group_sampling import GroupSampling
from genlm.core.model.adapters import BASE_MODEL, Adapter, Adapters
from genlm.core.model.cached_results import CachedResults
from genlm.core.model.context import Context, TokenBatch, TokenIds
from genlm.core.model.leases import LeaseTable
from genlm.core.model.members import Members
from genlm.core.queries.generations import Generation, Integers64, distinct_sequences
from genlm.core.queries.query import GroupQuery, GroupReduction, Query, Reduction
from genlm.core.queries.recent_sequences import SHORTEST, RecentSequences
from genlm.core.queries.scored_rows import ScoredRows
from genlm.core.queries.sequence import TokenSequence
from genlm.core.rows.output_cache import OutputCache
from genlm.core.scheduler import Scheduler

RowKey = tuple[object, str | None, bytes]
"""Key of a row: `CachedResults.model`, adapter, and the key of the token sequence."""

Item = tuple[Query, Any, Reduction | None]
"""A query, its key, and the requested reduction of its row; None for the whole result."""


class Requests:
    """The requests of one model; every method may be called from any thread.

    Args:
        scheduler: Scheduler of the engine.
        cache: Output cache, which other models may share.
        leases: Leases of the engine's state of contexts.
        backend: Engine name for messages.

    Attributes:
        scheduler: As the argument.
        counters: Counters of the requests.
        adapters: The loaded adapters.
        results: The model's results in the output cache.
        default_lora: Default adapter of requests, None for the base model.
        sampled_together: Maximum number of continuations in a query, None for no limit.
    """

    _query_ids = itertools.count()  # shared by all models: an engine may serve several

    def __init__(
        self,
        scheduler: Scheduler[Engine],
        cache: OutputCache,
        leases: LeaseTable,
        *,
        backend: str,
    ) -> None:
        engine = scheduler.engine
        self.scheduler = scheduler
        self.counters = RequestCounters()
        self.results = CachedResults(cache, scheduler)
        self.adapters = Adapters(scheduler, backend=backend, drop_rows=self.results.drop)
        self.default_lora: str | None = None
        self.vocab_size = engine.vocabulary.size
        self.max_context = engine.max_context
        self.sampled_together: int | None = getattr(engine, "samples_groups", None)
        self.scored_columns: int = getattr(engine, "scored_columns", 0)
        self.smallest_group: int = getattr(engine, "smallest_group", 2)
        self._leases = leases if hasattr(engine, "release_context") else None
        self._lease = None if self._leases is None else self._leases.lease
        self._recent = RecentSequences()

    # -- one sequence -----------------------------------------------------------------

    def build_query(self, token_ids: TokenIds, lora_name: str | None) -> tuple[Query, RowKey]:
        """Check a sequence and an adapter name, and build the query and its key."""
        sequence, adapter = self.context_parts(token_ids, lora_name)
        return self.sequence_query(sequence, adapter.engine_name)

    def sequence_query(
        self, sequence: TokenSequence, adapter: str | None, targets: tuple[int, ...] = ()
    ) -> tuple[Query, RowKey]:
        """Build the query of a checked sequence; `adapter` is the engine's adapter name."""
        if self.max_context is not None and len(sequence) > self.max_context:
            raise ContextLengthError(len(sequence), self.max_context)
        query = Query(next(self._query_ids), sequence, adapter, targets=targets)
        return query, (self.results.model, adapter, sequence.key)

    def group_query(  # noqa: PLR0917
        self,
        generation: Generation,
        places: Integers64,
        reduction: GroupReduction,
        adapter: str | None,
        members: Integers64 | None = None,
        sampling: GroupSampling | None = None,
    ) -> GroupQuery:
        """Build the query for some members; see `distinct_sequences` for the arguments."""
        wanted, row_of = distinct_sequences(
            generation.lineage, places, members, max_context=self.max_context
        )
        return GroupQuery(
            *(next(self._query_ids), generation, wanted, row_of),
            *(reduction, adapter, self._lease, sampling),
        )

    def sampling_query(
        self, generation: Generation, sampling: GroupSampling, adapter: str | None
    ) -> GroupQuery:
        """Build the query for continuations of at least one member."""
        active = np.flatnonzero((sampling.max_tokens > 0) & ~sampling.finished)
        draws = sampling.draws(active, 0)
        return self.group_query(generation, sampling.places, draws, adapter, active, sampling)

    def scored_query(
        self, scored: ScoredRows, reduction: GroupReduction, adapter: str | None
    ) -> GroupQuery:
        """Build the query for the rows that predict the tokens of continuations."""
        return GroupQuery(
            *(next(self._query_ids), scored.generation, scored.wanted, scored.row_of),
            *(reduction, adapter, self._lease),
            dropped=scored.dropped,
        )

    def groups(
        self, queries: Sequence[GroupQuery], then: Callable[[list[Any]], Any] | None = None
    ) -> Coroutine[Any, Any, list[Any]]:
        """Submit queries; return the `GroupResult`, `SampledGroup` or exception of each.

        For `then` see `Scheduler.submit`.
        """
        for query in queries:
            self.counters.count(len(query), requests=len(query.wanted))
        request = self.scheduler.submit([(query, None, None) for query in queries], then)
        return self.scheduler.results(request)  # no `await`: it would add a frame

    def reduce_no_rows(self, reduction: GroupReduction) -> tuple[torch.Tensor, ...]:
        """Return the columns of a reduction of no rows."""
        self.scheduler.check_open()
        rows = torch.empty(0, self.vocab_size, dtype=torch.float32, device="cpu")
        indices = torch.empty(0, dtype=torch.long, device="cpu")
        return reduction.compute(rows, indices, indices)

    def context_parts(
        self, token_ids: TokenIds, lora_name: str | None
    ) -> tuple[TokenSequence, Adapter]:
        """Return the parts of a `Context`: its sequence and its adapter."""
        if isinstance(token_ids, Context):
            return token_ids.sequence, self.adapter_of(token_ids, lora_name)
        adapter = self.adapter(lora_name)
        sequence = self._sequence(token_ids)
        if self.max_context is not None and len(sequence) > self.max_context:
            raise ContextLengthError(len(sequence), self.max_context)
        return sequence, adapter

    def adapter(self, lora_name: str | None) -> Adapter:
        """Return the adapter of a request, or the base model."""
        name = self.default_lora if lora_name is None else lora_name
        return BASE_MODEL if name is None else self.adapters.find(name)

    def _sequence(self, token_ids: Integers) -> TokenSequence:
        """Return checked token ids, or the extension of a recent sequence by the last id."""
        kind = type(token_ids)
        is_long = (kind is list or kind is tuple) and len(token_ids) >= SHORTEST
        if is_long:
            id_list: list[Any] = token_ids if kind is list else list(token_ids)  # type: ignore[assignment]
            recent = self._recent.find(id_list, self.vocab_size)
            if recent is not None:
                return recent
        ids, packed = checked_token_ids(token_ids, self.vocab_size)
        sequence = TokenSequence(packed)
        if is_long:
            self._recent.add(list(ids), sequence)
        return sequence

    def adapter_of(self, context: Context | Members, lora_name: str | None) -> Adapter:
        """Check that a context belongs to this model; return its adapter."""
        if context._lm._scheduler is not self.scheduler:  # noqa: SLF001 - internal to genlm.core.model
            raise ValueError(
                f"{context!r} belongs to a different model; create it with this model's method "
                f"{type(context).__name__.lower()}"
            )
        adapter = context._adapter  # noqa: SLF001
        name = adapter.name
        if lora_name is not None and lora_name != name:
            raise ValueError(
                f"lora_name={lora_name!r} for {context!r}, which has the adapter {name!r}; "
                f"create a context with the other adapter"
            )
        if name is not None and self.adapters.find(name) is not adapter:
            raise UnknownAdapterError(name, self.adapters.names)
        return adapter

    # -- results ----------------------------------------------------------------------

    async def result(
        self,
        token_ids: TokenIds,
        reduction: Reduction | None,
        lora_name: str | None,
        *,
        use_cache: bool = True,
    ) -> Any:
        """Return the row of a sequence or a reduction of it, which belongs to the caller."""
        query, key = self.build_query(token_ids, lora_name)
        [cached] = self.results.find([(key, reduction)]) if use_cache else [None]
        self.counters.count(len(query), hits=int(cached is not None))
        if cached is None:
            # Not `answer`: the garbage collector visits every coroutine of a pending request.
            request = self.scheduler.submit([(query, key, reduction)])
            [value] = await self.scheduler.results(request)
        else:
            [value] = await self.results.values([cached])
        if isinstance(value, Exception):
            raise value
        self._update_lease(token_ids, is_computed=cached is None)
        return value

    async def batch(
        self,
        contexts: TokenBatch,
        reductions: Sequence[Reduction | None] | None,
        lora_name: str | None,
    ) -> list[Any]:
        """Return the rows of several sequences, or the given reductions of them."""
        sequences = list(checked_batch(contexts))
        reductions = [None] * len(sequences) if reductions is None else reductions
        if len(reductions) != len(sequences):
            raise ValueError(
                f"{len(reductions)} reductions for {len(sequences)} contexts; pass one for each"
            )
        queries = map_batch(lambda ids: self.build_query(ids, lora_name), sequences)
        items = [(*query, output) for query, output in zip(queries, reductions, strict=True)]
        return await self.answer(items, sequences, range(len(items)))

    async def answer(
        self,
        items: Sequence[Item],
        sequences: Sequence[TokenIds] = (),
        places: Sequence[int] | None = None,
    ) -> list[Any]:
        """Return the results of requests, from the output cache or the engine.

        Args:
            items: Results of `build_query`, with the requested reductions.
            sequences: Arguments of the caller, whose contexts are leased.
            places: Places of the items in the caller's batch, for errors; None for one request.
        """
        entries = self.results.find([(key, reduction) for _, key, reduction in items])
        misses = [item for item, entry in zip(items, entries, strict=True) if entry is None]
        for turn, (query, _, _) in enumerate(misses):
            query.turn = turn
        tokens, hits = sum(len(query) for query, _, _ in items), len(items) - len(misses)
        self.counters.count(tokens, requests=len(items), hits=hits)
        request = self.scheduler.submit(misses)
        try:
            hit_values = await self.results.values(
                [entry for entry in entries if entry is not None]
            )
        except GeneratorExit:  # as in `Scheduler.results`
            raise
        except BaseException:
            self.scheduler.abandon(request)
            raise
        cached, computed = iter(hit_values), iter(await self.scheduler.results(request))
        values = [next(computed if entry is None else cached) for entry in entries]
        _raise_first(values, places)
        if self._leases is not None:
            for token_ids, entry in zip(sequences, entries, strict=False):
                self._update_lease(token_ids, is_computed=entry is None)
        return values

    def _update_lease(self, token_ids: object, *, is_computed: bool) -> None:
        """Lease the engine's state of a context while references to the context exist."""
        if self._leases is not None and isinstance(token_ids, Context):
            token_ids._update_lease(self._leases, is_computed=is_computed)  # noqa: SLF001


def _raise_first(values: Sequence[Any], places: Sequence[int] | None) -> None:
    """Raise the first exception among values, with the places of all exceptions."""
    failed = [i for i, value in enumerate(values) if isinstance(value, Exception)]
    if failed:
        error: Exception = values[failed[0]]
        if places is not None:
            with_places(error, list(dict.fromkeys(places[i] for i in failed)))
        raise error
