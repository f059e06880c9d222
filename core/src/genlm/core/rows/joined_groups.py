"""Reduction of several groups whose rows or logits were computed together.

The draws of these groups are computed as those of one group, and so are all other reductions of
`Population` except rows and user-defined ones: for small groups, a few operations on all rows
take much less time than the same operations on each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import cast

import numpy as np
import torch

from genlm.core.queries.query import GroupReduction, GroupValues
from genlm.core.rows.group_reductions import JoinableReduction
from genlm.core.rows.groups import GroupWork
from genlm.core.vocab import Vocabulary


def divide_reductions(reductions: Sequence[GroupReduction]) -> list[list[int]]:
    """Divide the indices of reductions into sets for `joined_reduction`."""
    by_key: dict[Hashable, list[int]] = {}
    for index, reduction in enumerate(reductions):
        key = reduction.joining_key if isinstance(reduction, JoinableReduction) else None
        kind: Hashable = index if key is None else (type(reduction), key)
        by_key.setdefault(kind, []).append(index)
    return list(by_key.values())


def joined_reduction(
    reductions: Sequence[GroupReduction],
) -> tuple[GroupReduction, list[int]]:
    """Return one reduction for a set of `divide_reductions`, and the first member of each."""
    if len(reductions) == 1:
        return reductions[0], [0]
    joinable = [cast("JoinableReduction", reduction) for reduction in reductions]
    ends = np.cumsum([each.count for each in joinable]).tolist()
    return type(joinable[0]).joined(joinable), [0, *ends[:-1]]


def divide_groups(works: Sequence[GroupWork]) -> list[list[GroupWork]]:
    """Divide groups into sets whose reductions `reduce_groups` computes together."""
    sets = divide_reductions([work.query.reduction for work in works])
    return [[works[index] for index in indices] for indices in sets]


class JoinedGroups:
    """A set of groups from `divide_groups`, as one group.

    Args:
        works: The groups, of which nothing was computed yet.
        vocabulary: Vocabulary of the rows.

    Attributes:
        work: The sequences of all groups, one group after the other.
        begins: Place of each group's first sequence in it.
    """

    def __init__(self, works: Sequence[GroupWork], vocabulary: Vocabulary) -> None:
        queries = [work.query for work in works]
        ends = np.cumsum([len(query.wanted) for query in queries]).tolist()
        self.begins = [0, *ends[:-1]]
        self._works = works
        row_of = [
            query.row_of + begin for query, begin in zip(queries, self.begins, strict=True)
        ]
        self.work = GroupWork(
            dataclasses.replace(
                queries[0],
                wanted=np.arange(ends[-1]),
                row_of=np.concatenate(row_of),
                reduction=joined_reduction([query.reduction for query in queries])[0],
            ),
            vocabulary,
        )

    def divide(self) -> None:
        """Set the results of the groups."""
        columns, errors = self.work.result()
        counts = [len(work.query.row_of) for work in self._works]
        parts = list(zip(*(torch.split(column, counts) for column in columns), strict=True))
        for index, (work, begin) in enumerate(zip(self._works, self.begins, strict=True)):
            places = range(begin, begin + len(work.query.wanted))
            work.put(
                parts[index] if parts else (),
                {place - begin: errors[place] for place in places if place in errors},
            )


def reduce_groups(
    works: Sequence[GroupWork], computed: GroupValues, vocabulary: Vocabulary
) -> None:
    """Reduce the values of all sequences of a set of groups from `divide_groups`.

    Args:
        works: The groups, of which nothing was computed yet.
        computed: Rows or logits of their sequences, one group after the other.
        vocabulary: Vocabulary of the rows.
    """
    joined = JoinedGroups(works, vocabulary)
    joined.work.reduce(np.arange(len(joined.work.query.wanted)), computed)
    joined.divide()
