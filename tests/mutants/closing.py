"""Faults of the core when `close` or `cancel_all` end requests, and of `wake`."""

from __future__ import annotations

import threading

from genlm import AsyncLM, EngineClosedError
from genlm.core.scheduler import Scheduler
from genlm.core.scheduler.request_table import RequestTable
from genlm.core.scheduler.worker import Worker

from .cached_engine import CachedEngine
from .mutant import core_fault, core_mutant, engine_mutant


@engine_mutant(killed_by="waking-does-not-wait-for-the-engine", shows_as="lost request")
class WakeWaitsForTheStep(CachedEngine):
    """Takes the lock of `step` in `wake`."""

    def __init__(self, **options):
        super().__init__(**options)
        self._lock = threading.Lock()

    def step(self):
        with self._lock:
            return super().step()

    def wake(self):
        with self._lock:
            super().wake()


@engine_mutant(killed_by="rows-are-right", shows_as="lost request")
class NeverClosed(CachedEngine):
    """Waits for ever in `close`."""

    def close(self):
        threading.Event().wait()


@engine_mutant(killed_by="cancelled-requests-change-no-other", shows_as="lost request")
class AbortsTheBatch(CachedEngine):
    """Drops all pending queries when one of them is aborted."""

    def abort(self, query_id):
        for pending_id in [query_id, *self._pending._queries]:
            super().abort(pending_id)


@core_mutant(Worker, "stop", killed_by="closing-ends-every-request", shows_as="lost request")
def close_leaves_waiters(stop):
    """`close` ends the engine's thread without completing pending requests."""

    def broken(self, error):
        with self._lock:
            for waiter in self._table.clear():
                self.left = (*getattr(self, "left", ()), waiter)
        stop(self, error)

    return broken


@core_mutant(Scheduler, "close", killed_by="closing-ends-every-request")
def close_says_reset(_close):
    """`close` tells waiters that their request was reset."""

    def broken(self):
        self.reset()
        self._worker.stop(EngineClosedError("closed"))
        self._worker.join()

    return broken


@core_fault(
    RequestTable,
    "clear",
    found_by="model/test_lm_lifecycle.py::test_a_reset_ends_all_requests_and_the_model_works_on",
    hangs=True,
)
def reset_forgets_the_inbox(clear):
    """Ends the requests in the engine and drops those in the inbox."""

    def broken(self):
        self.inbox.clear()
        return clear(self)

    return broken


@core_fault(
    AsyncLM,
    "cancel_all",
    found_by="model/test_lm_lifecycle.py::test_a_reset_ends_all_requests_and_the_model_works_on",
)
def reset_closes(_reset):
    """`cancel_all` closes the model."""
    return lambda self: self._scheduler._worker.stop(EngineClosedError("closed"))


@core_fault(
    AsyncLM,
    "close",
    found_by="model/test_lm_lifecycle.py::test_after_close_every_request_is_refused_though_it_was_answered_before",
)
def closed_cache_answers(_close):
    """A closed model still answers from its output cache."""
    return lambda self: self._scheduler.close()


@core_fault(
    Scheduler,
    "close",
    found_by="model/test_lm_lifecycle.py::test_closing_twice_closes_the_engine_once",
)
def closed_twice(close):
    """Closing a closed model closes its engine again."""

    def broken(self):
        self.kept = engine = self._worker._engine or self.kept
        close(self)
        engine.close()

    return broken
