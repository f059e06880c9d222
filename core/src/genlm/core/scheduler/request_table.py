"""The request table: unfinished evaluations, their queues, and the waiting requests.

This module uses no threads, event loops or engines; the worker guards the table with its lock.
All operations except `has_query` and `clear` take O(1) time per evaluation.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Protocol

from genlm.core.base.statistics import SchedulerStatistics

__all__ = ["Evaluation", "Future", "Identified", "Request", "RequestTable"]

Future = asyncio.Future[Any] | concurrent.futures.Future[Any]
"""The future of a coroutine or a thread."""


_ROW_ONLY: dict[Hashable, int] = {None: 0}
"""The outputs of most evaluations; must not be changed."""


class Identified(Protocol):
    """A query that can be scheduled."""

    @property
    def query_id(self) -> int:
        """Id of the query and of its completion, unique within the scheduler."""
        ...


class Request:
    """A request of one caller for one or several evaluations.

    Attributes:
        future: Future that is finished with `values` once all evaluations have ended.
        values: Evaluations by their place in the request, replaced by results, or by exceptions
            of failed evaluations. Results are written on the engine's thread.
        unfinished: Number of places without a result; guarded by the worker's lock.
        is_abandoned: Whether the caller has abandoned the request.
    """

    __slots__ = ("future", "is_abandoned", "unfinished", "values")

    def __init__(self, future: Future, places: int) -> None:
        self.future = future
        self.values: list[Any] = [None] * places
        self.unfinished = places
        self.is_abandoned = False


class Evaluation:
    """One query and the requests that wait for it; guarded by the worker's lock.

    Attributes:
        query: The query for the engine.
        key: Requests with equal keys share an evaluation; None is never shared.
        consumers: Requests, with the place of the evaluation in the request and the place of
            the requested output in `outputs`.
        waiting: Number of consumers that are not abandoned; 0 after the evaluation has ended.
        outputs: Requested outputs and their places; None is the whole result.
        arrived_s: `time.perf_counter()` at arrival.
    """

    __slots__ = ("arrived_s", "consumers", "key", "outputs", "query", "waiting")

    def __init__(self, query: Any, key: Hashable, output: Hashable, arrived_s: float) -> None:
        self.query = query
        self.key = key
        self.consumers: list[tuple[Request, int, int]] = []
        self.waiting = 0
        self.outputs: dict[Hashable, int] = _ROW_ONLY if output is None else {output: 0}
        self.arrived_s = arrived_s

    def add(self, request: Request, place: int, output: Hashable) -> None:
        """Add a consumer, and its output if that is new."""
        if output not in self.outputs:
            if self.outputs is _ROW_ONLY:
                self.outputs = _ROW_ONLY.copy()
            self.outputs[output] = len(self.outputs)
        wanted = self.outputs[output]
        self.consumers.append((request, place, wanted))
        self.waiting += 1
        request.values[place] = self

    def drop_unwanted(self) -> None:
        """Remove the outputs of abandoned requests."""
        if len(self.outputs) == 1:
            return
        consumers = [each for each in self.consumers if not each[0].is_abandoned]
        wanted = {output for _, _, output in consumers}
        kept = [output for output, place in self.outputs.items() if place in wanted]
        if len(kept) < len(self.outputs):
            moved = {self.outputs[output]: place for place, output in enumerate(kept)}
            self.outputs = {output: place for place, output in enumerate(kept)}
            self.consumers = [(r, place, moved[output]) for r, place, output in consumers]

    def end(self) -> None:
        """Remove the consumers, which refer to the evaluation."""
        self.waiting = 0
        self.consumers = []

    @property
    def is_whole(self) -> bool:
        """Whether the whole result is the only requested output."""
        return len(self.outputs) == 1 and None in self.outputs


class RequestTable:
    """All unfinished evaluations, in order of arrival, and their counters.

    An evaluation passes from the backlog of `max_pending` to the inbox, then to the engine.

    Attributes:
        inbox: Admitted evaluations that are not yet in the engine, by query id.
        in_engine: Evaluations in the engine, by query id.
        needs_flush: Whether the inbox contains evaluations from the backlog, for which no
            caller will flush the inbox.
    """

    def __init__(self, max_pending: int | None) -> None:
        self.inbox: OrderedDict[int, Evaluation] = OrderedDict()
        self.in_engine: dict[int, Evaluation] = {}
        self.needs_flush = False
        self._backlog: OrderedDict[int, Evaluation] = OrderedDict()
        self._joinable: dict[Hashable, Evaluation] = {}
        self._max_pending = max_pending
        self._joined = self._answered = self._failed = self._abandoned = 0
        self._batch_sizes: Counter[int] = Counter()
        self._dispatched = 0
        self._queue_seconds = 0.0

    def enqueue(  # noqa: PLR0917
        self,
        request: Request,
        place: int,
        query: Identified,
        key: Hashable,
        output: Hashable,
        arrived_s: float,
    ) -> None:
        """Add a query, or let the request join the unfinished evaluation with the same key.

        The outputs of a query are fixed once it is in the engine: a request that joins later
        can only share one of them.
        """
        evaluation = self._joinable.get(key) if key is not None else None
        if evaluation is not None and (
            output in evaluation.outputs or evaluation.query.query_id not in self.in_engine
        ):
            evaluation.add(request, place, output)
            self._joined += 1
            return
        query_id = query.query_id
        if query_id in self.inbox or query_id in self.in_engine or query_id in self._backlog:
            raise ValueError(
                f"query id {query_id} is that of an unanswered request; every query of a "
                f"scheduler needs an id of its own (itertools.count, for example)"
            )
        evaluation = Evaluation(query, key, output, arrived_s)
        evaluation.add(request, place, output)
        queue = self._backlog if self._backlog or self._is_full else self.inbox
        queue[query_id] = evaluation
        if key is not None:  # last: no request may join before it is queued
            self._joinable[key] = evaluation

    def leave(self, request: Request) -> list[int]:
        """Remove an abandoned request.

        Returns:
            Ids of the queries without other requests, which the engine must abort.
        """
        if request.is_abandoned:
            return []
        request.is_abandoned = True
        aborted = []
        for evaluation in request.values:
            if type(evaluation) is not Evaluation or not evaluation.waiting:  # it has ended
                continue
            evaluation.waiting -= 1
            if not evaluation.waiting:
                if evaluation.query.query_id in self.in_engine:
                    aborted.append(evaluation.query.query_id)
                self._remove(evaluation)
                self._abandoned += 1
        return aborted

    def take(self, limit: int | None, now_s: float) -> list[Evaluation]:
        """Move up to `limit` evaluations from the inbox to the engine, oldest first."""
        if limit is None or limit >= len(self.inbox):
            taken = list(self.inbox.values())
            self.inbox.clear()
        else:
            taken = [self.inbox.popitem(last=False)[1] for _ in range(limit)]
        self.needs_flush = self.needs_flush and bool(self.inbox)
        for evaluation in taken:
            evaluation.drop_unwanted()
            self.in_engine[evaluation.query.query_id] = evaluation
            self._queue_seconds += now_s - evaluation.arrived_s
        self._dispatched += len(taken)
        return taken

    def close_to_joiners(self, evaluation: Evaluation) -> None:
        """Prevent further requests from joining an evaluation."""
        if evaluation.key is not None and self._joinable.get(evaluation.key) is evaluation:
            del self._joinable[evaluation.key]

    def finish(self, evaluation: Evaluation, *, failed: bool) -> list[Request]:
        """Remove an evaluation whose results are in its requests, unless it has ended.

        Returns:
            The requests of which this was the last evaluation.
        """
        if not evaluation.waiting:
            return []
        self._remove(evaluation, finished=True)
        if failed:
            self._failed += 1
        else:
            self._answered += 1
        finished = []
        for request, _, _ in evaluation.consumers:
            request.unfinished -= 1
            if not request.unfinished and not request.is_abandoned:
                finished.append(request)
        evaluation.end()
        return finished

    def drop(self, evaluation: Evaluation) -> None:
        """Remove an evaluation whose results are lost, unless it has ended."""
        if evaluation.waiting:
            self._remove(evaluation)
            self._failed += 1

    def has_query(self, matches: Callable[[Any], bool]) -> bool:
        """Whether `matches` is true for the query of an unfinished evaluation."""
        queues = (self.in_engine, self.inbox, self._backlog)
        return any(matches(each.query) for queue in queues for each in queue.values())

    def count_batch(self, size: int) -> None:
        """Record that one step finished `size` evaluations."""
        self._batch_sizes[size] += 1

    def clear(self) -> list[Request]:
        """Remove all evaluations and return their requests; the caller fails them."""
        queues = (self.in_engine, self.inbox, self._backlog)
        evaluations = [each for queue in queues for each in queue.values()]
        for table in (*queues, self._joinable):
            table.clear()
        self.needs_flush = False
        self._failed += len(evaluations)
        consumers = [each for evaluation in evaluations for each in evaluation.consumers]
        for evaluation in evaluations:
            evaluation.end()
        waiting = (request for request, _, _ in consumers if not request.is_abandoned)
        return list(dict.fromkeys(waiting))

    def statistics(self) -> SchedulerStatistics:
        """Return a snapshot of the counters."""
        return SchedulerStatistics(
            joined=self._joined,
            dispatched=self._dispatched,
            answered=self._answered,
            failed=self._failed,
            abandoned=self._abandoned,
            batches=sum(self._batch_sizes.values()),
            batch_sizes=dict(self._batch_sizes),
            queue_seconds=self._queue_seconds,
            pending=self._pending,
            waiting=len(self._backlog),
        )

    @property
    def _pending(self) -> int:
        return len(self.inbox) + len(self.in_engine)

    @property
    def _is_full(self) -> bool:
        return self._max_pending is not None and self._pending >= self._max_pending

    def _remove(self, evaluation: Evaluation, *, finished: bool = False) -> None:
        self.close_to_joiners(evaluation)
        for queue in (self.in_engine, self.inbox, self._backlog):
            if queue.pop(evaluation.query.query_id, None) is not None:
                break
        if not finished:
            evaluation.end()
        while self._backlog and not self._is_full:
            query_id, admitted = self._backlog.popitem(last=False)
            self.inbox[query_id] = admitted
            self.needs_flush = True
