"""`Requests`: token ids and contexts become queries, unless the output cache has the answer.

Everything that a caller passes is checked here, before any request reaches the scheduler.
Longer than other modules because rows, reductions and scores are requested in the same way.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from genlm.core.context import Context, Holds
from genlm.core.engine import Capability, Engine
from genlm.core.errors import ContextLengthError, UnknownAdapterError
from genlm.core.query import Query
from genlm.core.recent_sequences import SHORTEST, RecentSequences
from genlm.core.reductions import Reduction, TargetScore, reduce_rows
from genlm.core.sequence import TokenSequence
from genlm.core.validation import checked_batch, checked_integer, checked_token_ids

if TYPE_CHECKING:
    from genlm.core.adapters import Adapters
    from genlm.core.cache import OutputCache
    from genlm.core.statistics import RequestCounters
    from genlm.core.validation import Integers, TokenBatch, TokenIds

__all__ = ["BatchRequest", "Requests", "RowKey", "drop_results"]

RowKey = tuple[object, str | None, bytes]
"""Identifies a request: model, adapter, and the key of the token sequence."""


@dataclass(slots=True)
class BatchRequest:
    """Several requests that were looked up in the output cache and counted.

    Attributes:
        asked: Those that it does not have, which the scheduler is asked.
        values: What it has, in the order of all requests; None elsewhere.
        sequences: What the caller passed for each, or nothing for parts of texts.
        requests: Keeps what the engine has for contexts among them.
    """

    asked: list[Any]
    values: list[Any]
    sequences: Sequence[TokenIds]
    requests: Requests

    def results(self, answers: Sequence[Any]) -> list[Any]:
        """Fill the gaps in `values` with the answers, in order."""
        remaining = iter(zip(self.asked, answers, strict=True))
        for place, value in enumerate(self.values):
            if value is None:
                (query, *_), self.values[place] = next(remaining)
                if self.sequences:
                    self.requests.hold(self.sequences[place], query)
        return self.values


class Requests:
    """Makes the requests of one model; every method may be called from any thread.

    Args:
        engine: Whose vocabulary, context and capabilities count.
        model: Stands for the model in keys: models may share one cache.
        cache: Rows and reductions that are known.
        adapters: Their names.
        counters: Count the requests.
        holds: Keep what the engine has for contexts; None if it keeps nothing for them.

    Attributes:
        default_lora: The adapter of requests that name none, None for the base model.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        model: object,
        cache: OutputCache,
        adapters: Adapters,
        counters: RequestCounters,
        holds: Holds | None,
    ) -> None:
        self.default_lora: str | None = None
        self.vocab_size = engine.vocabulary.size
        self.max_context = engine.max_context
        self.capabilities = engine.capabilities
        self.counters = counters
        self._model = model
        self._cache = cache
        self._adapters = adapters
        self._holds = holds
        self._recent = RecentSequences()
        self._query_ids = itertools.count()

    # -- one sequence -----------------------------------------------------------------

    def of(self, token_ids: TokenIds, lora_name: str | None) -> tuple[Query, RowKey]:
        """Check a sequence and the name of an adapter, and make the query and its key.

        Raises:
            GenlmError: As `AsyncLM.next_token_logprobs`.
            ValueError: A context of another model, or of another adapter than `lora_name`.
        """
        if isinstance(token_ids, Context):
            adapter = self.adapter_of(token_ids, lora_name)
            return self.of_sequence(token_ids.sequence, adapter)
        _, adapter = self._adapter(lora_name)
        return self.of_sequence(self._sequence(token_ids), adapter)

    def of_reduction(
        self, token_ids: TokenIds, reduction: Reduction, lora_name: str | None
    ) -> tuple[Query, RowKey]:
        """Do what `of` does for a request that asks for a reduction.

        Raises:
            TypeError: `reduction` is not a `Reduction`.
        """
        if not isinstance(reduction, Reduction):
            raise TypeError(
                f"expected an object of a subclass of genlm.Reduction; found {reduction!r}"
            )
        return self.of(token_ids, lora_name)

    def of_sequence(self, sequence: TokenSequence, adapter: str | None) -> tuple[Query, RowKey]:
        """Make the query of a checked sequence; `adapter` is the engine's name."""
        if self.max_context is not None and len(sequence) > self.max_context:
            raise ContextLengthError(len(sequence), self.max_context)
        query = Query(next(self._query_ids), sequence, adapter)
        return query, (self._model, adapter, sequence.key)

    def context_parts(
        self, token_ids: Integers, lora_name: str | None
    ) -> tuple[TokenSequence, str | None, str | None]:
        """Return what a `Context` consists of: sequence, adapter, the engine's name of it."""
        name, adapter = self._adapter(lora_name)
        sequence = self._sequence(token_ids)
        if self.max_context is not None and len(sequence) > self.max_context:
            raise ContextLengthError(len(sequence), self.max_context)
        return sequence, name, adapter

    def _adapter(self, lora_name: str | None) -> tuple[str | None, str | None]:
        name = self.default_lora if lora_name is None else lora_name
        return name, None if name is None else self._adapters.engine_name(name)

    def _sequence(self, token_ids: Integers) -> TokenSequence:
        """Check token ids and pack them, or find that they extend what was asked before."""
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

    def adapter_of(self, context: Context, lora_name: str | None) -> str | None:
        """Return the engine's name of a context's adapter, if this model can answer it."""
        if not context.is_of(self._model):
            raise ValueError(
                f"{context!r} is a context of another model than the one that is asked; make "
                f"it with that model's method context"
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

    def hold(self, token_ids: object, query: Query) -> None:
        """Keep what the engine has for a context while the context is referred to."""
        if self._holds is not None and isinstance(token_ids, Context):
            token_ids.hold(self._holds.of((query.adapter, query.sequence.key)))

    def share(self, token_ids: object, query: Query) -> None:
        """Keep what the engine has, if anything, for a context with a cached answer."""
        if self._holds is not None and isinstance(token_ids, Context):
            hold = self._holds.find((query.adapter, query.sequence.key))
            if hold is not None:
                token_ids.hold(hold)

    # -- the output cache -------------------------------------------------------------

    def cached(self, query: Query, key: Any, reduction: Reduction | None = None) -> Any:
        """Return a copy of what the output cache has, or None, and count the request."""
        value = self._found(key, reduction)
        self.counters.count(len(query), hit=value is not None)
        return value

    def _found(self, key: Any, reduction: Reduction | None = None) -> Any:
        """Look up a row, or a reduction, which the row answers as well."""
        if reduction is None:
            return self._cache.get(key)
        value = self._cache.get((key, reduction)) if reduction.is_reproducible else None
        if value is None and (row := self._cache.get(key)) is not None:
            [reduced] = reduce_rows(row[None], [(reduction,)])
            value = reduced if isinstance(reduced, Exception) else reduced.values[0]
            if isinstance(value, Exception):
                raise value
        return value

    # -- several sequences ------------------------------------------------------------

    def batch(self, made: Sequence[Any], sequences: Sequence[TokenIds] = ()) -> BatchRequest:
        """Look up requests that were checked; all are counted, or none if one raises.

        Args:
            made: A query and its key, and the reduction that is wanted if one is.
            sequences: What the caller passed for each, if contexts may be among them.
        """
        values = [self._found(*each[1:]) for each in made]
        for (query, *_), value in zip(made, values, strict=True):
            self.counters.count(len(query), hit=value is not None)
        for token_ids, (query, *_), value in zip(sequences, made, values, strict=False):
            if value is not None:
                self.share(token_ids, query)
        asked = [each for each, value in zip(made, values, strict=True) if value is None]
        return BatchRequest(asked, values, sequences, self)

    def rows(self, token_ids_list: TokenBatch, lora_name: str | None) -> BatchRequest:
        """Check several sequences, and look up their rows."""
        sequences = list(checked_batch(token_ids_list))
        made = [self.of(token_ids, lora_name) for token_ids in sequences]
        return self.batch(made, sequences)

    def reductions(
        self, contexts: TokenBatch, reductions: Sequence[Reduction], lora_name: str | None
    ) -> BatchRequest:
        """Check contexts and reductions, and look up their results.

        Raises:
            TypeError: One of them is not a `Reduction`.
            ValueError: Another number of reductions than of contexts.
        """
        sequences = list(checked_batch(contexts))
        if len(reductions) != len(sequences):
            raise ValueError(
                f"{len(reductions)} reductions for {len(sequences)} contexts; pass one for each"
            )
        made = [
            (*self.of_reduction(token_ids, reduction, lora_name), reduction)
            for token_ids, reduction in zip(sequences, reductions, strict=True)
        ]
        return self.batch(made, sequences)

    # -- texts ------------------------------------------------------------------------

    def scores(self, token_ids: TokenIds, start: int, lora_name: str | None) -> list[Any]:
        """Check a text, and make the requests that score it from a position on, for `batch`.

        Returns:
            One request for `TokenScores`, or one for the `ScoredToken` of each position.

        Raises:
            TypeError: `start` is not an integer.
            ValueError: It is below 1 or beyond the end.
            GenlmError: As `AsyncLM.next_token_logprobs`.
        """
        if isinstance(token_ids, Context):
            adapter = self.adapter_of(token_ids, lora_name)
            token_ids = token_ids.token_ids
        else:
            _, adapter = self._adapter(lora_name)
        longest = None if self.max_context is None else self.max_context + 1
        ids, packed = checked_token_ids(
            token_ids, vocab_size=self.vocab_size, max_context=longest
        )
        start = _checked_start(start, len(ids))
        if Capability.SCORE not in self.capabilities or start == len(ids):
            return self._scores_by_position(ids, packed, start, adapter)
        query = Query(
            next(self._query_ids), TokenSequence(packed[:-4]), adapter, targets=ids[start:]
        )
        return [(query, (self._model, adapter, query.sequence.key, ("score", start, ids[-1])))]

    def _scores_by_position(
        self, ids: tuple[int, ...], packed: bytes, start: int, adapter: str | None
    ) -> list[Any]:
        sequence = TokenSequence(packed[: 4 * start])
        made = []
        for place in range(start, len(ids)):
            if place > start:
                sequence = TokenSequence(packed[4 * place - 4 : 4 * place], sequence)
            made.append((*self.of_sequence(sequence, adapter), TargetScore(ids[place])))
        return made


def drop_results(cache: OutputCache, model: object, *adapter: str) -> None:
    """Drop the results of a model from an output cache, or those of one of its adapters."""

    def is_dropped(key: Any) -> bool:
        of_row = key[0] if isinstance(key, tuple) and len(key) == 2 else key
        own = isinstance(of_row, tuple) and of_row != () and of_row[0] is model
        return own and (not adapter or of_row[1] == adapter[0])

    cache.clear(is_dropped)


def _checked_start(start: object, length: int) -> int:
    first = checked_integer("start", start, 1)
    if first > length:
        raise ValueError(
            f"start={first} of a text of {length} tokens; it must be {length} or less"
        )
    return first
