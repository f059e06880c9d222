"""Faults of the core in its statistics, in long programs, and in the check of rows."""

from __future__ import annotations

from genlm import OutputCache
from genlm.core import row_results, rows
from genlm.core.requests import Requests
from genlm.core.scheduler.request_table import RequestTable

from .mutant import core_mutant


@core_mutant(Requests, "cached", killed_by="statistics-add-up")
def hits_not_counted(_cached):
    """Counts no single request that the output cache answered."""

    def broken(self, query, key):
        row = self._cache.get(key)
        if row is None:
            self.counters.count(len(query.token_ids), hit=False)
        return row

    return broken


@core_mutant(Requests, "batch", killed_by="statistics-add-up")
def hits_of_a_batch_counted_twice(batch):
    """Counts requests of a batch that the output cache answered twice."""

    def broken(self, made, sequences=()):
        request = batch(self, made, sequences)
        for (query, *_), value in zip(made, request.values, strict=True):
            if value is not None:
                self.counters.count(len(query), hit=True)
        return request

    return broken


@core_mutant(RequestTable, "leave", killed_by="statistics-add-up")
def abandoned_counted_as_failed(leave):
    """Counts an abandoned evaluation as a failed one."""

    def broken(self, request, waiter):
        abandoned = self._abandoned
        aborts = leave(self, request, waiter)
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


@core_mutant(row_results, "invalid_rows", killed_by="invalid-rows-are-refused")
def rows_not_checked(_invalid):
    """Returns every row unchecked."""
    return lambda _rows, _size: {}


@core_mutant(rows, "_SUM_TOLERANCE", killed_by="invalid-rows-are-refused")
def only_sums_that_are_not_finite(_tolerance):
    """Takes any finite sum of probabilities for 1."""
    return float("inf")


@core_mutant(row_results, "invalid_rows", killed_by="invalid-rows-are-refused")
def one_invalid_row_fails_its_step(invalid):
    """Fails every request of a step in which one row is invalid."""

    def broken(rows, size):
        found = invalid(rows, size)
        return dict.fromkeys(range(len(rows)), next(iter(found.values()))) if found else {}

    return broken
