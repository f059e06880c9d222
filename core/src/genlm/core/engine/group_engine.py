"""Group queries as the queries that an engine accepts.

A group query for continuations becomes one group query per token, which is submitted when the
one before is complete, without the scheduler and event loops between. A group query of few
members, or for an engine that accepts none, becomes one query per distinct sequence. The
reduction of the group is computed like other reductions: every query requests the entries of
the group's columns for the members that have its sequence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from genlm.core.engine.group_sampling import (
    MemberRuns,
    SamplingRun,
    Single,
    unexpected_answer,
)
from genlm.core.queries.generations import Integers64
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
from genlm.core.rows.groups import GroupWork
from genlm.core.rows.logits import invalid_rows, moved
from genlm.core.rows.reductions import reduce_rows

if TYPE_CHECKING:
    from genlm.core.engine.engine import Engine
    from genlm.core.vocab import Vocabulary

__all__ = ["GroupEngine", "MemberColumns", "with_groups"]

_FIRST_QUERY_ID = 2**48
"""Ids of the queries of groups, which are distinct from those of the scheduler's queries."""

_SMALLEST_GROUP = 2
"""A group of one member is a query like any other, and shares passes with these."""


class MemberColumns(Reduction):
    """The entries of a group's columns for the members that share one row.

    Args:
        reduction: Reduction of the group.
        members: Members that the row belongs to, shape `(m,)`.
    """

    is_cacheable = False

    def __init__(self, reduction: GroupReduction, members: Integers64) -> None:
        self.reduction = reduction
        self.members = members

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[MemberColumns]) -> Sequence[Any]:
        """Reduce all rows of a group at once."""
        results: list[Any] = [None] * len(requests)
        groups: dict[int, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(id(request.reduction), []).append(place)
        for places in groups.values():
            counts = [len(requests[place].members) for place in places]
            row_of = torch.arange(len(places)).repeat_interleave(torch.tensor(counts))
            members = np.concatenate([requests[place].members for place in places])
            own = rows
            if len(places) < len(rows):
                own = rows[moved(torch.tensor(places), rows.device)]
            reduction = requests[places[0]].reduction
            columns = reduction.compute(own, row_of, torch.from_numpy(members))
            if not reduction.stays_on_device:
                columns = tuple(each.cpu() for each in columns)
            divided = zip(*(torch.split(each, counts) for each in columns), strict=True)
            for place, values in zip(places, divided, strict=True):
                results[place] = values
        return results


class _Parts(GroupWork):
    """A group query whose distinct sequences are computed by one query each."""

    has_failed = False
    """The errors of sequences are part of the result."""

    def __init__(self, query: GroupQuery, vocabulary: Vocabulary) -> None:
        super().__init__(query, vocabulary)
        self.unanswered: set[int] = set()

    def singles(self) -> Iterator[Single]:
        """Yield the distinct sequences, with the reduction for their members."""
        sequence_of = self.query.generation.lineage.sequence
        for place, index in enumerate(self.query.wanted.tolist()):
            members = MemberColumns(self.query.reduction, self.members_of(place))
            yield place, sequence_of(index), members

    def add(self, place: int, answer: Any) -> None:
        """Add the columns of the members of a sequence, or its error."""
        try:
            if not isinstance(answer, tuple):
                raise unexpected_answer(answer)
            self._columns.add(self.members_of(place), answer)
        except Exception as error:  # noqa: BLE001 - it fails this sequence alone
            self.errors[place] = error

    def result(self) -> GroupResult:
        """Return the columns of all members."""
        self.query.keep_contexts()
        return super().result()


class GroupEngine:
    """Adds the group queries that an engine does not accept.

    Engines compute queries of different callers in one pass, but most compute groups one after
    the other. Groups with fewer members than the engine's `smallest_group` are therefore
    divided, unless the engine has state of their sequences as arrays. Other attributes are
    those of the engine.
    """

    _query_ids = itertools.count(_FIRST_QUERY_ID)  # of all models, as in `Requests`

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._smallest_group: float = math.inf
        if getattr(engine, "submit_group", None) is not None:
            self._smallest_group = getattr(engine, "smallest_group", _SMALLEST_GROUP)
        self._runs: dict[int, SamplingRun] = {}  # by query id
        self._divided: dict[int, _Parts | MemberRuns] = {}  # by query id
        # Of each query for a single sequence: id of the group, place, requested reduction.
        self._singles: dict[int, tuple[int, int, Reduction]] = {}
        self._refused: list[Completion] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def submit_group(self, group: GroupQuery) -> None:
        """Submit a group query; of one with `sampling`, the queries for the first tokens."""
        vocabulary, max_context = self.engine.vocabulary, self.engine.max_context
        if group.sampling is None:
            self._submit(group)
        elif self._is_divided(group):
            self._divide(MemberRuns(group, vocabulary, max_context))
        else:
            run = SamplingRun(group, vocabulary, max_context)
            self._submit(run.next_query())
            self._runs[group.query_id] = run

    def step(self) -> Iterable[Completion]:
        """Step the engine, and submit the queries for next tokens."""
        found: Iterable[Completion] = self._refused
        if found:
            self._refused = []
        else:
            found = self.engine.step()
        if not self._runs and not self._divided:
            return found
        completions: list[Completion] = []
        answered: dict[int, None] = {}  # groups, in order
        for completion in found:
            single = self._singles.pop(completion.query_id, None)
            if single is None:
                completions.append(completion)
                continue
            group_id, place, wanted = single
            answered[group_id] = None
            group = self._divided[group_id]
            group.unanswered.remove(completion.query_id)
            following = group.add(place, self._value(completion, wanted))
            if following is not None and not group.has_failed:
                self._submit_single(group, *following)
        for group_id in answered:
            group = self._divided[group_id]
            if group.has_failed or not group.unanswered:
                completions.append(self._combined(group_id))
        continued = map(self._continued, completions)
        return [each for each in continued if each is not None]

    def abort(self, query_id: int) -> None:
        """Drop a query."""
        self._runs.pop(query_id, None)
        divided = self._divided.pop(query_id, None)
        for each in [query_id] if divided is None else divided.unanswered:
            self._singles.pop(each, None)
            self.engine.abort(each)

    def _is_divided(self, group: GroupQuery) -> bool:
        is_small = len(group.row_of) < self._smallest_group
        return is_small and group.generation.is_of_contexts

    def _submit(self, group: GroupQuery) -> None:
        """Submit a group query, or a query for each of its distinct sequences."""
        if self._is_divided(group):
            self._divide(_Parts(group, self.engine.vocabulary))
        else:
            engine: Any = self.engine
            engine.submit_group(group)

    def _divide(self, group: _Parts | MemberRuns) -> None:
        singles = list(group.singles())
        if group.has_failed:
            group.result()  # raises
        self._divided[group.query.query_id] = group
        for single in singles:
            self._submit_single(group, *single)

    def _submit_single(
        self, group: _Parts | MemberRuns, place: int, sequence: TokenSequence, wanted: Reduction
    ) -> None:
        group_id, query_id = group.query.query_id, next(self._query_ids)
        group.unanswered.add(query_id)
        self._singles[query_id] = group_id, place, wanted
        query = Query(query_id, sequence, group.query.adapter, outputs=(wanted,))
        try:
            self.engine.submit(query)
        except Exception as error:  # noqa: BLE001 - it fails this sequence alone
            self._refused.append(Completion(query_id, error=error))

    def _value(self, completion: Completion, wanted: Reduction) -> Any:
        """Return the result of a reduction, or an exception."""
        answer: Any = completion.error or completion.result
        if isinstance(answer, torch.Tensor):  # an engine that leaves reductions to the core
            invalid = invalid_rows([answer], self.engine.vocabulary.size)
            answer = invalid[0] if invalid else reduce_rows(answer[None], [(wanted,)])[0]
        if isinstance(answer, Reduced) and len(answer.values) == 1:
            [answer] = answer.values
        return answer

    def _combined(self, group_id: int) -> Completion:
        """Return the completion of a divided group."""
        group = self._divided.pop(group_id)
        for each in group.unanswered:
            del self._singles[each]
            self.engine.abort(each)
        try:
            return Completion(group_id, group.result())
        except Exception as error:  # noqa: BLE001 - it fails this query alone
            return Completion(group_id, error=error)

    def _continued(self, completion: Completion) -> Completion | None:
        """Submit the query for the next token of a run, if any; else return the completion."""
        query_id, result, error = completion
        run = self._runs.get(query_id)
        if run is None:
            return completion
        if error is None and isinstance(result, GroupResult):
            try:
                run.add(result)
                if not run.is_complete:
                    self._submit(run.next_query())
                    return None
                completion = Completion(query_id, run.result())
            except Exception as raised:  # noqa: BLE001 - it fails this query alone
                completion = Completion(query_id, error=raised)
        del self._runs[query_id]
        return completion


def with_groups(engine: Engine) -> Engine:
    """Return an engine that accepts all group queries: this one, or one that adds them."""
    takes_groups = getattr(engine, "submit_group", None) is not None
    if takes_groups and getattr(engine, "samples_groups", None):
        return engine
    return GroupEngine(engine)
