"""`Requests`: builds the requests of a model and returns their results.

All arguments of callers are checked here, before a request reaches the scheduler. Results are
read from the output cache if possible; operations on rows do not run on the event loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from genlm.core.base.blocking import off_loop
from genlm.core.base.errors import (
    ContextLengthError,
    UnknownAdapterError,
    as_genlm_error,
    map_batch,
    with_places,
)
from genlm.core.base.validation import checked_batch, checked_integer, checked_token_ids
from genlm.core.engine.engine import Capability, Engine
from genlm.core.model.context import Context
from genlm.core.model.leases import LeaseTable
from genlm.core.queries.generations import Generation, Lineage, distinct_sequences
from genlm.core.queries.query import GroupQuery, GroupReduction, GroupResult, Query, Reduction
from genlm.core.queries.recent_sequences import SHORTEST, RecentSequences
from genlm.core.queries.sequence import TokenSequence
from genlm.core.rows.output_cache import Entry, entry_copy, entry_value
from genlm.core.rows.reductions import TargetScore, reduce_rows

if TYPE_CHECKING:
    from genlm.core.base.statistics import RequestCounters
    from genlm.core.base.validation import Integers
    from genlm.core.engine.group_sampling import GroupSampling
    from genlm.core.model.adapters import Adapters
    from genlm.core.model.context import TokenBatch, TokenIds
    from genlm.core.model.population import Population
    from genlm.core.queries.generations import Integers64
    from genlm.core.rows.output_cache import OutputCache
    from genlm.core.scheduler import Scheduler

__all__ = ["COPIED_ON_LOOP", "Item", "Requests", "RowKey", "drop_results"]

RowKey = tuple[object, str | None, bytes]
"""Key of a row: model, adapter, and the key of the token sequence."""

Item = tuple[Query, Any, Reduction | None]
"""A query, its key, and the requested reduction of its row; None for the whole result."""

_Cached = tuple[Entry, Reduction | None]
"""An entry of the output cache, and the requested reduction of it; None for a copy."""

COPIED_ON_LOOP = 2**16
"""Maximum number of bytes copied on the event loop: a copy takes as long as a thread switch."""

_REDUCED_AT_ONCE = 2**24
"""Maximum number of values of cached rows reduced at once: 64 MiB in float32."""


class Requests:
    """The requests of one model; every method may be called from any thread.

    Args:
        scheduler: Scheduler of the engine.
        model: Identity of the model in keys: models may share one cache.
        cache: Cache of rows and reductions.
        adapters: Loaded adapters.
        counters: Counters of requests.
        leases: Leases of the engine's state of contexts; None if the engine has no such state.

    Attributes:
        default_lora: Default adapter of requests, None for the base model.
        sampled_together: Maximum number of continuations in a query, None for no limit.
    """

    _query_ids = itertools.count()  # of all models: an engine may serve several

    def __init__(
        self,
        scheduler: Scheduler[Engine],
        *,
        model: object,
        cache: OutputCache,
        adapters: Adapters,
        counters: RequestCounters,
        leases: LeaseTable | None,
    ) -> None:
        engine = scheduler.engine
        self.default_lora: str | None = None
        self.vocab_size = engine.vocabulary.size
        self.max_context = engine.max_context
        self.capabilities = engine.capabilities
        self.sampled_together: int | None = getattr(engine, "samples_groups", None)
        self.counters = counters
        self.scheduler = scheduler
        self._model = model
        self._cache = cache
        self._adapters = adapters
        self._leases = leases
        self._recent = RecentSequences()

    # -- one sequence -----------------------------------------------------------------

    def build_query(self, token_ids: TokenIds, lora_name: str | None) -> tuple[Query, RowKey]:
        """Check a sequence and an adapter name, and build the query and its key."""
        sequence, _, adapter = self.context_parts(token_ids, lora_name)
        return self.sequence_query(sequence, adapter)

    def sequence_query(
        self, sequence: TokenSequence, adapter: str | None
    ) -> tuple[Query, RowKey]:
        """Build the query of a checked sequence; `adapter` is the engine's adapter name."""
        if self.max_context is not None and len(sequence) > self.max_context:
            raise ContextLengthError(len(sequence), self.max_context)
        query = Query(next(self._query_ids), sequence, adapter)
        return query, (self._model, adapter, sequence.key)

    def group_query(  # noqa: PLR0917
        self,
        generation: Generation,
        places: Integers64,
        reduction: GroupReduction,
        adapter: str | None,
        members: Integers64 | None = None,
        sampling: GroupSampling | None = None,
    ) -> GroupQuery:
        """Build the query of some members; see `distinct_sequences` for the arguments."""
        wanted, row_of = distinct_sequences(
            generation.lineage, places, members, max_context=self.max_context
        )
        lease = None if self._leases is None else self._leases.lease
        return GroupQuery(
            *(next(self._query_ids), generation, wanted, row_of),
            *(reduction, adapter, lease, sampling),
        )

    async def groups(self, queries: Sequence[GroupQuery]) -> list[Any]:
        """Return the `GroupResult`, `SampledGroup` or exception of each query."""
        for query in queries:
            self.counters.count(len(query), requests=len(query.wanted))
        request = self.scheduler.submit([(query, None, None) for query in queries])
        return await self.scheduler.results(request)

    async def group(self, query: GroupQuery) -> Any:
        """Return the `GroupResult` or `SampledGroup` of one query."""
        [answer] = await self.groups([query])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def context_parts(
        self, token_ids: TokenIds, lora_name: str | None
    ) -> tuple[TokenSequence, str | None, str | None]:
        """Return the parts of a `Context`: sequence, adapter, and the engine's adapter name."""
        if isinstance(token_ids, Context):
            adapter = self.adapter_of(token_ids, lora_name)
            return token_ids.sequence, token_ids.lora_name, adapter
        name, adapter = self._adapter(lora_name)
        sequence = self._sequence(token_ids)
        if self.max_context is not None and len(sequence) > self.max_context:
            raise ContextLengthError(len(sequence), self.max_context)
        return sequence, name, adapter

    def _adapter(self, lora_name: str | None) -> tuple[str | None, str | None]:
        name = self.default_lora if lora_name is None else lora_name
        return name, None if name is None else self._adapters.engine_name(name)

    def _sequence(self, token_ids: Integers) -> TokenSequence:
        """Check and pack token ids, or find the recent sequence that they extend."""
        kind = type(token_ids)
        is_long = (kind is list or kind is tuple) and len(token_ids) >= SHORTEST
        if is_long:
            listed: list[Any] = token_ids if kind is list else list(token_ids)  # type: ignore[assignment]
            known = self._recent.find(listed, self.vocab_size)
            if known is not None:
                return known
        ids, packed = checked_token_ids(
            token_ids, vocab_size=self.vocab_size, max_context=self.max_context
        )
        sequence = TokenSequence(packed)
        if is_long:
            self._recent.add(list(ids), sequence)
        return sequence

    def adapter_of(self, context: Context | Population, lora_name: str | None) -> str | None:
        """Return the engine's name of a context's adapter; check that this model serves it."""
        if context._lm._model is not self._model:  # noqa: SLF001 - parts of AsyncLM
            raise ValueError(
                f"{context!r} belongs to a different model; make it with this model's method "
                f"{type(context).__name__.lower()}"
            )
        if lora_name is not None and lora_name != context.lora_name:
            raise ValueError(
                f"lora_name={lora_name!r} for {context!r}, which has the adapter "
                f"{context.lora_name!r}; make a context of the other adapter"
            )
        if context.lora_name is None:
            return None
        adapter = context._adapter  # noqa: SLF001
        if self._adapters.engine_name(context.lora_name) != adapter:
            raise UnknownAdapterError(context.lora_name, self._adapters.names)
        return adapter

    # -- results ----------------------------------------------------------------------

    async def row(
        self, token_ids: TokenIds, lora_name: str | None, *, use_cache: bool = True
    ) -> Any:
        """Return the row of a sequence, which belongs to the caller."""
        query, key = self.build_query(token_ids, lora_name)
        row = None
        if use_cache and 4 * self.vocab_size <= COPIED_ON_LOOP:
            row = self._cache.get(key)
        elif use_cache and key in self._cache:
            row = await off_loop(self._cache.get, key)
        is_cached = row is not None
        self.counters.count(len(query), hits=int(is_cached))
        if not is_cached:
            row = await self.scheduler.answer(query, key)
        self._keep(token_ids, is_computed=not is_cached)
        return row

    async def batch(
        self,
        contexts: TokenBatch,
        wanted: Sequence[Reduction | None] | None,
        lora_name: str | None,
    ) -> list[Any]:
        """Return the row of each of several sequences, or a reduction of it."""
        sequences = list(checked_batch(contexts))
        wanted = [None] * len(sequences) if wanted is None else wanted
        if len(wanted) != len(sequences):
            raise ValueError(
                f"{len(wanted)} reductions for {len(sequences)} contexts; pass one for each"
            )
        queries = map_batch(lambda each: self.build_query(each, lora_name), sequences)
        items = [(*query, each) for query, each in zip(queries, wanted, strict=True)]
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
            sequences: The caller's arguments, if they may be contexts.
            places: Places of the items in the caller's batch, for errors; None for one request.
        """
        cached = [self._cached(key, wanted) for _, key, wanted in items]
        misses = [item for item, each in zip(items, cached, strict=True) if each is None]
        tokens, hits = sum(len(query) for query, _, _ in items), len(items) - len(misses)
        self.counters.count(tokens, requests=len(items), hits=hits)
        request = self.scheduler.submit(misses)
        try:
            read = await self._read([each for each in cached if each is not None])
        except GeneratorExit:  # as in `Scheduler.results`
            raise
        except BaseException:
            self.scheduler.abandon(request)
            raise
        found, computed = iter(read), iter(await self.scheduler.results(request))
        values = [next(computed if each is None else found) for each in cached]
        _raise_first(values, places)
        if self._leases is not None:
            for token_ids, each in zip(sequences, cached, strict=False):
                self._keep(token_ids, is_computed=each is None)
        return values

    def _cached(self, key: Any, wanted: Reduction | None) -> _Cached | None:
        """Find a result in the output cache, or the row of which it is a reduction."""
        if wanted is not None and wanted.is_cacheable:
            entry = self._cache.find((key, wanted))
            if entry is not None:
                return entry, None
        entry = self._cache.find(key)
        return None if entry is None else (entry, wanted)

    async def _read(self, cached: list[_Cached]) -> list[Any]:
        """Return copies and reductions of cached results, on another thread if that is long."""
        is_short = sum(entry[2] for entry, _ in cached) <= COPIED_ON_LOOP
        if is_short and all(wanted is None for _, wanted in cached):
            return [entry_copy(entry) for entry, _ in cached]
        return await off_loop(_read_cached, cached)

    def _keep(self, token_ids: object, *, is_computed: bool) -> None:
        """Lease the engine's state of a context while references to the context exist."""
        if self._leases is not None and isinstance(token_ids, Context):
            token_ids._keep(self._leases, is_computed=is_computed)  # noqa: SLF001

    # -- texts ------------------------------------------------------------------------

    def scores(self, token_ids: TokenIds, start: int, lora_name: str | None) -> list[Item]:
        """Check a text, and build the requests that score it from a position on.

        Returns:
            One request for `TokenScores`, or one request per position for a `ScoredToken`.
        """
        ids, packed, start, adapter = self._text(token_ids, start, lora_name)
        if Capability.SCORE not in self.capabilities or start == len(ids):
            return self._scores_by_position(ids, packed, start, adapter)
        query = Query(
            next(self._query_ids), TokenSequence(packed[:-4]), adapter, targets=ids[start:]
        )
        key = (self._model, adapter, query.sequence.key, ("score", start, ids[-1]))
        return [(query, key, None)]

    async def reduced_text(
        self,
        token_ids: TokenIds,
        reduction: GroupReduction,
        start: int,
        lora_name: str | None,
    ) -> tuple[torch.Tensor, ...]:
        """Return the columns of a reduction of the rows that predict the tokens of a text."""
        ids, packed, start, adapter = self._text(token_ids, start, lora_name)
        if start == len(ids):
            rows, nothing = torch.empty(0, self.vocab_size), torch.empty(0, dtype=torch.long)
            return reduction.compute(rows, nothing, nothing)
        if Capability.SCORE not in self.capabilities:
            return await self._reduced_by_position(packed, start, reduction, adapter)
        query = Query(
            next(self._query_ids),
            TokenSequence(packed[:-4]),
            adapter,
            outputs=(reduction,),
            targets=ids[start:],
        )
        self.counters.count(len(query))
        columns: tuple[torch.Tensor, ...] = await self.scheduler.answer(query)
        return columns

    def _text(
        self, token_ids: TokenIds, start: int, lora_name: str | None
    ) -> tuple[tuple[int, ...], bytes, int, str | None]:
        """Check a text; return its ids, packed ids, `start`, and the engine's adapter name."""
        if isinstance(token_ids, Context):
            adapter = self.adapter_of(token_ids, lora_name)
            token_ids = token_ids.token_ids
        else:
            _, adapter = self._adapter(lora_name)
        longest = None if self.max_context is None else self.max_context + 1
        ids, packed = checked_token_ids(
            token_ids, vocab_size=self.vocab_size, max_context=longest
        )
        first = checked_integer("start", start, 1)
        if first > len(ids):
            raise ValueError(
                f"start={first} of a text of {len(ids)} tokens; it must be {len(ids)} or less"
            )
        return ids, packed, first, adapter

    def _scores_by_position(
        self, ids: tuple[int, ...], packed: bytes, start: int, adapter: str | None
    ) -> list[Item]:
        pairs = zip(_beginnings(packed, start), ids[start:], strict=False)
        return [
            (*self.sequence_query(sequence, adapter), TargetScore(target))
            for sequence, target in pairs
        ]

    async def _reduced_by_position(
        self, packed: bytes, start: int, reduction: GroupReduction, adapter: str | None
    ) -> tuple[torch.Tensor, ...]:
        """Reduce the rows of a text's prefixes as those of a population."""
        lineage = Lineage.of_sequences(list(_beginnings(packed, start)))
        places = np.arange(len(lineage))
        query = self.group_query(Generation(lineage), places, reduction, adapter)
        answer: GroupResult = await self.group(query)
        if answer.errors:
            raise as_genlm_error(answer.errors[min(answer.errors)])
        return answer.columns


def _beginnings(packed: bytes, start: int) -> Iterator[TokenSequence]:
    """Yield the proper prefixes of a packed text of at least `start` tokens."""
    sequence = TokenSequence(packed[: 4 * start])
    yield sequence
    for place in range(4 * start, len(packed) - 4, 4):
        sequence = TokenSequence(packed[place : place + 4], sequence)
        yield sequence


def _read_cached(cached: list[_Cached]) -> list[Any]:
    values = [entry_copy(entry) if wanted is None else None for entry, wanted in cached]
    places_of: dict[int, list[int]] = {}  # of the reductions of each row
    for place, (entry, wanted) in enumerate(cached):
        if wanted is not None:
            places_of.setdefault(id(entry), []).append(place)
    of_rows = list(places_of.values())
    while of_rows:
        first = entry_value(cached[of_rows[0][0]][0])
        step = max(1, _REDUCED_AT_ONCE // len(first))
        part, of_rows = of_rows[:step], of_rows[step:]
        rows = [entry_value(cached[places[0]][0]) for places in part]
        outputs = [tuple(cached[place][1] for place in places) for places in part]
        answers = reduce_rows(torch.stack(rows), outputs)
        for places, answer in zip(part, answers, strict=True):
            for i, place in enumerate(places):
                values[place] = answer if isinstance(answer, Exception) else answer.values[i]
    return values


def drop_results(cache: OutputCache, model: object, *adapter: str) -> None:
    """Drop the results of a model, or of one of its adapters, from an output cache."""

    def is_dropped(key: Any) -> bool:
        of_row = key[0] if isinstance(key, tuple) and len(key) == 2 else key
        own = isinstance(of_row, tuple) and of_row != () and of_row[0] is model
        return own and (not adapter or of_row[1] == adapter[0])

    cache.clear(is_dropped)


def _raise_first(values: Sequence[Any], places: Sequence[int] | None) -> None:
    """Raise the first exception among values, with the places of all exceptions."""
    failed = [i for i, value in enumerate(values) if isinstance(value, Exception)]
    if failed:
        error: Exception = values[failed[0]]
        if places is not None:
            with_places(error, list(dict.fromkeys(places[i] for i in failed)))
        raise error
