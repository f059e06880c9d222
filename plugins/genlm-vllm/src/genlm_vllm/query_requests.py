"""`QueryRequests`: queries that are a request of vLLM each, from its beginning to its end.

These are continuations, scores, and rows where requests cannot stay in vLLM (`residents`).
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from genlm.plugin import Completion, EvaluationError, Query
from genlm_vllm.adapters import Adapters
from genlm_vllm.core_requests import CoreRequests
from genlm_vllm.row_sampler import DRAWN, OWN, DrawPlan
from genlm_vllm.scores import SCORES, ScoreTargets
from genlm_vllm.worker_rows import RowPart
from genlm_vllm.workers import Workers

__all__ = ["QueryRequests"]


@dataclass(slots=True, eq=False)
class _Request:
    """A query and its request.

    Attributes:
        query: The query.
        reads_cache: Whether vLLM's prefix cache may serve its beginning.
        name: The request's id in vLLM, once it is sent.
        cached: Tokens that were not computed.
        drawn: Tokens of a continuation.
    """

    query: Query
    reads_cache: bool = True
    name: str = ""
    cached: int = 0
    drawn: list[int] = field(default_factory=list)


class QueryRequests:
    """Begins and ends the requests of single queries.

    Args:
        engine: The `vllm.LLMEngine`.
        adapters: The loaded adapters.
        workers: Compute rows, draws and scores.
        check: Raises the error of a query that is not valid.

    Attributes:
        tokens_computed: Tokens that the model computed.
        tokens_drawn: Tokens of continuations.
    """

    def __init__(
        self,
        engine: Any,
        *,
        adapters: Adapters,
        workers: Workers,
        check: Callable[[Query], None],
    ) -> None:
        self._core = CoreRequests(engine)
        self._adapters = adapters
        self._workers = workers
        self._check = check
        self._block_tokens: int = engine.vllm_config.cache_config.block_size
        self._pending: deque[_Request] = deque()
        self._by_id: dict[int, _Request] = {}
        self._by_name: dict[str, _Request] = {}
        self._finished: list[_Request] = []
        self.tokens_computed = self.tokens_drawn = 0

    def close(self) -> None:
        """Undo the changes in vLLM."""
        self._core.close()

    @property
    def has_run(self) -> bool:
        """Whether the last step executed the model."""
        return self._core.has_run

    @property
    def unanswered(self) -> int:
        """Number of unanswered queries."""
        return len(self._by_id)

    def submit(self, query: Query) -> None:
        """Accept a query for the next `send`.

        Raises:
            GenlmError: It is not valid.
        """
        self._check(query)
        # A block of the prefix cache could end after the first target.
        first = len(query) - len(query.targets)
        reads_cache = not query.targets or first >= self._block_tokens
        self._accept(_Request(query, reads_cache))

    def _accept(self, request: _Request) -> None:
        self._by_id[request.query.query_id] = request
        self._pending.append(request)

    def abort(self, query_id: int) -> None:
        """Drop a query and end its request; an unknown query is ignored."""
        request = self._by_id.pop(query_id, None)
        if request is None:
            return
        if not request.name:
            self._pending.remove(request)
            return
        del self._by_name[request.name]
        self._core.end([request.name])
        self._workers.inputs.dropped += (query_id, request.name)

    def drop_all(self) -> list[int]:
        """Drop all queries; return their ids."""
        dropped = list(self._by_id)
        for query_id in dropped:
            self.abort(query_id)
        return dropped

    def send(self) -> list[Completion]:
        """Send the accepted queries to vLLM; return the errors of those that it refuses."""
        refused = []
        while self._pending:
            request = self._pending.popleft()
            query = request.query
            prefix = OWN if query.sampling is None else DRAWN
            lora = self._adapters.request(query.adapter)
            try:
                params = self._params(request)
                request.name = self._core.begin(prefix, query.token_ids, params, lora)
            except Exception as error:  # noqa: BLE001 - it fails this query alone
                del self._by_id[query.query_id]
                refused.append(Completion(query.query_id, error=error))
                continue
            self._by_name[request.name] = request
            if query.sampling is not None:
                seed = query.sampling.seed
                seed = secrets.randbits(63) if seed is None else seed % 2**64
                plan = DrawPlan(seed, float(query.sampling.temperature), len(query))
                self._workers.inputs.plans[request.name] = plan
        return refused

    def _params(self, request: _Request) -> Any:
        """Return the `vllm.SamplingParams`; tokens are drawn by `RowSampler`."""
        import vllm

        query, sampling = request.query, request.query.sampling
        arguments = None
        if query.targets:
            first = len(query) - len(query.targets)
            outputs = self._workers.sent(query.outputs)
            targets = ScoreTargets(query.query_id, first, query.targets, outputs)
            arguments = {SCORES: targets}
        return vllm.SamplingParams(
            max_tokens=1 if sampling is None else sampling.max_tokens,
            temperature=0.0,
            stop_token_ids=[] if sampling is None else sorted(sampling.stop_token_ids),
            ignore_eos=True,
            detokenize=False,
            skip_clone=True,  # used by this request only
            skip_reading_prefix_cache=not request.reads_cache,
            extra_args=arguments,
        )

    # -- results ----------------------------------------------------------------------

    def collect(self) -> list[Completion]:
        """Request the results of finished requests; return the errors of failed ones."""
        failed = []
        for output in self._core.take():
            request = self._by_name.get(output.name)
            if request is None:
                continue
            if not request.drawn:
                request.cached = output.cached
            query = request.query
            if query.sampling is not None:
                request.drawn += output.token_ids
            if not output.is_finished:
                continue
            self.tokens_computed += len(query) - request.cached
            self.tokens_computed += max(0, len(request.drawn) - 1)  # the last is no input
            self.tokens_drawn += len(request.drawn)
            if output.reason is not None:
                error = EvaluationError(
                    f"vLLM ended the request with {output.reason!r} before it was complete; "
                    f"see its log"
                )
                self.abort(query.query_id)
                failed.append(Completion(query.query_id, error=error))
                continue
            self._finished.append(request)
            results = self._workers.results
            if query.sampling is not None:
                results.drawn.append((query.query_id, request.name))
            elif query.targets:
                results.scored.append((query.query_id, query.query_id))
            else:
                outputs = self._workers.sent(query.outputs)
                results.rows.append(RowPart(query.query_id, request.name, outputs))
        return failed

    def finish(self, found: dict[int, Completion]) -> list[Completion]:
        """Return the completions of the requests that the last `collect` found finished.

        Args:
            found: Results of the workers by query id, of which those of these queries are
                removed.
        """
        finished, self._finished = self._finished, []
        completions = []
        for request in finished:
            query = request.query
            del self._by_id[query.query_id], self._by_name[request.name]
            completion = found.pop(query.query_id, Completion(query.query_id))
            if query.sampling is not None and completion.error is None:
                if request.drawn[-1] in query.sampling.stop_token_ids:
                    request.drawn.pop()
                completion = Completion(query.query_id, request.drawn)
            elif completion.result is None and completion.error is None:
                if query.targets and request.reads_cache:
                    # The prefix cache served some of the positions.
                    self._accept(_Request(query, reads_cache=False))
                    continue
                message = "vLLM finished the request without computing its scores"
                completion = Completion(query.query_id, error=EvaluationError(message))
            completions.append(completion)
        return completions
