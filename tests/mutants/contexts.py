"""Faults of the core and of engines in what they keep for contexts."""

from __future__ import annotations

import time

from genlm import Context
from genlm.core.model.requests import Requests
from genlm.core.queries.sequence import TokenSequence

from .mutant import core_fault, engine_mutant
from .resident_engine import ResidentEngine


@core_fault(
    Context,
    "__eq__",
    found_by="model/test_context.py::test_extending_by_several_ids_or_by_one_of_any_kind",
)
def equal_by_identity(_equal):
    """Compares contexts by identity."""
    return lambda self, other: self is other


@core_fault(
    Context,
    "extend",
    found_by="model/test_context.py::test_extending_by_several_ids_or_by_one_of_any_kind",
)
def the_first_of_several_only(extend):
    """Adds only the first of several tokens to a context."""

    def broken(self, token_ids):
        return extend(self, token_ids if isinstance(token_ids, int) else token_ids[:1])

    return broken


@core_fault(
    Requests, "sequence_query", found_by="model/test_context.py::test_the_public_example"
)
def contexts_have_keys_of_their_own(sequence_query):
    """Gives every request a key of its own, so that nothing is joined or cached."""

    def broken(self, sequence, adapter):
        query, key = sequence_query(self, sequence, adapter)
        return query, (*key, query.query_id)

    return broken


@engine_mutant(killed_by="prefixes-equal-fresh-evaluation")
class ForksReadTheirSibling(ResidentEngine):
    """Extends what is kept for a context in place, so that a second extension gets it too."""

    def resident_logits(self, query):
        logits = super().resident_logits(query)
        sequence = query.sequence
        if len(sequence) > 1:
            parent = (query.adapter, sequence.prefix_key(len(sequence) - 1))
            if parent in self.residents:
                self.residents[parent] = self.residents[query.adapter, sequence.key]
        return logits


@engine_mutant(killed_by="prefixes-equal-fresh-evaluation")
class ContextsByTheirLastToken(ResidentEngine):
    """Finds what is kept for a context by its length and last token."""

    def parent(self, adapter, sequence):
        if len(sequence) == 1:
            return None
        length, last = len(sequence) - 1, sequence.ids_from(len(sequence) - 2)[0]
        return self.residents.get((adapter, b"%d %d" % (length, last)))

    def key(self, sequence):
        return b"%d %d" % (len(sequence), sequence.ids_from(len(sequence) - 1)[0])


@engine_mutant(killed_by="contexts-may-be-dropped")
class ReleasedPlacesAreFoundAgain(ResidentEngine):
    """Gives the place of a released context to the next one, and finds the old one there."""

    def release_context(self, adapter, key):
        if (adapter, key) in self.residents:
            self.free = [*getattr(self, "free", []), (adapter, key)]

    def resident_logits(self, query):
        logits = super().resident_logits(query)
        while getattr(self, "free", []):
            self.residents[self.free.pop()] = self.residents[query.adapter, query.sequence.key]
        return logits


@engine_mutant(killed_by="contexts-outlast-what-ends-requests")
class ReleasesOnlyWhatItHas(ResidentEngine):
    """Raises when a context is released that it no longer has."""

    def release_context(self, adapter, key):
        del self.residents[adapter, key]


@engine_mutant(killed_by="tight-budgets-change-nothing")
class ReleasesOnlyWhatWasNotEvicted(ReleasesOnlyWhatItHas):
    """Raises when a context is released that has been evicted."""


@engine_mutant(killed_by="contexts-outlast-what-ends-requests")
class AbortedTokensStay(ResidentEngine):
    """Keeps the token of an aborted query in the context that it continued."""

    def choose(self, pending):
        return pending[:1]

    def abort(self, query_id):
        query = self._pending.drop(query_id)
        super().abort(query_id)
        if query is None:
            return
        sequence = query.sequence
        state = self.parent(query.adapter, sequence)
        if state is not None:
            (last,) = sequence.ids_from(len(sequence) - 1)
            grown, _ = self.model(query.adapter).extend(state, last, len(state))
            self.residents[query.adapter, sequence.prefix_key(len(sequence) - 1)] = grown


_last_extended: list[TokenSequence] = []


@core_fault(
    Context,
    "extend",
    found_by="model/test_context.py::test_extending_by_several_ids_or_by_one_of_any_kind",
)
def extended_through_a_global(extend):
    """Passes the extended sequence through a variable that all threads share."""

    def broken(self, token_ids):
        context = extend(self, token_ids)
        _last_extended[:] = [context.sequence]
        time.sleep(1e-4)  # another thread runs
        return Context(context._lm, _last_extended[0], context._adapter, context._lease)

    return broken


@core_fault(
    Requests,
    "adapter_of",
    found_by="model/test_lm_batches.py::test_checks_of_other_arguments_name_the_place_too",
)
def contexts_of_any_model(_adapter_of):
    """Takes contexts of other models."""
    return lambda _self, context, _lora_name: context._adapter


@core_fault(
    Requests,
    "adapter_of",
    found_by="model/test_lm_sampling.py::test_a_batch_of_several_adapters_is_drawn_with_each",
)
def the_default_adapter(adapter_of):
    """Answers contexts with the adapter that is the default when they are asked."""

    def broken(self, context, lora_name):
        adapter_of(self, context, lora_name)
        return self.adapter(None)

    return broken
