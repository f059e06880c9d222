"""What travels between the scheduler and an engine: queries and completions.

Plain values. `Query` and `Completion` are made for every request, so neither is a frozen
dataclass, which takes twice the time to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from genlm.core.sequence import TokenSequence

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


class Query:
    """One request to an engine, validated against its vocabulary and context.

    Two queries are equal if all their attributes are.

    Args:
        query_id: Unique among the scheduler's queries; names the answer.
        token_ids: The sequence, oldest first, never empty.
        adapter: Name of a loaded LoRA adapter, None for the base model.
        sampling: None asks for the next-token row; otherwise for a continuation
            (only engines with `Capability.SAMPLE` receive such queries).
    """

    __slots__ = ("_adapter", "_query_id", "_sampling", "_sequence", "_token_ids")

    def __init__(
        self,
        query_id: int,
        token_ids: Sequence[int] | TokenSequence,
        adapter: str | None = None,
        sampling: SamplingParams | None = None,
    ) -> None:
        self._query_id = query_id
        self._adapter = adapter
        self._sampling = sampling
        self._sequence: TokenSequence | None = None
        self._token_ids: tuple[int, ...] | None = None
        if type(token_ids) is TokenSequence:
            self._sequence = token_ids
        else:
            self._token_ids = tuple(cast("Sequence[int]", token_ids))

    @property
    def query_id(self) -> int:
        """Names the answer."""
        return self._query_id

    @property
    def adapter(self) -> str | None:
        """Name of a loaded LoRA adapter, None for the base model."""
        return self._adapter

    @property
    def sampling(self) -> SamplingParams | None:
        """How to continue the sequence; None asks for the next-token row."""
        return self._sampling

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids, put together when first read."""
        if self._token_ids is None:
            assert self._sequence is not None  # noqa: S101 - one of the two is there
            self._token_ids = self._sequence.token_ids
        return self._token_ids

    @property
    def sequence(self) -> TokenSequence:
        """The token ids as a sequence, whose keys and last ids cost no more for long ones."""
        if self._sequence is None:
            assert self._token_ids is not None  # noqa: S101 - one of the two is there
            self._sequence = TokenSequence.of(self._token_ids)
        return self._sequence

    def __len__(self) -> int:
        """Number of token ids."""
        return len(self.sequence if self._token_ids is None else self._token_ids)

    def replace(self, **changes: Any) -> Query:
        """Return a copy with other attributes, by the names of the arguments."""
        tokens = self._token_ids if self._sequence is None else self._sequence
        arguments = {
            "query_id": self.query_id,
            "token_ids": tokens,
            "adapter": self.adapter,
            "sampling": self.sampling,
        }
        return type(self)(**(arguments | changes))

    _replace = replace  # of named tuples, which queries were before 1.0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Query):
            return NotImplemented
        mine = (self.query_id, self.adapter, self.sampling)
        its = (other.query_id, other.adapter, other.sampling)
        return mine == its and self.token_ids == other.token_ids

    def __hash__(self) -> int:
        return hash((self.query_id, self.adapter, self.sampling))

    def __repr__(self) -> str:
        return (
            f"Query(query_id={self.query_id}, token_ids={self.token_ids}, "
            f"adapter={self.adapter!r}, sampling={self.sampling!r})"
        )


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
