"""The request table: unfinished evaluations in their queues, and the requests for them.

This module uses no threads, event loops or engines; the worker guards the table with its lock.
All operations that read no whole queue take O(log n) time per evaluation.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import heapq
import operator
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, Protocol

from genlm.core.base.statistics import SchedulerStatistics
from genlm.core.engine.query_queue import Turns

Future = asyncio.Future[Any] | concurrent.futures.Future[Any]
"""Future on which a coroutine or a thread waits."""


_ROW_ONLY: dict[Hashable, int] = {None: 0}
"""`Evaluation.outputs` for the row only; shared, so it must not be changed."""


_NO_VALUES: list[Any] = []
"""`Evaluation.values` before the results are known; shared, so it must not be changed."""

_TURN = operator.attrgetter("turn")


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
        then: Function of `values`, whose result is delivered as the only value. If the result
            is a `concurrent.futures.Future`, its result is delivered. The function is called on
            the engine's thread, or on the calling thread if it waits for the result.
    """

    __slots__ = ("future", "is_abandoned", "then", "unfinished", "values")

    def __init__(
        self, future: Future, places: int, then: Callable[[list[Any]], Any] | None = None
    ) -> None:
        self.future = future
        self.then = then
        self.values: list[Any] = [None] * places
        self.unfinished = places
        self.is_abandoned = False


class Evaluation:
    """One query and the requests that wait for it; guarded by the worker's lock.

    Attributes:
        query: The query for the engine.
        turn: Evaluations leave a queue by turn, then by age; see `Turns`.
        key: Requests with equal keys share an evaluation; None is never shared.
        consumers: Triples of a request, the place of the evaluation in the request, and the
            place of the requested output.
        waiting: Number of consumers that are not abandoned; 0 after the evaluation has ended.
        outputs: Places of the requested outputs; None stands for the whole result.
        values: Results or exceptions by place of the output; empty until they are known, and
            once the requests have them. Only the engine's thread uses them.
        has_failed: Whether the values are the error of the query.
        arrived_s: `time.perf_counter()` at arrival.
    """

    __slots__ = (
        *("arrived_s", "consumers", "has_failed", "key", "outputs", "query", "turn"),
        *("values", "waiting"),
    )

    def __init__(
        self, query: Any, turn: int, key: Hashable, output: Hashable, arrived_s: float
    ) -> None:
        self.query = query
        self.turn = turn
        self.key = key
        self.consumers: list[tuple[Request, int, int]] = []
        self.waiting = 0
        self.outputs: dict[Hashable, int] = _ROW_ONLY if output is None else {output: 0}
        self.values = _NO_VALUES
        self.has_failed = False
        self.arrived_s = arrived_s

    def add(self, request: Request, place: int, output: Hashable) -> None:
        """Add a consumer, and its output if no other consumer has requested it."""
        output_place = self.outputs.get(output)
        if output_place is None:
            output_place = len(self.outputs)
            if self.is_whole:
                self.outputs = _ROW_ONLY.copy()
            self.outputs[output] = output_place
        self.consumers.append((request, place, output_place))
        self.waiting += 1
        request.values[place] = self

    def fail(self, error: Exception) -> None:
        """Set an error of the query as the value of all outputs."""
        self.values = [error] * len(self.outputs)
        self.has_failed = True

    def end(self) -> None:
        """Remove the consumers, whose requests refer to this evaluation."""
        self.waiting = 0
        self.consumers = []

    @property
    def is_whole(self) -> bool:
        """Whether the whole result is the only requested output."""
        return self.outputs is _ROW_ONLY


class EvaluationQueue(dict[int, Evaluation]):
    """Evaluations by query id, in order of arrival, which can also be taken by turn."""

    _heap: list[tuple[int, int]] | None = None
    """Turns and ids, also of removed evaluations; None until evaluations are taken by turn."""

    def add(self, evaluation: Evaluation) -> None:
        """Add an evaluation."""
        query_id = evaluation.query.query_id
        if self._heap is not None:
            heapq.heappush(self._heap, (evaluation.turn, query_id))
        self[query_id] = evaluation

    def pop_first(self) -> Evaluation:
        """Remove and return the oldest evaluation of the first turn."""
        if self._heap is None:
            self._heap = [(evaluation.turn, query_id) for query_id, evaluation in self.items()]
            heapq.heapify(self._heap)
        while (query_id := self._heap[0][1]) not in self:
            heapq.heappop(self._heap)
        return self.pop(query_id)

    def compact(self) -> None:
        """Drop the heap if most of its evaluations were removed."""
        if self._heap is not None and len(self._heap) > 2 * len(self):
            self._heap = None

    def clear(self) -> None:
        """Remove all evaluations."""
        super().clear()
        self._heap = None


class RequestTable:
    """All unfinished evaluations and the counters of the scheduler.

    An evaluation moves from the inbox to the engine. The evaluations of a long request take
    turns with those of later requests.

    Attributes:
        inbox: Evaluations that are not yet in the engine, by query id.
        in_engine: Evaluations in the engine, by query id.
    """

    def __init__(self) -> None:
        self.inbox = EvaluationQueue()
        self.in_engine: dict[int, Evaluation] = {}
        self._turns = Turns()
        self._joinable: dict[Hashable, Evaluation] = {}
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
        """Add a query, or add the request to the unfinished evaluation with the same key.

        The outputs of a query are fixed once it is in the engine: a request that joins later
        can only share one of them.
        """
        evaluation = self._joinable.get(key)
        if evaluation is not None and (
            output in evaluation.outputs or evaluation.query.query_id not in self.in_engine
        ):
            evaluation.add(request, place, output)
            self._joined += 1
            return
        query_id = query.query_id
        if query_id in self.inbox or query_id in self.in_engine:
            raise ValueError(
                f"query id {query_id} belongs to an unfinished request; every query of a "
                f"scheduler needs a unique id (from itertools.count, for example)"
            )
        evaluation = Evaluation(query, self._turns.current + place, key, output, arrived_s)
        evaluation.add(request, place, output)
        self.inbox.add(evaluation)
        if key is not None:  # last: no request may join an evaluation that is not queued
            self._joinable[key] = evaluation

    def leave(self, request: Request) -> list[int]:
        """Remove an abandoned request.

        Returns:
            Ids of the queries that no other request needs, which the engine must abort.
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
                evaluation.end()
                self._abandoned += 1
        self.inbox.compact()
        return aborted

    def take(self, limit: int | None, now_s: float) -> list[Evaluation]:
        """Move up to `limit` evaluations from the inbox to the engine, by turn."""
        if limit is None or limit >= len(self.inbox):
            evaluations = list(self.inbox.values())
            self.inbox.clear()
        else:
            evaluations = [self.inbox.pop_first() for _ in range(limit)]
        if evaluations:
            self._turns.begin_step(min(map(_TURN, evaluations)))
        for evaluation in evaluations:
            self.in_engine[evaluation.query.query_id] = evaluation
            self._queue_seconds += now_s - evaluation.arrived_s
        self._dispatched += len(evaluations)
        return evaluations

    def close_to_joiners(self, evaluation: Evaluation) -> None:
        """Prevent further requests from joining an evaluation."""
        if self._joinable.get(evaluation.key) is evaluation:
            del self._joinable[evaluation.key]

    def separate_later_requests(self) -> set[int]:
        """Order further requests behind all evaluations, which they cannot join.

        Returns:
            The query ids of the evaluations.
        """
        self._joinable.clear()
        self._turns.begin_step(max(map(_TURN, self.inbox.values()), default=0))
        return {*self.in_engine, *self.inbox}

    def count_in_inbox(self, matches: Callable[[Any], bool]) -> int:
        """Return the number of queries in the inbox for which `matches` is true."""
        return sum(matches(evaluation.query) for evaluation in self.inbox.values())

    def finish(self, evaluation: Evaluation) -> list[Request]:
        """Remove an evaluation whose results have been written into its requests.

        An evaluation that has ended is ignored.

        Returns:
            The requests without further unfinished evaluations.
        """
        if not evaluation.waiting:
            return []
        self._remove(evaluation)
        if evaluation.has_failed:
            self._failed += 1
        else:
            self._answered += 1
        finished_requests = []
        for request, _, _ in evaluation.consumers:
            request.unfinished -= 1
            if not request.unfinished and not request.is_abandoned:
                finished_requests.append(request)
        evaluation.end()
        return finished_requests

    def drop(self, evaluation: Evaluation) -> None:
        """Remove an evaluation whose results are lost, unless it has ended."""
        if evaluation.waiting:
            self._remove(evaluation)
            evaluation.end()
            self._failed += 1

    def has_query(self, matches: Callable[[Any], bool]) -> bool:
        """Whether `matches` is true for the query of an unfinished evaluation."""
        queues = (self.in_engine, self.inbox)
        return any(matches(item.query) for queue in queues for item in queue.values())

    def count_batch(self, size: int) -> None:
        """Count a step that finished `size` evaluations."""
        self._batch_sizes[size] += 1

    def clear(self) -> list[Request]:
        """Remove all evaluations and return their requests; the caller fails them."""
        evaluations = [*self.in_engine.values(), *self.inbox.values()]
        for table in (self.in_engine, self.inbox, self._joinable):
            table.clear()
        self._failed += len(evaluations)
        requests: dict[Request, None] = {}
        for evaluation in evaluations:
            requests |= dict.fromkeys(request for request, _, _ in evaluation.consumers)
            evaluation.end()
        return [request for request in requests if not request.is_abandoned]

    def statistics(self, max_pending: int | None) -> SchedulerStatistics:
        """Return the counters; evaluations above `max_pending` count as waiting."""
        unfinished = len(self.inbox) + len(self.in_engine)
        pending = unfinished if max_pending is None else min(unfinished, max_pending)
        return SchedulerStatistics(
            joined=self._joined,
            dispatched=self._dispatched,
            answered=self._answered,
            failed=self._failed,
            abandoned=self._abandoned,
            batches=sum(self._batch_sizes.values()),
            batch_sizes=dict(self._batch_sizes),
            queue_seconds=self._queue_seconds,
            pending=pending,
            waiting=unfinished - pending,
        )

    def _remove(self, evaluation: Evaluation) -> None:
        self.close_to_joiners(evaluation)
        query_id = evaluation.query.query_id
        if self.in_engine.pop(query_id, None) is None:
            self.inbox.pop(query_id, None)
