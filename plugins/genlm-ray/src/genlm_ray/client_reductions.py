"""`ReductionThread`: computes the reductions that are a client's own code.

Such code may take any time, so it never runs on the engine's thread. A thread cannot be ended:
one that does not return keeps its time slices, and its client gets no second one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from genlm.plugin import Completion, EvaluationError, Query, Reduced, reduce_rows

__all__ = ["ReductionThread", "has_client_code", "reduced_completions"]

_TRUSTED = ("genlm.core.", "genlm_ray.")


def has_client_code(query: Query) -> bool:
    """Whether a query asks for a reduction that is not part of genlm."""
    return any(
        each is not None and not type(each).__module__.startswith(_TRUSTED)
        for each in query.outputs
    )


def reduced_completions(members: Sequence[tuple[Query, torch.Tensor]]) -> list[Completion]:
    """Compute what queries ask of their rows."""
    rows = torch.stack([row for _, row in members])
    results = reduce_rows(rows, [query.outputs for query, _ in members])
    return [
        Completion(query.query_id, result)
        if isinstance(result, Reduced)
        else Completion(query.query_id, error=result)
        for (query, _), result in zip(members, results, strict=True)
    ]


class ReductionThread:
    """The thread of one client.

    Args:
        on_reduced: Called on the thread with the completions of a batch.
    """

    def __init__(self, on_reduced: Callable[[list[Completion]], None]) -> None:
        self._batches: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._began_s: float | None = None
        arguments = (self._batches, on_reduced)
        threading.Thread(
            target=self._run, args=arguments, name="genlm-reductions", daemon=True
        ).start()

    @property
    def seconds(self) -> float:
        """How long the current batch has taken."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def submit(self, members: list[tuple[Query, torch.Tensor]]) -> None:
        """Have queries' rows reduced."""
        self._batches.put(members)

    def close(self) -> None:
        """End the thread after what was submitted."""
        self._batches.put(None)

    def _run(
        self, batches: queue.SimpleQueue[Any], on_reduced: Callable[[list[Completion]], None]
    ) -> None:
        while (members := batches.get()) is not None:
            self._began_s = time.monotonic()
            try:
                completions = reduced_completions(members)
            except BaseException as error:  # noqa: BLE001 - a client must not end the replica
                cause = EvaluationError(f"the reductions raised {type(error).__name__}")
                completions = [Completion(query.query_id, error=cause) for query, _ in members]
            finally:
                self._began_s = None
            on_reduced(completions)
            del members, completions  # no row outlives its batch here
