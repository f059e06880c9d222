"""Counters of the scheduler and of `AsyncLM`, and their frozen snapshots."""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from genlm.core.base.forking import renew_in_forks

_GAUGES = {"pending", "waiting", "cache_entries", "cache_bytes", "engine", "batch_sizes"}
"""Fields that are not cumulative; the difference of two snapshots contains the later value."""


class Count(int):
    """A cumulative number among the statistics of an engine, whose other numbers are sizes."""


class RequestCounters:
    """Counters of the requests of a language model; any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests = self._cache_hits = self._tokens_requested = 0
        self._start_s = time.monotonic()
        renew_in_forks(self)

    def count(self, tokens: int, *, requests: int = 1, hits: int = 0) -> None:
        """Count requests, the sum of their lengths, and hits of the output cache."""
        with self._lock:
            self._requests += requests
            self._cache_hits += hits
            self._tokens_requested += tokens

    def snapshot(self) -> dict[str, Any]:
        """Return the counters, and the seconds since the start."""
        with self._lock:
            return {
                "requests": self._requests,
                "cache_hits": self._cache_hits,
                "tokens_requested": self._tokens_requested,
                "seconds": time.monotonic() - self._start_s,
            }


@dataclass(frozen=True, kw_only=True)
class SchedulerStatistics:
    """Counters of the scheduler since it started.

    Attributes:
        joined: Requests that shared the evaluation of an identical in-flight request.
        dispatched: Evaluations submitted to the engine.
        answered: Evaluations with a result.
        failed: Evaluations with an error.
        abandoned: Evaluations dropped because all callers were cancelled.
        batches: Engine steps with at least one finished evaluation.
        batch_sizes: Number of batches by number of evaluations; a population has one
            evaluation per distinct sequence.
        queue_seconds: Time from arrival to the engine, summed over `dispatched`; the mean is
            `mean_queue_s`.
        pending: Current number of accepted, unfinished evaluations.
        waiting: Current number of requests that wait because of `max_pending`.
    """

    joined: int
    dispatched: int
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
        """Maximum number of evaluations in a batch."""
        return max(self.batch_sizes, default=0)

    @property
    def mean_batch_size(self) -> float:
        """Evaluations per batch."""
        finished = sum(size * count for size, count in self.batch_sizes.items())
        return _ratio(finished, self.batches)

    @property
    def mean_queue_s(self) -> float:
        """Mean number of seconds from the arrival of an evaluation to its dispatch."""
        return _ratio(self.queue_seconds, self.dispatched)


@dataclass(frozen=True, kw_only=True)
class Statistics(SchedulerStatistics):
    """Counters of a language model since it was loaded.

    `print` and notebooks show the counters as a table. The difference `after - before` of two
    snapshots of one model contains the counts and rates of the period between them.

    Attributes:
        requests: Requests for rows and continuations; a population makes one request per
            distinct sequence.
        cache_hits: Requests with a result from the output cache.
        tokens_requested: Sum of the lengths of the requested sequences, cached or not.
        cache_entries: Current number of rows in the output cache.
        cache_bytes: Memory of these rows and of the token ids in their keys.
        seconds: Time since the model was loaded; not compared by `==`.
        engine: Counters and sizes of the engine. `tokens_evaluated` is the number of tokens of
            the evaluated contexts, `tokens_computed` the number of those not in its caches.
    """

    requests: int
    cache_hits: int
    tokens_requested: int
    cache_entries: int
    cache_bytes: int
    seconds: float = field(compare=False)
    engine: Mapping[str, int | float | str]

    @property
    def cache_hit_ratio(self) -> float:
        """Share of the requests with a result from the output cache."""
        return _ratio(self.cache_hits, self.requests)

    @property
    def joined_ratio(self) -> float:
        """Share of the requests that shared the evaluation of another request."""
        return _ratio(self.joined, self.requests)

    @property
    def requests_per_s(self) -> float:
        """Requests per second."""
        return _ratio(self.requests, self.seconds)

    @property
    def tokens_reused_ratio(self) -> float | None:
        """Share of the evaluated tokens in the engine's caches; None if it does not count."""
        evaluated = self.engine.get("tokens_evaluated", 0)
        computed = self.engine.get("tokens_computed")
        if isinstance(evaluated, str) or isinstance(computed, str) or computed is None:
            return None
        return max(0.0, 1 - computed / evaluated) if evaluated else None

    def __sub__(self, before: Statistics) -> Statistics:
        """Return the counts since an earlier snapshot of the same model.

        Current values (pending requests, cache entries, statistics of the engine that are no
        counts) are those of the later snapshot.
        """
        if not isinstance(before, Statistics):
            return NotImplemented
        counters = {counter.name for counter in fields(self)} - _GAUGES
        differences = {name: getattr(self, name) - getattr(before, name) for name in counters}
        sizes = {
            size: count - before.batch_sizes.get(size, 0)
            for size, count in self.batch_sizes.items()
            if count != before.batch_sizes.get(size, 0)
        }
        engine = dict(self.engine)
        for name, count in self.engine.items():
            earlier = before.engine.get(name)
            if isinstance(count, Count) and isinstance(earlier, Count):
                engine[name] = Count(count - earlier)
        return replace(self, **differences, batch_sizes=sizes, engine=engine)

    def __str__(self) -> str:
        """Format the table as text."""
        rows = list(self._rows())
        width = max(len(label) for label, _, _ in rows)
        value_width = max(
            (len(value) for _, value, note in rows if note is not None), default=0
        )
        lines = []
        for label, value, note in rows:
            cell = value if note is None else f"{value:>{value_width}}  {note}"
            lines.append(f"{label:<{width}}  {cell}".rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Format the table for notebooks."""
        cells = "".join(
            f"<tr><th style='text-align:left'>{html.escape(label)}</th>"
            f"<td style='text-align:right'>{html.escape(value)}</td>"
            f"<td style='text-align:left'>{html.escape(note or '')}</td></tr>"
            for label, value, note in self._rows()
        )
        return f"<table>{cells}</table>"

    def _rows(self) -> Iterator[tuple[str, str, str | None]]:
        """Yield the label, value and note of each row; the engine's rows have the note None."""
        rate = f"{self.requests_per_s:,.1f} a second over {self.seconds:,.1f} s"
        yield "requests", f"{self.requests:,}", rate
        yield "  from the output cache", f"{self.cache_hits:,}", f"{self.cache_hit_ratio:.1%}"
        yield "  joined a pending one", f"{self.joined:,}", f"{self.joined_ratio:.1%}"
        yield "tokens requested", f"{self.tokens_requested:,}", ""
        yield "evaluations answered", f"{self.answered:,}", ""
        yield "  failed", f"{self.failed:,}", ""
        yield "  abandoned", f"{self.abandoned:,}", ""
        yield "  pending now", f"{self.pending:,}", f"{self.waiting:,} more waiting"
        yield "  mean time in the queue", f"{1000 * self.mean_queue_s:,.2f}", "ms"
        sizes = f"of {self.mean_batch_size:,.1f} on average, {self.largest_batch:,} at most"
        yield "batches", f"{self.batches:,}", sizes
        yield (
            "rows in the output cache",
            f"{self.cache_entries:,}",
            _format_size(self.cache_bytes),
        )
        if self.tokens_reused_ratio is not None:
            yield "tokens reused by engine", f"{self.tokens_reused_ratio:.1%}", ""
        for name, value in self.engine.items():
            yield f"engine: {name}", _format_value(value), None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _format_size(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def _format_value(value: float | str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
