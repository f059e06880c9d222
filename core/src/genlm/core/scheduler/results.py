"""`ResultHandler`: post-processing of results between an engine's step and their delivery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from genlm.core.errors import EvaluationError
from genlm.core.query import Completion, Reduced
from genlm.core.scheduler.delivery import Outcome
from genlm.core.scheduler.request_table import Evaluation

__all__ = ["ResultHandler"]


class ResultHandler:
    """Checks, reduces, stores and copies results; this one returns them unchanged.

    Subclasses override the public methods. They are called on the engine's thread. What they
    raise fails the evaluations concerned, and the engine goes on.
    """

    def find_invalid(
        self, engine: Any, queries: Sequence[Any], results: Sequence[Any]
    ) -> Mapping[int, Exception]:
        """Return an error for each invalid result of a step, by its position.

        Args:
            engine: The engine.
            queries: As the engine got them.
            results: The result of each query; a `Reduced` has been checked for its length.
        """
        del engine, queries, results
        return {}

    def reduce(
        self, results: Sequence[Any], outputs: Sequence[tuple[Any, ...]]
    ) -> Sequence[Reduced | Exception]:
        """Compute what is wanted of results that the engine has not reduced itself.

        Args:
            results: Whole results.
            outputs: Requested outputs of each result; None stands for the whole result.
        """
        del results, outputs
        raise NotImplementedError(f"{type(self).__name__} does not implement reduce")

    def store(self, key: Any, result: Any) -> None:
        """Store a result before the callers are woken.

        Args:
            key: Key of the request, or `(key, output)` for one of its outputs.
            result: As callers get it; must not be changed.
        """

    def copy(self, result: Any) -> Any:
        """Copy a result for the second and later callers that share it."""
        return result

    def release(self, engine: Any, items: list[Any]) -> None:
        """Release items that were given to `Scheduler.release`. What it raises is logged."""

    def outcomes(
        self, engine: Any, finished: Sequence[tuple[Evaluation, Completion]]
    ) -> list[tuple[Evaluation, Outcome]]:
        """Check what a step returned and reduce what the engine left whole; never raises."""
        outcomes: dict[Evaluation, Outcome] = {}
        try:
            self._add_outcomes(engine, finished, outcomes)
        except Exception as error:  # noqa: BLE001 - it fails those without an outcome so far
            for evaluation, _ in finished:
                outcomes.setdefault(evaluation, error)
        return list(outcomes.items())

    def _add_outcomes(
        self,
        engine: Any,
        finished: Sequence[tuple[Evaluation, Completion]],
        outcomes: dict[Evaluation, Outcome],
    ) -> None:
        results: dict[Evaluation, Any] = {}
        for evaluation, (_, result, error) in finished:
            problem = _problem(evaluation, result, error)
            if problem is None:
                results[evaluation] = result
            else:
                outcomes[evaluation] = problem
        queries = [evaluation.query for evaluation in results]
        invalid = self.find_invalid(engine, queries, list(results.values()))
        whole: dict[Evaluation, Any] = {}
        for position, (evaluation, result) in enumerate(results.items()):
            if position in invalid:
                outcomes[evaluation] = invalid[position]
            elif isinstance(result, Reduced):
                outcomes[evaluation] = result.values
            elif evaluation.is_whole:
                outcomes[evaluation] = (result,)
            else:
                whole[evaluation] = result
        if whole:
            wanted = [tuple(evaluation.outputs) for evaluation in whole]
            reduced = self.reduce(list(whole.values()), wanted)
            for evaluation, answer in zip(whole, reduced, strict=True):
                outcomes[evaluation] = (
                    answer if isinstance(answer, Exception) else answer.values
                )

    def stored(self, evaluation: Evaluation, outcome: Outcome) -> Outcome:
        """Store the results of an evaluation, and return them, or the error of storing them."""
        if isinstance(outcome, Exception) or evaluation.key is None:
            return outcome
        try:
            for output, value in zip(evaluation.outputs, outcome, strict=True):
                if not isinstance(value, Exception):
                    self.store(evaluation.output_key(output), value)
        except Exception as error:  # noqa: BLE001 - it fails this evaluation alone
            return error
        return outcome


def _problem(evaluation: Evaluation, result: Any, error: Any) -> Exception | None:
    """Return the error of a completion, or what is wrong with its form."""
    if error is not None:
        if isinstance(error, Exception):
            return error
        return EvaluationError(f"the engine returned as an error {error!r}")
    if result is None:
        return EvaluationError("the engine returned neither a result nor an error")
    if isinstance(result, Reduced) and len(result.values) != len(evaluation.outputs):
        return EvaluationError(
            f"the engine returned {len(result.values)} values for a query with "
            f"{len(evaluation.outputs)} outputs"
        )
    return None
