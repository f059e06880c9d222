"""`CachedResults`: copies and reductions of entries of the output cache, off the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from genlm.core.base.blocking import is_blocking
from genlm.core.base.error_handling import free_locals
from genlm.core.base.loop_batches import LoopBatches
from genlm.core.queries.query import Reduction
from genlm.core.rows.output_cache import Entry, entry_copy, entry_value
from genlm.core.rows.outputs import reduce_rows

CachedResult: TypeAlias = tuple[Entry, Reduction | None]
"""An entry of the output cache, and the requested reduction; None for the stored value."""

_Request: TypeAlias = tuple[list[CachedResult], asyncio.Future[list[Any]]]
"""Results that a coroutine requests, and the future of their values."""

COPIED_ON_LOOP = 2**16
"""Maximum number of bytes copied on the event loop; this takes as long as a thread switch."""

_REDUCED_AT_ONCE = 2**24
"""Maximum number of values of cached rows reduced at once: 64 MiB in float32."""


class CachedResults:
    """Computes requested results from entries of the output cache.

    Copies of few bytes are made at once. Other results that coroutines of an event loop request
    together are computed together, on another thread.
    """

    def __init__(self) -> None:
        self._requests: LoopBatches[_Request] = LoopBatches(_compute_on_thread)

    async def values(self, cached: list[CachedResult]) -> list[Any]:
        """Return results, which belong to the caller, or exceptions of reductions."""
        is_short = sum(entry[2] for entry, _ in cached) <= COPIED_ON_LOOP
        if is_short and all(reduction is None for _, reduction in cached):
            return [entry_copy(entry) for entry, _ in cached]
        if is_blocking():
            return _compute(cached)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Any]] = loop.create_future()
        self._requests.add(loop, (cached, future))
        return await future


def _compute_on_thread(requests: list[_Request]) -> None:
    """Compute the results of a batch on another thread."""
    try:
        asyncio.get_running_loop().run_in_executor(None, _compute_all, requests)
    except RuntimeError as error:  # the event loop or the interpreter is being closed
        _deliver(requests, [error] * len(requests))


def _compute_all(requests: list[_Request]) -> None:
    parts = [cached for cached, _ in requests]
    together = _attempt(list(itertools.chain(*parts)))
    values: list[list[Any] | Exception]
    if isinstance(together, Exception):  # such as out of memory: not that of each request
        values = [_attempt(cached) for cached in parts]
    else:
        remaining = iter(together)
        values = [list(itertools.islice(remaining, len(cached))) for cached in parts]
    with contextlib.suppress(RuntimeError):  # the event loop is closed
        requests[0][1].get_loop().call_soon_threadsafe(_deliver, requests, values)


def _deliver(requests: list[_Request], values: Sequence[list[Any] | Exception]) -> None:
    for (_, future), value in zip(requests, values, strict=True):
        if future.done():  # its coroutine was cancelled
            continue
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)


def _attempt(cached: list[CachedResult]) -> list[Any] | Exception:
    """Return the values of some results, or the error of their computation."""
    try:
        return _compute(cached)
    except Exception as error:  # noqa: BLE001 - raised by the coroutine
        return error


def _compute(cached: list[CachedResult]) -> list[Any]:
    """Copy cached results, and compute reductions of cached rows, some rows at a time."""
    values = [entry_copy(entry) if reduction is None else None for entry, reduction in cached]
    remaining = [place for place, (_, reduction) in enumerate(cached) if reduction is not None]
    while remaining:
        first_row = entry_value(cached[remaining[0]][0])
        step = max(1, _REDUCED_AT_ONCE // len(first_row))
        part, remaining = remaining[:step], remaining[step:]
        results = reduce_rows(
            torch.stack([entry_value(cached[place][0]) for place in part]),
            [(cached[place][1],) for place in part],
        )
        for place, result in zip(part, results, strict=True):
            value = result if isinstance(result, Exception) else result.values[0]
            if isinstance(value, Exception):
                free_locals(value)
            values[place] = value
    return values
