"""Faults of engines that assign rows to the wrong queries of a batch."""

from __future__ import annotations

import torch

from genlm import BatchEngine, Completion, rows_from_logits

from .cached_engine import CachedEngine, PlainEngine
from .mutant import core_fault, engine_mutant


@engine_mutant(killed_by="batch-equals-map")
class PaddedWithoutAMask(PlainEngine):
    """Pads shorter sequences of a batch on the left and forgets the mask."""

    def evaluate(self, queries):
        longest = max(len(query.token_ids) for query in queries)
        padded = [(0,) * (longest - len(q.token_ids)) + q.token_ids for q in queries]
        rows = [self.row(token_ids) for token_ids in padded]
        return torch.stack(rows)

    def row(self, token_ids):
        logits = torch.from_numpy(self.logits(token_ids)[None])
        return rows_from_logits(logits, self.vocabulary)[0]


@engine_mutant(killed_by="batch-equals-map")
class SortedByLength(CachedEngine):
    """Sorts a batch by length to pad less and answers in the sorted order."""

    def evaluate(self, queries):
        return super().evaluate(sorted(queries, key=lambda query: len(query.token_ids)))


@engine_mutant(killed_by="batch-equals-map")
class RowOfTheNeighbour(CachedEngine):
    """Reads the row of the next sequence in a packed batch."""

    def evaluate(self, queries):
        return super().evaluate(queries).roll(1, dims=0)


@engine_mutant(killed_by="batch-equals-map")
class LongestDecides(CachedEngine):
    """Reads every row at the last position of the longest sequence of the batch."""

    def evaluate(self, queries):
        longest = max(len(query.token_ids) for query in queries)
        rows = super().evaluate(queries)
        short = [i for i, query in enumerate(queries) if len(query.token_ids) < longest]
        rows[short] = rows[short].roll(1, dims=1)
        return rows


@engine_mutant(killed_by="concurrent-requests-share-steps")
class OneAStep(PlainEngine):
    """Never batches: evaluates one query a step."""

    def choose(self, pending):
        return pending[:1]


@engine_mutant(killed_by="concurrent-requests-share-steps")
class SmallBatchesOnly(CachedEngine):
    """Raises for more than 12 queries, so that their batch is computed in halves."""

    def evaluate(self, queries):
        return super().evaluate(queries)[: min(len(queries), 12)]


@core_fault(
    BatchEngine,
    "_evaluate_batch",
    found_by="engine/test_engine.py::test_halving_fails_exactly_the_queries_that_raise",
)
def all_fail_together(evaluate_batch):
    """Fails a whole batch for the one query that raises."""

    def broken(self, queries):
        try:
            return evaluate_batch(self, queries)
        except Exception as error:  # noqa: BLE001 - the fault
            return [error] * len(queries)

    return broken


@core_fault(
    BatchEngine,
    "step",
    found_by="engine/test_engine.py::test_halving_fails_exactly_the_queries_that_raise",
)
def failed_row_skipped(step):
    """Leaves the failing query out and shifts the rows after it by one."""

    def broken(self):
        finished = step(self)
        rows = [completion.result for completion in finished if completion.error is None]
        errors = [completion for completion in finished if completion.error is not None]
        if not errors or not rows:
            return finished
        ids = [each.query_id for each in finished if each.error is None]
        return [*errors, *map(Completion, ids, [rows[-1], *rows[:-1]])]

    return broken


@engine_mutant(killed_by="cancelled-requests-change-no-other")
class AbortShiftsTheQueue(CachedEngine):
    """Drops an aborted query's id but not its row, so that later ones move up."""

    def __init__(self, **options):
        super().__init__(**options)
        self.aborted = set()

    def abort(self, query_id):
        super().abort(query_id)
        self.aborted.add(query_id)

    def step(self):
        finished = super().step()
        if not self.aborted or len(finished) < 2:
            return finished
        self.aborted.clear()
        ids = [completion.query_id for completion in finished]
        return [
            Completion(i, c.result) for i, c in zip(ids[1:] + ids[:1], finished, strict=True)
        ]
