"""Continuations: draws and extensions of the members of a group on the engine's thread.

`SamplingRun` turns a group query with `sampling` into one group query per token, `MemberRuns`
turns that of few members into a query per member and token. `GroupEngine` runs them for engines
that do not forward such queries to other processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from genlm.core.base.errors import ContextLengthError, EvaluationError
from genlm.core.queries.generations import (
    NO_TOKEN,
    Contexts,
    Generation,
    Integers64,
    distinct_sequences,
    raise_failed,
)
from genlm.core.queries.query import GroupQuery, GroupResult, Reduction
from genlm.core.queries.sequence import TokenSequence
from genlm.core.rows.group_reductions import DrawColumns
from genlm.core.rows.reductions import Draw, DrawnToken
from genlm.core.rows.row_weights import RowWeights
from genlm.core.rows.sampling import stream_uniform, stream_uniforms
from genlm.core.vocab.text import search_stop

if TYPE_CHECKING:
    import numpy.typing as npt

    from genlm.core.vocab import Vocabulary

__all__ = [
    "GroupSampling",
    "MemberRuns",
    "SampledGroup",
    "SamplingRun",
    "Single",
    "unexpected_answer",
]

Single = tuple[int, TokenSequence, Reduction]
"""A place in a group, its sequence, and the reduction of the row that is requested."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupSampling:
    """Sampling parameters of a group query for continuations.

    The member i draws its t-th token, counted from 0, with the random number
    `stream_uniform(seeds[i], step + t)`.

    Attributes:
        places: The sequence of the query's generation that each member has, shape `(n,)`.
        finished: Members that draw nothing, shape `(n,)`.
        max_tokens: Maximum number of tokens of each member, shape `(n,)`.
        weights: Temperature, top-k and top-p, the last two the same for all members.
        seeds: Seed of each member's random numbers, shape `(n,)`.
        step: Position of the first token in the streams of random numbers.
        stop_ids: A member is finished with a token of these ids.
        stop_texts: A member is finished with the token that completes one of these texts among
            the tokens that were drawn.
    """

    places: Integers64
    finished: npt.NDArray[np.bool_]
    max_tokens: Integers64
    weights: RowWeights
    seeds: Integers64
    step: int
    stop_ids: frozenset[int]
    stop_texts: tuple[bytes, ...]

    def draws(self, members: Integers64, token: int) -> DrawColumns:
        """Return the reduction that draws a token, counted from 0, of some members."""
        numbers = stream_uniforms(self.seeds[members], [self.step + token])
        return DrawColumns(self.weights.of(members), numbers)


class SampledGroup(NamedTuple):
    """The result of a group query with `sampling`.

    Attributes:
        token_ids: Shape `(n, k)`, int64, -1 after the end of a member; k is the number of
            tokens of the longest continuation.
        logprobs: The model's log-probability of each token, shape `(n, k)`, float32; 0 for -1.
        draw_logprob: The log-probability with which each token was drawn, shape `(n, k)`,
            float32; 0 for -1.
        generation: Generation with the extended sequences of the members, as
            `Generation.extended` makes it of that of the query.
        places: The sequence of the generation that each member has, shape `(n,)`.
        finished: Members that are finished, shape `(n,)`.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    draw_logprob: torch.Tensor
    generation: Generation
    places: Integers64
    finished: npt.NDArray[np.bool_]


class _Continuations:
    """A group query with `sampling` while its tokens are drawn.

    Args:
        query: The query.
        vocabulary: Vocabulary with the bytes of tokens.
        max_context: Maximum number of tokens of a sequence, None for no limit.

    Attributes:
        query: As above.
    """

    def __init__(
        self, query: GroupQuery, vocabulary: Vocabulary, max_context: int | None
    ) -> None:
        assert query.sampling is not None  # noqa: S101 - checked by callers
        self.query = query
        self._sampling = query.sampling
        self._vocabulary = vocabulary
        self._max_context = max_context
        self._tails = [b""] * len(self._sampling.places)

    def _has_stop_text(self, member: int, token_id: int) -> bool:
        """Whether a drawn token completes a text that finishes the member."""
        text = self._tails[member] + bytes(self._vocabulary.byte_vocab[token_id])
        found, self._tails[member] = search_stop(text, self._sampling.stop_texts)
        return found


class SamplingRun(_Continuations):
    """Continuations of which every token of all members is one group query."""

    def __init__(
        self, query: GroupQuery, vocabulary: Vocabulary, max_context: int | None
    ) -> None:
        super().__init__(query, vocabulary, max_context)
        self._generation = query.generation
        self._places = self._sampling.places
        self._finished = self._sampling.finished
        self._row_of = self._places
        self._stop_ids = np.array(sorted(self._sampling.stop_ids), np.int64)
        self._columns: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._active = self._unfinished()

    @property
    def is_complete(self) -> bool:
        """Whether all continuations are complete."""
        return not len(self._active)

    def next_query(self) -> GroupQuery:
        """Return the query for the next token of the members that draw one.

        Raises:
            PopulationError: Members whose contexts are full.
        """
        lineage, members = self._generation.lineage, self._active
        wanted, row_of = distinct_sequences(
            lineage, self._places, members, max_context=self._max_context
        )
        self._row_of = row_of
        return dataclasses.replace(
            self.query,
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
        token_ids, logprobs, _, draw_logprob = result.columns
        count = len(self._places)
        if len(self._active) < count:
            active = torch.from_numpy(self._active)
            token_ids = torch.full((count,), NO_TOKEN).index_copy_(0, active, token_ids)
            logprobs = torch.zeros(count).index_copy_(0, active, logprobs)
            draw_logprob = torch.zeros(count).index_copy_(0, active, draw_logprob)
        self._columns.append((token_ids, logprobs, draw_logprob))
        new = token_ids.numpy()
        self._generation, self._places = self._generation.extended(self._places, new[:, None])
        ends = np.isin(new, self._stop_ids)
        if self._sampling.stop_texts:
            for member in np.flatnonzero(new >= 0).tolist():
                ends[member] |= self._has_stop_text(member, int(new[member]))
        self._finished = self._finished | ends
        self._active = self._unfinished()

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

    def _unfinished(self) -> Integers64:
        """Return the members that draw another token, ascending."""
        has_room = self._sampling.max_tokens > len(self._columns)
        return np.flatnonzero(has_room & ~self._finished)


class MemberRuns(_Continuations):
    """Continuations whose members are drawn independently of one another.

    Attributes:
        query: The query.
        unanswered: Ids of the unanswered queries for single sequences.
    """

    def __init__(
        self, query: GroupQuery, vocabulary: Vocabulary, max_context: int | None
    ) -> None:
        super().__init__(query, vocabulary, max_context)
        self.unanswered: set[int] = set()
        sampling = self._sampling
        sequence_of = query.generation.lineage.sequence
        self._sequences = [sequence_of(place) for place in sampling.places.tolist()]
        self._seeds: list[int] = sampling.seeds.tolist()
        self._temperatures: list[float] = sampling.weights.temperatures.tolist()
        self._top_k_and_p = int(sampling.weights.top_k), float(sampling.weights.top_p)
        self._limits: list[int] = sampling.max_tokens.tolist()
        self._finished: list[bool] = sampling.finished.tolist()
        self._drawn: list[list[DrawnToken]] = [[] for _ in self._sequences]
        self._errors: dict[int, Exception] = {}

    @property
    def has_failed(self) -> bool:
        """Whether a member failed, which ends the run."""
        return bool(self._errors)

    def singles(self) -> Iterator[Single]:
        """Yield the draws of the first tokens."""
        for member, is_finished in enumerate(self._finished):
            if not is_finished and self._limits[member]:
                single = self._next_draw(member)
                if single is not None:
                    yield single

    def add(self, member: int, answer: Any) -> Single | None:
        """Add a token, or an error; return the draw of the next token if there is one."""
        if not isinstance(answer, DrawnToken):
            self._errors[member] = unexpected_answer(answer)
            return None
        drawn, sampling = self._drawn[member], self._sampling
        drawn.append(answer)
        token_id = answer.token_id
        self._sequences[member] = TokenSequence.of([token_id], self._sequences[member])
        is_finished = token_id in sampling.stop_ids
        if sampling.stop_texts:
            is_finished = self._has_stop_text(member, token_id) or is_finished
        self._finished[member] = is_finished
        has_ended = is_finished or len(drawn) == self._limits[member]
        return None if has_ended else self._next_draw(member)

    def result(self) -> SampledGroup:
        """Return the tokens of all members.

        Raises:
            PopulationError: Members that failed.
        """
        count = len(self._sequences)
        raise_failed(self._errors, np.arange(count), None, count)
        longest = max(map(len, self._drawn))
        token_ids = torch.full((count, longest), NO_TOKEN)
        numbers = torch.zeros(2, count, longest)
        for member, drawn in enumerate(self._drawn):
            if drawn:
                ids, logprobs, _, draw_logprobs = zip(*drawn, strict=True)
                token_ids[member, : len(drawn)] = torch.tensor(ids)
                numbers[:, member, : len(drawn)] = torch.tensor([logprobs, draw_logprobs])
        added = token_ids.numpy()
        generation, places = self._computed().extended(self._sampling.places, added)
        return SampledGroup(
            token_ids, numbers[0], numbers[1], generation, places, np.array(self._finished)
        )

    def _next_draw(self, member: int) -> Single | None:
        sequence, sampling = self._sequences[member], self._sampling
        if self._max_context is not None and len(sequence) > self._max_context:
            self._errors[member] = ContextLengthError(len(sequence), self._max_context)
            return None
        position = sampling.step + len(self._drawn[member])
        uniform = stream_uniform(self._seeds[member], position)
        draw = Draw(uniform, self._temperatures[member], None, *self._top_k_and_p)
        return member, sequence, draw

    def _computed(self) -> Generation:
        """Return a generation with a lease of the contexts that the engine has computed."""
        lease = None
        if self.query.lease is not None:
            keys = [
                (self.query.adapter, sequence.prefix_key(len(sequence) - 1))
                for sequence, drawn in zip(self._sequences, self._drawn, strict=True)
                if drawn
            ]
            lease = self.query.lease(keys)
        computed = Generation(self.query.generation.lineage)
        computed.keep(Contexts(lease))
        return computed


def unexpected_answer(answer: object) -> Exception:
    """Return an error for an answer to a query for a reduction, which may be an exception."""
    if isinstance(answer, Exception):
        return answer
    return EvaluationError(
        f"the engine answered a query for a reduction of a row with {answer!r}"
    )
