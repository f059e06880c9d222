"""Throughput of a loaded model for each batch size and context length.

Each batch is measured twice: with new contexts, which share no prefix and are not cached, and
with the same contexts extended by one token, like the particles of a filter.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genlm.core.model.context import Context
    from genlm.core.model.lm import AsyncLM


@dataclass(frozen=True)
class Plan:
    """The batches to measure.

    Attributes:
        lengths: Context lengths in tokens.
        batch_sizes: Numbers of contexts per batch.
        repeats: Number of measurements per batch; medians are reported.
        steps: Number of times that the contexts of a measurement are extended by one token.
        most_tokens: Maximum number of tokens in a batch; larger batches are skipped.
        seed: Random seed of the token ids.
    """

    lengths: Sequence[int]
    batch_sizes: Sequence[int]
    repeats: int
    steps: int
    most_tokens: int
    seed: int

    @property
    def all_batches(self) -> list[tuple[int, int]]:
        """The length and size of every batch, the smallest first."""
        return list(itertools.product(sorted({*self.lengths}), sorted({*self.batch_sizes})))

    @property
    def batches(self) -> list[tuple[int, int]]:
        """The batches to measure: those with at most `most_tokens`."""
        return [(n, m) for n, m in self.all_batches if n * m <= self.most_tokens]

    def within(self, max_context: int | None) -> Plan:
        """Return the plan for a model's context, which bounds lengths with their extensions."""
        if max_context is None:
            return self
        lengths = [min(length, max_context - self.steps) for length in self.lengths]
        return replace(self, lengths=lengths)


@dataclass(frozen=True)
class Cell:
    """The speed of one batch.

    Attributes:
        context_tokens: Context length in tokens.
        batch_size: Number of contexts.
        new_rows_per_s: Rows per second for new contexts.
        continued_rows_per_s: Rows per second for contexts extended by one token.
    """

    context_tokens: int
    batch_size: int
    new_rows_per_s: float
    continued_rows_per_s: float


def first_row_s(llm: AsyncLM, tokens: int) -> float:
    """Return the latency in seconds of the first row after loading."""
    return _measure_seconds(llm, [next(_contexts(llm, tokens, random.Random(0)))])


def measure(llm: AsyncLM, plan: Plan) -> Iterator[Cell]:
    """Measure every batch of a plan.

    Args:
        llm: A model without an output cache, so that the engine computes all rows.
        plan: The batches to measure.
    """
    rng, token_ids = random.Random(plan.seed), _token_ids(llm)
    for length, size in plan.within(llm.max_context).batches:
        new, continued = [], []
        for _ in range(plan.repeats + 1):
            contexts = list(itertools.islice(_contexts(llm, length, rng), size))
            new.append(_measure_seconds(llm, contexts))
            steps = []
            for _ in range(plan.steps):
                contexts = [context.extend(rng.choice(token_ids)) for context in contexts]
                steps.append(_measure_seconds(llm, contexts))
            continued.append(statistics.median(steps))
        # The first measurement of a shape compiles kernels and allocates buffers.
        yield Cell(
            length,
            size,
            size / statistics.median(new[1:]),
            size / statistics.median(continued[1:]),
        )


def _measure_seconds(llm: AsyncLM, contexts: Sequence[Context]) -> float:
    began = time.perf_counter()
    llm.batch_next_token_logprobs_sync(contexts)
    return time.perf_counter() - began


def _contexts(llm: AsyncLM, tokens: int, rng: random.Random) -> Iterator[Context]:
    token_ids = _token_ids(llm)
    while True:
        yield llm.context(rng.choices(token_ids, k=tokens))


def _token_ids(llm: AsyncLM) -> list[int]:
    """Return half of the ids of text; models may lack embeddings of the highest ids."""
    from genlm.cli.text_ids import ids_with_text

    token_ids = ids_with_text(llm.vocabulary)
    return token_ids[: -(-len(token_ids) // 2)]
