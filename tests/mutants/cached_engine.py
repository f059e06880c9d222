"""`CachedEngine`: a correct engine with all optional abilities.

It has a prefix cache with eviction, adapters, and native sampling. The engine mutants are
subclasses, each with one broken method.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from genlm import (
    AdapterError,
    BatchEngine,
    Capability,
    Completion,
    Query,
    SamplingParams,
    rows_from_logits,
)
from genlm.plugin import TokenScores, stream_uniform

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


@dataclass
class Continuation:
    """A query with `sampling` and what was drawn for it so far."""

    query: Query
    params: SamplingParams
    uniforms: Iterator[float]
    drawn: list[int] = field(default_factory=list)

    @property
    def token_ids(self) -> Prefix:
        """The prompt and what was drawn."""
        return (*self.query.token_ids, *self.drawn)


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
        self.continuations: OrderedDict[int, Continuation] = OrderedDict()
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

    def score(self, queries: Sequence[Query]) -> list[TokenScores]:
        return [self.scores(query) for query in queries]

    def scores(self, query: Query) -> TokenScores:
        """Score the targets of a query, each from the hidden vector before it."""
        first = len(query) - len(query.targets) + 1
        ends = [query.token_ids[: first + place] for place in range(len(query.targets))]
        logits = np.stack([self.logits(end, query.adapter) for end in ends])
        rows = self.rows(torch.from_numpy(logits))
        logprobs = rows.gather(1, torch.tensor(query.targets)[:, None])[:, 0]
        return TokenScores(logprobs, logprobs >= rows.amax(-1))

    # -- continuations ----------------------------------------------------------------

    def submit(self, query: Query) -> None:
        if query.sampling is None:
            super().submit(query)
        else:
            self.continuations[query.query_id] = Continuation(
                query, query.sampling, self.stream(query.sampling)
            )

    def step(self) -> list[Completion]:
        finished = super().step()
        for query_id, continuation in list(self.continuations.items()):
            if self.draw(continuation):
                del self.continuations[query_id]
                finished.append(Completion(query_id, continuation.drawn))
        return finished

    def abort(self, query_id: int) -> None:
        super().abort(query_id)
        self.continuations.pop(query_id, None)

    def stream(self, params: SamplingParams) -> Iterator[float]:
        """The uniform numbers of one continuation."""
        return (stream_uniform(params.seed, position) for position in itertools.count())

    def draw(self, continuation: Continuation) -> bool:
        """Draw a token; whether the continuation has ended."""
        token_ids, params = continuation.token_ids, continuation.params
        row = self.rows(
            torch.from_numpy(self.logits(token_ids, continuation.query.adapter)[None])
        )
        token_id = self.drawn(row[0].double().numpy(), params, next(continuation.uniforms))
        if token_id in params.stop_token_ids:
            return True
        continuation.drawn.append(token_id)
        return (
            len(continuation.drawn) == params.max_tokens
            or len(continuation.token_ids) > self.max_context
        )

    def drawn(self, row: Floats, params: SamplingParams, uniform: float) -> int:
        """Draw from a row by inverting its distribution."""
        if params.temperature == 0:
            return int(row.argmax())
        weights = np.exp((row - row.max()) / params.temperature)
        cumulative = np.cumsum(weights)
        return int(np.searchsorted(cumulative, uniform * cumulative[-1], "right"))

    # -- adapters, prefixes, figures --------------------------------------------------

    def add_adapter(self, name: str, path: str) -> None:
        if path not in ADAPTER_SEEDS:
            raise AdapterError(f"no adapter in {path!r}")
        self.models[name] = base_model().adapted(ADAPTER_SEEDS[path])

    def remove_adapter(self, name: str) -> None:
        del self.models[name]

    def cache_prefix(self, token_ids: Sequence[int], adapter: str | None) -> None:
        prefix = tuple(token_ids)
        self.prefixes.pin(adapter, prefix, self.computed(prefix, adapter)[0])

    def clear_prefix_cache(self) -> None:
        self.prefixes.clear()

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
