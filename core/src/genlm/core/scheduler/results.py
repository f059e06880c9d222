"""What becomes of an engine's results before their callers get them.

Results are checked, reduced to what callers want of them, and stored; `ResultHandler` says how.
Everything here runs on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from genlm.core.errors import EvaluationError
from genlm.core.query import Completion, Reduced
from genlm.core.scheduler.request_table import PendingRequest

__all__ = ["ResultHandler", "checked", "reduced", "stored"]

FindRequest = Callable[[int], PendingRequest | None]
"""From a query id to its request; None if it was abandoned."""


class ResultHandler:
    """Checks, reduces, stores and copies results; this one accepts them as they are.

    Methods are called on the engine's thread, except `copy`, which is called on any.
    """

    def find_invalid(self, engine: Any, results: Sequence[Any]) -> Mapping[int, Exception]:
        """Return an error for each invalid result of a step, by its position."""
        del engine, results
        return {}

    def reduce(
        self, results: Sequence[Any], outputs: Sequence[tuple[Any, ...]]
    ) -> Sequence[Reduced | Exception]:
        """Compute what is wanted of results that the engine has not reduced itself.

        Args:
            results: Whole results.
            outputs: What is wanted of each; None stands for the whole result.
        """
        del results, outputs
        raise NotImplementedError(f"{type(self).__name__} does not implement reduce")

    def store(self, key: Any, result: Any) -> None:
        """Store a result before the callers are woken.

        Args:
            key: Of the request, or `(key, output)` for one of its outputs.
            result: As callers get it; must not be changed.
        """

    def copy(self, result: Any) -> Any:
        """Copy a result for the second and later callers that share it."""
        return result

    def release(self, engine: Any, items: list[Any]) -> None:
        """Release items that were given to `Scheduler.release`. What it raises is logged."""


def checked(
    handler: ResultHandler, engine: Any, completions: list[Completion]
) -> list[Completion]:
    """Replace invalid results by their errors, and errors that cannot be raised."""
    for i, (query_id, _, error) in enumerate(completions):
        if not isinstance(cast("object", error), Exception | None):
            refused = EvaluationError(f"the engine returned as an error {error!r}")
            completions[i] = Completion(query_id, error=refused)
    places = [i for i, each in enumerate(completions) if each.result is not None]
    try:
        invalid = handler.find_invalid(engine, [completions[i].result for i in places])
    except Exception as error:  # noqa: BLE001 - out of memory; the engine goes on
        invalid = dict.fromkeys(range(len(places)), error)
    for position, problem in invalid.items():
        query_id = completions[places[position]].query_id
        completions[places[position]] = Completion(query_id, error=problem)
    return completions


def reduced(
    handler: ResultHandler, find_request: FindRequest, completions: list[Completion]
) -> list[Completion]:
    """Reduce results of which something else is wanted and that the engine left whole."""
    places, wanted = [], []
    for place, (query_id, result, error) in enumerate(completions):
        request = find_request(query_id)
        if request is None or request.is_whole or error is not None or result is None:
            continue
        if not isinstance(result, Reduced):
            places.append(place)
            wanted.append(tuple(request.outputs))
        elif len(result.values) != len(request.outputs):
            problem = EvaluationError(
                f"the engine returned {len(result.values)} values for a query with "
                f"{len(request.outputs)} outputs"
            )
            completions[place] = Completion(query_id, error=problem)
    if not places:
        return completions
    results: Sequence[Reduced | Exception]
    try:
        results = handler.reduce([completions[place].result for place in places], wanted)
    except Exception as error:  # noqa: BLE001 - out of memory; the engine goes on
        results = [error] * len(places)
    for place, answer in zip(places, results, strict=True):
        query_id = completions[place].query_id
        if isinstance(answer, Exception):
            completions[place] = Completion(query_id, error=answer)
        else:
            completions[place] = Completion(query_id, answer)
    return completions


def stored(
    handler: ResultHandler, find_request: FindRequest, completion: Completion
) -> Completion:
    """Store what was computed for a request; its error becomes that of the completion."""
    request = find_request(completion.query_id)
    if request is None or completion.error is not None:
        return completion
    if completion.result is None:
        error = EvaluationError("the engine returned neither a result nor an error")
        return Completion(completion.query_id, error=error)
    if request.key is None:
        return completion
    result = completion.result
    values = result.values if isinstance(result, Reduced) else (result,)
    try:
        for output, value in zip(request.outputs, values, strict=True):
            if not isinstance(value, Exception):
                handler.store(request.output_key(output), value)
    except Exception as error:  # noqa: BLE001 - it fails this query alone
        return Completion(completion.query_id, error=error)
    return completion
