"""Post-processing of results between an engine's step and their delivery.

Results are checked against their queries, rows are reduced if the engine has not reduced them,
and cacheable results are stored in the output cache. The functions run on the engine's thread;
their errors fail single evaluations, not the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from genlm.core.base.errors import EvaluationError
from genlm.core.queries.query import ROW_ONLY, Completion, Query, Reduced, TokenScores
from genlm.core.rows.logits import invalid_rows
from genlm.core.rows.output_cache import OutputCache
from genlm.core.rows.outputs import reduce_rows
from genlm.core.scheduler.request_table import Evaluation

Completed = Sequence[tuple[Evaluation, Completion]]


def check_results(engine: Any, completed: Completed) -> None:
    """Set the values of completed evaluations: check results, and reduce rows if necessary.

    If that raises, the evaluations without values fail with the error.
    """
    try:
        _check_results(engine, completed)
    except Exception as error:  # noqa: BLE001 - fails the evaluations without values
        for evaluation, _ in completed:
            if not evaluation.values:
                evaluation.fail(error)


def _check_results(engine: Any, completed: Completed) -> None:
    rows: list[tuple[Evaluation, torch.Tensor]] = []
    for evaluation, completion in completed:
        result, query = completion.result, evaluation.query
        requests_row = type(query) is Query and not query.targets
        if requests_row and isinstance(result, torch.Tensor) and completion.error is None:
            if completion.is_checked and evaluation.is_whole:
                evaluation.values = [result]
            else:
                rows.append((evaluation, result))
        else:
            _check_completion(evaluation, completion)
    if rows:
        _check_rows(engine, rows)


def _check_rows(engine: Any, rows: list[tuple[Evaluation, torch.Tensor]]) -> None:
    """Set the values of evaluations whose results are rows."""
    invalid = invalid_rows([row for _, row in rows], engine.vocabulary.size)
    reduced: list[tuple[Evaluation, torch.Tensor]] = []
    for position, (evaluation, row) in enumerate(rows):
        if position in invalid:
            evaluation.fail(invalid[position])
        elif evaluation.is_whole:
            evaluation.values = [row]
        else:
            reduced.append((evaluation, row))
    if reduced:
        outputs: list[Any] = [tuple(evaluation.outputs) for evaluation, _ in reduced]
        results = reduce_rows([row for _, row in reduced], outputs)
        for (evaluation, _), values in zip(reduced, results, strict=True):
            if isinstance(values, Exception):
                evaluation.fail(values)
            else:
                evaluation.values = list(values.values)


def store_results(cache: OutputCache, evaluations: Iterable[Evaluation]) -> None:
    """Store the values of evaluations; an error of storing a value takes its place."""
    if not cache.max_entries:
        return
    for evaluation in evaluations:
        if evaluation.key is None:
            continue
        for output, place in evaluation.outputs.items():
            value = evaluation.values[place]
            if value is None or isinstance(value, Exception):
                continue
            try:
                if getattr(output, "is_cacheable", True):
                    cache.put(
                        evaluation.key if output is None else (evaluation.key, output), value
                    )
            except Exception as error:  # noqa: BLE001 - fails only this value
                evaluation.values[place] = error


def _check_completion(evaluation: Evaluation, completion: Completion) -> None:
    """Set the values of a completion: its results, its error, or that of an invalid result."""
    result: Any = completion.result
    error: Any = completion.error
    if error is None:
        error = _result_error(evaluation, result)
    elif not isinstance(error, Exception):
        error = EvaluationError(f"the engine returned {error!r} as an error")
    if error is not None:
        evaluation.fail(error)
    else:
        evaluation.values = list(result.values) if isinstance(result, Reduced) else [result]


def _result_error(evaluation: Evaluation, result: Any) -> Exception | None:
    """Return an error if a result is not of the kind and size that its query requests."""
    if result is None:
        return EvaluationError("the engine returned neither a result nor an error")
    types = _result_types(evaluation.query)
    if not isinstance(result, types):
        names = " or ".join(result_type.__name__ for result_type in types)
        return EvaluationError(
            f"the engine returned an object of type {type(result).__name__} for a query that "
            f"requests {names}"
        )
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
