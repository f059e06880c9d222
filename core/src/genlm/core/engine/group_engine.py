"""Group queries on engines that do not accept them.

A group query becomes one query per distinct sequence. The reduction of the group is computed
like other reductions: every query requests the entries of the group's columns for the members
that have its sequence. A group query for continuations becomes one group query per token, which
is submitted when the one before is complete, without the scheduler and event loops between.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from genlm.core.base.errors import EvaluationError
from genlm.core.engine.group_sampling import SamplingRun
from genlm.core.queries.generations import Integers64
from genlm.core.queries.query import (
    Completion,
    GroupQuery,
    GroupReduction,
    GroupResult,
    GroupValues,
    Query,
    Reduced,
    Reduction,
)
from genlm.core.rows.groups import GroupWork
from genlm.core.rows.logits import moved

if TYPE_CHECKING:
    from genlm.core.engine.engine import Engine

__all__ = ["GroupEngine", "MemberColumns", "with_groups"]

_FIRST_QUERY_ID = 2**40
"""Ids of the queries of groups, which are distinct from those of the scheduler's queries."""


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
            columns = requests[places[0]].reduction.compute(
                own, row_of, torch.from_numpy(members)
            )
            divided = zip(*(torch.split(each.cpu(), counts) for each in columns), strict=True)
            for place, values in zip(places, divided, strict=True):
                results[place] = values
        return results


class GroupEngine:
    """Adds group queries to an engine that does not accept them, or not those with `sampling`.

    Other attributes are those of the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._takes_groups = getattr(engine, "submit_group", None) is not None
        self._samples_groups = getattr(engine, "samples_groups", False)
        self._runs: dict[int, SamplingRun] = {}  # by query id
        # Each group's work, and its unanswered queries with the places of their sequences.
        self._divided: dict[int, tuple[GroupWork, dict[int, int]]] = {}
        self._group_of: dict[int, int] = {}  # by id of a query for a single sequence
        self._refused: list[Completion] = []
        self._query_ids = itertools.count(_FIRST_QUERY_ID)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def submit_group(self, group: GroupQuery) -> None:
        """Submit a group query; of one with `sampling`, the query for the first token."""
        if group.sampling is None or self._samples_groups:
            self._submit(group)
            return
        run = SamplingRun(group, self.engine.vocabulary, self.engine.max_context)
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
        completed = map(self._completed, found)
        return [each for each in completed if each is not None]

    def abort(self, query_id: int) -> None:
        """Drop a query."""
        self._runs.pop(query_id, None)
        if query_id not in self._divided:
            self.engine.abort(query_id)
            return
        _, unanswered = self._divided.pop(query_id)
        for each in unanswered:
            del self._group_of[each]
            self.engine.abort(each)

    def _submit(self, group: GroupQuery) -> None:
        """Submit a group query, or a query for each of its distinct sequences."""
        if self._takes_groups:
            engine: Any = self.engine
            engine.submit_group(group)
            return
        work = GroupWork(group, self.engine.vocabulary)
        unanswered: dict[int, int] = {}
        self._divided[group.query_id] = work, unanswered
        for place, index in enumerate(group.wanted.tolist()):
            wanted = MemberColumns(group.reduction, work.members_of(place))
            sequence = group.generation.lineage.sequence(index)
            query = Query(next(self._query_ids), sequence, group.adapter, outputs=(wanted,))
            unanswered[query.query_id] = place
            self._group_of[query.query_id] = group.query_id
            try:
                self.engine.submit(query)
            except Exception as error:  # noqa: BLE001 - it fails this sequence alone
                self._refused.append(Completion(query.query_id, error=error))

    def _completed(self, completion: Completion) -> Completion | None:
        """Return a completion for the scheduler, None while its query is incomplete."""
        group_id = self._group_of.pop(completion.query_id, None)
        if group_id is not None:
            work, unanswered = self._divided[group_id]
            _add_answer(work, unanswered.pop(completion.query_id), completion)
            if unanswered:
                return None
            del self._divided[group_id]
            work.query.keep_contexts()
            completion = Completion(group_id, work.result())
        run = self._runs.get(completion.query_id)
        return completion if run is None else self._continued(run, completion)

    def _continued(self, run: SamplingRun, completion: Completion) -> Completion | None:
        """Submit the query for the next token; return the completion of the last one."""
        query_id, result, error = completion
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


def _add_answer(work: GroupWork, place: int, completion: Completion) -> None:
    """Record the answer to the query for a place in the `wanted` of a group."""
    answer: Any = completion.error or completion.result
    if isinstance(answer, Reduced) and len(answer.values) == 1:
        [answer] = answer.values
    try:
        if isinstance(answer, Exception):
            work.errors[place] = answer
        elif isinstance(answer, torch.Tensor):  # an engine that leaves reductions to the core
            values = GroupValues(answer[None], are_logits=False)
            work.reduce(np.array([place]), values)
        else:
            work.add(place, answer)
    except Exception as error:  # noqa: BLE001 - it fails this sequence alone
        work.errors[place] = error
        if not isinstance(answer, torch.Tensor):
            work.errors[place] = EvaluationError(
                f"the engine answered a query for a reduction of a row with {answer!r}"
            )
            work.errors[place].__cause__ = error


def with_groups(engine: Engine) -> Engine:
    """Return an engine that accepts all group queries: this one, or one that adds them."""
    takes_groups = getattr(engine, "submit_group", None) is not None
    if takes_groups and getattr(engine, "samples_groups", False):
        return engine
    return GroupEngine(engine)
