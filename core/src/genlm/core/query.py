"""What travels between the scheduler and an engine: queries and completions.

Plain values without behaviour. `Query` and `Completion` are made for every request, so they
are named tuples, which take half the time of a frozen dataclass to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["Completion", "Query", "SamplingParams"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue a sequence.

    Attributes:
        max_tokens: The most tokens to draw, at least 1.
        temperature: Divides the log-probabilities; 0 takes the most likely token.
        stop_token_ids: Drawing one of these ends the continuation, which leaves it out.
        seed: Makes the continuation reproducible; None draws a fresh seed.
    """

    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: frozenset[int] = frozenset()
    seed: int | None = None


class Query(NamedTuple):
    """One request to an engine, validated against its vocabulary and context.

    Attributes:
        query_id: Unique among the scheduler's queries; names the answer.
        token_ids: The sequence, oldest first, never empty.
        adapter: Name of a loaded LoRA adapter, None for the base model.
        sampling: None asks for the next-token row; otherwise for a continuation
            (only engines with `Capability.SAMPLE` receive such queries).
    """

    query_id: int
    token_ids: tuple[int, ...]
    adapter: str | None = None
    sampling: SamplingParams | None = None


class Completion(NamedTuple):
    """The answer to one query: a result or an error, never both.

    Attributes:
        query_id: The query that this answers.
        result: The row of log-probabilities, shape `(vocab_size,)`, or, for a
            query with `sampling`, the list of drawn token ids. A row shares its
            memory with no other tensor; it belongs to the receiver.
        error: The error, if the query failed.
    """

    query_id: int
    result: torch.Tensor | list[int] | None = None
    error: Exception | None = None
