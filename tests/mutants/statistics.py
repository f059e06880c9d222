"""Faults of the core in its statistics, in long programs, and in the check of rows."""

from __future__ import annotations

from genlm import OutputCache
from genlm.core.base.statistics import RequestCounters
from genlm.core.rows import logits as rows
from genlm.core.scheduler import results
from genlm.core.scheduler.request_table import RequestTable

from .mutant import core_fault, core_mutant


@core_fault(
    RequestCounters,
    "count",
    found_by="model/test_lm_caching.py::test_an_uncached_request_is_evaluated_and_remembered",
)
def hits_not_counted(count):
    """Counts no single request that the output cache answered."""

    def broken(self, tokens, *, requests=None, hits=0):
        if requests is not None or not hits:
            count(self, tokens, requests=1 if requests is None else requests, hits=hits)

    return broken


@core_fault(
    RequestCounters,
    "count",
    found_by="model/test_lm_caching.py::test_rows_that_are_evicted_while_others_are_read_are_found_or_computed",
)
def hits_of_a_batch_counted_twice(count):
    """Counts requests of a batch that the output cache answered twice."""

    def broken(self, tokens, *, requests=None, hits=0):
        if requests is not None and hits:
            count(self, tokens, requests=requests, hits=hits)
        count(self, tokens, requests=1 if requests is None else requests, hits=hits)

    return broken


@core_fault(
    RequestTable,
    "leave",
    found_by="scheduler/test_cancellation.py::test_a_request_cancelled_before_its_batch_left_is_never_evaluated",
)
def abandoned_counted_as_failed(leave):
    """Counts an abandoned evaluation as a failed one."""

    def broken(self, request):
        abandoned = self._abandoned
        aborts = leave(self, request)
        self._failed += self._abandoned - abandoned
        self._abandoned = abandoned
        return aborts

    return broken


@core_fault(
    RequestTable,
    "count_batch",
    found_by="model/test_lm_caching.py::test_statistics_say_what_was_asked_and_how_it_was_answered",
)
def batches_counted_as_one(count):
    """Counts every batch as one of a single evaluation."""
    return lambda self, _size: count(self, 1)


@core_mutant(OutputCache, "put", killed_by="random-programs-agree-with-the-oracle")
def evicted_row_under_the_new_key(put):
    """Puts a new key into the place of an evicted one and leaves the old row there."""

    def broken(self, key, row):
        if len(self._entries) == self.max_entries and key not in self._entries:
            row = next(iter(self._entries.items()))[1][0]
        put(self, key, row)

    return broken


@core_fault(
    results,
    "invalid_rows",
    found_by="scheduler/test_faults.py::test_a_result_of_the_wrong_kind_fails_its_request_alone",
)
def rows_not_checked(_invalid):
    """Returns every row unchecked."""
    return lambda _rows, _size: {}


@core_fault(
    rows,
    "_SUM_TOLERANCE",
    found_by="rows/test_rows.py::test_only_the_rows_that_are_not_distributions_are_found",
)
def only_sums_that_are_not_finite(_tolerance):
    """Takes any finite sum of probabilities for 1."""
    return float("inf")


@core_fault(
    results,
    "invalid_rows",
    found_by="scheduler/test_faults.py::test_a_result_of_the_wrong_kind_fails_its_request_alone",
)
def one_invalid_row_fails_its_step(invalid):
    """Fails every request of a step in which one row is invalid."""

    def broken(rows, size):
        found = invalid(rows, size)
        return dict.fromkeys(range(len(rows)), next(iter(found.values()))) if found else {}

    return broken
