"""`Halving`: isolates the items of a batch whose evaluation raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from genlm.core.base.error_handling import free_locals
from genlm.core.base.errors import EvaluationError, describe_error
from genlm.core.queries.query import Completion


class UnfinishedError(Exception):
    """Raised by an engine that has computed a part of a query, which then stays pending."""


class Halving:
    """Evaluates a batch and, if that raises, its halves recursively, to isolate failing items.

    A batch is a list or an array.

    Halving stops, and all remaining items fail, in two cases: the device has failed; or no item
    has been evaluated successfully, both halves of a batch raise the same error, and so do the
    first and the last item of each half alone.

    Attributes:
        recovered_error: Description of the error of a batch whose items were all evaluated
            successfully in smaller batches; `""` if there is none.
    """

    def __init__(self, evaluate: Callable[[Any], Sequence[Any]]) -> None:
        self._evaluate = evaluate
        self._has_succeeded = False
        self._device_error: Exception | None = None
        self.recovered_error = ""

    def results(self, batch: Any) -> Sequence[Any]:
        """Return the results or errors of the items."""
        outcome = self._attempt(batch)
        if not isinstance(outcome, Exception):
            return outcome
        results = self._evaluate_halves(batch, outcome)
        if not any(isinstance(result, Exception) for result in results):
            self.recovered_error = describe_error(outcome)
        return results

    def _attempt(self, batch: Any) -> Sequence[Any] | Exception:
        if self._device_error is not None:
            return self._device_error
        try:
            results: Sequence[Any] = self._evaluate(batch)
        except Exception as error:  # noqa: BLE001 - it fails the item that causes it
            free_locals(error)
            if _is_device_failure(error):
                self._device_error = error
            return error
        self._has_succeeded = True
        return results

    def _evaluate_halves(self, batch: Any, error: Exception) -> Sequence[Any]:
        """Evaluate the halves of a batch whose evaluation raised `error`."""
        if len(batch) == 1 or self._device_error is not None:
            return [error] * len(batch)
        middle = len(batch) // 2
        halves = [batch[:middle], batch[middle:]]
        outcomes = [self._attempt(half) for half in halves]
        have_one_cause = self._have_same_error(halves, outcomes)
        results: list[Any] = []
        for half, outcome in zip(halves, outcomes, strict=True):
            if not isinstance(outcome, Exception):
                results += outcome
            else:
                results += (
                    [outcome] * len(half)
                    if have_one_cause
                    else self._evaluate_halves(half, outcome)
                )
        return results

    def _have_same_error(
        self, halves: list[Any], outcomes: list[Sequence[Any] | Exception]
    ) -> bool:
        """Whether both halves and the items at their ends raise the same error."""
        if self._has_succeeded:
            return False
        expected = _error_kind(outcomes[0])
        if _error_kind(outcomes[1]) != expected:
            return False
        ends = [end for half in halves if len(half) > 1 for end in (half[:1], half[-1:])]
        return all(_error_kind(self._attempt(end)) == expected for end in ends)


def _error_kind(outcome: Sequence[Any] | Exception) -> tuple[type, str]:
    return type(outcome), describe_error(outcome) if isinstance(outcome, Exception) else ""


def completions_of(
    queries: Sequence[Any], results: Sequence[Any], *, are_checked: bool = False
) -> list[Completion]:
    """Return the result or the error of each query that is not unfinished."""
    return [
        Completion(query.query_id, error=result)
        if isinstance(result, Exception)
        else Completion(query.query_id, result, None, are_checked)
        for query, result in zip(queries, results, strict=True)
        if not isinstance(result, UnfinishedError)
    ]


def _is_device_failure(error: Exception) -> bool:
    """Whether the accelerator has failed, so that no later computation on it succeeds."""
    import torch

    if isinstance(error, EvaluationError) and error.__cause__ is not None:  # of a reduction
        return isinstance(error.__cause__, Exception) and _is_device_failure(error.__cause__)
    message = str(error)
    is_failure = isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and message.startswith(("CUDA error", "HIP error"))
    )
    return is_failure and "out of memory" not in message
