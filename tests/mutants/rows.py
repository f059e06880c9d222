"""Faults of single rows: form, values, memory."""

from __future__ import annotations

import torch

from genlm import Completion
from genlm.core.rows import outputs

from .attention import CONTEXT, MISSING, SIZE
from .cached_engine import CachedEngine, PlainEngine
from .mutant import core_fault, engine_mutant


@engine_mutant(killed_by="rows-are-distributions", shows_as="exception")
class NotNormalised(CachedEngine):
    """Returns logits for log-probabilities."""

    def rows(self, logits):
        return logits[:, :SIZE].float().index_fill(1, torch.tensor([MISSING]), -torch.inf)


@engine_mutant(killed_by="rows-are-distributions", shows_as="exception")
class PaddingNormalised(CachedEngine):
    """Normalises over the logits beyond the vocabulary before it cuts them."""

    def rows(self, logits):
        rows = logits.float().log_softmax(-1)[:, :SIZE].clone()
        rows[:, MISSING] = -torch.inf
        return rows


@engine_mutant(killed_by="rows-are-distributions", shows_as="exception")
class DoublePrecision(CachedEngine):
    """Returns float64 rows."""

    def step(self):
        finished = super().step()
        return [Completion(each.query_id, each.result.double()) for each in finished]


@engine_mutant(killed_by="rows-are-distributions")
class MissingIdsAreLikely(CachedEngine):
    """Gives ids that no token has a share of the probability."""

    def rows(self, logits):
        return logits[:, :SIZE].float().log_softmax(-1)


@engine_mutant(killed_by="rows-are-distributions", shows_as="exception")
class Impossible(CachedEngine):
    """Turns probabilities of 0 into NaN: infinity minus infinity."""

    def rows(self, logits):
        rows = super().rows(logits)
        return rows + 0 * rows


@engine_mutant(killed_by="rows-are-right")
class HalfPrecision(CachedEngine):
    """Computes in float16 what it declares as float32."""

    def rows(self, logits):
        return super().rows(logits.half())


@engine_mutant(killed_by="rows-are-right")
class Tempered(CachedEngine):
    """Divides the logits by a default temperature of the model's configuration."""

    def rows(self, logits):
        return super().rows(logits / 0.9)


@engine_mutant(killed_by="rows-are-right")
class FirstTokenDropped(PlainEngine):
    """Takes the first token for a beginning-of-sequence mark and drops it."""

    def logits(self, token_ids):
        return super().logits(token_ids[1:] or token_ids)


@engine_mutant(killed_by="rows-are-right")
class LastTokenDropped(PlainEngine):
    """Scores the last token given those before it, as a scorer of prompts does."""

    def logits(self, token_ids):
        return super().logits(token_ids[:-1] or token_ids)


@engine_mutant(killed_by="the-context-can-be-filled")
class WindowTooShort(CachedEngine):
    """Forgets the oldest token of a full context to make room for the next one."""

    def logits(self, token_ids, adapter):
        return super().logits(token_ids[1 - CONTEXT :], adapter)


@engine_mutant(killed_by="rows-hold-no-more-than-themselves")
class ViewsOfTheBatch(CachedEngine):
    """Returns rows that are views, each of which keeps the whole batch alive."""

    def _evaluate_batch(self, queries):
        results = super()._evaluate_batch(queries)
        are_rows = all(isinstance(result, torch.Tensor) for result in results)
        return list(torch.stack(results)) if are_rows else results


@engine_mutant(killed_by="rows-belong-to-the-caller")
class RowsKept(CachedEngine):
    """Keeps the row it returned and returns it again when asked again."""

    def __init__(self, **options):
        super().__init__(**options)
        self.kept = {}

    def _evaluate_batch(self, queries):
        return [
            self.kept.setdefault((query.token_ids, query.adapter), row)
            for query, row in zip(queries, super()._evaluate_batch(queries), strict=True)
        ]


@core_fault(
    outputs,
    "copied_rows",
    found_by="engine/test_engine.py::test_every_row_owns_exactly_its_memory_and_can_be_changed",
)
def views_of_the_rows_of_a_part(_copied_rows):
    """Returns views of memory in which the next rows are computed."""
    return list


@core_fault(
    outputs,
    "_compute",
    found_by="rows/test_reductions.py::test_draws_from_logits_depend_on_their_query_alone",
)
def draws_need_rows_if_one_of_them_does(results_of):
    """Computes all draws of a part from rows if one of them needs its row."""

    def broken(compute, values, requests):
        results = results_of(compute, values, requests)
        need_rows = any(result is None or isinstance(result, Exception) for result in results)
        from_logits = compute.__name__ == "compute_from_logits"
        return [None] * len(results) if from_logits and need_rows else results

    return broken
