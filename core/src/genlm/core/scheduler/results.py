"""Post-processing of results between an engine's step and their delivery.

Results are checked against their queries, rows are reduced if the engine has not reduced them,
and cacheable results are stored in the output cache. The functions run on the engine's thread;
their errors fail single evaluations, not the engine.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from genlm.core.base.error_handling import as_genlm_error
from genlm.core.base.errors import EvaluationError
from genlm.core.queries.query import (
    ROW_ONLY,
    Completion,
    Query,
    Reduced,
    Reduction,
    TokenScores,
)
from genlm.core.rows.logits import invalid_rows
from genlm.core.rows.output_cache import OutputCache
from genlm.core.rows.outputs import reduce_rows
from genlm.core.scheduler.delivery import Outcome
from genlm.core.scheduler.request_table import Evaluation

__all__ = ["outcomes_of", "store_outcomes"]

Finished = Sequence[tuple[Evaluation, Completion]]


def outcomes_of(engine: Any, finished: Finished) -> list[tuple[Evaluation, Outcome]]:
    """Check the results of a step, and reduce rows if necessary; never raises."""
    outcomes: dict[Evaluation, Outcome] = {}
    try:
        _add_outcomes(engine, finished, outcomes)
    except Exception as error:  # noqa: BLE001 - fails the evaluations without an outcome
        for evaluation, _ in finished:
            outcomes.setdefault(evaluation, error)
    return list(outcomes.items())


def _add_outcomes(engine: Any, finished: Finished, outcomes: dict[Evaluation, Outcome]) -> None:
    rows: list[tuple[Evaluation, torch.Tensor]] = []
    for evaluation, completion in finished:
        result = completion.result
        query = evaluation.query
        requests_row = type(query) is Query and not query.targets
        if requests_row and isinstance(result, torch.Tensor) and completion.error is None:
            if completion.is_checked and evaluation.is_whole:
                outcomes[evaluation] = (result,)
            else:
                rows.append((evaluation, result))
        else:
            outcomes[evaluation] = _checked_outcome(evaluation, completion)
    if not rows:
        return
    invalid = invalid_rows([row for _, row in rows], engine.vocabulary.size)
    reduced: list[tuple[Evaluation, torch.Tensor]] = []
    for position, (evaluation, row) in enumerate(rows):
        if position in invalid:
            outcomes[evaluation] = invalid[position]
        elif evaluation.is_whole:
            outcomes[evaluation] = (row,)
        else:
            reduced.append((evaluation, row))
    if reduced:
        outputs: list[Any] = [tuple(evaluation.outputs) for evaluation, _ in reduced]
        results = reduce_rows(torch.stack([row for _, row in reduced]), outputs)
        for (evaluation, _), values in zip(reduced, results, strict=True):
            outcomes[evaluation] = values if isinstance(values, Exception) else values.values


def store_outcomes(
    cache: OutputCache, finished: Sequence[tuple[Evaluation, Outcome]]
) -> list[tuple[Evaluation, Outcome]]:
    """Store the results of a step, but not those that later ones would evict.

    Returns:
        The evaluations and their results. An error of storing a result takes its place.
    """
    outcomes = dict(finished)
    if not cache.max_entries:
        return list(finished)
    results: list[tuple[Hashable, Any]] = []
    places: list[tuple[Evaluation, int]] = []  # of each result

    for evaluation, outcome in finished:
        if isinstance(outcome, Exception) or evaluation.key is None:
            continue
        try:
            for place, output in enumerate(evaluation.outputs):
                value = outcome[place]
                is_stored = not isinstance(output, Reduction) or output.is_cacheable
                if is_stored and value is not None and not isinstance(value, Exception):
                    key = evaluation.key if output is None else (evaluation.key, output)
                    results.append((key, value))
                    places.append((evaluation, place))
        except Exception as error:  # noqa: BLE001 - fails only this evaluation
            outcomes[evaluation] = error
    try:
        first = cache.first_kept(results)
    except Exception:  # noqa: BLE001 - `put` raises it again for the result that causes it
        first = 0
    for (evaluation, place), (key, value) in zip(places[first:], results[first:], strict=True):
        try:
            cache.put(key, value)
        except Exception as error:  # noqa: BLE001 - fails only this result
            values = outcomes[evaluation]
            if not isinstance(values, Exception):
                failed = as_genlm_error(error)
                outcomes[evaluation] = (*values[:place], failed, *values[place + 1 :])
    return list(outcomes.items())


def _checked_outcome(evaluation: Evaluation, completion: Completion) -> Outcome:
    """Return the results of a completion, its error, or an error for an invalid result."""
    result: Any = completion.result
    error: Any = completion.error
    if error is not None:
        if isinstance(error, Exception):
            return error
        return EvaluationError(f"the engine returned {error!r} as an error")
    if result is None:
        return EvaluationError("the engine returned neither a result nor an error")
    types = _result_types(evaluation.query)
    if not isinstance(result, types):
        names = " or ".join(result_type.__name__ for result_type in types)
        return EvaluationError(
            f"the engine returned an object of type {type(result).__name__} for a query that "
            f"requests {names}"
        )
    values: Outcome = result.values if isinstance(result, Reduced) else (result,)
    return _size_error(evaluation, result) or values


def _size_error(evaluation: Evaluation, result: Any) -> Exception | None:
    """Return an error if a result does not have the size that its query requests."""
    if isinstance(result, Reduced) and len(result.values) != len(evaluation.outputs):
        return EvaluationError(
            f"the engine returned {len(result.values)} values for a query with "
            f"{len(evaluation.outputs)} outputs"
        )
    if not isinstance(result, TokenScores):
        return None
    expected = (len(evaluation.query.targets),)
    shapes = [tuple(getattr(field, "shape", ())) for field in result]
    if shapes == [expected, expected]:
        return None
    return EvaluationError(
        f"the engine returned TokenScores of shapes {shapes[0]} and {shapes[1]} for a query of "
        f"{expected[0]} targets; expected {expected} for both"
    )


def _result_types(query: Any) -> tuple[type, ...]:
    if type(query) is not Query:
        return (object,)
    if query.targets:
        return (TokenScores,) if query.outputs == ROW_ONLY else (Reduced,)
    return torch.Tensor, Reduced
