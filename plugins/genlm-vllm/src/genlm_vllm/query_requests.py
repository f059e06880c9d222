"""`QueryRequests`: single queries as vLLM requests, some of them resident between steps.

The request of a row query is resumable where vLLM can keep it: when its row is there, vLLM
parks it with its KV blocks, and a query that adds a few tokens to its context continues it.
vLLM never ends or preempts a parked request, which counts as running. All rules by which such
requests end, and by which no request waits for ever, are in this module:

- Idle requests take only places that no unanswered request needs. The least recently used ones
  end first.
- While a request waits and the KV cache has no room for it, the older half of the idle requests
  ends after each step.
- When vLLM runs nothing although requests are unanswered, the older half of the idle requests
  ends; when none is left, the younger half of the requests that continue a context restarts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from genlm.plugin import Completion, EvaluationError, Query
from genlm_vllm.adapters import Adapters
from genlm_vllm.core_requests import CoreRequests, Load, obstacle
from genlm_vllm.populations import RunningPopulations
from genlm_vllm.request_table import MOST_ADDED, Parent, Request, RequestTable
from genlm_vllm.requests import Fork, LocalRows, Result, capture_row, params_of
from genlm_vllm.worker import call_workers

__all__ = ["QueryRequests"]

_STALLED_STEPS = 2
"""Steps without a running request after which idle requests end."""

_LOST_STEPS = 1000
"""Steps without a running request, with nothing left to end, after which requests fail."""


class _Pending(NamedTuple):
    """A query that is sent to vLLM with the next step.

    Attributes:
        query: The query.
        parent: The request that it continued when it was submitted, if any.
        reads_cache: Whether vLLM's prefix cache may serve its beginning.
    """

    query: Query
    parent: Parent | None
    reads_cache: bool


class QueryRequests:
    """Begins, continues and ends the requests of single queries.

    Args:
        engine: The `vllm.LLMEngine`.
        adapters: The loaded adapters.
        rows: Fetches the stored results of the workers.
        check: Raises the error of a query that is not valid.
        max_context: Largest number of tokens of a query.
        embedded_ids: Number of ids that the model embeds.
        populations: Populations, whose requests also stay in vLLM; None if not supported.

    Attributes:
        obstacle: Why no request can stay, None if requests can.
        tokens_computed: Tokens that the model computed.
        tokens_drawn: Tokens of continuations.
    """

    def __init__(
        self,
        engine: Any,
        *,
        adapters: Adapters,
        rows: LocalRows,
        check: Callable[[Query], None],
        max_context: int,
        embedded_ids: int,
        populations: RunningPopulations | None,
    ) -> None:
        self._core = CoreRequests(engine)
        self._adapters = adapters
        self._rows = rows
        self._check = check
        self._max_context = max_context
        self._embedded_ids = embedded_ids
        self._block_tokens: int = engine.vllm_config.cache_config.block_size
        self._populations = populations
        self.obstacle = obstacle(engine)
        self._forks = self.obstacle is None and all(call_workers(engine, "genlm_start_forks"))
        self._keeps = False
        self._numbers = itertools.count()
        self._table = RequestTable()
        self._pending: dict[int, _Pending] = {}
        self._ending: list[str] = []  # names of requests that were ended here
        self._stalls = 0
        self._continued = self._ended = 0
        self.tokens_computed = self.tokens_drawn = 0

    def statistics(self) -> dict[str, int]:
        """Return the counters; from any thread."""
        return {
            "contexts_resident": self._table.staying,
            "contexts_continued": self._continued,
            "contexts_ended": self._ended,
        }

    def close(self) -> None:
        """Undo the changes in vLLM."""
        self._core.close()

    @property
    def keeps(self) -> bool:
        """Whether the requests of row queries stay; may be set between steps."""
        return self._keeps

    @keeps.setter
    def keeps(self, keeps: bool) -> None:
        self._keeps = keeps and self.obstacle is None
        if not keeps:
            self.end_idle()

    @property
    def unanswered(self) -> int:
        """Number of unanswered queries."""
        return len(self._pending) + self._table.busy

    def queries(self) -> list[Query]:
        """Return the unanswered queries."""
        return [each.query for each in self._pending.values()] + list(self._table.unanswered())

    # -- queries ----------------------------------------------------------------------

    def submit(self, query: Query) -> None:
        """Accept a query for the next `send`.

        Raises:
            GenlmError: It is not valid.
        """
        parent = self._valid_parent(query) if self._may_stay(query) else None
        if parent is None:
            self._check(query)
        # A block of the prefix cache could end after the first target.
        first = len(query) - len(query.targets)
        reads_cache = not query.targets or first >= self._block_tokens
        self._pending[query.query_id] = _Pending(query, parent, reads_cache)

    def _may_stay(self, query: Query) -> bool:
        return self._keeps and query.sampling is None and not query.targets

    def _valid_parent(self, query: Query) -> Parent | None:
        """Return the request that a query continues if its further tokens are valid."""
        try:
            parent = self._table.parent(query)
        except OverflowError:  # ids that no sequence can have
            return None
        if parent is None or max(parent.added) >= self._embedded_ids:
            return None
        return parent if len(query) <= self._max_context else None

    def abort(self, query_id: int) -> None:
        """Drop a query and end its request; an unknown query is ignored."""
        if self._pending.pop(query_id, None) is not None:
            return
        request = self._table.end_query(query_id)
        if request is not None:
            self._end([request])
            self._send_ends()
            self._rows.abandon(request.number)

    def send(self) -> list[Completion]:
        """Send the accepted queries to vLLM; return the errors of those that it refuses.

        First those that continue a request: new requests may then end the idle ones.
        """
        begun: list[tuple[_Pending, Fork | None]] = []
        while self._pending:
            pending = self._pending.pop(next(iter(self._pending)))
            query, parent, _ = pending
            resumes = parent is not None and self._table.can_resume(parent)
            if not resumes and self._may_stay(query):  # the idle requests may have changed
                parent = self._table.parent(query)
                resumes = parent is not None and self._table.can_resume(parent)
            if parent is not None and resumes:
                request = parent.request
                self._table.resume(parent, query)
                asked = capture_row(request.number, query, self._rows)
                self._core.extend(request.core_request, parent.added, asked)
                self._continued += 1
            else:
                begun.append((pending, self._fork(parent)))
        self._make_room(len(begun))
        self._send_ends()
        return [error for each in begun if (error := self._begin(*each)) is not None]

    def _fork(self, parent: Parent | None) -> Fork | None:
        # An aborted request that vLLM sees again after its end has `MOST_ADDED` tokens at most.
        if parent is None or not self._forks or parent.length <= MOST_ADDED:
            return None
        return Fork(parent.request.name, parent.length)

    def _begin(self, pending: _Pending, fork: Fork | None) -> Completion | None:
        query, _, reads_cache = pending
        number, stays = next(self._numbers), self._may_stay(query)
        try:
            core_request = self._core.new(
                number,
                query.token_ids,
                params_of(query, number, self._rows, reads_cache=reads_cache, fork=fork),
                self._adapters.request(query.adapter),
                resumable=stays,
            )
        except Exception as error:  # noqa: BLE001 - it fails this query alone
            return Completion(query.query_id, error=error)
        name = core_request.request_id
        self._table.begin(Request(name, number, core_request, query, stays, reads_cache))
        self._core.send(core_request)
        return None

    # -- results ----------------------------------------------------------------------

    def collect(self) -> list[Completion]:
        """Return the completions of the last step. Resumable requests stay."""
        stopped: dict[Request, str | None] = {}
        for output in self._core.take():
            request = self._table.find(output.name)
            if request is None:
                continue
            if not request.drawn:
                request.cached = output.cached
            if request.query.sampling is not None:
                request.drawn += output.token_ids
            if output.is_finished:
                stopped[request] = output.reason
                self._table.answered(request.name)
        for request, reason in stopped.items():
            if reason is not None:
                self._rows.abandon(request.number)
        keys = [request.number for request, reason in stopped.items() if reason is None]
        results = self._rows.take(keys)
        completions: list[Completion] = []
        for request, reason in stopped.items():
            query, result = request.query, results.get(request.number)
            self.tokens_computed += request.tokens_computed
            self.tokens_drawn += len(request.drawn)
            if reason is not None:
                result = EvaluationError(
                    f"vLLM ended the request with {reason!r} before it was complete; "
                    f"see its log"
                )
            self._rest_or_end(request, is_parked=reason is None)
            if result is None and query.targets and request.reads_cache:
                # The prefix cache served some of the positions.
                self._pending[query.query_id] = _Pending(query, None, reads_cache=False)
            else:
                completions.append(_completion(request, result))
        return completions

    def _rest_or_end(self, request: Request, *, is_parked: bool) -> None:
        if not (request.stays and is_parked):
            self._table.end(request)
            return
        length = len(request.query)
        if length < self._max_context and self._core.can_continue(length):
            other = self._table.rest(request)
            self._end([] if other is None else [other])
        else:
            self._table.end(request)
            self._end([request])

    # -- room -------------------------------------------------------------------------

    def _make_room(self, new: int = 0) -> None:
        """End idle requests in places that unanswered and new requests need."""
        room = self._core.slots - self._table.busy - new
        if self._populations is not None:
            room -= self._populations.living
        self._end(self._table.end_oldest(self._table.idle - max(0, room)))

    def relieve(self) -> list[Completion]:
        """End idle requests that block waiting ones, after a step.

        Returns:
            Errors of queries that vLLM lost.
        """
        if self.obstacle is not None:  # no request stays
            return []
        if not self._keeps:  # those that were computed when it was turned off
            self._end(self._table.end_idle())
        self._make_room()
        load = self._core.load()
        if load is not None and self._populations is not None:
            load = load._replace(running=load.running - self._populations.resting)
        if load is None or self._table.busy <= load.running:
            self._stalls = 0
        else:
            self._end_for_waiting(load)
        self._send_ends()
        return self._fail_lost() if self._stalls >= _LOST_STEPS else []

    def _end_for_waiting(self, load: Load) -> None:
        if load.running or self._core.progressed:
            self._stalls = 0
        elif load.is_settled:
            self._stalls += 1
        stalled = self._stalls >= _STALLED_STEPS
        if self._table.idle:
            if stalled or load.free_tokens < 2 * self._longest_wait():
                self._end(self._table.end_oldest((self._table.idle + 1) // 2))
        elif stalled:
            for request in self._table.end_youngest_resumed():
                self._end([request])
                self._rows.abandon(request.number)
                query = request.query
                self._pending[query.query_id] = _Pending(query, None, reads_cache=True)

    def _longest_wait(self) -> int:
        """Maximum number of tokens of an unanswered request, drawn tokens included."""
        lengths = [
            len(query) + (query.sampling.max_tokens if query.sampling else 0)
            for query in self._table.unanswered()
        ]
        return min(max(lengths, default=0), self._max_context)

    def _fail_lost(self) -> list[Completion]:
        """Fail the queries that vLLM no longer has, which would wait for ever."""
        error = "vLLM lost the request; this is a defect of genlm-vllm or vLLM"
        lost = list(self._table.unanswered())
        for query in lost:
            self.abort(query.query_id)
        return [Completion(query.query_id, error=EvaluationError(error)) for query in lost]

    # -- ends -------------------------------------------------------------------------

    def release(self, adapter: str | None, key: bytes) -> None:
        """End the idle request of a context, if there is one."""
        request = self._table.end_context(adapter, key)
        if request is not None:
            self._end([request])

    def end_idle(self, adapter: str | None = None) -> None:
        """End the idle requests of one adapter, or all."""
        ended = self._table.end_idle(lambda each: adapter in {None, each.query.adapter})
        self._end(ended)
        self._send_ends()

    def end_oldest(self, count: int) -> bool:
        """End up to that many idle requests; return whether any ended."""
        ended = self._table.end_oldest(count)
        self._end(ended)
        self._send_ends()
        return bool(ended)

    def _end(self, requests: Sequence[Request]) -> None:
        self._ended += sum(request.stays for request in requests)
        self._ending += [request.name for request in requests]

    def _send_ends(self) -> None:
        """Have vLLM end the ended requests in one call, because calls are expensive."""
        if self._ending:
            names, self._ending = self._ending, []
            self._core.end(names)


def _completion(request: Request, result: Result | None) -> Completion:
    """Build the completion from the worker's result, None without a result."""
    query = request.query
    if isinstance(result, Exception):
        return Completion(query.query_id, error=result)
    if query.sampling is not None:
        drawn = request.drawn
        if drawn and drawn[-1] in query.sampling.stop_token_ids:
            drawn.pop()
        return Completion(query.query_id, drawn)
    if result is None:
        what = "scores" if query.targets else "row"
        error = f"vLLM finished the request without computing its {what}"
        return Completion(query.query_id, error=EvaluationError(error))
    return Completion(query.query_id, result)
