"""`ReductionThread`: computes the reductions that are a client's code.

Such code may take any time, so it never runs on the engine's thread. A thread cannot be ended:
one that does not return keeps its CPU time, and its client gets no second thread. The rows of
a text are computed and reduced in parts, one after the other, so that few are in memory.
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
    PositionReduction,
    Query,
    Reduced,
    ReducedText,
    TokenSequence,
    reduce_rows,
)

__all__ = [
    "AnyQuery",
    "ReductionThread",
    "has_client_code",
    "reduced_rows",
    "rows_only",
]

AnyQuery = Query | GroupQuery

_TRUSTED = ("genlm.core.", "genlm.engines.", "genlm_ray.")


def has_client_code(query: AnyQuery) -> bool:
    """Whether a query requests a reduction that is not part of genlm."""
    if isinstance(query, GroupQuery):
        return _is_client_code(query.reduction)
    return any(map(_is_client_code, query.outputs))


def _is_client_code(output: Any) -> bool:
    if output is None:
        return False
    if not type(output).__module__.startswith(_TRUSTED):
        return True
    return _is_client_code(getattr(output, "reduction", None))  # perhaps within genlm's


def rows_only(query: AnyQuery, text_rows: int) -> AnyQuery:
    """Return a query for the rows of another query's distinct sequences.

    Args:
        query: A query with client code.
        text_rows: Maximum number of rows of a text; the query is for the first of them.
    """
    if isinstance(query, GroupQuery):
        each = np.arange(len(query.wanted))
        return dataclasses.replace(query, row_of=each, reduction=_DistinctRows())
    if not query.targets:
        return query.replace(outputs=(None,))
    rows = PositionReduction(_DistinctRows())
    targets = query.targets[:text_rows]
    end = len(query) - len(query.targets) + len(targets)
    sequence = query.sequence
    if end < len(query):
        sequence = TokenSequence.of(query.token_ids[:end])
    return query.replace(token_ids=sequence, targets=targets, outputs=(rows,))


class _DistinctRows(GroupReduction):
    """The rows themselves: one column, shape `(n, vocab_size)`."""

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        del members
        return (rows[row_of.to(rows.device)],)


class _RestOfText(PositionReduction):
    """A client's reduction of a text of which some rows are reduced.

    Args:
        reduction: The client's reduction.
        columns: Its columns.
        done: Number of targets whose rows are reduced.
    """

    def __init__(self, reduction: GroupReduction, columns: ReducedText, done: int) -> None:
        super().__init__(reduction)
        self.columns, self.done = columns, done


def _reduced_text(query: Query, found: Reduced) -> Completion | Query:
    """Reduce the rows that predict the first targets of a query.

    Returns:
        The completion, or a query for the other targets.
    """
    [columns_of_rows] = found.values
    if isinstance(columns_of_rows, Exception):
        return Completion(query.query_id, error=columns_of_rows)
    [rows] = columns_of_rows
    [output] = query.outputs
    assert isinstance(output, PositionReduction)  # noqa: S101 - as `rows_only` expects
    if isinstance(output, _RestOfText):
        columns, done = output.columns, output.done
    else:
        columns, done = ReducedText(output.reduction, len(query.targets)), 0
    columns.add(np.arange(done, done + len(rows)), rows)
    if columns.has_failed or len(rows) == len(query.targets):
        result = columns.result()
        if isinstance(result, Exception):
            return Completion(query.query_id, error=result)
        return Completion(query.query_id, result)
    rest = _RestOfText(output.reduction, columns, done + len(rows))
    return query.replace(targets=query.targets[len(rows) :], outputs=(rest,))


def _reduced_group(group: GroupQuery, rows: GroupResult) -> Completion:
    """Reduce the computed rows of a group."""
    if not rows.columns:
        return Completion(group.query_id, rows)
    members = np.argsort(group.row_of, kind="stable")
    members = members[~np.isin(group.row_of[members], list(rows.errors))]
    row_of = torch.from_numpy(group.row_of[members])
    places = torch.from_numpy(members)
    columns = []
    try:
        for part in group.reduction.compute(rows.columns[0], row_of, places):
            column = part.new_empty((len(group.row_of), *part.shape[1:]))
            column[places.to(part.device)] = part
            columns.append(column)
    except Exception as error:  # noqa: BLE001 - a program's code
        return Completion(group.query_id, error=error)
    return Completion(group.query_id, GroupResult(tuple(columns), rows.errors))


def reduced_rows(members: Sequence[tuple[Query, torch.Tensor]]) -> list[Completion]:
    """Reduce the rows of queries."""
    rows = torch.stack([row for _, row in members])
    results = reduce_rows(rows, [query.outputs for query, _ in members])
    return [
        Completion(query.query_id, result)
        if isinstance(result, Reduced)
        else Completion(query.query_id, error=result)
        for (query, _), result in zip(members, results, strict=True)
    ]


def _reduced(members: Sequence[tuple[AnyQuery, Any]]) -> list[Completion | Query]:
    """Reduce the rows of queries, groups and texts."""
    found: list[Completion | Query] = []
    single: list[tuple[Query, torch.Tensor]] = []
    for query, rows in members:
        if isinstance(query, GroupQuery):
            found.append(_reduced_group(query, rows))
        elif query.targets:
            found.append(_reduced_text(query, rows))
        else:
            single.append((query, rows))
    return [*found, *reduced_rows(single)] if single else found


class ReductionThread:
    """The thread of one client.

    Args:
        on_reduced: Called on the thread with the completions of a batch, and with queries for
            the rest of texts.
    """

    def __init__(self, on_reduced: Callable[[list[Completion | Query]], None]) -> None:
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
        self,
        batches: queue.SimpleQueue[Any],
        on_reduced: Callable[[list[Completion | Query]], None],
    ) -> None:
        while (members := batches.get()) is not None:
            self._began_s = time.monotonic()
            try:
                completions = _reduced(members)
            except BaseException as error:  # noqa: BLE001 - a client must not end the replica
                cause = EvaluationError(f"the reductions raised {type(error).__name__}")
                completions = [Completion(query.query_id, error=cause) for query, _ in members]
            finally:
                self._began_s = None
            on_reduced(completions)
            del members, completions  # no row outlives its batch here
