"""`ContextTable`: the resident requests of single contexts."""

from __future__ import annotations

from collections.abc import Iterable

from genlm.plugin import Query
from genlm_vllm.running_requests import Parent, ResidentRequest

_MAX_EXTENSION_TOKENS = 8
"""Maximum number of tokens by which a query may extend a context; the table has one look-up for
each length. Queries that add more tokens use vLLM's prefix cache."""

_MAX_CONTEXTS = 64
"""Maximum number of contexts that a request is listed under. Lists of token ids are never
released, so programs that pass them would otherwise add one at each step."""

_Key = tuple[str | None, bytes]


class ContextTable:
    """Requests by the adapter and the key of their contexts.

    A request is listed under its present context and under those from which it was continued,
    whose further children are forked, until they are released. The table keeps requests alive.

    Attributes:
        removed: Number of requests that were removed.
    """

    def __init__(self) -> None:
        self.removed = 0
        self._by_context: dict[_Key, ResidentRequest] = {}
        self._contexts: dict[str, dict[_Key, None]] = {}  # by the request's id, oldest first

    def __len__(self) -> int:
        """Number of requests."""
        return len(self._contexts)

    def put(self, query: Query, resident: ResidentRequest) -> None:
        """List a request under the context of a query, in place of an earlier request."""
        context = query.adapter, query.sequence.key
        if self._by_context.get(context) is resident:
            return
        self.release(context)
        self._by_context[context] = resident
        contexts = self._contexts.setdefault(resident.name, {})
        contexts[context] = None
        if len(contexts) > _MAX_CONTEXTS:
            self.release(next(iter(contexts)))

    def release(self, context: _Key) -> None:
        """Remove a context, and its request if that was its only context."""
        resident = self._by_context.pop(context, None)
        if resident is not None:
            contexts = self._contexts[resident.name]
            del contexts[context]
            if not contexts:
                del self._contexts[resident.name]
                self.removed += 1

    def parent(self, query: Query, length: int) -> Parent | None:
        """Find the longest context that a query extends by few enough tokens.

        Args:
            query: The query.
            length: Maximum number of tokens of the context, which has at most 8 fewer.
        """
        if not self._by_context:
            return None
        sequence, adapter = query.sequence, query.adapter
        for shorter in range(length, max(0, length - 1 - _MAX_EXTENSION_TOKENS), -1):
            resident = self._by_context.get((adapter, sequence.prefix_key(shorter)))
            if resident is not None:
                return Parent(resident, shorter, list(sequence.ids_from(shorter)))
        return None

    def remove(self, names: Iterable[str]) -> None:
        """Remove requests by their ids."""
        for name in names:
            for context in list(self._contexts.get(name, ())):
                self.release(context)
