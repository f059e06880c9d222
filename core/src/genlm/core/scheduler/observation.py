"""Step logging and tracing: log records and OpenTelemetry spans.

The logger `genlm.batches` receives a DEBUG record per step, a WARNING for slow steps, and one
for many steps in a row that complete no query. If the program has set an OpenTelemetry tracer
provider, it receives a span per step. This module imports OpenTelemetry only if the program has
imported it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from genlm.core.scheduler.request_table import Evaluation

logger = logging.getLogger("genlm.batches")

SLOW_STEP_S = 10.0
"""Steps that take longer are logged as warnings: users of interactive programs notice them, and
a full batch of a model that suits its machine takes a fraction of this time."""

WARNING_INTERVAL_S = 60.0
"""Minimum time between two warnings of an engine."""


EMPTY_STEPS = 1_000_000
"""Steps in a row without a completed query after which a warning is logged: more than engines
need for long queries, and reached in seconds by an engine that never completes a query."""


class StepObserver:
    """Reports the steps of one engine; used on its thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tracer: Any = None
        self._warned_s: float | None = None
        self._unreported = 0
        self._empty_steps = 0  # in a row

    def observe(
        self, step: Callable[[Any], list[Evaluation]], engine: Any, queries: int
    ) -> float:
        """Call a function that steps an engine with `queries` queries, and report the step.

        Returns:
            The seconds of the step.
        """
        if self._tracer is None and "opentelemetry.trace" in sys.modules:
            self._tracer = _configured_tracer()
        span_context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._tracer is not None:
            span_context = self._tracer.start_as_current_span("genlm.batch")
        with span_context as span:  # current, so that spans of the engine are its children
            is_traced = span is not None and span.is_recording()
            is_reported = is_traced or logger.isEnabledFor(logging.DEBUG)
            tokens_before = _tokens_computed(engine) if is_reported else None
            start_s = time.perf_counter()
            finished = step(engine)
            step_s = time.perf_counter() - start_s
            if is_reported:
                failed = sum(evaluation.has_failed for evaluation in finished)
                counts = {"queries": queries, "finished": len(finished), "failed": failed}
                tokens_after = _tokens_computed(engine)
                if tokens_before is not None and tokens_after is not None:
                    counts["tokens_computed"] = tokens_after - tokens_before
                self._log(counts, step_s)
            if is_traced:
                span.set_attribute("genlm.engine", self._name)
                span.set_attributes({f"genlm.batch.{key}": counts[key] for key in counts})
        self._empty_steps = 0 if finished else self._empty_steps + 1
        if self._empty_steps == EMPTY_STEPS:
            logger.warning(
                "%s: %d steps in a row completed none of %d queries. Steps must return a "
                "Completion for each submitted query, with its query_id, and must wait for "
                "results that others compute",
                *(self._name, EMPTY_STEPS, queries),
            )
        if step_s >= SLOW_STEP_S:
            self._warn(queries, step_s)
        return step_s

    def _log(self, counts: Mapping[str, int], step_s: float) -> None:
        parts = [f"step of {counts['queries']} queries", f"{counts['finished']} finished"]
        if counts["failed"]:
            parts.append(f"{counts['failed']} failed")
        if "tokens_computed" in counts:
            parts.append(f"{counts['tokens_computed']} tokens computed")
        logger.debug("%s: %s, %.1f ms", self._name, ", ".join(parts), 1000 * step_s)

    def _warn(self, queries: int, step_s: float) -> None:
        now_s = time.monotonic()
        if self._warned_s is not None and now_s - self._warned_s < WARNING_INTERVAL_S:
            self._unreported += 1
            return
        suffix = f"; {self._unreported} more since the last warning" if self._unreported else ""
        self._warned_s, self._unreported = now_s, 0
        if queries > 1:
            suffix += ". A smaller max_batch_size makes steps shorter"
        kind = "query" if queries == 1 else "queries"
        logger.warning(
            "%s: a step of %d %s took %.1f s%s", self._name, queries, kind, step_s, suffix
        )


def _configured_tracer() -> Any:
    """Return a tracer, None if the program has set no tracer provider."""
    from opentelemetry import trace

    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):
        return None
    return provider.get_tracer("genlm")


def _tokens_computed(engine: Any) -> int | None:
    """Return the engine's counter of computed tokens, None if it does not count them."""
    try:
        count = engine.statistics().get("tokens_computed")
    except Exception:  # noqa: BLE001 - the engine may lack the method; the step is still reported
        return None
    return count if isinstance(count, int) else None
