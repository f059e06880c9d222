"""Counters that the scheduler and `AsyncLM` report, as frozen snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["SchedulerStatistics", "Statistics"]


@dataclass(frozen=True, kw_only=True)
class SchedulerStatistics:
    """Counters of the scheduler since it started.

    Attributes:
        joined: Requests that shared the evaluation of an identical one in flight.
        answered: Evaluations that gave a result.
        failed: Evaluations that gave an error.
        abandoned: Evaluations dropped because every caller was cancelled.
        batches: Engine steps that finished something.
        batch_sizes: How many batches had how many evaluations.
        queue_seconds: Time from arrival to the engine, summed over evaluations.
        pending: Evaluations accepted and unfinished now.
        waiting: Requests held back by `max_pending` now.
    """

    joined: int
    answered: int
    failed: int
    abandoned: int
    batches: int
    batch_sizes: Mapping[int, int]
    queue_seconds: float
    pending: int
    waiting: int

    @property
    def largest_batch(self) -> int:
        """Most evaluations that one batch finished."""
        return max(self.batch_sizes, default=0)

    @property
    def mean_batch_size(self) -> float:
        """Evaluations per batch."""
        finished = sum(size * count for size, count in self.batch_sizes.items())
        return finished / self.batches if self.batches else 0.0


@dataclass(frozen=True, kw_only=True)
class Statistics(SchedulerStatistics):
    """Counters of a language model since it was loaded.

    Attributes:
        requests: Requests for rows and continuations.
        cache_hits: Requests answered from the output cache.
        tokens_asked: Sum of the lengths of the requested sequences.
        cache_entries: Rows in the output cache now.
        cache_bytes: Their memory and that of the token ids in their keys.
        engine: The engine's own figures; the ratio of `tokens_computed` to `tokens_asked`
            shows how much work was saved.
    """

    requests: int
    cache_hits: int
    tokens_asked: int
    cache_entries: int
    cache_bytes: int
    engine: Mapping[str, int | float | str]
