"""`RequestTable`: requests by query and by context, and their eviction order.

The table does not depend on vLLM: `query_requests` begins, continues and ends the requests.

    query --begin--> busy --------answered, rest--------> idle --end_oldest--> (gone)
                      |  <-------------resume------------  |  --end_context, end_idle-->
                      +--answered, end; end_query--> (gone)

A busy request has an unanswered query. An idle request has a context, of which vLLM keeps the
KV blocks, and waits for a query that continues it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from genlm.plugin import Query

__all__ = ["MOST_ADDED", "Parent", "Request", "RequestTable"]

MOST_ADDED = 8
"""Maximum number of tokens by which a query may continue a request; every number is a look-up.
More tokens begin a new request, of which vLLM's prefix cache serves the beginning."""

_ContextKey = tuple[str | None, bytes]


@dataclass(slots=True, eq=False)
class Request:
    """A request of vLLM.

    Attributes:
        name: The request's id in vLLM.
        number: Ascending; also the key of what the workers store for it.
        core_request: The request as it was last sent to vLLM, to be sent again.
        query: The unanswered query, or the last one if the request is idle.
        stays: Whether vLLM keeps it when its row is there.
        reads_cache: Whether vLLM's prefix cache may serve its beginning.
        added: Tokens that were added for `query`; None if it began the request.
        cached: Tokens that were not computed when it began.
        drawn: Tokens of its continuation.
        computed: The last two contexts that were computed, of which its KV blocks have all
            tokens: adapters and keys, the newer one last.
    """

    name: str
    number: int
    core_request: Any
    query: Query
    stays: bool = True
    reads_cache: bool = True
    added: int | None = None
    cached: int = 0
    drawn: list[int] = field(default_factory=list)
    computed: list[_ContextKey] = field(default_factory=list)

    @property
    def tokens_computed(self) -> int:
        """Number of tokens that the model computed for the last query."""
        begun = len(self.query) - self.cached if self.added is None else self.added
        return begun + max(0, len(self.drawn) - 1)  # the last one is not an input

    @property
    def context(self) -> _ContextKey:
        """Adapter and key of its context once `query` is answered."""
        return self.query.adapter, self.query.sequence.key


class Parent(NamedTuple):
    """The request that a query continues.

    Attributes:
        request: Request whose computed context the query continues.
        length: Number of the context's tokens.
        added: The query's further tokens.
    """

    request: Request
    length: int
    added: tuple[int, ...]


class RequestTable:
    """Idle requests by context, least recently used first, and busy ones by name.

    Requests are also found by the contexts of which they have the KV blocks.
    """

    def __init__(self) -> None:
        self._by_computed: dict[_ContextKey, Request] = {}
        self._idle: OrderedDict[_ContextKey, Request] = OrderedDict()
        self._busy: dict[str, Request] = {}
        self._by_query: dict[int, Request] = {}

    @property
    def idle(self) -> int:
        """Number of idle requests."""
        return len(self._idle)

    @property
    def busy(self) -> int:
        """Number of busy requests."""
        return len(self._busy)

    @property
    def staying(self) -> int:
        """Number of requests that are idle or will be."""
        return len(self._idle) + sum(each.stays for each in tuple(self._busy.values()))

    def parent(self, query: Query) -> Parent | None:
        """Find the longest context that a query continues, by up to `MOST_ADDED` tokens.

        A context of the same length does not count, because its row is not stored.
        """
        if not self._by_computed:
            return None
        sequence, adapter = query.sequence, query.adapter
        length = len(sequence)
        for shorter in range(length - 1, max(0, length - 1 - MOST_ADDED), -1):
            found = self._by_computed.get((adapter, sequence.prefix_key(shorter)))
            if found is not None:
                return Parent(found, shorter, sequence.ids_from(shorter))
        return None

    def can_resume(self, parent: Parent) -> bool:
        """Whether an idle request has no more tokens than a query continues."""
        request = parent.request
        same = len(request.query) == parent.length
        return same and self._idle.get(request.context) is request

    def begin(self, request: Request) -> None:
        """Add a request, whose query is unanswered."""
        self._busy[request.name] = request
        self._by_query[request.query.query_id] = request

    def resume(self, parent: Parent, query: Query) -> None:
        """Assign a query to the idle request that it continues."""
        request = parent.request
        del self._idle[request.context]
        request.query, request.added = query, len(parent.added)
        self.begin(request)

    def find(self, name: str) -> Request | None:
        """Return the busy request of a name, or None."""
        return self._busy.get(name)

    def answered(self, name: str) -> Request | None:
        """Remove and return the busy request of a name, for `rest` or `end`; or None."""
        request = self._busy.pop(name, None)
        if request is not None:
            del self._by_query[request.query.query_id]
        return request

    def rest(self, request: Request) -> Request | None:
        """Keep a request that was answered, as the most recently used one.

        Returns:
            The earlier request of the same context, removed from the table.
        """
        context = request.context
        other = self._idle.pop(context, None)
        if other is not None:
            self._forget(other)
        self._idle[context] = request
        self._by_computed[context] = request
        request.computed.append(context)
        if len(request.computed) > 2:
            self._forget_context(request, request.computed.pop(0))
        return other

    def _forget(self, request: Request) -> Request:
        for context in request.computed:
            self._forget_context(request, context)
        return request

    def _forget_context(self, request: Request, context: _ContextKey) -> None:
        if self._by_computed.get(context) is request:
            del self._by_computed[context]

    # -- ends: these methods remove the requests that they return ----------------------

    def end(self, request: Request) -> None:
        """Forget a request that was answered."""
        self._forget(request)

    def end_query(self, query_id: int) -> Request | None:
        """Remove and return the request that is busy with a query, or None."""
        request = self._by_query.get(query_id)
        if request is None:
            return None
        self.answered(request.name)
        return self._forget(request)

    def end_context(self, adapter: str | None, key: bytes) -> Request | None:
        """Remove and return the idle request of a context, or None."""
        request = self._idle.pop((adapter, key), None)
        return None if request is None else self._forget(request)

    def end_oldest(self, count: int) -> list[Request]:
        """Remove up to that many idle requests, least recently used first."""
        count = min(count, len(self._idle))
        return [self._forget(self._idle.popitem(last=False)[1]) for _ in range(count)]

    def end_idle(self, ends: Callable[[Request], bool] = lambda _: True) -> list[Request]:
        """Remove all idle requests that a function chooses."""
        ended = [request for request in self._idle.values() if ends(request)]
        for request in ended:
            del self._idle[request.context]
            self._forget(request)
        return ended

    def end_youngest_resumed(self) -> list[Request]:
        """Remove the younger half of the busy requests that continue a context."""
        resumed = [each for each in self._busy.values() if each.added is not None]
        ended = resumed[len(resumed) // 2 :]
        for request in ended:
            self.answered(request.name)
            self._forget(request)
        return ended

    def unanswered(self) -> Iterator[Query]:
        """Yield the queries of busy requests, oldest first."""
        return (request.query for request in self._busy.values())
