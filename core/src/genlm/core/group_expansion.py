"""Populations on engines without group queries: one query per distinct sequence.

The reduction of a group is computed like other reductions: every query requests the entries of
the group's columns for the members that have its sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from genlm.core.columns import Columns
from genlm.core.errors import EvaluationError
from genlm.core.generations import Integers64
from genlm.core.groups import members_by_row
from genlm.core.query import (
    Completion,
    GroupQuery,
    GroupReduction,
    GroupResult,
    Query,
    Reduced,
    Reduction,
)
from genlm.core.reductions import reduce_rows

if TYPE_CHECKING:
    from genlm.core.engine import Engine

__all__ = ["ExpandedGroups", "MemberColumns", "with_groups"]

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
            own = rows if len(places) == len(rows) else rows[torch.tensor(places)]
            columns = requests[places[0]].reduction.compute(
                own, row_of, torch.from_numpy(members)
            )
            divided = zip(*(torch.split(each.cpu(), counts) for each in columns), strict=True)
            for place, values in zip(places, divided, strict=True):
                results[place] = values
        return results


class _Expansion:
    """A group query, the queries for its sequences, and their answers.

    Attributes:
        query: The group query.
    """

    def __init__(self, query: GroupQuery) -> None:
        self.query = query
        self._columns = Columns(query.reduction, len(query.row_of))
        self._errors: dict[int, Exception] = {}
        self._unanswered = len(query.wanted)
        order = members_by_row(query.row_of)
        ends = np.searchsorted(query.row_of[order], np.arange(len(query.wanted)), side="right")
        begins = [0, *ends.tolist()]
        self._members = [order[a:b] for a, b in itertools.pairwise(begins)]

    def queries(self, query_ids: Iterator[int]) -> Iterator[Query]:
        """Yield a query for each place in `query.wanted`, in order."""
        lineage = self.query.generation.lineage
        for place, members in zip(self.query.wanted.tolist(), self._members, strict=True):
            wanted = MemberColumns(self.query.reduction, members)
            sequence = lineage.sequence(place)
            yield Query(next(query_ids), sequence, self.query.adapter, outputs=(wanted,))

    def add(self, place: int, completion: Completion) -> None:
        """Record the answer to the query for a place in `query.wanted`."""
        self._unanswered -= 1
        answer: Any = completion.error or completion.result
        if isinstance(answer, torch.Tensor):  # an engine that leaves reductions to the core
            wanted = MemberColumns(self.query.reduction, self._members[place])
            [answer] = reduce_rows(answer[None], [(wanted,)])
        if isinstance(answer, Reduced) and len(answer.values) == 1:
            [answer] = answer.values
        if isinstance(answer, Exception):
            self._errors[place] = answer
            return
        try:
            self._columns.add(self._members[place], answer)
        except Exception as error:  # noqa: BLE001 - it fails this sequence alone
            self._errors[place] = EvaluationError(
                f"the engine answered a query for a reduction of a row with {answer!r}"
            )
            self._errors[place].__cause__ = error

    @property
    def is_complete(self) -> bool:
        """Whether all sequences have a result."""
        return not self._unanswered

    def result(self) -> GroupResult:
        """Return the columns of all members."""
        return GroupResult(self._columns.result(), self._errors)


class ExpandedGroups:
    """Adds `submit_group` to an engine; other attributes are those of the engine.

    Args:
        engine: Engine for queries of single sequences.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._query_ids = itertools.count(_FIRST_QUERY_ID)
        self._groups: dict[int, _Expansion] = {}
        self._places: dict[int, tuple[int, int]] = {}  # by query id: group, place in it
        self._refused: list[Completion] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def submit_group(self, group: GroupQuery) -> None:
        """Submit a query for each distinct sequence of a group."""
        expansion = self._groups[group.query_id] = _Expansion(group)
        for place, each in enumerate(expansion.queries(self._query_ids)):
            self._places[each.query_id] = group.query_id, place
            try:
                self.engine.submit(each)
            except Exception as error:  # noqa: BLE001 - it fails this sequence alone
                self._refused.append(Completion(each.query_id, error=error))

    def step(self) -> Iterable[Completion]:
        """Step the engine; a group is complete with its last sequence."""
        found: Iterable[Completion] = self._refused
        if found:
            self._refused = []
        else:
            found = self.engine.step()
        completions = []
        for each in found:
            group_id, place = self._places.pop(each.query_id, (None, 0))
            group = self._groups.get(group_id) if group_id is not None else None
            if group_id is None:
                completions.append(each)
            elif group is not None:
                group.add(place, each)
                if group.is_complete:
                    group.query.keep_contexts()
                    del self._groups[group_id]
                    completions.append(Completion(group_id, group.result()))
        return completions

    def abort(self, query_id: int) -> None:
        """Drop a query or a group."""
        if self._groups.pop(query_id, None) is None:
            self.engine.abort(query_id)
            return
        own = [key for key, (group_id, _) in self._places.items() if group_id == query_id]
        for key in own:
            del self._places[key]
            self.engine.abort(key)


def with_groups(engine: Engine) -> Engine:
    """Return the engine if it has `submit_group`, else one that adds it."""
    if getattr(engine, "submit_group", None) is not None:
        return engine
    return ExpandedGroups(engine)
