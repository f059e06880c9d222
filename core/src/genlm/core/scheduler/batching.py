"""The batching policy: when the requests in the inbox are dispatched to the engine.

No timer is used: an idle engine receives a batch when the event loop of its callers has run
ready callbacks and adds no further requests (`LoopBatches`). The loop then flushes the inbox.

After a step, the callers that received results are likely to submit their next requests. A
request that arrived during the step is therefore held until the event loop has run these
callers, or for a grace period that is a small share of the step's duration, whichever is
shorter.

An engine that has queries may defer them: computing them would free cached state that the
callers with results are likely to continue. Its next step then waits for these callers, too, at
most for about the duration of the last step.
"""

from __future__ import annotations

import time

from genlm.core.scheduler.request_table import RequestTable

GRACE_SHARE = 0.1
"""Maximum grace period, as a share of the last step. It costs at most this share of the
throughput; without it, one late request can split a population into two batches permanently."""

DEFERRAL_SHARE = 1.0
"""Maximum delay of a step that an engine defers, as a share of the last step. To compute again
what the deferred step frees takes longer."""

MIN_GRACE_S = 1e-4
"""Minimum grace period; for shorter ones, thread switches cost more than a split batch."""


class BatchingPolicy:
    """Decides when the inbox is dispatched; guarded by the worker's lock."""

    def __init__(self, max_batch_size: int | None) -> None:
        self._max_batch_size = max_batch_size
        # Times of `time.perf_counter()`, 0 for at once.
        self._dispatch_s: float | None = None  # of the inbox; None at the next flush
        self._step_s = 0.0  # of the next step of an engine with queries

    @property
    def is_flushed(self) -> bool:
        """Whether the requests in the inbox are to be dispatched."""
        return self._dispatch_s == 0.0

    def flush(self, table: RequestTable) -> None:
        """Dispatch the inbox, and end a delay of the next step; later requests need a flush."""
        self._dispatch_s = 0.0 if table.inbox else None
        self._step_s = 0.0

    def hold(self) -> None:
        """Hold later requests until the next flush."""
        self._dispatch_s = None

    def begin_grace_period(self, step_s: float) -> bool:
        """Hold late requests until the callers with results of the last step have run.

        Returns:
            Whether requests are held; the event loops of the callers must then flush.
        """
        if GRACE_SHARE * step_s <= MIN_GRACE_S:
            return False
        self._dispatch_s = time.perf_counter() + GRACE_SHARE * step_s
        return True

    def pause(self, step_s: float) -> None:
        """Delay the next step of an engine that defers its queries, until the next flush."""
        self._step_s = time.perf_counter() + DEFERRAL_SHARE * step_s

    def seconds_to_step(self) -> float:
        """Return the time for which the step of an engine with queries is delayed."""
        return _seconds_to(self._step_s)

    def seconds_to_work(self, table: RequestTable) -> float | None:
        """Return the time until the next step or dispatch; None to wait for the next flush."""
        return self.seconds_to_step() if table.in_engine else self.seconds_to_dispatch(table)

    def seconds_to_dispatch(self, table: RequestTable) -> float | None:
        """Return the time until the inbox is dispatched; None to wait for the next flush."""
        if not table.inbox:
            return None
        is_full = self._max_batch_size is not None and len(table.inbox) >= self._max_batch_size
        if is_full:
            return 0.0
        return None if self._dispatch_s is None else _seconds_to(self._dispatch_s)


def _seconds_to(time_s: float) -> float:
    """Return the seconds until a time of `time.perf_counter()`; 0 for an earlier one."""
    return max(0.0, time_s - time.perf_counter())
