"""`PrefixEngine`: the base class of engines that run a model over a prefix tree."""

from __future__ import annotations

import abc
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch

from genlm.core.base.errors import (
    AdapterError,
    UnknownAdapterError,
    UnsupportedCapabilityError,
)
from genlm.core.base.statistics import Count
from genlm.core.engine.batch_engine import BatchEngine
from genlm.core.engine.engine import Capability
from genlm.core.engine.halving import UnfinishedError
from genlm.core.queries.query import GroupQuery, GroupValues, Query
from genlm.core.queries.query_checks import check_query
from genlm.engines.adapter_table import AdapterTable
from genlm.prefix.execution_path import PathChoice
from genlm.prefix.rows import PrefixRows

if TYPE_CHECKING:
    from genlm.core.queries.generations import Generation, Integers64
    from genlm.core.rows.text_scores import TextResult

T = TypeVar("T")
AnyQuery = TypeVar("AnyQuery", Query, GroupQuery)


class _Unfinished(NamedTuple):
    """The passes over a sequence of a query or group of which steps have computed a part."""

    key: bytes
    """Key of the sequence."""
    passes: Generator[Any, None, None]
    is_computed: bool = False
    """Whether `passes` only returns the result, so that no tokens are pinned."""


class ModelAdapters(AdapterTable[T]):
    """The adapters of one model."""

    @abc.abstractmethod
    def activate(self, name: str) -> AbstractContextManager[None]:
        """Apply one adapter in forward passes within the context."""


class _NoAdapters(ModelAdapters[Any]):
    """The empty table of an engine without adapters."""

    def _load(self, name: str, path: Path) -> Any:
        raise AdapterError(f"adapter {name!r} in {path}: the engine has no adapters")

    def activate(self, name: str) -> AbstractContextManager[None]:
        raise UnknownAdapterError(name, ())


class PrefixEngine(BatchEngine):
    """Base class of engines that run a model through an execution path.

    A subclass loads its model and calls `serve` once. It may extend `activate`,
    `model_statistics`, `update_weights`, `add_adapter`, `remove_adapter`, `clear_prefix_cache`
    and `close`.

    Attributes:
        backend: Name of the engine in messages.
        capability_hints: Advice for each capability that this model lacks.
    """

    backend: ClassVar[str]
    capability_hints: Mapping[Capability, str]

    _choice: PathChoice
    _adapters: ModelAdapters[Any]
    _embedding_rows: int
    _load_weights: Callable[[Mapping[str, Any]], None] | None
    _tokens_evaluated = 0
    _final_statistics: Mapping[str, int | float | str] | None = None

    def serve(
        self,
        choice: PathChoice,
        adapters: ModelAdapters[Any] | None = None,
        *,
        embedding_rows: int,
        hints: Mapping[Capability, str] | None = None,
        load_weights: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        """Set the attributes that serve queries except `vocabulary` and `max_context`.

        Args:
            choice: Execution path that computes the rows.
            adapters: Adapters of the model; None for an engine without `Capability.LORA`.
            embedding_rows: Number of ids that the model can embed.
            hints: Advice for each capability that the model lacks.
            load_weights: Function that copies new weights into the model; it raises an error
                of `update_weights`. None if the engine cannot replace weights.
        """
        self._choice, self._adapters = choice, adapters or _NoAdapters()
        self._unfinished: dict[int, _Unfinished] = {}  # by id of a query or group
        self._load_weights = load_weights
        self._embedding_rows = embedding_rows
        hints = dict(hints or {})
        if adapters is None:
            hints.setdefault(Capability.LORA, f"{self.backend} has no adapters")
        if self._cache is None:
            hints[Capability.PREFIX_CACHE] = f"this model has no cache ({choice.reason})"
        self.capability_hints = hints
        capabilities = {Capability.LORA, Capability.PREFIX_CACHE, Capability.SCORE}
        if load_weights is not None:
            capabilities.add(Capability.WEIGHTS)
        self.capabilities = frozenset(capabilities - hints.keys())

    @property
    def scored_columns(self) -> int:
        """Maximum number of rows of a sequence of a population that one pass computes."""
        return 0 if self._cache is None else self._cache.populations.scored_columns

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that queries can use."""
        return self._adapters.names

    def submit(self, query: Query) -> None:
        """Accept a query for the next step.

        Raises:
            UnknownAdapterError: The adapter is not loaded.
            TokenIdError: The tokenizer has an id for which the model has no embedding.
            UnsupportedCapabilityError: The query requests scores of a model that lacks the
                capability.
        """
        if query.targets and Capability.SCORE not in self.capabilities:
            raise self._unsupported(Capability.SCORE)
        self._check(query)
        super().submit(query)

    def submit_group(self, group: GroupQuery) -> None:
        """Accept the query of a population; errors as `submit`."""
        self._adapters.check_loaded(group.adapter)
        if self.vocabulary.size > self._embedding_rows:
            lineage, wanted = group.generation.lineage, group.wanted
            firsts, token_ids = lineage.suffixes(wanted)
            firsts[(token_ids >= self._embedding_rows).any(axis=1)] = -1  # checks one of these
            for place in wanted[np.unique(firsts, return_index=True)[1]].tolist():
                self._check(Query(group.query_id, lineage.sequence(place), group.adapter))
        super().submit_group(group)

    def group_limit(self, group: GroupQuery) -> int:
        """Return the number of sequences of a population for about one pass."""
        cache = self._cache
        return super().group_limit(group) if cache is None else cache.populations.limit(group)

    def choose_groups(self, pending: Sequence[GroupQuery]) -> Sequence[GroupQuery]:
        """Select populations whose next tokens are computed in one forward pass."""
        if self._cache is None or len(pending) == 1:
            return super().choose_groups(pending)
        populations = self._cache.populations
        return populations.choose(self._ready(pending, populations.is_long))

    def defers(self, pending: Sequence[GroupQuery]) -> bool:
        """Whether populations wait because the tokens of others would be freed for them."""
        return self._cache is not None and self._cache.populations.defers(pending)

    def evaluate_groups(self, parts: Sequence[tuple[GroupQuery, Integers64]]) -> GroupValues:
        """Compute sequences of populations in one forward pass, from tables or the tree."""
        cache = self._cache
        if cache is not None:
            with self.activate(parts[0][0].adapter):
                logits = cache.group_logits(parts)
            if logits is not None:
                self._restart(*(group.query_id for group, _ in parts))
                self._tokens_evaluated += sum(
                    int(group.lengths[places].sum()) for group, places in parts
                )
                return GroupValues(logits, are_logits=True)
        values = super().evaluate_groups(parts)
        if cache is not None:
            for group, places in parts:
                cache.populations.adopt(group, places)
        return values

    def keep_sequences(self, generation: Generation) -> None:
        """Add the tokens of a population to the tree, where other requests find them."""
        if self._cache is not None:
            self._cache.populations.tables.share(generation.root)

    def choose(self, pending: Sequence[Query]) -> Sequence[Query]:
        """Select queries for about one forward pass: the first, and others of its adapter.

        The selected queries request either rows or scores. A context that is longer than a
        pass is selected alone; each step computes one pass of it, and other queries take turns
        with it. Contexts of this kind are computed one after the other, because the computed
        tokens of an unfinished one are pinned.
        """
        if self._unfinished:
            pending = self._ready(pending, self._prefix_cache().is_long)
        adapter, path = pending[0].adapter, self._choice.path
        scored = bool(pending[0].targets)
        candidates = [
            query
            for query in pending
            if query.adapter == adapter and bool(query.targets) == scored
        ]
        firsts = [query.first_target for query in candidates] if scored else None
        indices = path.next_pass(adapter, [query.sequence for query in candidates], firsts)
        return [candidates[index] for index in indices]

    def evaluate(self, queries: Sequence[Query]) -> GroupValues:
        """Compute the logits of queries with the same adapter; see `BatchEngine.evaluate`."""
        adapter, sequences = queries[0].adapter, [query.sequence for query in queries]
        passes = self._choice.path.logits_by_pass(adapter, sequences)
        return GroupValues(self._result(queries, passes), are_logits=True)

    def score(self, queries: Sequence[Query]) -> Sequence[TextResult]:
        """Score or reduce texts with the same adapter; see `BatchEngine.score`."""
        adapter = queries[0].adapter
        return self._result(queries, self._choice.path.scores_by_pass(adapter, queries))

    def abort(self, query_id: int) -> None:
        """Drop a query; its computed tokens can be evicted."""
        super().abort(query_id)
        self._restart(query_id)

    def activate(self, adapter: str | None) -> AbstractContextManager[None]:
        """Prepare the model for forward passes with an adapter, or with None."""
        return nullcontext() if adapter is None else self._adapters.activate(adapter)

    def cache_prefix(self, token_ids: Sequence[int], adapter: str | None) -> None:
        """Compute a prefix and pin it until `clear_prefix_cache`.

        Raises:
            UnsupportedCapabilityError: The model is served without a cache.
            EvaluationError: The prefix does not fit into the cache with the pinned prefixes.
            GenlmError: As `submit`.
        """
        cache = self._prefix_cache()
        query = Query(0, tuple(token_ids), adapter)
        self._check(query)
        with self.activate(adapter):
            cache.pin(adapter, query.sequence)

    def release_context(self, adapter: str | None, key: bytes) -> None:
        """Evict a context that has no references before other tokens."""
        if self._cache is not None:
            self._cache.release(adapter, key)

    def clear_prefix_cache(self) -> None:
        """Free all cached tokens, including pinned prefixes. Rows do not change."""
        self._restart(*self._unfinished)
        self._prefix_cache().clear()

    def update_weights(self, weights: Mapping[str, Any] | None) -> None:
        """Replace the weights of the base model, and free all cached tokens.

        Args:
            weights: All weights by name; None if they have been changed in the model.

        Raises:
            UnsupportedCapabilityError: The weights of the model cannot be replaced.
            ValueError: The weights do not fit the model, which is unchanged.
        """
        if self._load_weights is None or Capability.WEIGHTS not in self.capabilities:
            raise self._unsupported(Capability.WEIGHTS)
        try:
            if weights is not None:
                self._load_weights(weights)
        finally:
            if self._cache is not None:
                self.clear_prefix_cache()

    def add_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter in folder `path` under the name `name`.

        Raises:
            UnsupportedCapabilityError: The model cannot have adapters.
            AdapterError: The name is in use, the folder contains no LoRA adapter, or the
                adapter does not fit the model; the engine is unchanged.
        """
        if Capability.LORA not in self.capabilities:
            raise self._unsupported(Capability.LORA)
        self._adapters.load(name, path)

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter that `add_adapter` loaded, and all tokens computed with it.

        Raises:
            UnknownAdapterError: No adapter of this name is loaded.
        """
        self._adapters.remove(name)
        if self._cache is not None:
            self._cache.drop(name)

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return counters, the execution path and facts about the model.

        `tokens_evaluated` counts the tokens of all contexts, `tokens_computed` those that
        passed through the model. `execution_path_reason` is the reason for the choice of the
        path, `self_test_error` its largest error in the self-test. After `close`, the method
        returns the last statistics.
        """
        try:
            return {
                **self._choice.path.statistics(),
                **self._choice.statistics(),
                "tokens_evaluated": Count(self._tokens_evaluated),
                "adapters": len(self._adapters.names),
                **self.model_statistics(),
            }
        except AttributeError:  # closed, possibly by another thread
            if self._final_statistics is None:
                raise
            return self._final_statistics

    def model_statistics(self) -> Mapping[str, int | float | str]:
        """Return statistics of the subclass, such as the model's class and device."""
        return {}

    def close(self) -> None:
        """Free the execution path and the adapters; `statistics` stays available."""
        self._final_statistics = self.statistics()
        self._restart(*self._unfinished)
        del self._choice, self._adapters, self._load_weights

    def compute_unfinished(self) -> bool:
        """Compute the unfinished queries of which no pass is running, whose tokens are pinned.

        This is the `make_room` of engines whose passes name their adapter, because another one
        may be active.

        Returns:
            Whether there were any.
        """
        pinned = [i for i, each in self._unfinished.items() if not each.is_computed]
        for query_id in pinned:
            unfinished = self._unfinished.pop(query_id)  # one of its passes is running
            passes = _computed(unfinished.passes)
            self._unfinished[query_id] = unfinished._replace(passes=passes, is_computed=True)
        return bool(pinned)

    def _member_id(self, group: GroupQuery) -> int:
        return group.query_id  # of `_unfinished`

    def _ready(
        self, pending: Sequence[AnyQuery], is_long: Callable[[AnyQuery], bool]
    ) -> Sequence[AnyQuery]:
        """Return the unfinished query alone, or other queries if one of them is next.

        Long queries that precede it wait until the unfinished one is complete.
        """
        unfinished = self._unfinished
        if not any(query.query_id in unfinished for query in pending):
            return pending
        first = next(q for q in pending if q.query_id in unfinished or not is_long(q))
        if first.query_id in unfinished:
            return [first]
        return [first] + [q for q in pending if q is not first and q.query_id not in unfinished]

    def _restart(self, *query_ids: int) -> None:
        """Drop the passes of unfinished queries, which are then computed from the beginning."""
        for query_id in query_ids:
            if query_id in self._unfinished:
                self._unfinished.pop(query_id).passes.close()

    def _result(self, queries: Sequence[Query], passes: Generator[T | None, None, None]) -> T:
        """Compute all passes of several queries, or the next one of a single query.

        Raises:
            UnfinishedError: A single query needs further passes.
        """
        first, is_single, result = queries[0], len(queries) == 1, None
        query_id, key = first.query_id, first.sequence.key
        unfinished = self._unfinished.get(query_id)
        if is_single and unfinished is not None and unfinished.key == key:
            passes = self._unfinished.pop(query_id).passes
        self._restart(query_id)  # of another sequence of a group
        with self.activate(first.adapter):
            for result in passes:
                if result is None and is_single:
                    self._unfinished[query_id] = _Unfinished(key, passes)
                    raise UnfinishedError
        assert result is not None  # noqa: S101 - the last result
        self._tokens_evaluated += sum(map(len, queries))
        return result

    def _check(self, query: Query) -> None:
        embeds_all = self.vocabulary.size <= self._embedding_rows
        rows = None if embeds_all and query.is_checked else self._embedding_rows
        check_query(query, embedding_rows=rows, adapters=self._adapters.names)

    def _prefix_cache(self) -> PrefixRows:
        if self._cache is None:
            raise self._unsupported(Capability.PREFIX_CACHE)
        return self._cache

    @property
    def _cache(self) -> PrefixRows | None:
        path = self._choice.path
        return path if isinstance(path, PrefixRows) else None

    def _unsupported(self, capability: Capability) -> UnsupportedCapabilityError:
        hint = self.capability_hints.get(capability, "")
        return UnsupportedCapabilityError(capability, self.backend, hint)


def _computed(passes: Generator[T, None, None]) -> Generator[T, None, None]:
    """Compute all passes, and return a generator that returns or raises their outcome."""
    error: Exception | None = None
    result: Any = None
    try:
        for result in passes:  # noqa: B007 - the last one
            pass
        if isinstance(result, torch.Tensor):
            result = result.clone()  # later passes overwrite it
    except Exception as caught:  # noqa: BLE001 - raised for the query that causes it
        error = caught

    def outcome() -> Generator[T, None, None]:
        if error is not None:
            raise error
        yield result

    return outcome()
