"""Conversion of queries for groups and texts into queries that an engine accepts.

What a query becomes, and where a `GroupEngine` keeps it until it is complete::

    text, engine without `Capability.SCORE`    group query of its prefixes      _texts
    group of one member                        query                            _divided
    first group of few members                 waits for the next step          _waiting
      beside queries for one sequence          query per distinct sequence      _divided
    continuations                              group query per token            _runs
    continuations of few members               query per sequence and token     _divided
    the same, for their tokens only, engine    wait for the next step           _waiting
      with `keep_sequences`
        enough members together                group query per token            _runs
        otherwise                              query per sequence and token     _divided

An engine that accepts no group queries receives a query for each distinct sequence of any
group. Later groups of a population are divided if its first one was. Continuations with masks
or biases are computed like those of many members. The query for a distinct sequence requests
the entries of the group's columns for the members that have this sequence. The query for the
next token is submitted when the previous one is complete, without passing through the scheduler
or an event loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from genlm.core.engine.engine import (
    Capability,
    Engine,
    call_each,
    checked_completions,
    query_ids,
)
from genlm.core.engine.group_sampling import MemberRuns, RowRequest, SamplingRun, result_error
from genlm.core.engine.joined_sampling import JoinedRun, joining_key
from genlm.core.engine.text_groups import text_completion, text_group
from genlm.core.queries.generations import Integers64
from genlm.core.queries.member_states import Contexts
from genlm.core.queries.query import (
    Completion,
    GroupQuery,
    GroupReduction,
    GroupResult,
    Query,
    Reduced,
    Reduction,
)
from genlm.core.queries.sequence import TokenSequence
from genlm.core.rows.groups import GroupWork, compute_columns
from genlm.core.rows.joined_groups import divide_reductions, joined_reduction
from genlm.core.rows.logits import device_index, invalid_rows
from genlm.core.rows.outputs import reduce_rows
from genlm.core.vocab import Vocabulary

_SMALLEST_GROUP = 2
"""A group of one member becomes a single query, which shares passes with other queries."""


class MemberColumns(Reduction):
    """The entries of a group's columns for the members that share one row.

    Args:
        reduction: Reduction of the group.
        members: Indices of the members that share the row, shape `(m,)`.
    """

    is_cacheable = False

    def __init__(self, reduction: GroupReduction, members: Integers64) -> None:
        self.reduction = reduction
        self.members = members

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[MemberColumns]) -> Sequence[Any]:
        """Reduce all rows of a group at once, and the draws of several groups as one."""
        results: list[Any] = [None] * len(requests)
        groups: dict[int, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(id(request.reduction), []).append(place)
        group_places = list(groups.values())
        reductions = [requests[places[0]].reduction for places in group_places]
        for indices in divide_reductions(reductions):
            reduction, begins = joined_reduction([reductions[index] for index in indices])
            places = [place for index in indices for place in group_places[index]]
            members = np.concatenate(
                [
                    requests[place].members + begin
                    for index, begin in zip(indices, begins, strict=True)
                    for place in group_places[index]
                ]
            )
            counts = [len(requests[place].members) for place in places]
            row_of = np.repeat(np.arange(len(places)), counts)
            group_rows = rows
            if places != list(range(len(rows))):
                group_rows = rows[device_index(places, rows.device)]
            columns = compute_columns(reduction, group_rows, row_of, members)
            assert columns is not None  # noqa: S101 - these are rows
            if not reduction.stays_on_device:
                columns = tuple(column.cpu() for column in columns)
            parts = zip(*(torch.split(column, counts) for column in columns), strict=True)
            for place, part in zip(places, parts, strict=True):
                results[place] = part
        return results


class _DividedGroup(GroupWork):
    """A group query that is computed by one query per distinct sequence."""

    has_failed = False
    """Always False: the errors of sequences are part of the result."""

    def __init__(self, query: GroupQuery, vocabulary: Vocabulary) -> None:
        super().__init__(query, vocabulary)
        self.pending_ids: set[int] = set()

    def row_requests(self) -> Iterator[RowRequest]:
        """Yield the distinct sequences, with the reduction for their members."""
        query = self.query
        for place, sequence in enumerate(query.sequences(slice(None))):
            yield place, sequence, MemberColumns(query.reduction, self.members_of(place))

    def add(self, place: int, result: Any) -> None:
        """Add the columns of the members of a sequence, or its error."""
        try:
            if not isinstance(result, tuple):
                raise result_error(result)
            self._columns.add(self.members_of(place), result)
        except Exception as error:  # noqa: BLE001 - it fails this sequence alone
            self.errors[place] = error

    def result(self) -> GroupResult:
        """Return the columns of all members."""
        self.query.keep_contexts()
        return super().result()


class GroupEngine:
    """Adds support for all queries to an engine; other attributes are the engine's.

    Most engines compute groups and single queries in different passes. The groups of a
    population with fewer members than the engine's `smallest_group` are therefore divided into
    single queries if the first one is pending together with single queries.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._smallest_group: float = math.inf
        if getattr(engine, "submit_group", None) is not None:
            self._smallest_group = getattr(engine, "smallest_group", _SMALLEST_GROUP)
        self._keep_sequences = getattr(engine, "keep_sequences", None)
        self._scores_texts = Capability.SCORE in engine.capabilities
        self._texts: dict[int, Query] = {}  # that are computed as groups, by query id
        self._has_single = False  # a query for one sequence was submitted since the last step
        self._waiting: dict[int, GroupQuery] = {}  # groups that the next step begins
        self._runs: dict[int, SamplingRun] = {}  # by query id
        self._divided: dict[int, _DividedGroup | MemberRuns] = {}  # by query id
        # By id of a query for one sequence: id of the group, place, requested reduction.
        self._row_requests: dict[int, tuple[int, int, Reduction]] = {}
        self._rejected: list[Completion] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def submit(self, query: Query) -> None:
        """Submit a query, which shares its passes with continuations that are being drawn."""
        if self._runs:
            self._separate_joined()
        if not query.targets or self._scores_texts:
            self.engine.submit(query)
            self._has_single = True
        else:
            self._submit(text_group(query), is_divided=self._smallest_group == math.inf)
            self._texts[query.query_id] = query

    def submit_group(self, group: GroupQuery) -> None:
        """Submit a group query, or the queries for its first tokens if it has `sampling`."""
        if self._keep_sequences is not None:
            sources, group.generation.root.joined = group.generation.root.joined, []
            kept = [(source.generation,) for source in sources]
            call_each(self._keep_sequences, kept)
        if group.sampling is None:
            is_first = group.generation.root.state is None
            if is_first and 1 < len(group.row_of) < self._smallest_group < math.inf:
                self._waiting[group.query_id] = group
            else:
                self._submit(group, is_divided=self._is_divided(group))
        elif group.sampling.weights.has_masks_or_biases or not self._is_divided(group):
            self._run(SamplingRun(group, self.engine.vocabulary))
        elif group.sampling.returns_generation or self._keep_sequences is None:
            self._divide(MemberRuns(group, self.engine.vocabulary))
        else:
            self._waiting[group.query_id] = group

    def step(self) -> Iterable[Completion]:
        """Step the engine, and submit the queries for next tokens."""
        if self._waiting:
            self._begin_waiting()
        self._has_single = False
        step_completions: Iterable[Completion] = self._rejected
        if step_completions:
            self._rejected = []
        else:
            step_completions = self.engine.step()
        if not self._runs and not self._divided and not self._texts:
            return step_completions
        completions: list[Completion] = []
        group_ids: dict[int, None] = {}  # groups with completed queries, in order
        for completion in self._with_reduced_rows(checked_completions(step_completions)):
            row_request = self._row_requests.pop(completion.query_id, None)
            if row_request is None:
                completions.append(completion)
                continue
            group_id, place, _ = row_request
            group_ids[group_id] = None
            group = self._divided[group_id]
            group.pending_ids.remove(completion.query_id)
            next_request = group.add(place, self._value(completion))
            if next_request is not None and not group.has_failed:
                self._submit_row_request(group, *next_request)
        for group_id in group_ids:
            group = self._divided[group_id]
            if group.has_failed or not group.pending_ids:
                completions.append(self._finish_group(group_id))
        return [result for completion in completions for result in self._advance(completion)]

    def abort(self, query_id: int) -> None:
        """Drop a query."""
        if self._waiting.pop(query_id, None) is not None:
            return
        for run_id, run in self._runs.items():
            if isinstance(run, JoinedRun) and query_id in run.unfinished_queries:
                run.drop(query_id)
                if run.unfinished_queries:
                    return
                query_id = run_id
                break
        self._runs.pop(query_id, None)
        self._texts.pop(query_id, None)
        self._abort_query(query_id)

    def _abort_query(self, query_id: int) -> None:
        """Abort a query of the engine, or the queries of a divided group."""
        group = self._divided.pop(query_id, None)
        if group is None:
            self.engine.abort(query_id)
        else:
            self._abort_pending(group)

    def _is_divided(self, group: GroupQuery) -> bool:
        is_small = len(group.row_of) < self._smallest_group
        return is_small and isinstance(group.generation.root.state, Contexts | None)

    def _run(self, run: SamplingRun) -> None:
        """Submit the query for the first tokens of continuations."""
        self._submit_next(run)
        self._runs[run.query.query_id] = run

    def _submit_next(self, run: SamplingRun) -> None:
        query = run.next_query()
        self._submit(query, is_divided=self._is_divided(query))

    def _begin_waiting(self) -> None:
        """Submit the queries of waiting groups.

        Groups of few members are divided if there are other queries for one sequence.
        """
        waiting, self._waiting = self._waiting.values(), {}
        continuations = [query for query in waiting if query.sampling is not None]
        if continuations:
            self._begin_continuations(continuations)
        is_divided = self._has_single or bool(self._divided)
        for query in waiting:
            if query.sampling is None:
                try:
                    self._submit(query, is_divided=is_divided)
                except Exception as error:  # noqa: BLE001 - it fails this query alone
                    self._rejected.append(Completion(query.query_id, error=error))

    def _begin_continuations(self, waiting: Sequence[GroupQuery]) -> None:
        """Submit the queries for the first tokens of continuations.

        They are drawn together if there are enough of them and no other continuations.
        Otherwise all are drawn by separate queries, which share passes.
        """
        self._separate_joined()
        is_idle = not self._runs and not self._divided
        by_key: dict[Any, list[GroupQuery]] = {}
        for query in waiting:
            by_key.setdefault(joining_key(query), []).append(query)
        vocabulary = self.engine.vocabulary
        for queries in by_key.values():
            count = sum(len(query.row_of) for query in queries)
            if is_idle and count >= self._smallest_group:
                run = JoinedRun(next(query_ids), queries, vocabulary)
                try:
                    self._run(run)
                except Exception:  # noqa: BLE001 - raised again by the query that causes it
                    self._divide_all(run.separated())
            else:
                self._divide_all(MemberRuns(query, vocabulary) for query in queries)

    def _separate_joined(self) -> None:
        """Continue joined runs as separate queries, which share passes with other queries."""
        joined = [run for run in self._runs.values() if isinstance(run, JoinedRun)]
        for run in joined:
            del self._runs[run.query.query_id]
            self._abort_query(run.query.query_id)
            self._keep(run)
            self._divide_all(run.separated())

    def _keep(self, run: SamplingRun) -> None:
        """Let the engine keep the tokens of continuations for other requests."""
        if self._keep_sequences is not None:
            call_each(self._keep_sequences, [(run.generation,)])

    def _divide_all(self, runs: Iterable[MemberRuns]) -> None:
        """Submit the next queries of several runs."""
        for run in runs:
            self._divide(run)

    def _submit(self, group: GroupQuery, *, is_divided: bool) -> None:
        """Submit a group query, or a query for each of its distinct sequences."""
        if is_divided:
            self._divide(_DividedGroup(group, self.engine.vocabulary))
        else:
            engine: Any = self.engine
            engine.submit_group(group)

    def _divide(self, group: _DividedGroup | MemberRuns) -> None:
        """Submit the first queries of a divided group."""
        self._divided[group.query.query_id] = group
        for row_request in group.row_requests():
            self._submit_row_request(group, *row_request)

    def _submit_row_request(
        self,
        group: _DividedGroup | MemberRuns,
        place: int,
        sequence: TokenSequence,
        reduction: Reduction,
    ) -> None:
        group_id, query_id = group.query.query_id, next(query_ids)
        group.pending_ids.add(query_id)
        self._row_requests[query_id] = group_id, place, reduction
        query = Query(query_id, sequence, group.query.adapter, outputs=(reduction,))
        try:
            self.engine.submit(query)
        except Exception as error:  # noqa: BLE001 - it fails this sequence alone
            self._rejected.append(Completion(query_id, error=error))

    def _with_reduced_rows(self, completions: list[Completion]) -> list[Completion]:
        """Replace rows that the core reduces for groups by their reductions, or by errors."""
        rows = {
            place: completion.result
            for place, completion in enumerate(completions)
            if completion.query_id in self._row_requests
            and completion.error is None
            and isinstance(completion.result, torch.Tensor)
        }
        size = self.engine.vocabulary.size
        invalid = invalid_rows(list(rows.values()), size) if rows else {}
        results: dict[int, Any] = {list(rows)[i]: error for i, error in invalid.items()}
        places = [place for place in rows if place not in results]
        outputs = [(self._row_requests[completions[place].query_id][2],) for place in places]
        reduced = reduce_rows([rows[place] for place in places], outputs)
        results |= zip(places, reduced, strict=True)
        for place, result in results.items():
            error = result if isinstance(result, Exception) else None
            completions[place] = completions[place]._replace(
                result=None if error else result, error=error
            )
        return completions

    @staticmethod
    def _value(completion: Completion) -> Any:
        """Return the result of a query's reduction, or its error."""
        result: Any = completion.error or completion.result
        if isinstance(result, Reduced) and len(result.values) == 1:
            [result] = result.values
        return result

    def _finish_group(self, group_id: int) -> Completion:
        """Return the completion of a divided group; abort its pending queries."""
        group = self._divided.pop(group_id)
        self._abort_pending(group)
        try:
            return Completion(group_id, group.result())
        except Exception as error:  # noqa: BLE001 - it fails this query alone
            return Completion(group_id, error=error)

    def _abort_pending(self, group: _DividedGroup | MemberRuns) -> None:
        for query_id in group.pending_ids:
            del self._row_requests[query_id]
        call_each(self.engine.abort, ((query_id,) for query_id in group.pending_ids))

    def _advance(self, completion: Completion) -> list[Completion]:
        """Submit the next query of a run; return completions of callers' queries.

        If a joined run fails, its queries are computed separately, so that an error fails only
        the queries that cause it.
        """
        run = self._runs.get(completion.query_id)
        if run is None:
            text = self._texts.pop(completion.query_id, None)
            return [completion if text is None else text_completion(text, completion)]
        completions: list[Completion] = []
        error = completion.error
        if error is None and not isinstance(completion.result, GroupResult):
            error = result_error(completion.result)
        if error is None:
            try:
                run.add(completion.result)  # type: ignore[arg-type]
                completions = run.completed()
                if not run.is_complete:
                    self._submit_next(run)
                    return completions
            except Exception as raised:  # noqa: BLE001 - it fails the queries of this run alone
                error = raised
        del self._runs[completion.query_id]
        sampling = run.query.sampling
        if isinstance(run, JoinedRun) and error is not None:
            self._divide_all(run.separated())
        elif error is not None:
            completions = [Completion(completion.query_id, error=error)]
        elif sampling is not None and not sampling.returns_generation:
            self._keep(run)
        return completions


def with_groups(engine: Engine) -> Engine:
    """Return an engine that accepts all group queries: the same one, or a `GroupEngine`."""
    takes_groups = getattr(engine, "submit_group", None) is not None
    if takes_groups and getattr(engine, "samples_groups", None):
        return engine
    return GroupEngine(engine)
