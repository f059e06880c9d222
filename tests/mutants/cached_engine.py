"""`CachedEngine`: a correct engine with all optional abilities.

It has a prefix cache with eviction and adapters. The engine mutants are
subclasses, each with one broken method.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from genlm import AdapterError, BatchEngine, Capability, Query, rows_from_logits
from genlm.plugin import TokenScores
from genlm.prefix import PieceScores

from .attention import ADAPTER_SEEDS, CONTEXT, EMPTY, Attention, Floats, State, base_model
from .vocabulary import small_vocabulary

Prefix = tuple[int, ...]


class PrefixStore:
    """Keys and values of the prefixes of recent sequences, least recently used out.

    Args:
        budget: The most tokens stored, beside those of pinned prefixes.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.states: OrderedDict[tuple[str | None, Prefix], State] = OrderedDict()
        self.pinned: dict[tuple[str | None, Prefix], State] = {}

    def key(self, adapter: str | None, prefix: Prefix) -> tuple[str | None, Prefix]:
        """What must be the same for a state to be used again."""
        return adapter, prefix

    def longest(self, adapter: str | None, token_ids: Prefix) -> State:
        """The state of the longest prefix known; always leaves a token to compute."""
        for length in range(len(token_ids) - 1, 0, -1):
            key = self.key(adapter, token_ids[:length])
            for places in (self.pinned, self.states):
                if key in places:
                    return self.found(places[key], length)
        return EMPTY

    def found(self, state: State, length: int) -> State:
        """What of a stored state belongs to the prefix of `length` tokens."""
        return state.cut(length)

    def keep(self, adapter: str | None, token_ids: Prefix, state: State) -> None:
        """Remember the state under every prefix of the sequence."""
        for length in range(1, len(token_ids) + 1):
            key = self.key(adapter, token_ids[:length])
            self.states[key] = state
            self.states.move_to_end(key)
        while len(self.states) > self.budget:
            self.evict()

    def evict(self) -> None:
        """Drop the prefix used the longest time ago."""
        self.states.popitem(last=False)

    def pin(self, adapter: str | None, token_ids: Prefix, state: State) -> None:
        """Keep a prefix and all its prefixes, outside the budget."""
        for length in range(1, len(token_ids) + 1):
            self.pinned[self.key(adapter, token_ids[:length])] = state

    def clear(self) -> None:
        """Drop everything."""
        self.states.clear()
        self.pinned.clear()


class CachedEngine(BatchEngine):
    """Serves the model of `attention` through a cache of keys and values.

    Args:
        kv_budget: The most prefixes in the cache.
    """

    capabilities = frozenset(Capability)
    max_context = CONTEXT
    Store = PrefixStore

    def __init__(self, kv_budget: int = 4096) -> None:
        self.vocabulary = small_vocabulary()
        self.prefixes = self.Store(kv_budget)
        self.models: dict[str | None, Attention] = {None: base_model()}
        self.adapter_seeds: dict[str, int] = {}
        self.tokens_computed = 0

    # -- rows -------------------------------------------------------------------------

    def evaluate(self, queries: Sequence[Query]) -> torch.Tensor:
        logits = np.stack([self.logits(query.token_ids, query.adapter) for query in queries])
        return self.rows(torch.from_numpy(logits))

    def rows(self, logits: torch.Tensor) -> torch.Tensor:
        return rows_from_logits(logits, self.vocabulary)

    def logits(self, token_ids: Prefix, adapter: str | None) -> Floats:
        state, hidden = self.computed(token_ids, adapter)
        self.prefixes.keep(adapter, token_ids, state)
        return self.model(adapter).logits(hidden)

    def computed(self, token_ids: Prefix, adapter: str | None) -> tuple[State, Floats]:
        """State and last hidden vector of a sequence, from its longest known prefix."""
        state = self.prefixes.longest(adapter, token_ids)
        for token_id in token_ids[len(state) :]:
            state, hidden = self.model(adapter).extend(state, token_id, self.position(state))
            self.tokens_computed += 1
        return state, hidden

    def position(self, state: State) -> int:
        """The position of the token after a prefix."""
        return len(state)

    def model(self, adapter: str | None) -> Attention:
        return self.models[adapter]

    def score(self, queries: Sequence[Query]) -> list[Any]:
        reduced = iter(self.reduced([query for query in queries if query.outputs != (None,)]))
        return [
            self.scores(query) if query.outputs == (None,) else next(reduced)
            for query in queries
        ]

    def scores(self, query: Query) -> TokenScores:
        """Score the targets of a query, each from the hidden vector before it."""
        rows = self.rows(self.text_logits(query))
        logprobs = rows.gather(1, torch.tensor(query.targets)[:, None])[:, 0]
        return TokenScores(logprobs, logprobs >= rows.amax(-1))

    def reduced(self, queries: Sequence[Query]) -> list[Any]:
        """Reduce the rows that predict the targets of queries."""
        scores = PieceScores(queries, self.vocabulary)
        for query, end in zip(queries, scores.ends, strict=False):
            scores.add(end + np.arange(len(query.targets)), self.text_logits(query))
        return scores.results()

    def text_logits(self, query: Query) -> torch.Tensor:
        """Return the logits that predict the targets of a query."""
        first = query.first_target + 1
        ends = [query.token_ids[: first + place] for place in range(len(query.targets))]
        return torch.from_numpy(np.stack([self.logits(end, query.adapter) for end in ends]))

    # -- adapters, prefixes, figures --------------------------------------------------

    def add_adapter(self, name: str, path: str) -> None:
        if path not in ADAPTER_SEEDS:
            raise AdapterError(f"no adapter in {path!r}")
        self.adapter_seeds[name] = ADAPTER_SEEDS[path]
        self.adapt()

    def adapt(self) -> None:
        """Merge the adapters into the current weights."""
        for name, seed in self.adapter_seeds.items():
            self.models[name] = self.models[None].adapted(seed)

    def update_weights(self, weights: Mapping[str, Any] | None) -> None:
        if weights is not None:
            self.models[None] = base_model(int(weights["seed"]))
            self.adapt()
        self.prefixes.clear()

    def remove_adapter(self, name: str) -> None:
        del self.models[name], self.adapter_seeds[name]

    def cache_prefix(self, token_ids: Sequence[int], adapter: str | None) -> None:
        prefix = tuple(token_ids)
        self.prefixes.pin(adapter, prefix, self.computed(prefix, adapter)[0])

    def clear_prefix_cache(self) -> None:
        self.prefixes.clear()

    def wake(self) -> None:
        """Do nothing, because `step` never waits."""

    def statistics(self) -> Mapping[str, int | float | str]:
        return {"tokens_computed": self.tokens_computed}


class PlainEngine(BatchEngine):
    """The same model without any of the abilities: every row from nothing."""

    max_context = CONTEXT

    def __init__(self) -> None:
        self.vocabulary = small_vocabulary()

    def evaluate(self, queries: Sequence[Query]) -> torch.Tensor:
        logits = [self.logits(query.token_ids) for query in queries]
        return rows_from_logits(torch.from_numpy(np.stack(logits)), self.vocabulary)

    def logits(self, token_ids: Prefix) -> Floats:
        state, model = EMPTY, base_model()
        for position, token_id in enumerate(token_ids):
            state, hidden = model.extend(state, token_id, position)
        return model.logits(hidden)
