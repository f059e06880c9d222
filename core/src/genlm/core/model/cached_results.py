"""`CachedResults`: the results of one model in the output cache, copied off the event loop."""

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
from genlm.core.engine.engine import Engine
from genlm.core.queries.query import Reduction
from genlm.core.rows.output_cache import Entry, OutputCache, entry_copy, entry_value
from genlm.core.rows.outputs import reduce_rows
from genlm.core.scheduler import Scheduler

CachedResult: TypeAlias = tuple[Entry, Reduction | None]
"""An entry of the output cache, and the requested reduction; None for the stored value."""

_Request: TypeAlias = tuple[list[CachedResult], asyncio.Future[list[Any]]]
"""Results that a coroutine requests, and the future of their values."""

COPIED_ON_LOOP = 2**16
"""Maximum number of bytes copied on the event loop; this takes as long as a thread switch."""

_REDUCED_AT_ONCE = 2**24
"""Maximum number of values of cached rows reduced at once: 64 MiB in float32."""


class CachedResults:
    """The results of one model in an output cache, and the changes of the model's weights.

    Models that `with_lora` returns share it.

    Args:
        cache: Output cache, which several models may share.
        scheduler: Scheduler of the model's engine.

    Attributes:
        cache: The output cache.
        model: First part of the keys of the model's results. Entries of a shared cache may
            outlive the model, so this object refers to nothing.
    """

    def __init__(self, cache: OutputCache, scheduler: Scheduler[Engine]) -> None:
        self.cache = cache
        self.model = object()
        self._scheduler = scheduler
        self._requests: LoopBatches[_Request] = LoopBatches(_compute_on_thread)
        self._weight_changes = 0
        self._has_versions = hasattr(scheduler.engine, "weights_version")
        self._version = self._engine_version()  # at the last check

    def find(
        self, results: Sequence[tuple[Any, Reduction | None]]
    ) -> list[CachedResult | None]:
        """Look up results of the engine's current weights, by the keys of their rows."""
        changes = self._weight_changes
        entries = [self._find(*result) for result in results]
        # Only hits are checked: reading the version takes longer than a lookup.
        if self._has_versions and any(entry is not None for entry in entries):
            return entries if self.weight_changes() == changes else [None] * len(entries)
        return entries

    def _find(self, key: Any, reduction: Reduction | None) -> CachedResult | None:
        """Look up a result, or the row from which it can be computed."""
        if reduction is not None and reduction.is_cacheable:
            entry = self.cache.find((key, reduction))
            if entry is not None:
                return entry, None
        entry = self.cache.find(key)
        return None if entry is None else (entry, reduction)

    def drop(self, *adapter: str | None) -> None:
        """Drop all results of the model, or those of one of its adapters."""

        def is_dropped(key: Any) -> bool:
            row_key = key[0] if isinstance(key, tuple) and len(key) == 2 else key
            is_own = isinstance(row_key, tuple) and row_key != () and row_key[0] is self.model
            return is_own and (not adapter or row_key[1] == adapter[0])

        self.cache.clear(is_dropped)

    def change_weights(self) -> None:
        """Count a change of the weights, and drop the results of the earlier weights."""
        try:
            self._version = self._engine_version()
        finally:
            self._weight_changes += 1
            self.drop()

    def weight_changes(self) -> int:
        """Count the changes of the weights so far, also those that the engine detects."""
        if self._engine_version() != self._version:
            self.change_weights()
        return self._weight_changes

    def _engine_version(self) -> Any:
        """Return the version of the engine's weights, None if it does not change them."""
        engine: Any = self._scheduler.engine
        return engine.weights_version() if self._has_versions else None

    async def values(self, cached: list[CachedResult]) -> list[Any]:
        """Return results, which belong to the caller, or exceptions of reductions.

        Copies of few bytes are made at once. Other results that coroutines of an event loop
        request together are computed together, on another thread.
        """
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
