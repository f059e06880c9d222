"""Faults of `AsyncTokenCharacterTrie` that mix up callers or let one affect others."""

from __future__ import annotations

import asyncio

from genlm import AsyncTokenCharacterTrie
from genlm.core.queries.query import Completion
from genlm.core.trie.async_trie import ReductionEngine

from .mutant import core_fault


@core_fault(
    ReductionEngine,
    "_reduce",
    found_by="trie/test_async_trie.py::test_concurrent_calls_share_batches_and_get_their_own_rows",
)
def rows_given_out_backwards(reduce):
    """Gives the rows of a batch to its callers in the opposite order."""
    return lambda self, batch: reduce(self, batch)[::-1]


@core_fault(
    ReductionEngine,
    "step",
    found_by="trie/test_async_trie.py::test_operations_and_dtypes_in_one_step_do_not_mix",
)
def dtypes_in_one_batch(step):
    """Stacks rows of different dtypes, so that float32 comes back as float64."""

    def broken(self):
        alike = {}
        for query in self._pending.values():
            alike.setdefault((query.operation, query.returns), []).append(query)
        self._pending = {}
        return [answer for batch in alike.values() for answer in self._completions(batch)]

    return broken


@core_fault(
    ReductionEngine,
    "step",
    found_by="trie/test_async_trie.py::test_operations_and_dtypes_in_one_step_do_not_mix",
)
def operations_in_one_batch(step):
    """Reduces a batch by the operation of its first request."""

    def broken(self):
        alike = {}
        for query in self._pending.values():
            alike.setdefault((query.returns, str(query.ws.dtype)), []).append(query)
        self._pending = {}
        return [answer for batch in alike.values() for answer in self._completions(batch)]

    return broken


@core_fault(
    AsyncTokenCharacterTrie,
    "weight_sum",
    found_by="trie/test_async_trie.py::test_concurrent_calls_share_batches_and_get_their_own_rows",
)
def mass_as_maximum(_weight_sum):
    """Finds the largest probability instead of the mass."""
    return AsyncTokenCharacterTrie.weight_max


@core_fault(
    ReductionEngine,
    "_reduce",
    found_by="trie/test_async_trie.py::test_concurrent_calls_share_batches_and_get_their_own_rows",
)
def row_by_row(reduce):
    """Reduces the rows of a batch one after another."""
    return lambda self, batch: [row for query in batch for row in reduce(self, [query])]


@core_fault(
    ReductionEngine,
    "_completions",
    found_by="trie/test_async_trie.py::test_one_bad_request_fails_alone",
)
def one_error_for_the_batch(answers):
    """Fails every request of a batch of which one fails."""

    def broken(self, batch):
        found = answers(self, batch)
        errors = [answer.error for answer in found if answer.error is not None]
        return (
            [Completion(query.query_id, error=errors[0]) for query in batch]
            if errors
            else found
        )

    return broken


@core_fault(
    AsyncTokenCharacterTrie,
    "_request",
    found_by="trie/test_async_trie.py::test_a_cancelled_call_disturbs_no_other",
)
def one_leaves_and_all_must(answer):
    """Shuts the trie down when a caller is cancelled."""

    async def broken(self, ws, operation, returns):
        try:
            return await answer(self, ws, operation, returns)
        except asyncio.CancelledError:
            scheduler, self._scheduler = self._scheduler, None
            if scheduler is not None:
                await asyncio.to_thread(scheduler.reset)
            raise

    return broken


@core_fault(
    AsyncTokenCharacterTrie,
    "_request",
    found_by="trie/test_async_trie.py::test_a_cancelled_call_disturbs_no_other",
    hangs=True,
)
def cancellation_delayed(answer):
    """Delays cancellation until the answer arrives."""

    async def broken(self, ws, operation, returns):
        task = asyncio.ensure_future(answer(self, ws, operation, returns))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await task
            raise

    return broken


@core_fault(
    AsyncTokenCharacterTrie,
    "shutdown",
    found_by="trie/test_async_trie.py::test_ending_fails_who_waits_and_a_later_call_starts_afresh",
    hangs=True,
)
def forgotten_at_the_end(_shutdown):
    """Drops the scheduler without ending it or its pending calls."""

    def broken(self):
        self._scheduler = None

    return broken


@core_fault(
    AsyncTokenCharacterTrie,
    "shutdown",
    found_by="trie/test_async_trie.py::test_ending_fails_who_waits_and_a_later_call_starts_afresh",
)
def ended_for_good(_shutdown):
    """Keeps the closed scheduler, so that later calls are refused."""

    def broken(self):
        if self._scheduler is not None:
            self._scheduler.close()

    return broken
