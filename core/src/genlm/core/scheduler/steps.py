"""Submission of evaluations to an engine, and the evaluations that a step completes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from genlm.core.engine.engine import checked_completions
from genlm.core.queries.query import Completion, GroupQuery
from genlm.core.scheduler.request_table import Evaluation


def submit_evaluations(engine: Any, evaluations: Iterable[Evaluation]) -> list[Evaluation]:
    """Submit the queries of evaluations; return the evaluations that the engine rejected."""
    rejected: list[Evaluation] = []
    for evaluation in evaluations:
        try:
            query = evaluation.query
            if isinstance(query, GroupQuery):
                engine.submit_group(query)
                continue
            if not evaluation.is_whole:
                query = query.replace(outputs=tuple(evaluation.outputs))
            engine.submit(query)
        except Exception as error:  # noqa: BLE001 - it fails this query alone
            evaluation.fail(error)
            rejected.append(evaluation)
    return rejected


def step_engine(
    engine: Any, in_engine: Mapping[int, Evaluation]
) -> list[tuple[Evaluation, Completion]]:
    """Step an engine once; return the completed evaluations of those in the engine.

    Completions of other queries, which were aborted, are ignored.

    Raises:
        EvaluationError: The step returned an object that is not a list of `Completion` objects.
        Exception: The error of the engine's step.
    """
    finished: dict[Evaluation, Completion] = {}
    for completion in checked_completions(engine.step()):
        evaluation = in_engine.get(completion.query_id)
        if evaluation is not None:
            finished.setdefault(evaluation, completion)
    return list(finished.items())
