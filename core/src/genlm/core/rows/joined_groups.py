"""Reduction of several groups whose rows or logits were computed together.

The draws of these groups are computed as those of one group, and so are scores of texts: for
small groups, a few operations on all rows take much less time than the same operations on each.
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


def reduce_groups(
    works: Sequence[GroupWork], computed: GroupValues, vocabulary: Vocabulary
) -> None:
    """Reduce the values of all sequences of a set of groups from `divide_groups`.

    Args:
        works: The groups, of which nothing was computed yet.
        computed: Rows or logits of their sequences, one group after the other.
        vocabulary: Vocabulary of the rows.
    """
    queries = [work.query for work in works]
    ends = np.cumsum([len(query.wanted) for query in queries])
    begins = [0, *ends[:-1].tolist()]
    row_of = [query.row_of + begin for query, begin in zip(queries, begins, strict=True)]
    joined = GroupWork(
        dataclasses.replace(
            queries[0],
            wanted=np.arange(ends[-1]),
            row_of=np.concatenate(row_of),
            reduction=joined_reduction([query.reduction for query in queries])[0],
        ),
        vocabulary,
    )
    joined.reduce(np.arange(ends[-1]), computed)
    columns, errors = joined.result()
    counts = [len(query.row_of) for query in queries]
    parts = list(zip(*(torch.split(column, counts) for column in columns), strict=True))
    for index, (work, begin) in enumerate(zip(works, begins, strict=True)):
        places = range(begin, begin + len(work.query.wanted))
        work.put(
            parts[index] if parts else (),
            {place - begin: errors[place] for place in places if place in errors},
        )
