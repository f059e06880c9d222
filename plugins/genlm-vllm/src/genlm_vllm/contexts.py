"""`ContextTable`: the resident requests of single contexts."""

from __future__ import annotations

from collections.abc import Set

from genlm.plugin import Query
from genlm_vllm.running_requests import Parent, ResidentRequest

__all__ = ["ContextTable"]

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
        self._by_context: dict[_Key, tuple[ResidentRequest, int]] = {}
        self._contexts: dict[ResidentRequest, list[_Key]] = {}

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
            self.remove({earlier.name})
        self._by_context[context] = resident, len(query)
        contexts = self._contexts.setdefault(resident, [])
        contexts.append(context)
        if len(contexts) > 2:
            self._forget(resident, contexts.pop(0))

    def find(self, context: _Key) -> ResidentRequest | None:
        """Return the request whose present context this is, or None."""
        resident, _ = self._by_context.get(context, (None, 0))
        return resident if resident and self._contexts[resident][-1] == context else None

    def parent(self, query: Query) -> Parent | None:
        """Find the longest context that a query extends by few enough tokens."""
        if not self._by_context:
            return None
        sequence, adapter, length = query.sequence, query.adapter, len(query)
        for shorter in range(length, max(0, length - 1 - _MAX_EXTENSION_TOKENS), -1):
            entry = self._by_context.get((adapter, sequence.prefix_key(shorter)))
            if entry is not None:
                return Parent(entry[0], shorter, list(sequence.ids_from(shorter)))
        return None

    def remove(self, names: Set[str]) -> int:
        """Remove requests by their ids; return how many the table had."""
        ended = [resident for resident in self._contexts if resident.name in names]
        for resident in ended:
            for context in self._contexts.pop(resident):
                self._forget(resident, context)
        return len(ended)

    def _forget(self, resident: ResidentRequest, context: _Key) -> None:
        if self._by_context.get(context, (None, 0))[0] is resident:
            del self._by_context[context]
