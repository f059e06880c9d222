"""`ReductionThread`: computes the reductions that are a client's code.

Such code may take any time, so it never runs on the engine's thread. A thread cannot be ended:
one that does not return keeps its CPU time, and its client gets no second thread.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from genlm.plugin import (
    Completion,
    EvaluationError,
    GroupQuery,
    GroupReduction,
    GroupResult,
    Query,
    Reduced,
    reduce_rows,
)

__all__ = [
    "AnyQuery",
    "ReductionThread",
    "has_client_code",
    "reduced_completions",
    "rows_only",
]

AnyQuery = Query | GroupQuery

_TRUSTED = ("genlm.core.", "genlm.engines.", "genlm_ray.")


def has_client_code(query: AnyQuery) -> bool:
    """Whether a query requests a reduction that is not part of genlm."""
    outputs: Sequence[Any]
    if isinstance(query, GroupQuery):  # perhaps a program's reduction of one row within genlm's
        outputs = (query.reduction, getattr(query.reduction, "reduction", None))
    else:
        outputs = query.outputs
    return any(
        each is not None and not type(each).__module__.startswith(_TRUSTED) for each in outputs
    )


def rows_only(query: AnyQuery) -> AnyQuery:
    """Return a query for the rows of another query's distinct sequences."""
    if isinstance(query, GroupQuery):
        each = np.arange(len(query.wanted))
        return dataclasses.replace(query, row_of=each, reduction=_DistinctRows())
    return query.replace(outputs=(None,))


class _DistinctRows(GroupReduction):
    """The rows themselves: one column, shape `(n, vocab_size)`."""

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        del members
        return (rows[row_of.to(rows.device)],)


def reduced_group(group: GroupQuery, rows: GroupResult) -> GroupResult:
    """Reduce the computed rows of a group."""
    if not rows.columns:
        return rows
    members = np.argsort(group.row_of, kind="stable")
    members = members[~np.isin(group.row_of[members], list(rows.errors))]
    row_of = torch.from_numpy(group.row_of[members])
    places = torch.from_numpy(members)
    columns = []
    for part in group.reduction.compute(rows.columns[0], row_of, places):
        column = part.new_empty((len(group.row_of), *part.shape[1:]))
        column[places.to(part.device)] = part
        columns.append(column)
    return GroupResult(tuple(columns), rows.errors)


def reduced_completions(members: Sequence[tuple[AnyQuery, Any]]) -> list[Completion]:
    """Reduce the rows of queries."""
    single = [(query, row) for query, row in members if isinstance(query, Query)]
    reduced = iter(_reduced_rows(single) if single else [])
    return [
        next(reduced) if isinstance(query, Query) else _reduced_alone(query, rows)
        for query, rows in members
    ]


def _reduced_alone(group: GroupQuery, rows: GroupResult) -> Completion:
    try:
        return Completion(group.query_id, reduced_group(group, rows))
    except Exception as error:  # noqa: BLE001 - a program's code
        return Completion(group.query_id, error=error)


def _reduced_rows(members: Sequence[tuple[Query, torch.Tensor]]) -> list[Completion]:
    rows = torch.stack([row for _, row in members])
    results = reduce_rows(rows, [query.outputs for query, _ in members])
    return [
        Completion(query.query_id, result)
        if isinstance(result, Reduced)
        else Completion(query.query_id, error=result)
        for (query, _), result in zip(members, results, strict=True)
    ]


class ReductionThread:
    """The thread of one client.

    Args:
        on_reduced: Called on the thread with the completions of a batch.
    """

    def __init__(self, on_reduced: Callable[[list[Completion]], None]) -> None:
        self._batches: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._began_s: float | None = None
        arguments = (self._batches, on_reduced)
        threading.Thread(
            target=self._run, args=arguments, name="genlm-reductions", daemon=True
        ).start()

    @property
    def seconds(self) -> float:
        """Elapsed time of the current batch."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def submit(self, members: list[tuple[AnyQuery, Any]]) -> None:
        """Have queries' rows reduced."""
        self._batches.put(members)

    def close(self) -> None:
        """End the thread after the submitted batches."""
        self._batches.put(None)

    def _run(
        self, batches: queue.SimpleQueue[Any], on_reduced: Callable[[list[Completion]], None]
    ) -> None:
        while (members := batches.get()) is not None:
            self._began_s = time.monotonic()
            try:
                completions = reduced_completions(members)
            except BaseException as error:  # noqa: BLE001 - a client must not end the replica
                cause = EvaluationError(f"the reductions raised {type(error).__name__}")
                completions = [Completion(query.query_id, error=cause) for query, _ in members]
            finally:
                self._began_s = None
            on_reduced(completions)
            del members, completions  # no row outlives its batch here
