"""Faults of the core in its statistics, in long programs, and in the check of rows."""

from __future__ import annotations

from genlm import OutputCache
from genlm.core.base.statistics import RequestCounters
from genlm.core.rows import logits as rows
from genlm.core.scheduler import results
from genlm.core.scheduler.request_table import RequestTable

from .mutant import core_mutant


@core_mutant(RequestCounters, "count", killed_by="statistics-add-up")
def hits_not_counted(count):
    """Counts no single request that the output cache answered."""

    def broken(self, tokens, *, requests=None, hits=0):
        if requests is not None or not hits:
            count(self, tokens, requests=1 if requests is None else requests, hits=hits)

    return broken


@core_mutant(RequestCounters, "count", killed_by="statistics-add-up")
def hits_of_a_batch_counted_twice(count):
    """Counts requests of a batch that the output cache answered twice."""

    def broken(self, tokens, *, requests=None, hits=0):
        if requests is not None and hits:
            count(self, tokens, requests=requests, hits=hits)
        count(self, tokens, requests=1 if requests is None else requests, hits=hits)

    return broken


@core_mutant(RequestTable, "leave", killed_by="statistics-add-up")
def abandoned_counted_as_failed(leave):
    """Counts an abandoned evaluation as a failed one."""

    def broken(self, request):
        abandoned = self._abandoned
        aborts = leave(self, request)
        self._failed += self._abandoned - abandoned
        self._abandoned = abandoned
        return aborts

    return broken


@core_mutant(RequestTable, "count_batch", killed_by="statistics-add-up")
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


@core_mutant(results, "invalid_rows", killed_by="invalid-rows-are-refused")
def rows_not_checked(_invalid):
    """Returns every row unchecked."""
    return lambda _rows, _size: {}


@core_mutant(rows, "_SUM_TOLERANCE", killed_by="invalid-rows-are-refused")
def only_sums_that_are_not_finite(_tolerance):
    """Takes any finite sum of probabilities for 1."""
    return float("inf")


@core_mutant(results, "invalid_rows", killed_by="invalid-rows-are-refused")
def one_invalid_row_fails_its_step(invalid):
    """Fails every request of a step in which one row is invalid."""

    def broken(rows, size):
        found = invalid(rows, size)
        return dict.fromkeys(range(len(rows)), next(iter(found.values()))) if found else {}

    return broken
