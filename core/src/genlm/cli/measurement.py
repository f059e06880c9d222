"""How many rows a second a loaded model gives, over batch sizes and lengths of contexts.

Two figures for each batch: rows of new contexts, which have nothing in common and none of which
the engine has seen, and rows of the same contexts continued by one token, as particles are.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genlm.core.context import Context
    from genlm.core.lm import AsyncLM

__all__ = ["Cell", "Plan", "first_row_s", "measured"]


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        lengths: Tokens of a context; those that the model does not take are replaced by the
            longest one that it takes.
        batch_sizes: Contexts that are asked at once.
        repeats: Measurements of each batch, of which the medians are reported.
        steps: Tokens by which the contexts of a measurement are continued, one at a time.
        most_tokens: Batches of more tokens than this are left out.
        seed: Of the token ids.
    """

    lengths: Sequence[int]
    batch_sizes: Sequence[int]
    repeats: int
    steps: int
    most_tokens: int
    seed: int

    def batches(self, max_context: int | None) -> list[tuple[int, int]]:
        """Return the length and size of each batch to measure, the smallest first."""
        return [(n, m) for n, m in self.all_batches(max_context) if n * m <= self.most_tokens]

    def all_batches(self, max_context: int | None) -> list[tuple[int, int]]:
        """Return the same with those of more tokens than `most_tokens`."""
        longest = max(self.lengths) if max_context is None else max_context - self.steps
        lengths = sorted({min(length, longest) for length in self.lengths})
        return [(length, size) for length in lengths for size in sorted({*self.batch_sizes})]

    def too_long(self, max_context: int | None) -> list[int]:
        """Return the lengths that do not fit in a context with their continuations."""
        longest = max(self.lengths) if max_context is None else max_context - self.steps
        return sorted({length for length in self.lengths if length > longest})


@dataclass(frozen=True)
class Cell:
    """The speed of one batch.

    Attributes:
        context_tokens: Tokens of each context.
        batch_size: Contexts asked at once.
        new_rows_per_s: Rows a second of new contexts.
        continued_rows_per_s: Rows a second of contexts continued by one token.
    """

    context_tokens: int
    batch_size: int
    new_rows_per_s: float
    continued_rows_per_s: float


def first_row_s(llm: AsyncLM, tokens: int) -> float:
    """Return the seconds to the row of the first context after loading."""
    return _seconds(llm, [next(_contexts(llm, tokens, random.Random(0)))])


def measured(
    llm: AsyncLM, plan: Plan, on_cell: Callable[[], None] = lambda: None
) -> Iterator[Cell]:
    """Measure every batch of a plan.

    Args:
        llm: A model without an output cache, which would answer instead of the engine.
        plan: What to measure.
        on_cell: Called after each batch.
    """
    rng = random.Random(plan.seed)
    for length, size in plan.batches(llm.max_context):
        new, continued = [], []
        for _ in range(plan.repeats + 1):
            made = _contexts(llm, length, rng)
            contexts = [next(made) for _ in range(size)]
            new.append(_seconds(llm, contexts))
            steps = []
            for _ in range(plan.steps):
                contexts = [each.extend(_token_id(llm, rng)) for each in contexts]
                steps.append(_seconds(llm, contexts))
            continued.append(statistics.median(steps))
        # The first measurement of a shape compiles kernels and allocates buffers.
        yield Cell(
            length,
            size,
            size / statistics.median(new[1:]),
            size / statistics.median(continued[1:]),
        )
        on_cell()


def _seconds(llm: AsyncLM, contexts: Sequence[Context]) -> float:
    began = time.perf_counter()
    llm.batch_next_token_logprobs_sync(contexts)
    return time.perf_counter() - began


def _contexts(llm: AsyncLM, tokens: int, rng: random.Random) -> Iterator[Context]:
    while True:
        yield llm.context([_token_id(llm, rng) for _ in range(tokens)])


def _token_id(llm: AsyncLM, rng: random.Random) -> int:
    """Draw an id of text; models may embed none of the highest ids."""
    excluded = {*llm.vocabulary.special_ids, *llm.vocabulary.missing_ids}
    while (drawn := rng.randrange(max(1, llm.vocab_size // 2))) in excluded:
        pass
    return drawn
