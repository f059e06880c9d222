"""Random walks of contexts, and the largest error of their rows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import torch

from genlm import Query
from genlm.plugin import TokenSequence
from genlm.testing import TINY_VOCABULARY
from genlm_sgl.conformance import TinyLlama

Context = tuple[int, ...]


class Walk:
    """Contexts that grow, fork, wait and are cancelled at random.

    Args:
        engine: The engine.
        tiny: The model, which is the oracle.
        seed: Seed of the walk.
        adapters: Adapters of contexts.
        longest: Length at which contexts are replaced by new prompts.
    """

    def __init__(
        self,
        engine: Any,
        tiny: TinyLlama,
        seed: int,
        *,
        adapters: Sequence[str | None] = (None,),
        longest: int = 60,
    ) -> None:
        self._engine, self._tiny = engine, tiny
        self._random = random.Random(seed)
        self._adapters, self._longest = adapters, longest
        self._ids = itertools.count(1000 * seed)
        self.pending: dict[int, Query] = {}
        self.answered: list[tuple[Query, Any]] = []
        self.contexts: list[tuple[str | None, Context]] = []

    def tokens(self, count: int) -> Context:
        return tuple(self._random.randrange(TINY_VOCABULARY) for _ in range(count))

    def submit(self, adapter: str | None, context: Context) -> int:
        number = next(self._ids)
        query = Query(number, TokenSequence.of(context), adapter)
        self.pending[number] = query
        self._engine.submit(query)
        return number

    def step(self) -> None:
        for completion in self._engine.step():
            assert completion.error is None, completion.error
            query = self.pending.pop(completion.query_id)  # neither cancelled nor complete
            self.answered.append((query, completion.result))

    def run(self, steps: int, population: int) -> None:
        """Take random steps with a population of contexts, and complete all queries."""
        for _ in range(population):
            prompt = self.tokens(self._random.randint(1, 12))
            self.contexts.append((self._random.choice(self._adapters), prompt))
        for _ in range(steps):
            for place in range(population):
                if self._random.random() < 0.6:  # other contexts wait
                    self._act(place)
            for _ in range(self._random.randint(0, 3)):
                self.step()
        self.finish()

    def finish(self) -> None:
        for _ in range(300):
            if not self.pending:
                return
            self.step()
        raise AssertionError(f"{len(self.pending)} queries wait for ever")

    def _act(self, place: int) -> None:
        adapter, context = self.contexts[place]
        draw = self._random.random()
        if len(context) >= self._longest:
            context = self.tokens(self._random.randint(1, 12))
        elif draw < 0.55:
            context = (*context, *self.tokens(1))
        elif draw < 0.65:  # several tokens at once
            context = (*context, *self.tokens(self._random.randint(2, 9)))
        elif draw < 0.75:  # as resampling does
            adapter, context = self._random.choice(self.contexts)
            context = (*context, *self.tokens(1))
        elif draw < 0.80 and len(context) > 1:  # a sibling, or the parent again
            context = (*context[:-1], *self.tokens(self._random.randint(0, 1)))
        elif draw < 0.85:
            self._engine.release_context(adapter, TokenSequence.of(context).key)
            return
        elif draw < 0.95 and self.pending:
            number = self._random.choice(list(self.pending))
            del self.pending[number]
            self._engine.abort(number)
            return
        elif draw < 0.96:
            self._engine.cache_prefix(context, adapter)
            return
        self.contexts[place] = adapter, context
        self.submit(adapter, context)

    def largest_error(self) -> float:
        """Return the largest error against unbatched forward passes."""
        largest = 0.0
        for query, result in self.answered:
            assert isinstance(result, torch.Tensor)
            expected = self._tiny.logprobs(query.token_ids, query.adapter)
            largest = max(largest, float((result - expected).abs().max()))
        return largest
