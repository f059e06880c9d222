"""Faults of the core when it validates requests."""

from __future__ import annotations

import numpy as np
import torch

import genlm.core.model.requests
from genlm import AsyncLM, ContextLengthError, EvaluationError, GenlmError
from genlm.core.model.requests import Requests

from .mutant import core_fault, core_mutant


@core_fault(
    genlm.core.model.requests,
    "checked_token_ids",
    found_by="model/test_lm.py::test_a_wrong_request_is_refused",
)
def negative_ids_count_from_the_end(checked):
    """Takes negative ids as places counted from the end, as lists do."""

    def broken(token_ids, vocab_size):
        if isinstance(token_ids, list) and all(type(i) is int for i in token_ids):
            token_ids = [i % vocab_size if -vocab_size <= i < 0 else i for i in token_ids]
        return checked(token_ids, vocab_size)

    return broken


@core_fault(Requests, "_sequence", found_by="model/test_lm.py::test_a_wrong_request_is_refused")
def too_long_is_cut(sequence):
    """Cuts sequences that are longer than the context."""

    def broken(self, token_ids):
        if isinstance(token_ids, list) and self.max_context is not None:
            token_ids = token_ids[-self.max_context :]
        return sequence(self, token_ids)

    return broken


@core_fault(
    genlm.core.model.requests,
    "checked_token_ids",
    found_by="model/test_lm.py::test_a_wrong_request_is_refused",
)
def floats_are_rounded(checked):
    """Rounds ids that are not integers."""

    def broken(token_ids, vocab_size):
        if isinstance(token_ids, list) and any(isinstance(i, float) for i in token_ids):
            token_ids = [int(i) for i in token_ids]
        return checked(token_ids, vocab_size)

    return broken


@core_fault(
    AsyncLM,
    "batch_next_token_logprobs",
    found_by="model/test_lm.py::test_a_wrong_request_is_refused",
)
def errors_of_one_class(batch):
    """Raises EvaluationError for every kind of error in a batch."""

    async def broken(self, token_ids_list, **options):
        try:
            return await batch(self, token_ids_list, **options)
        except GenlmError as error:
            raise EvaluationError(str(error)) from error

    return broken


@core_fault(
    genlm.core.model.requests,
    "checked_token_ids",
    found_by="model/test_lm.py::test_sequences_of_any_kind_are_one_and_the_same",
)
def bytes_of_arrays(checked):
    """Reads arrays of any width as if their integers had 64 bits."""

    def broken(token_ids, vocab_size):
        if isinstance(token_ids, np.ndarray) and token_ids.itemsize == 4:
            wide = np.frombuffer(token_ids.tobytes()[: len(token_ids) // 2 * 8], np.int64)
            token_ids = (wide & 7).tolist() or token_ids
        return checked(token_ids, vocab_size)

    return broken


@core_fault(
    genlm.core.model.requests,
    "checked_token_ids",
    found_by="model/test_lm.py::test_a_matrix_is_a_batch_of_its_rows",
)
def strides_ignored(checked):
    """Reads a strided view of an array as if it were contiguous."""

    def broken(token_ids, vocab_size):
        if isinstance(token_ids, np.ndarray) and token_ids.base is not None:
            token_ids = token_ids.base.ravel()[: len(token_ids)]
        return checked(token_ids, vocab_size)

    return broken


@core_fault(
    genlm.core.model.requests,
    "checked_token_ids",
    found_by="model/test_lm.py::test_sequences_of_any_kind_are_one_and_the_same",
)
def lists_only(checked):
    """Refuses torch tensors as token ids."""

    def broken(token_ids, vocab_size):
        return checked(None if isinstance(token_ids, torch.Tensor) else token_ids, vocab_size)

    return broken


@core_mutant(Requests, "_sequence", killed_by="the-context-can-be-filled", shows_as="exception")
def context_one_short(sequence):
    """Refuses a sequence that fills the context."""

    def broken(self, token_ids):
        result = sequence(self, token_ids)
        if len(result) == self.max_context:
            raise ContextLengthError(len(result), self.max_context - 1)
        return result

    return broken


@core_fault(
    AsyncLM,
    "pin_prefix",
    found_by="model/test_lm_adapters.py::test_an_engine_that_keeps_no_prefixes_says_so",
)
def prefixes_kept_nowhere(_cache_kv):
    """Accepts a prefix to keep although the engine keeps none."""
    return lambda _self, _prompt: None


@core_fault(
    AsyncLM,
    "batch_next_token_logprobs_sync",
    found_by="model/test_lm_blocking.py::test_every_coroutine_method_has_a_blocking_twin_of_its_signature",
)
def cached_rows_first(batch):
    """The sync batch puts the rows from the cache before all others."""

    def broken(self, token_ids_list, *, lora_name=None):
        keys = [self._requests.build_query(ids, lora_name)[1] for ids in token_ids_list]
        is_new = [key not in self.output_cache for key in keys]
        rows = batch(self, token_ids_list, lora_name=lora_name)
        return rows[sorted(range(len(rows)), key=is_new.__getitem__)]

    return broken
