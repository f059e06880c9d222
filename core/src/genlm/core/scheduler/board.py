"""Where each request is: held back, in the inbox, or in the engine.

Bookkeeping only: no threads, no event loops, no engine. The worker guards it with
its lock. Every operation is O(1) in the number of requests.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable

from genlm.core.scheduler.flight import Flight, Identified, Waiter
from genlm.core.statistics import SchedulerStatistics

__all__ = ["Board"]


class Board:
    """All unfinished flights, in order of arrival, and the counters about them.

    Attributes:
        inbox: Flights admitted and not yet in the engine, by query id.
        in_engine: Flights that the engine works on, by query id.
        admitted_late: Whether the inbox has flights that were held back first: no caller
            is about to say that they may leave.
    """

    def __init__(self, max_pending: int | None) -> None:
        self.inbox: OrderedDict[int, Flight] = OrderedDict()
        self.in_engine: dict[int, Flight] = {}
        self.admitted_late = False
        self._held_back: OrderedDict[int, Flight] = OrderedDict()
        self._joinable: dict[Hashable, Flight] = {}
        self._max_pending = max_pending
        self._joined = self._answered = self._failed = self._abandoned = 0
        self._batch_sizes: Counter[int] = Counter()
        self._queue_seconds = 0.0

    def enqueue(
        self, query: Identified, key: Hashable, waiter: Waiter, arrived_s: float
    ) -> Flight:
        """Add a request, or let it join the flight with the same key.

        Raises:
            ValueError: An unfinished request has the same id.
        """
        flight = self._joinable.get(key) if key is not None else None
        if flight is not None:
            flight.waiters[waiter] = None
            self._joined += 1
            return flight
        query_id = query.query_id
        if query_id in self.inbox or query_id in self.in_engine or query_id in self._held_back:
            raise ValueError(
                f"query id {query_id} is that of an unanswered request; every query of a "
                f"scheduler needs an id of its own (itertools.count, for example)"
            )
        flight = Flight(query, key, waiter, arrived_s)
        place = self._held_back if self._held_back or self._is_full else self.inbox
        place[query_id] = flight
        if key is not None:  # last: nobody may join a flight that Ctrl-C kept from its place
            self._joinable[key] = flight
        return flight

    def leave(self, flight: Flight, waiter: Waiter) -> bool:
        """Remove a waiter; True if the engine should now abort the flight."""
        if waiter not in flight.waiters:
            return False
        del flight.waiters[waiter]
        if flight.waiters:
            return False
        query_id = flight.query.query_id
        aborts = query_id in self.in_engine
        self._remove(flight)
        self._abandoned += 1
        return aborts

    def take(self, limit: int | None, now_s: float) -> list[Flight]:
        """Move up to `limit` flights from the inbox to the engine, oldest first."""
        if limit is None or limit >= len(self.inbox):
            taken = list(self.inbox.values())
            self.inbox.clear()
        else:
            taken = [self.inbox.popitem(last=False)[1] for _ in range(limit)]
        self.admitted_late = self.admitted_late and bool(self.inbox)
        for flight in taken:
            self.in_engine[flight.query.query_id] = flight
            self._queue_seconds += now_s - flight.arrived_s
        return taken

    def finish(self, query_id: int, *, failed: bool) -> list[Waiter]:
        """Remove an answered flight and return its waiters; none if it was abandoned."""
        flight = self.in_engine.pop(query_id, None)
        if flight is None:
            return []
        self._close_to_joiners(flight)
        if self._held_back:
            self._admit()
        if failed:
            self._failed += 1
        else:
            self._answered += 1
        return flight.take_waiters()

    def count_batch(self, size: int) -> None:
        """Record that one step finished `size` evaluations."""
        self._batch_sizes[size] += 1

    def clear(self) -> list[Waiter]:
        """Remove all flights and return everybody who waited; the caller fails them."""
        flights = [*self.in_engine.values(), *self.inbox.values(), *self._held_back.values()]
        for places in (self.in_engine, self.inbox, self._held_back, self._joinable):
            places.clear()
        self.admitted_late = False
        self._failed += len(flights)
        return [waiter for flight in flights for waiter in flight.take_waiters()]

    def statistics(self) -> SchedulerStatistics:
        """A snapshot of the counters."""
        return SchedulerStatistics(
            joined=self._joined,
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
            query_id, flight = self._held_back.popitem(last=False)
            self.inbox[query_id] = flight
            self.admitted_late = True

    def _remove(self, flight: Flight) -> None:
        self._close_to_joiners(flight)
        for place in (self.in_engine, self.inbox, self._held_back):
            if place.pop(flight.query.query_id, None) is not None:
                break
        self._admit()

    def _close_to_joiners(self, flight: Flight) -> None:
        if flight.key is not None and self._joinable.get(flight.key) is flight:
            del self._joinable[flight.key]
