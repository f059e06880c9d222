"""`ClientEngine`: computes user-defined reductions of a driver on a thread of the driver.

User code may take any time, so it never runs on the engine's thread or the event loop. A thread
cannot be ended: if user code does not return, its thread continues, and its driver has no
second thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from genlm.plugin import (
    BatchEngine,
    Capability,
    Completion,
    Engine,
    GroupQuery,
    GroupReduction,
    GroupValues,
    Query,
    Reduced,
    ReducedText,
    Rows,
    TokenSequence,
    run_blocking,
    user_code,
)
from genlm_ray.wire import AnyQuery

SHARED_ROWS = 64
"""Maximum number of queries in the engine while several drivers have queries, and of rows in
memory for the user-defined reductions of a driver."""

_TEXT_VALUES = 2**25
"""Maximum number of entries in the rows of a part of a text: 128 MiB. With fewer rows, an
engine without a prefix cache would need more passes."""


def has_client_code(query: AnyQuery) -> bool:
    """Whether a query requests a user-defined reduction."""
    outputs = (query.reduction,) if isinstance(query, GroupQuery) else query.outputs
    return any(user_code(output) is not None for output in outputs)


class ClientEngine(BatchEngine):
    """Reduces rows that the replica's engine computes.

    It has `Capability.SCORE` because it divides texts itself.

    Args:
        engine: The replica's engine.
        compute: Coroutine function that returns the engine's results or exceptions of queries.
        active: Ids of the queries that were not aborted.
    """

    capabilities = frozenset({Capability.SCORE})

    def __init__(
        self,
        engine: Engine,
        compute: Callable[[Sequence[AnyQuery]], Coroutine[Any, Any, list[Any]]],
        active: Container[int],
    ) -> None:
        self.vocabulary = engine.vocabulary
        self._compute = compute
        self._active = active
        self._text_rows = max(SHARED_ROWS, _TEXT_VALUES // self.vocabulary.size)
        self._started_s: float | None = None  # of the current reduction

    @property
    def reduction_s(self) -> float:
        """Elapsed time of the current reduction."""
        started_s = self._started_s
        return 0.0 if started_s is None else time.monotonic() - started_s

    def step(self) -> list[Completion]:
        """Compute and reduce rows."""
        try:
            return super().step()
        finally:
            self._started_s = None

    def choose(self, pending: Sequence[Query]) -> Sequence[Query]:
        """Choose as many queries as `SHARED_ROWS` allows."""
        return pending[:SHARED_ROWS]

    def evaluate(self, queries: Sequence[Query]) -> torch.Tensor:
        """Return the rows of queries."""
        return torch.stack(self._results([query.replace(outputs=(None,)) for query in queries]))

    def evaluate_groups(
        self, parts: Sequence[tuple[GroupQuery, npt.NDArray[np.int64]]]
    ) -> GroupValues:
        """Return rows of populations."""
        queries = [
            replace(
                group,
                wanted=group.wanted[places],
                row_of=np.arange(len(places)),
                reduction=Rows(),
            )
            for group, places in parts
        ]
        rows = []
        for columns, errors in self._results(queries):
            if errors:
                raise next(iter(errors.values()))
            rows.append(columns[0])
        return GroupValues(torch.cat(rows), are_logits=False)

    def score(self, queries: Sequence[Query]) -> Sequence[Reduced | Exception]:
        """Compute and reduce the rows of texts, one part of a text after the other."""
        return [self._reduce_text(query) for query in queries]

    def _reduce_text(self, query: Query) -> Reduced | Exception:
        [output] = query.outputs
        assert isinstance(output, GroupReduction)  # noqa: S101 - the output of a text
        count, first = len(query.targets), query.first_target
        columns = ReducedText(output, count)
        for begin in range(0, count, self._text_rows):
            places = np.arange(begin, min(count, begin + self._text_rows))
            part = query.replace(
                token_ids=TokenSequence.of(query.token_ids[: first + len(places) + begin]),
                targets=query.targets[begin : begin + len(places)],
                outputs=(Rows(),),
            )
            try:
                [(rows,)] = self._results([part])
            except Exception as error:  # noqa: BLE001 - the error of this text only
                return error
            columns.add(places, rows)
            if columns.has_failed or query.query_id not in self._active:
                break
        return columns.result()

    def _results(self, queries: Sequence[AnyQuery]) -> list[Any]:
        """Return the results of queries, or raise the first of their exceptions."""
        self._started_s = None
        results = run_blocking(self._compute(queries))
        self._started_s = time.monotonic()
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results
