"""Continuations of the members of a population: draws and extensions on the engine's thread.

An engine with its own sampling loop declares `samples_groups` and receives the query unchanged;
for other engines `GroupEngine` submits one query per token. Both may use `SamplingRun`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from genlm.core.queries.generations import (
    NO_TOKEN,
    Generation,
    Integers64,
    distinct_sequences,
    raise_failed,
)
from genlm.core.queries.query import GroupQuery, GroupResult
from genlm.core.rows.group_reductions import DrawColumns
from genlm.core.rows.row_weights import RowWeights
from genlm.core.rows.sampling import uniforms
from genlm.core.vocab.text import search_stop

if TYPE_CHECKING:
    import numpy.typing as npt

    from genlm.core.vocab import Vocabulary

__all__ = ["GroupSampling", "SampledGroup", "SamplingRun"]


@dataclass(frozen=True, slots=True, eq=False)
class GroupSampling:
    """Sampling parameters of a group query for continuations.

    The member i draws its t-th token with the random number
    `uniforms(seed, [i], step + t)`.

    Attributes:
        places: The sequence of the query's generation that each member has, shape `(n,)`.
        finished: Members that draw nothing, shape `(n,)`.
        max_tokens: Maximum number of tokens of a member, at least 1.
        weights: The temperature of each member.
        top_k: Draw from the k most likely tokens; None for all.
        top_p: Draw from the fewest tokens that have this share of the probability.
        seed: Seed of the random numbers.
        step: The step of the first token.
        stop_ids: A member is finished with a token of these ids.
        stop_texts: A member is finished with the token that completes one of these texts among
            the tokens that were drawn.
    """

    places: Integers64
    finished: npt.NDArray[np.bool_]
    max_tokens: int
    weights: RowWeights
    top_k: int | None
    top_p: float
    seed: int
    step: int
    stop_ids: Integers64
    stop_texts: tuple[bytes, ...]

    def draws(self, members: Integers64, token: int) -> DrawColumns:
        """Return the reduction that draws a token, counted from 0, of some members."""
        numbers = uniforms(self.seed, members, self.step + token)
        return DrawColumns(self.weights.of(members), numbers, self.top_k, self.top_p)


class SampledGroup(NamedTuple):
    """The result of a group query with `sampling`.

    Attributes:
        token_ids: Shape `(n, k)`, int64, -1 after the end of a member; k is the number of
            tokens of the longest continuation.
        logprobs: The model's log-probability of each token, shape `(n, k)`, float32; 0 for -1.
        draw_logprob: The log-probability with which each token was drawn, shape `(n, k)`,
            float32; 0 for -1.
        generation: Generation with the extended sequences of the members.
        places: The sequence of the generation that each member has, shape `(n,)`.
        finished: Members that are finished, shape `(n,)`.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    draw_logprob: torch.Tensor
    generation: Generation
    places: Integers64
    finished: npt.NDArray[np.bool_]


class SamplingRun:
    """A group query with `sampling` while its tokens are drawn.

    Args:
        group: The query.
        vocabulary: Vocabulary with the bytes of tokens.
        max_context: Maximum number of tokens of a sequence, None for no limit.
    """

    def __init__(
        self, group: GroupQuery, vocabulary: Vocabulary, max_context: int | None
    ) -> None:
        assert group.sampling is not None  # noqa: S101 - checked by callers
        self._group = group
        self._sampling = group.sampling
        self._vocabulary = vocabulary
        self._max_context = max_context
        self._generation = group.generation
        self._places = self._sampling.places
        self._finished = self._sampling.finished
        self._active = np.flatnonzero(~self._finished)
        self._row_of = self._places
        self._tails = [b""] * len(self._places)
        self._columns: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    @property
    def is_complete(self) -> bool:
        """Whether all continuations are complete."""
        full = len(self._columns) == self._sampling.max_tokens
        return full or not len(self._active)

    def next_query(self) -> GroupQuery:
        """Return the query for the next token of the members that are not finished.

        Raises:
            PopulationError: Members whose contexts are full.
        """
        lineage, members = self._generation.lineage, self._active
        wanted, row_of = distinct_sequences(
            lineage, self._places, members, max_context=self._max_context
        )
        self._row_of = row_of
        return dataclasses.replace(
            self._group,
            generation=self._generation,
            wanted=wanted,
            row_of=row_of,
            reduction=self._sampling.draws(members, len(self._columns)),
            sampling=None,
        )

    def add(self, result: GroupResult) -> None:
        """Add the tokens that the last query drew.

        Raises:
            PopulationError: Members that failed.
        """
        raise_failed(result.errors, self._row_of, self._active, len(self._places))
        drawn, logprobs, _, draw_logprob = result.columns
        active = torch.from_numpy(self._active)
        count = len(self._places)
        token_ids = torch.full((count,), NO_TOKEN)
        token_ids[active] = drawn
        found = torch.zeros(2, count)
        found[0, active], found[1, active] = logprobs, draw_logprob
        self._columns.append((token_ids, found[0], found[1]))
        new = token_ids.numpy()
        self._generation, self._places = self._generation.extended(self._places, new[:, None])
        ends = np.isin(new, self._sampling.stop_ids)
        if self._sampling.stop_texts:
            ends |= self._completed(new)
        self._finished = self._finished | ends
        self._active = np.flatnonzero(~self._finished)

    def result(self) -> SampledGroup:
        """Return the tokens of all members."""
        token_ids, logprobs, draw_logprob = zip(*self._columns, strict=True)
        return SampledGroup(
            torch.stack(token_ids, 1),
            torch.stack(logprobs, 1),
            torch.stack(draw_logprob, 1),
            self._generation,
            self._places,
            self._finished,
        )

    def _completed(self, token_ids: Integers64) -> npt.NDArray[np.bool_]:
        """Append tokens to the members' tails; return which of these now have a text."""
        found = np.zeros(len(token_ids), bool)
        for member in np.flatnonzero(token_ids >= 0).tolist():
            text = self._tails[member] + bytes(self._vocabulary.byte_vocab[token_ids[member]])
            found[member], self._tails[member] = search_stop(text, self._sampling.stop_texts)
        return found
