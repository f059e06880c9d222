"""`ClientReductions`: computes the reductions that are a client's code.

Such code may take any time, so it never runs on the engine's thread or the event loop. A thread
cannot be ended: one that does not return keeps its CPU time, and its client gets no second
thread. The rows of a text are computed and reduced in parts, one after the other, so that few
are in memory.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
from collections.abc import Awaitable, Callable
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
from genlm_ray.router import AnyQuery
from genlm_ray.shared_engine import SHARED_ROWS

__all__ = ["ClientReductions", "has_client_code"]

_TRUSTED = ("genlm.core.", "genlm.engines.", "genlm_ray.")

_TEXT_VALUES = 2**25
"""Maximum number of entries of the rows of a part of a text: 128 MiB. Fewer rows would cost an
engine without a prefix cache more passes."""

Compute = Callable[[AnyQuery], Awaitable[Any]]


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


class ClientReductions:
    """The reductions of one client, on a thread of their own.

    Args:
        compute: Returns the engine's result of a query, or raises its error.
        vocab_size: Number of entries of a row.
        timeout_s: Timeout of the reductions of a batch of rows or of a part of a text.
    """

    def __init__(self, compute: Compute, vocab_size: int, timeout_s: float) -> None:
        self._compute = compute
        self._timeout_s = None if timeout_s == float("inf") else timeout_s
        self._text_rows = max(SHARED_ROWS, _TEXT_VALUES // vocab_size)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "genlm-reductions")
        self._turn = asyncio.Lock()
        # Rows wait for the thread in memory.
        self._has_room = asyncio.Semaphore(SHARED_ROWS)
        self._has_room_for_text = asyncio.Semaphore(2)
        self._overdue: asyncio.Future[Any] | None = None
        self._rows: dict[asyncio.Future[Reduced | Exception], tuple[Query, Any]] = {}

    def close(self) -> None:
        """End the thread once it returns."""
        self._thread.shutdown(wait=False)

    async def reduced(self, query: AnyQuery) -> Completion:
        """Compute a query and its reductions."""
        async with self._has_room:
            try:
                self._raise_if_overdue()
                result = await self._reduced(query)
            except Exception as error:  # noqa: BLE001 - of the engine, or of the client's code
                return Completion(query.query_id, error=error)
        return Completion(query.query_id, result)

    async def _reduced(self, query: AnyQuery) -> Any:
        if isinstance(query, GroupQuery):
            each = np.arange(len(query.wanted))
            of_rows = dataclasses.replace(query, row_of=each, reduction=_DistinctRows())
            rows = await self._compute(of_rows)
            return await self._run(_reduced_group, query, rows)
        if query.targets:
            async with self._has_room_for_text:
                return await self._reduced_text(query)
        row = await self._compute(query.replace(outputs=(None,)))
        future: asyncio.Future[Reduced | Exception] = asyncio.get_running_loop().create_future()
        self._rows[future] = query, row
        async with self._turn:
            if not future.done():
                await self._reduce_rows()
        result = future.result()
        if isinstance(result, Exception):
            raise result
        return result

    async def _reduce_rows(self) -> None:
        """Reduce all rows that have come meanwhile in one call."""
        batch, self._rows = self._rows, {}
        rows = torch.stack([row for _, row in batch.values()])
        outputs = [query.outputs for query, _ in batch.values()]
        try:
            results = await self._call(reduce_rows, rows, outputs)
        except asyncio.CancelledError:  # one query was aborted, the others wait for their turn
            self._rows = batch | self._rows
            raise
        except Exception as error:  # noqa: BLE001 - as in `reduced`
            results = [error] * len(batch)
        for future, result in zip(batch, results, strict=True):
            future.set_result(result)

    async def _reduced_text(self, query: Query) -> Reduced:
        [output] = query.outputs
        assert isinstance(output, PositionReduction)  # noqa: S101 - others have no targets
        count, first = len(query.targets), len(query) - len(query.targets)
        columns = ReducedText(output.reduction, count)
        for begin in range(0, count, self._text_rows):
            places = np.arange(begin, min(count, begin + self._text_rows))
            part = query.replace(
                token_ids=TokenSequence.of(query.token_ids[: first + len(places) + begin]),
                targets=query.targets[begin : begin + len(places)],
                outputs=(PositionReduction(_DistinctRows()),),
            )
            found = await self._compute(part)
            [columns_of_rows] = found.values
            if isinstance(columns_of_rows, Exception):
                raise columns_of_rows
            await self._run(columns.add, places, columns_of_rows[0])
            if columns.has_failed:
                break
        result = columns.result()
        if isinstance(result, Exception):
            raise result
        return result

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        async with self._turn:
            return await self._call(function, *arguments)

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function on the client's thread, which no other call uses."""
        self._raise_if_overdue()
        call = asyncio.get_running_loop().run_in_executor(
            self._thread, _called, function, arguments
        )
        await asyncio.wait([call], timeout=self._timeout_s)
        if not call.done():
            self._overdue = call
            self._raise_if_overdue()
        return call.result()

    def _raise_if_overdue(self) -> None:
        if self._overdue is not None and not self._overdue.done():
            raise EvaluationError(
                f"a reduction of this program has run for more than {self._timeout_s:g} s in a "
                f"replica; until it returns, no other reduction of its own is computed there"
            )


def _called(function: Callable[..., Any], arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception:
        raise
    except BaseException as error:  # noqa: BLE001 - a client must not end the replica
        raise EvaluationError(f"the reductions raised {type(error).__name__}") from None


class _DistinctRows(GroupReduction):
    """The rows themselves: one column, shape `(n, vocab_size)`."""

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        del members
        return (rows[row_of.to(rows.device)],)


def _reduced_group(group: GroupQuery, rows: GroupResult) -> GroupResult:
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
