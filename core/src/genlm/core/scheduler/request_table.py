"""The request table: where each unfinished request is, and who waits for it.

Bookkeeping only: no threads, no event loops, no engine. The worker guards it with
its lock. Every operation but `has_query` and `clear` is
O(1) in the number of requests.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Protocol

from genlm.core.scheduler.delivery import Waiter
from genlm.core.statistics import SchedulerStatistics

__all__ = ["Identified", "PendingRequest", "RequestTable"]


class Identified(Protocol):
    """Anything that can be scheduled: it has an id of its own."""

    @property
    def query_id(self) -> int:
        """Names the answer; unique among the scheduler's queries."""
        ...


class PendingRequest:
    """One evaluation and the callers that wait for it; guarded by the worker's lock.

    Finishing a request removes its waiters, so that a caller who is cancelled at that
    moment finds itself removed already.

    Attributes:
        query: What the engine is asked.
        key: Requests with equal keys share an evaluation; None is never shared.
        waiters: Futures of the callers, and what each wants: the place of its output in
            `outputs`. Empty means abandoned.
        outputs: What is wanted of the evaluation, by place; None is the whole result.
        arrived_s: `time.perf_counter()` at arrival.
    """

    __slots__ = ("arrived_s", "key", "outputs", "query", "waiters")

    def __init__(
        self, query: Any, key: Hashable, waiter: Waiter, output: Hashable, arrived_s: float
    ) -> None:
        self.query = query
        self.key = key
        self.waiters: dict[Waiter, int] = {waiter: 0}
        self.outputs: dict[Hashable, int] = {output: 0}
        self.arrived_s = arrived_s

    def add(self, waiter: Waiter, output: Hashable) -> None:
        """Add a caller and, if it is new, what it wants."""
        self.waiters[waiter] = self.outputs.setdefault(output, len(self.outputs))

    def drop_unwanted(self) -> None:
        """Remove the outputs that only callers who left wanted."""
        if len(self.outputs) == 1:
            return
        wanted = set(self.waiters.values())
        kept = [output for output, place in self.outputs.items() if place in wanted]
        if len(kept) < len(self.outputs):
            moved = {self.outputs[output]: place for place, output in enumerate(kept)}
            self.outputs = {output: place for place, output in enumerate(kept)}
            self.waiters = {waiter: moved[place] for waiter, place in self.waiters.items()}

    @property
    def is_whole(self) -> bool:
        """Whether the whole result is all that is wanted."""
        return len(self.outputs) == 1 and None in self.outputs

    def output_key(self, output: Hashable) -> Hashable:
        """Return the key under which an output is stored; None if it is not."""
        return self.key if output is None or self.key is None else (self.key, output)

    def take_waiters(self) -> list[tuple[Waiter, int]]:
        """Remove and return all waiters, with the places of their outputs."""
        waiters = list(self.waiters.items())
        self.waiters.clear()
        return waiters


class RequestTable:
    """All unfinished requests, in order of arrival, and the counters about them.

    A request is held back by `max_pending`, then in the inbox, then in the engine.

    Attributes:
        inbox: Requests admitted and not yet in the engine, by query id.
        in_engine: Requests that the engine works on, by query id.
        admitted_late: Whether the inbox has requests that were held back first: no caller
            will flush the inbox for them.
    """

    def __init__(self, max_pending: int | None) -> None:
        self.inbox: OrderedDict[int, PendingRequest] = OrderedDict()
        self.in_engine: dict[int, PendingRequest] = {}
        self.admitted_late = False
        self._held_back: OrderedDict[int, PendingRequest] = OrderedDict()
        self._joinable: dict[Hashable, PendingRequest] = {}
        self._max_pending = max_pending
        self._joined = self._answered = self._failed = self._abandoned = 0
        self._batch_sizes: Counter[int] = Counter()
        self._dispatched = 0
        self._queue_seconds = 0.0

    def enqueue(
        self,
        query: Identified,
        key: Hashable,
        waiter: Waiter,
        arrived_s: float,
        output: Hashable = None,
    ) -> PendingRequest:
        """Add a request, or let its caller join the request with the same key.

        What the engine was asked for is fixed: of a request that it works on, a caller can
        only share an output that somebody else wants.

        Raises:
            ValueError: An unfinished request has the same id.
        """
        request = self._joinable.get(key) if key is not None else None
        if request is not None and (
            output in request.outputs or request.query.query_id not in self.in_engine
        ):
            request.add(waiter, output)
            self._joined += 1
            return request
        query_id = query.query_id
        if query_id in self.inbox or query_id in self.in_engine or query_id in self._held_back:
            raise ValueError(
                f"query id {query_id} is that of an unanswered request; every query of a "
                f"scheduler needs an id of its own (itertools.count, for example)"
            )
        request = PendingRequest(query, key, waiter, output, arrived_s)
        place = self._held_back if self._held_back or self._is_full else self.inbox
        place[query_id] = request
        if key is not None:  # last: Ctrl-C may keep a request from its place, not from joiners
            self._joinable[key] = request
        return request

    def leave(self, request: PendingRequest, waiter: Waiter) -> bool:
        """Remove a waiter; True if the engine should now abort the request."""
        if waiter not in request.waiters:
            return False
        del request.waiters[waiter]
        if request.waiters:
            return False
        aborts = request.query.query_id in self.in_engine
        self._remove(request)
        self._abandoned += 1
        return aborts

    def take(self, limit: int | None, now_s: float) -> list[PendingRequest]:
        """Move up to `limit` requests from the inbox to the engine, oldest first."""
        if limit is None or limit >= len(self.inbox):
            taken = list(self.inbox.values())
            self.inbox.clear()
        else:
            taken = [self.inbox.popitem(last=False)[1] for _ in range(limit)]
        self.admitted_late = self.admitted_late and bool(self.inbox)
        for request in taken:
            request.drop_unwanted()
            self.in_engine[request.query.query_id] = request
            self._queue_seconds += now_s - request.arrived_s
        self._dispatched += len(taken)
        return taken

    def finish(self, query_id: int, *, failed: bool) -> list[tuple[Waiter, int]]:
        """Remove an answered request and return its waiters; none if it was abandoned.

        With each waiter comes the place of what it wants in the request's `outputs`.
        """
        request = self.in_engine.pop(query_id, None)
        if request is None:
            return []
        self._close_to_joiners(request)
        if self._held_back:
            self._admit()
        if failed:
            self._failed += 1
        else:
            self._answered += 1
        return request.take_waiters()

    def has_query(self, matches: Callable[[Any], bool]) -> bool:
        """Whether `matches` is true for the query of an unfinished request."""
        places = (self.in_engine, self.inbox, self._held_back)
        return any(matches(request.query) for place in places for request in place.values())

    def count_batch(self, size: int) -> None:
        """Record that one step finished `size` evaluations."""
        self._batch_sizes[size] += 1

    def clear(self) -> list[Waiter]:
        """Remove all requests and return all waiters; the caller fails them."""
        requests = [
            *self.in_engine.values(),
            *self.inbox.values(),
            *self._held_back.values(),
        ]
        for places in (self.in_engine, self.inbox, self._held_back, self._joinable):
            places.clear()
        self.admitted_late = False
        self._failed += len(requests)
        return [waiter for request in requests for waiter, _ in request.take_waiters()]

    def statistics(self) -> SchedulerStatistics:
        """A snapshot of the counters."""
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
            waiting=len(self._held_back),
        )

    @property
    def _pending(self) -> int:
        return len(self.inbox) + len(self.in_engine)

    @property
    def _is_full(self) -> bool:
        return self._max_pending is not None and self._pending >= self._max_pending

    def _admit(self) -> None:
        """Fill the inbox up to `max_pending` with what was held back."""
        while self._held_back and not self._is_full:
            query_id, request = self._held_back.popitem(last=False)
            self.inbox[query_id] = request
            self.admitted_late = True

    def _remove(self, request: PendingRequest) -> None:
        self._close_to_joiners(request)
        for place in (self.in_engine, self.inbox, self._held_back):
            if place.pop(request.query.query_id, None) is not None:
                break
        self._admit()

    def _close_to_joiners(self, request: PendingRequest) -> None:
        if request.key is not None and self._joinable.get(request.key) is request:
            del self._joinable[request.key]
