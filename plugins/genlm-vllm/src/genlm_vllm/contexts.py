"""`ContextTable`: the resident requests of single contexts."""

from __future__ import annotations

from collections.abc import Iterable

from genlm.plugin import Query
from genlm_vllm.running_requests import Parent, ResidentRequest

_MAX_EXTENSION_TOKENS = 8
"""Maximum number of tokens by which a query may extend a context; the table has one look-up for
each length. Queries that add more tokens use vLLM's prefix cache."""

_Key = tuple[str | None, bytes]


class ContextTable:
    """Requests by the adapter and the key of their context.

    A request is listed under its present context and the one before it, of which further
    children may be forked until the next step. The table keeps its requests alive.
    """

    def __init__(self) -> None:
        self._by_context: dict[_Key, ResidentRequest] = {}
        self._contexts: dict[str, list[_Key]] = {}  # by the request's id, oldest first

    def __len__(self) -> int:
        """Number of requests."""
        return len(self._contexts)

    def put(self, query: Query, resident: ResidentRequest) -> None:
        """Record that a request has the context of a query, and replace an earlier request."""
        context = query.adapter, query.sequence.key
        earlier = self.find(context)
        if earlier is resident:
            return
        if earlier is not None:  # not a request that was continued since
            self.remove([earlier.name])
        self._by_context[context] = resident
        contexts = self._contexts.setdefault(resident.name, [])
        contexts.append(context)
        if len(contexts) > 2:
            self._forget(resident.name, contexts.pop(0))

    def find(self, context: _Key) -> ResidentRequest | None:
        """Return the request whose present context this is, or None."""
        resident = self._by_context.get(context)
        is_present = resident is not None and self._contexts[resident.name][-1] == context
        return resident if is_present else None

    def parent(self, query: Query) -> Parent | None:
        """Find the longest context that a query extends by few enough tokens."""
        if not self._by_context:
            return None
        sequence, adapter, length = query.sequence, query.adapter, len(query)
        for shorter in range(length, max(0, length - 1 - _MAX_EXTENSION_TOKENS), -1):
            resident = self._by_context.get((adapter, sequence.prefix_key(shorter)))
            if resident is not None:
                return Parent(resident, shorter, list(sequence.ids_from(shorter)))
        return None

    def remove(self, names: Iterable[str]) -> int:
        """Remove requests by their ids; return how many the table had."""
        before = len(self)
        for name in names:
            for context in self._contexts.pop(name, ()):
                self._forget(name, context)
        return before - len(self)

    def _forget(self, name: str, context: _Key) -> None:
        resident = self._by_context.get(context)
        if resident is not None and resident.name == name:
            del self._by_context[context]
