"""`ResidentTable`: which contexts vLLM keeps between steps, and which of them end first.

A resident is a request of vLLM that stays when its row is there and is continued with the next
tokens. It is idle, and then has a context, or busy, and then has a query. The table knows no
vLLM: `resident_requests` starts, continues and ends the requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from genlm.plugin import Query

__all__ = ["MOST_ADDED", "Parent", "Resident", "ResidentTable"]

MOST_ADDED = 8
"""Most tokens by which a query may continue a resident; each number is a look-up. More tokens
begin a new request, of which vLLM's prefix cache serves the beginning."""

_ContextKey = tuple[str | None, bytes]


@dataclass(slots=True, eq=False)
class Resident:
    """A request that stays in vLLM.

    Attributes:
        name: The request's id in vLLM.
        number: Ascending; also the key of its rows.
        request: What vLLM was sent last, to be sent again with other tokens.
        query: The unanswered query, or the last one if the resident is idle.
        added: Tokens that were added for `query`; None if it began the request.
        computed: The last two contexts that were computed, of which its KV blocks have all
            tokens: adapters and keys, the newer one last.
    """

    name: str
    number: int
    request: Any
    query: Query
    added: int | None = None
    computed: list[_ContextKey] = field(default_factory=list)

    @property
    def context(self) -> _ContextKey:
        """Adapter and key of the context that it has, once `query` is answered."""
        return self.query.adapter, self.query.sequence.key


class Parent(NamedTuple):
    """What a query continues.

    Attributes:
        resident: Has computed a context that the query continues.
        length: Number of the context's tokens.
        added: The query's further tokens.
    """

    resident: Resident
    length: int
    added: tuple[int, ...]


class ResidentTable:
    """Idle residents by context, least recently used first, and busy ones by name.

    Residents are also found by the contexts of which they have the KV blocks.
    """

    def __init__(self) -> None:
        self._by_computed: dict[_ContextKey, Resident] = {}
        self._idle: OrderedDict[_ContextKey, Resident] = OrderedDict()
        self._busy: dict[str, Resident] = {}
        self._by_query: dict[int, Resident] = {}

    @property
    def idle(self) -> int:
        """Number of idle residents."""
        return len(self._idle)

    @property
    def busy(self) -> int:
        """Number of busy residents."""
        return len(self._busy)

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    def parent(self, query: Query) -> Parent | None:
        """Find the longest context that a query continues, by up to `MOST_ADDED` tokens.

        A context of the same length is none, because its row is not stored.
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
        """Whether a resident is idle, with no more tokens than a query continues."""
        resident = parent.resident
        same = len(resident.query) == parent.length
        return same and self._idle.get(resident.context) is resident

    def begin(self, resident: Resident) -> None:
        """Add a resident, whose query is unanswered."""
        self._busy[resident.name] = resident
        self._by_query[resident.query.query_id] = resident

    def resume(self, parent: Parent, query: Query) -> None:
        """Give an idle resident the query that continues it."""
        resident = parent.resident
        del self._idle[resident.context]
        resident.query, resident.added = query, len(parent.added)
        self.begin(resident)

    def answered(self, name: str) -> Resident | None:
        """Return the busy resident of a name, for `rest` or `end`; None if there is none."""
        resident = self._busy.pop(name, None)
        if resident is not None:
            del self._by_query[resident.query.query_id]
        return resident

    def rest(self, resident: Resident) -> Resident | None:
        """Keep a resident that was answered, as the most recently used one.

        Returns:
            The one that had the same context before; it is no longer in the table.
        """
        context = resident.context
        other = self._idle.pop(context, None)
        if other is not None:
            self._forget(other)
        self._idle[context] = resident
        self._by_computed[context] = resident
        resident.computed.append(context)
        if len(resident.computed) > 2:
            self._forget_context(resident, resident.computed.pop(0))
        return other

    def _forget(self, resident: Resident) -> Resident:
        for context in resident.computed:
            self._forget_context(resident, context)
        return resident

    def _forget_context(self, resident: Resident, context: _ContextKey) -> None:
        if self._by_computed.get(context) is resident:
            del self._by_computed[context]

    # -- ends: what these methods return is no longer in the table ---------------------

    def end(self, resident: Resident) -> None:
        """Forget a resident that was answered."""
        self._forget(resident)

    def end_query(self, query_id: int) -> Resident | None:
        """Remove the resident that is busy with a query; None if there is none."""
        resident = self._by_query.get(query_id)
        if resident is None:
            return None
        self.answered(resident.name)
        return self._forget(resident)

    def end_context(self, adapter: str | None, key: bytes) -> Resident | None:
        """Remove the idle resident of a context; None if there is none."""
        resident = self._idle.pop((adapter, key), None)
        return None if resident is None else self._forget(resident)

    def end_oldest(self, count: int) -> list[Resident]:
        """Remove up to so many idle residents, least recently used first."""
        count = min(count, len(self._idle))
        return [self._forget(self._idle.popitem(last=False)[1]) for _ in range(count)]

    def end_idle(self, ends: Callable[[Resident], bool] = lambda _: True) -> list[Resident]:
        """Remove all idle residents that a function chooses."""
        ended = [resident for resident in self._idle.values() if ends(resident)]
        for resident in ended:
            del self._idle[resident.context]
            self._forget(resident)
        return ended

    def end_youngest_resumed(self) -> list[Resident]:
        """Remove the younger half of the busy residents that continue a context."""
        resumed = [each for each in self._busy.values() if each.added is not None]
        ended = resumed[len(resumed) // 2 :]
        for resident in ended:
            self.answered(resident.name)
            self._forget(resident)
        return ended

    def unanswered(self) -> Iterator[Query]:
        """Yield the queries of busy residents, oldest first."""
        return (resident.query for resident in self._busy.values())
