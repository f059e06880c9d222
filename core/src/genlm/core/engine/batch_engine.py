"""`BatchEngine`: base class of engines that evaluate one batch of queries in each step."""

from __future__ import annotations

import abc
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from genlm.core.base.errors import EvaluationError, UnsupportedCapabilityError
from genlm.core.engine.engine import Capability, query_ids
from genlm.core.engine.halving import Halving, UnfinishedError, completions_of
from genlm.core.engine.query_queue import QueryQueue
from genlm.core.queries.generations import Integers64
from genlm.core.queries.query import (
    ROW_ONLY,
    Completion,
    GroupQuery,
    GroupValues,
    Query,
    Reduced,
    TokenScores,
)
from genlm.core.vocab import Vocabulary

if TYPE_CHECKING:
    import torch

    from genlm.core.rows.groups import GroupWork

logger = logging.getLogger("genlm")

_GROUP_VALUES = 2**26
"""Maximum number of logits of a group that are computed at once: 256 MiB in float32."""


class BatchEngine(abc.ABC):
    """Base class of engines that evaluate batches; subclasses implement `evaluate`.

    Subclasses also set the attributes below. `step` evaluates the queries that `choose`
    returns, by default all pending ones, in one call, and computes requested reductions of
    their rows. When `evaluate` raises, the batch is halved until the queries at fault are
    isolated; only those fail. If no query is at fault, as when memory is short, the error is
    logged. When the device has failed, or all parts of the batch raise the
    same error, all of its queries fail. Populations are computed in parts, between which steps
    evaluate other queries. The queries of a long batch of one caller take turns with those of
    other callers (`Turns`), so a later request does not wait for the whole batch.

    Attributes:
        vocabulary: Tokens whose ids are those of queries and the indices of rows.
        max_context: Maximum number of tokens of a query, None for no limit.
        capabilities: Abilities beyond next-token rows.
        smallest_group: Populations with fewer members are evaluated as separate queries if
            their first request shares its batch with single queries. Steps alternate between
            groups and single queries.
        is_deferring: Whether the next step should wait for further requests; see `defers`.
    """

    vocabulary: Vocabulary
    max_context: int | None = None
    capabilities: frozenset[Capability] = frozenset()
    smallest_group: int = 8
    is_deferring: bool = False

    _pending: QueryQueue
    _groups: dict[int, GroupWork]
    _group_is_next = False
    _has_logged = False

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        """Initialise the pending queries, so that subclasses need not call `__init__`."""
        engine = super().__new__(cls)
        engine._pending = QueryQueue()
        engine._groups = {}
        return engine

    @abc.abstractmethod
    def evaluate(self, queries: Sequence[Query]) -> torch.Tensor | GroupValues:
        """Compute the next-token row of each query, or the logits.

        Args:
            queries: At least one query, distinct in (adapter, token ids), with at least one
                token id each.

        Returns:
            Natural-log probabilities, shape `(len(queries), vocabulary.size)`, float32,
            normalised, row i for query i (`genlm.rows_from_logits` computes them from logits).
            Or `GroupValues` of the logits: the core then computes rows in the memory of their
            callers, and draws without rows. In both cases, the engine may reuse the memory in
            its next step.

        Raises:
            UnfinishedError: Only a part of a query, which was chosen alone, was computed. It
                stays pending; later steps continue with it.
        """

    def score(self, queries: Sequence[Query]) -> Sequence[TokenScores | Reduced | Exception]:  # noqa: ARG002
        """Score texts, or reduce their rows; engines with `Capability.SCORE` implement this.

        `genlm.prefix.PieceScores` computes the results from logits.

        Args:
            queries: At least one query, all with targets.

        Returns:
            For each query, the scores of its n targets, or, if its output is a
            `GroupReduction`, a `Reduced` with the columns; or the error. The row of target i is
            that after the first `len(query) - n + 1 + i` ids of the query.

        Raises:
            UnfinishedError: As `evaluate`.
        """
        raise UnsupportedCapabilityError(Capability.SCORE, type(self).__name__)

    def choose(self, pending: Sequence[Query]) -> Sequence[Query]:
        """Choose the queries that the next step evaluates; all by default.

        The remaining queries stay pending and can be cancelled. The choice must not exceed what
        the engine computes at once, and must include the first query, so that every query is
        evaluated. While a query is unfinished (`UnfinishedError`), the first may wait for it.

        Args:
            pending: At least one query, in the order in which they should be computed: by turn,
                then by age.

        Returns:
            At least one of the pending queries, with the first one, without repetition.
        """
        return pending

    def group_limit(self, group: GroupQuery) -> int:  # noqa: ARG002
        """Return the number of sequences that `evaluate_groups` should compute at once."""
        return max(1, _GROUP_VALUES // self.vocabulary.size)

    def choose_groups(self, pending: Sequence[GroupQuery]) -> Sequence[GroupQuery]:
        """Choose the groups that the next step computes; by default about `group_limit`.

        Args:
            pending: Groups of which nothing was computed yet, oldest first.

        Returns:
            A group, alone or with others of its adapter; the first group must be chosen after
            a bounded number of calls. Groups that are chosen together are computed by one call
            of `evaluate_groups`; a group that is chosen alone is computed in parts of
            `group_limit`.
        """
        if len(pending) == 1:
            return pending
        limit, count = self.group_limit(pending[0]), 0
        chosen: list[GroupQuery] = []
        for group in pending:
            if group.adapter == pending[0].adapter:
                count += len(group.wanted)
                if chosen and count > limit:
                    break
                chosen.append(group)
        return chosen

    def defers(self, pending: Sequence[GroupQuery]) -> bool:  # noqa: ARG002
        """Whether groups should wait for the next requests of the callers of the last step.

        The scheduler calls the next `step` when these callers have run, or after the duration
        of the last step. That step computes the groups, unless other requests have arrived and
        are chosen.

        Args:
            pending: At least one group of which nothing was computed yet.

        Returns:
            False by default. True if computing the groups now would free the cached state of
            populations that these callers are likely to continue.
        """
        return False

    def evaluate_groups(self, parts: Sequence[tuple[GroupQuery, Integers64]]) -> GroupValues:
        """Compute sequences of groups of one adapter, by default as separate queries.

        Engines that compute populations on arrays override this method. If it raises for
        several groups, they are computed one by one.

        Args:
            parts: At least one group, whose `generation` may hold the engine's state, each with
                indices into its `wanted`, at least one.

        Returns:
            Logits or rows, one for each index of the first part, then of the second, and so on.
        """
        return self._evaluate_distinct(
            [
                Query(self._member_id(group), sequence, group.adapter)
                for group, places in parts
                for sequence in group.sequences(places)
            ]
        )

    def submit(self, query: Query) -> None:
        """Accept a query for one of the next steps."""
        self._pending.add(query)

    def submit_group(self, group: GroupQuery) -> None:
        """Accept the query of a population, which one or several steps compute."""
        from genlm.core.rows.groups import GroupWork  # loads torch

        self._groups[group.query_id] = GroupWork(group, self.vocabulary)

    def step(self) -> list[Completion]:
        """Evaluate the queries that `choose` returns; halve the batch to isolate errors.

        Raises:
            EvaluationError: `choose` or `choose_groups` returned nothing, or a query that is
                not pending, or `choose` did not return the first one.
        """
        self._group_is_next = bool(self._groups) and not (self._group_is_next and self._pending)
        if self._group_is_next:
            return self._group_step()
        if not self._pending:
            return []
        batch = self._pending.take(self.choose, type(self).__name__)
        score_queries = [query for query in batch if query.targets]
        row_queries = [query for query in batch if not query.targets]
        completions: list[Completion] = []
        for queries, compute, are_rows in (
            (score_queries, self._score_batch, False),
            (row_queries, self._evaluate_batch, True),
        ):
            if queries:
                results = self._evaluate_by_halving(compute, queries)
                for query, result in zip(queries, results, strict=True):
                    if isinstance(result, UnfinishedError):
                        self._pending.put_back(query)
                completions += completions_of(queries, results, are_checked=are_rows)
        return completions

    def abort(self, query_id: int) -> None:
        """Drop a query that no step has evaluated yet."""
        self._pending.drop(query_id)
        self._groups.pop(query_id, None)

    def close(self) -> None:  # noqa: B027 - optional for subclasses
        """Free the engine's resources; nothing by default."""

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return counters and sizes of the engine; none by default."""
        return {}

    def _member_id(self, group: GroupQuery) -> int:  # noqa: ARG002
        """Return the id of a query for a sequence of a group; engines receive each id once."""
        return next(query_ids)

    def _group_step(self) -> list[Completion]:
        """Compute several groups, or a part of one; further steps continue with the others."""
        works = self._take_groups()
        if len(works) > 1:
            self._evaluate_together(works)
        else:
            [work] = works
            self._evaluate_part(work, work.next_part(self.group_limit(work.query)))
        completions = []
        for work in works:
            if work.is_complete:
                work.query.keep_contexts()
                completions.append(Completion(work.query.query_id, work.result()))
            else:
                self._groups[work.query.query_id] = work
        self.is_deferring = self._defers()
        return completions

    def _defers(self) -> bool:
        """Whether the next step should wait for the requests of callers; see `defers`."""
        works = self._groups.values()
        can_wait = works and not self._pending and not any(work.is_begun for work in works)
        return bool(can_wait) and self.defers([work.query for work in works])

    def _take_groups(self) -> list[GroupWork]:
        """Remove the oldest group, or several groups that are computed together."""
        works = list(self._groups.values())
        if not works[0].is_begun:
            pending = {work.query.query_id: work.query for work in works if not work.is_begun}
            chosen = [each.query_id for each in self.choose_groups([*pending.values()]) or ()]
            if (
                not chosen
                or not pending.keys() >= set(chosen)
                or len(set(chosen)) < len(chosen)
            ):
                raise EvaluationError(
                    f"{type(self).__name__}.choose_groups returned the groups {chosen} of the "
                    f"pending {[*pending]}; return at least one of them, without repetition"
                )
            return [self._groups.pop(query_id) for query_id in chosen]
        return [self._groups.pop(works[0].query.query_id)]

    def _evaluate_together(self, works: Sequence[GroupWork]) -> None:
        """Compute all sequences of several groups; groups that fail are computed one by one."""
        from genlm.core.rows.joined_groups import divide_groups, reduce_groups  # loads torch

        parts = {work: work.next_part(len(work.query.wanted)) for work in works}
        remaining = divide_groups(works)
        try:
            values, are_logits = self.evaluate_groups(
                [(work.query, parts[work]) for joined in remaining for work in joined]
            )
            while remaining:
                count = sum(len(parts[work]) for work in remaining[0])
                computed, values = GroupValues(values[:count], are_logits), values[count:]
                reduce_groups(remaining[0], computed, self.vocabulary)
                del remaining[0]
        except Exception:  # noqa: BLE001 - raised again by the group that causes it
            for work in itertools.chain(*remaining):
                self._evaluate_part(work, parts[work])

    def _evaluate_part(self, work: GroupWork, part: Integers64) -> None:
        """Compute a part of a group, and record the errors of its sequences."""

        def evaluate(places: Integers64) -> Sequence[None]:
            work.reduce(places, self.evaluate_groups([(work.query, places)]))
            return [None] * len(places)

        errors = self._evaluate_by_halving(evaluate, part)
        if any(errors):
            for place, error in zip(part.tolist(), errors, strict=True):
                if isinstance(error, UnfinishedError):
                    work.put_back(place)
                elif error is not None:
                    work.errors[place] = error

    def _evaluate_by_halving(
        self, evaluate: Callable[[Any], Sequence[Any]], batch: Any
    ) -> Sequence[Any]:
        """Return the results or errors of a batch; log the first error that no query causes."""
        halving = Halving(evaluate)
        results = halving.results(batch)
        if halving.recovered_error and not self._has_logged:
            self._has_logged = True
            logger.error(
                "%s raised %s for a batch of %d queries, all of which it then computed in "
                "smaller batches; further errors like this are not logged",
                type(self).__name__,
                halving.recovered_error,
                len(batch),
            )
        return results

    def _score_batch(self, queries: list[Query]) -> Sequence[Any]:
        results: Any = self.score(queries)
        if not isinstance(results, Sequence) or len(results) != len(queries):
            is_list = isinstance(results, Sequence)
            description = f"{len(results)} results" if is_list else repr(results)
            raise EvaluationError(
                f"{type(self).__name__}.score returned {description} for {len(queries)} "
                f"queries; expected a list with one result for each query"
            )
        return results

    def _evaluate_batch(self, queries: list[Query]) -> Sequence[Any]:
        """Evaluate queries and return their rows, or their requested outputs."""
        from genlm.core.rows.outputs import reduce_logits, reduce_rows  # loads torch

        values, are_logits = self._evaluate_distinct(queries)
        outputs = [query.outputs for query in queries]
        results = (
            reduce_logits(values, self.vocabulary, outputs)
            if are_logits
            else reduce_rows(values, outputs)
        )
        return [
            result.values[0] if isinstance(result, Reduced) and wanted == ROW_ONLY else result
            for result, wanted in zip(results, outputs, strict=True)
        ]

    def _evaluate_distinct(self, queries: Sequence[Query]) -> GroupValues:
        """Evaluate each sequence once; return checked rows or logits, one for each query.

        Queries of one sequence request different outputs, belong to different groups, or were
        submitted when the first one could no longer be joined.
        """
        from genlm.core.rows.logits import checked_values, device_index  # loads torch

        distinct: dict[tuple[str | None, bytes], Query] = {}
        for query in queries:
            distinct.setdefault((query.adapter, query.sequence.key), query)
        size, method = self.vocabulary.size, f"{type(self).__name__}.evaluate"
        computed = self.evaluate(list(distinct.values()))
        if not isinstance(computed, GroupValues):
            computed = GroupValues(computed, are_logits=False)
        computed = checked_values(computed, len(distinct), size, method)
        if len(distinct) == len(queries):
            return computed
        row_of = {key: row for row, key in enumerate(distinct)}
        rows = [row_of[query.adapter, query.sequence.key] for query in queries]
        values, are_logits = computed
        return GroupValues(values[device_index(rows, values.device)], are_logits)
