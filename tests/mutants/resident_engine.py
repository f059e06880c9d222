"""`ResidentEngine`: a correct engine that keeps what it computed for each context.

A query that continues a context by one token costs one token. What is kept for a context goes
when the context is released, or least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict

import torch

from .attention import State
from .cached_engine import CachedEngine

ContextKey = tuple[str | None, bytes]


class ResidentEngine(CachedEngine):
    """Keeps the keys and values of whole contexts.

    Args:
        kv_budget: The most contexts kept.
    """

    def __init__(self, kv_budget: int = 4096) -> None:
        super().__init__(kv_budget)
        self.residents: OrderedDict[ContextKey, State] = OrderedDict()

    def evaluate(self, queries):
        return self.rows(torch.stack([self.resident_logits(query) for query in queries]))

    def resident_logits(self, query):
        sequence, adapter = query.sequence, query.adapter
        state = self.parent(adapter, sequence)
        if state is None:
            state, hidden = self.computed(query.token_ids, adapter)
        else:
            (last,) = sequence.ids_from(len(sequence) - 1)
            state, hidden = self.model(adapter).extend(state, last, self.position(state))
            self.tokens_computed += 1
        self.residents[adapter, self.key(sequence)] = state
        while len(self.residents) > self.prefixes.budget:
            self.residents.popitem(last=False)
        return torch.from_numpy(self.model(adapter).logits(hidden))

    def parent(self, adapter, sequence):
        """What is kept for the context without its last token."""
        if len(sequence) == 1:
            return None
        return self.residents.get((adapter, sequence.prefix_key(len(sequence) - 1)))

    def key(self, sequence):
        return sequence.key

    def release_context(self, adapter, key):
        self.residents.pop((adapter, key), None)

    def update_weights(self, weights):
        super().update_weights(weights)
        self.residents.clear()

    def remove_adapter(self, name):
        super().remove_adapter(name)
        for key in [key for key in self.residents if key[0] == name]:
            del self.residents[key]

    def clear_prefix_cache(self):
        super().clear_prefix_cache()
        self.residents.clear()
