"""Continuations of the members of a group, drawn and extended on the engine's thread.

`SamplingRun` converts a group query with `sampling` into one group query per token;
`joined_sampling` does so for several queries that are pending together. For few members,
`MemberRuns` converts a query into one query per member and token. `GroupEngine` runs them for
engines that do not forward such queries to other processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from genlm.core.base.errors import EvaluationError
from genlm.core.queries.generations import (
    NO_TOKEN,
    Generation,
    Integers64,
    distinct_sequences,
    raise_member_errors,
)
from genlm.core.queries.member_states import NO_CONTEXTS, Contexts
from genlm.core.queries.query import Completion, GroupQuery, GroupResult, Reduction
from genlm.core.queries.sequence import TokenSequence
from genlm.core.rows.group_reductions import DrawColumns
from genlm.core.rows.reductions import Draw, DrawnToken
from genlm.core.rows.row_weights import RowWeights, check_log_masses
from genlm.core.rows.sampling import stream_uniform, stream_uniforms
from genlm.core.vocab import Vocabulary
from genlm.core.vocab.text import search_stop

RowRequest = tuple[int, TokenSequence, Reduction]
"""A place in a group, its sequence, and the requested reduction of its row."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupSampling:
    """Sampling parameters of a group query for continuations.

    The member i draws its t-th token, counted from 0, with the random number
    `stream_uniform(seeds[i], step + t)`.

    Attributes:
        places: Index of each member's sequence in the query's generation, shape `(n,)`.
        finished: Flags of the members that draw no token, shape `(n,)`.
        max_tokens: Maximum number of tokens of each member, shape `(n,)`; no larger than the
            context of the model permits.
        weights: Masks, temperatures and biases of the members, and the truncation of all.
        seeds: Seed of each member's random numbers, shape `(n,)`.
        step: Position of the first token in the streams of random numbers.
        stop_ids: Ids of tokens that finish a member.
        stop_texts: Texts that finish a member, with the token that completes one of them among
            the drawn tokens.
        returns_generation: Whether the caller uses `generation` and `places` of the result,
            which are otherwise undefined.
    """

    places: Integers64
    finished: npt.NDArray[np.bool_]
    max_tokens: Integers64
    weights: RowWeights
    seeds: Integers64
    step: int
    stop_ids: frozenset[int]
    stop_texts: tuple[bytes, ...]
    returns_generation: bool = True

    def draws(self, members: Integers64, token: int) -> DrawColumns:
        """Return the reduction that draws the token with index `token` for some members."""
        numbers = stream_uniforms(self.seeds[members], [self.step + token])
        return DrawColumns(self.weights.of(members), numbers)

    def of(self, members: Integers64, places: Integers64) -> GroupSampling:
        """Return the parameters of some members.

        Args:
            members: Indices of members, shape `(m,)`.
            places: `places` of the result, shape `(m,)`.
        """
        return dataclasses.replace(
            self,
            places=places,
            finished=self.finished[members],
            max_tokens=self.max_tokens[members],
            weights=self.weights.of(members),
            seeds=self.seeds[members],
        )


class SampledGroup(NamedTuple):
    """The result of a group query with `sampling`.

    Attributes:
        token_ids: Shape `(n, k)`, int64, -1 after the end of a member; k is the number of
            tokens of the longest continuation.
        logprobs: The model's log-probability of each token, shape `(n, k)`, float32; 0 for -1.
        draw_logprob: The log-probability with which each token was drawn, shape `(n, k)`,
            float32; 0 for -1.
        generation: Generation with the extended sequences of the members, the result of
            `Generation.extended` of the query's generation.
        places: Index of each member's sequence in the generation, shape `(n,)`.
        finished: Flags of the finished members, shape `(n,)`.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    draw_logprob: torch.Tensor
    generation: Generation
    places: Integers64
    finished: npt.NDArray[np.bool_]


class _Continuations:
    """A group query with `sampling` while its tokens are drawn."""

    def __init__(self, query: GroupQuery, vocabulary: Vocabulary) -> None:
        self.query = query
        self._sampling = sampling_of(query)
        self._vocabulary = vocabulary
        self._tails = [b""] * len(self._sampling.places)

    def _has_stop_text(self, member: int, token_id: int) -> bool:
        """Whether a drawn token completes a text that finishes the member."""
        text = self._tails[member] + bytes(self._vocabulary.byte_vocab[token_id])
        is_complete, self._tails[member] = search_stop(text, self._sampling.stop_texts)
        return is_complete


class SamplingRun(_Continuations):
    """Continuations with one group query per token, for all members.

    Attributes:
        generation: Generation with the extended sequences of the members.
    """

    def __init__(self, query: GroupQuery, vocabulary: Vocabulary) -> None:
        super().__init__(query, vocabulary)
        self.generation = query.generation
        self._places = self._sampling.places
        self._finished = self._sampling.finished
        self._limits = self._sampling.max_tokens
        self._row_of = self._places
        self._stop_ids = np.array(sorted(self._sampling.stop_ids), np.int64)
        self._columns: list[list[npt.NDArray[Any]]] = []
        self._active = self._unfinished()

    @property
    def is_complete(self) -> bool:
        """Whether all continuations are complete."""
        return not len(self._active)

    def next_query(self) -> GroupQuery:
        """Return the query for the next token of the unfinished members."""
        lineage, members = self.generation.lineage, self._active
        wanted, row_of = distinct_sequences(lineage, self._places, members)
        self._row_of = row_of
        return dataclasses.replace(
            self.query,
            generation=self.generation,
            wanted=wanted,
            row_of=row_of,
            reduction=self._sampling.draws(members, len(self._columns)),
            sampling=None,
        )

    def add(self, result: GroupResult) -> None:
        """Add the tokens that the last query drew.

        Raises:
            PopulationError: Members failed.
        """
        raise_member_errors(result.errors, self._row_of, self._active, len(self._places))
        token_ids, logprobs, log_mass, draw_logprob = result.columns
        count = len(self._places)
        if self._sampling.weights.has_masks_or_biases:
            check_log_masses(log_mass, self._active, count)
            has_no_token = token_ids < 0
            logprobs = logprobs.masked_fill(has_no_token, 0.0)
            self._limits = self._limits.copy()
            self._limits[self._active[has_no_token.numpy()]] = 0
        if len(self._active) < count:
            active = torch.from_numpy(self._active)
            padding = torch.full((count,), NO_TOKEN, device="cpu")
            token_ids = padding.index_copy_(0, active, token_ids)
            zeros = torch.zeros(count, dtype=torch.float32, device="cpu")
            logprobs = zeros.index_copy(0, active, logprobs)
            draw_logprob = zeros.index_copy(0, active, draw_logprob)
        # Arrays, because tensors that are kept divide the memory in which steps allocate rows.
        columns = [each.numpy().copy() for each in (token_ids, logprobs, draw_logprob)]
        self._columns.append(columns)
        new_ids = columns[0]
        self.generation, self._places = self.generation.extended(self._places, new_ids[:, None])
        ends = np.isin(new_ids, self._stop_ids)
        if self._sampling.stop_texts:
            for member in np.flatnonzero(new_ids >= 0).tolist():
                ends[member] |= self._has_stop_text(member, int(new_ids[member]))
        self._finished = self._finished | ends
        self._active = self._unfinished()

    def result(self) -> SampledGroup:
        """Return the tokens of all members."""
        columns = [
            torch.from_numpy(np.stack(column, 1)) for column in zip(*self._columns, strict=True)
        ]
        # In the last column, no member may have had a possible token.
        longest = int((columns[0] >= 0).sum(1).max())
        token_ids, logprobs, draw_logprob = (column[:, :longest] for column in columns)
        return SampledGroup(
            token_ids,
            logprobs,
            draw_logprob,
            self.generation,
            self._places,
            self._finished,
        )

    def completed(self) -> list[Completion]:
        """Return the completions of queries whose continuations have become complete."""
        return [Completion(self.query.query_id, self.result())] if self.is_complete else []

    def _unfinished(self) -> Integers64:
        """Return the members that draw another token, ascending."""
        has_room = self._limits > len(self._columns)
        return np.flatnonzero(has_room & ~self._finished)


def sampling_of(query: GroupQuery) -> GroupSampling:
    """Return `query.sampling`, which must not be None."""
    assert query.sampling is not None  # noqa: S101 - checked by callers
    return query.sampling


class MemberRuns(_Continuations):
    """Continuations whose members are drawn independently of one another.

    Attributes:
        pending_ids: Ids of the pending queries of members.
    """

    def __init__(self, query: GroupQuery, vocabulary: Vocabulary) -> None:
        super().__init__(query, vocabulary)
        self.pending_ids: set[int] = set()
        sampling = self._sampling
        self._sequences = query.generation.lineage.sequences(sampling.places)
        self._seeds: list[int] = sampling.seeds.tolist()
        self._temperatures: list[float] = sampling.weights.temperatures.tolist()
        self._limits: list[int] = sampling.max_tokens.tolist()
        self._finished: list[bool] = sampling.finished.tolist()
        self._drawn: list[list[DrawnToken]] = [[] for _ in self._sequences]
        self._errors: dict[int, Exception] = {}

    @property
    def has_failed(self) -> bool:
        """Whether a member failed, which ends the run."""
        return bool(self._errors)

    def row_requests(self) -> Iterator[RowRequest]:
        """Yield the draws of the next tokens."""
        for member, is_finished in enumerate(self._finished):
            if not is_finished and len(self._drawn[member]) < self._limits[member]:
                yield self._next_draw(member)

    def add(self, member: int, result: Any) -> RowRequest | None:
        """Add a token, or an error; return the draw of the next token if there is one."""
        if not isinstance(result, DrawnToken):
            self._errors[member] = result_error(result)
            return None
        drawn, sampling = self._drawn[member], self._sampling
        drawn.append(result)
        token_id = result.token_id
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
            PopulationError: Members failed.
        """
        count = len(self._sequences)
        raise_member_errors(self._errors, np.arange(count), None, count)
        longest = max(map(len, self._drawn))
        token_ids = torch.full((count, longest), NO_TOKEN, device="cpu")
        numbers = torch.zeros(2, count, longest, dtype=torch.float32, device="cpu")
        for member, drawn in enumerate(self._drawn):
            if drawn:
                ids, logprobs, _, draw_logprobs = zip(*drawn, strict=True)
                token_ids[member, : len(drawn)] = torch.tensor(ids, device="cpu")
                numbers[:, member, : len(drawn)] = torch.tensor(
                    [logprobs, draw_logprobs], dtype=torch.float32, device="cpu"
                )
        generation, places = Generation(self.query.generation.lineage), self._sampling.places
        if self._sampling.returns_generation:
            generation, places = generation.extended(places, token_ids.numpy())
        self._lease_contexts(generation, places)
        return SampledGroup(
            token_ids, numbers[0], numbers[1], generation, places, np.array(self._finished)
        )

    def _next_draw(self, member: int) -> RowRequest:
        sequence, sampling = self._sequences[member], self._sampling
        position = sampling.step + len(self._drawn[member])
        uniform = stream_uniform(self._seeds[member], position)
        truncation = sampling.weights.truncation
        draw = Draw(uniform, self._temperatures[member], None, truncation)
        return member, sequence, draw

    def _lease_contexts(self, generation: Generation, places: Integers64) -> None:
        """Lease the contexts that were computed, for a generation of the members' sequences.

        Args:
            generation: The generation.
            places: Index in it of the sequence of each member.
        """
        if self.query.lease is None:
            generation.keep(NO_CONTEXTS)
            return
        computed = [
            sequence.prefix_key(len(sequence) - 1) if drawn else None
            for sequence, drawn in zip(self._sequences, self._drawn, strict=True)
        ]
        lease = self.query.lease([(self.query.adapter, key) for key in computed if key])
        contexts = Contexts.of(generation)
        contexts.put(places, computed, generation.lineage.lengths[places] - 1)
        generation.keep(contexts._replace(lease=lease))


def result_error(result: object) -> Exception:
    """Return the error of a failed query, or an error that describes an unexpected result."""
    if isinstance(result, Exception):
        return result
    return EvaluationError(
        f"the engine returned {result!r} for a query that requests a reduction of a row"
    )
