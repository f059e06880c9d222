"""`ContextTable`: the resident requests of single contexts."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from genlm.plugin import Query
from genlm_vllm.running_requests import LivingRequest

__all__ = ["ContextTable", "Parent"]

_MOST_ADDED = 8
"""Maximum number of tokens by which a query may extend a context; every number is a look-up.
For more tokens vLLM's prefix cache serves the beginning."""

_Key = tuple[str | None, bytes]


class Parent(NamedTuple):
    """The request that a query extends.

    Attributes:
        living: Request that has the context's tokens.
        length: Number of these tokens.
        added: The query's further tokens.
    """

    living: LivingRequest
    length: int
    added: list[int]


class ContextTable:
    """Requests by the adapter and the key of their context.

    A request is found by its present context, and by the one before it, of which further
    children may be forked until the next step. The table keeps requests alive.
    """

    def __init__(self) -> None:
        self._by_context: dict[_Key, tuple[LivingRequest, int]] = {}
        self._contexts: dict[LivingRequest, list[_Key]] = {}

    def __len__(self) -> int:
        """Number of requests."""
        return len(self._contexts)

    def put(self, query: Query, living: LivingRequest) -> None:
        """Record that a request has the context of a query, in place of another request."""
        context = query.adapter, query.sequence.key
        earlier = self.find(context)
        if earlier is living:
            return
        if earlier is not None:  # one that has gone on keeps its present context
            self.remove({earlier.name})
        self._by_context[context] = living, len(query)
        known = self._contexts.setdefault(living, [])
        known.append(context)
        if len(known) > 2:
            self._forget(living, known.pop(0))

    def find(self, context: _Key) -> LivingRequest | None:
        """Return the request whose present context is this one, or None."""
        living, _ = self._by_context.get(context, (None, 0))
        return living if living and self._contexts[living][-1] == context else None

    def parent(self, query: Query) -> Parent | None:
        """Find the longest context that a query extends by up to `_MOST_ADDED` tokens."""
        if not self._by_context:
            return None
        sequence, adapter, length = query.sequence, query.adapter, len(query)
        for shorter in range(length, max(0, length - 1 - _MOST_ADDED), -1):
            found = self._by_context.get((adapter, sequence.prefix_key(shorter)))
            if found is not None:
                return Parent(found[0], shorter, list(sequence.ids_from(shorter)))
        return None

    def remove(self, names: Set[str]) -> int:
        """Forget requests by their ids; return how many were known."""
        ended = [living for living in self._contexts if living.name in names]
        for living in ended:
            for context in self._contexts.pop(living):
                self._forget(living, context)
        return len(ended)

    def _forget(self, living: LivingRequest, context: _Key) -> None:
        if self._by_context.get(context, (None, 0))[0] is living:
            del self._by_context[context]
