"""`LLMRequests`: queries as requests of `vllm.LLMEngine`, one each.

All continuations and scores are, and rows where vLLM keeps no contexts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from genlm.plugin import Completion, EvaluationError, Query
from genlm_vllm.adapters import Adapters
from genlm_vllm.requests import LocalRows, Request, params_of

__all__ = ["LLMRequests"]


class LLMRequests:
    """Adds requests to an `LLMEngine` and finds the finished ones among its outputs.

    Args:
        engine: The `vllm.LLMEngine`.
        adapters: The loaded adapters.
        rows: Is told which results nobody will fetch.
        numbers: Ascending; names and row keys of requests.

    Attributes:
        unanswered: Requests by vLLM's id, oldest first.
    """

    def __init__(
        self, engine: Any, adapters: Adapters, rows: LocalRows, numbers: Iterator[int]
    ) -> None:
        self._engine = engine
        self._adapters = adapters
        self._rows = rows
        self._numbers = numbers
        self.unanswered: dict[str, Request] = {}
        self._ids: dict[int, str] = {}  # vLLM's ids by the query's

    def add(self, query: Query, *, reads_cache: bool = True) -> None:
        """Add a checked query to the running batch.

        Args:
            query: The query.
            reads_cache: Whether vLLM's prefix cache may serve its beginning.
        """
        from vllm.inputs import tokens_input

        number = next(self._numbers)
        request, name = Request(query, number, reads_cache), str(number)
        self._engine.add_request(
            name,
            tokens_input(list(query.token_ids)),
            params_of(request, self._rows),
            lora_request=self._adapters.request(query.adapter),
        )
        self.unanswered[name] = request
        self._ids[query.query_id] = name

    def abort(self, query_id: int) -> None:
        """Remove a query from the running batch; nothing if there is none."""
        name = self._ids.pop(query_id, None)
        request = None if name is None else self.unanswered.pop(name, None)
        if request is not None:
            self._engine.abort_request([name])
            self._rows.abandon(request.number)

    def finished(self, outputs: Iterable[Any]) -> list[tuple[Request, Any]]:
        """Remove and return the requests that are finished, with their outputs."""
        found = []
        for output in outputs:
            request = self.unanswered.pop(output.request_id, None) if output.finished else None
            if request is not None:
                self._ids.pop(request.query.query_id, None)
                found.append((request, output))
        return found

    def fail_lost(self) -> list[Completion]:
        """Fail the requests that vLLM no longer has, which would wait for ever."""
        if not self.unanswered or self._engine.has_unfinished_requests():
            return []
        lost = [request.query.query_id for request in self.unanswered.values()]
        self.unanswered.clear()
        self._ids.clear()
        error = "vLLM lost the request; this is a defect of genlm-vllm or vLLM"
        return [Completion(query_id, error=EvaluationError(error)) for query_id in lost]
