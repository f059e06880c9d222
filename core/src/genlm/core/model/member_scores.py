"""`MemberScores`: scores of continuations of the members of a population."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch

from genlm.core.base.blocking import blocking
from genlm.core.base.errors import ContextLengthError, GenlmError, PopulationError
from genlm.core.model.draw_settings import DrawSettings
from genlm.core.model.member_reductions import MemberReductions
from genlm.core.model.members import ArrayLike
from genlm.core.queries.generations import Integers64
from genlm.core.queries.member_states import Contexts
from genlm.core.queries.query import GroupReduction
from genlm.core.queries.scored_rows import scored_rows
from genlm.core.rows.group_reductions import DrawLogprobColumns, ScoreColumns, TokenColumns
from genlm.core.rows.row_masks import MasksLike
from genlm.core.rows.row_weights import RowWeights, check_log_masses


class MemberScores(MemberReductions):
    """Scores of continuations of the members of a population; see `Population`."""

    __slots__ = ()

    async def score(
        self,
        continuations: ArrayLike,
        masks: MasksLike | None = None,
        *,
        mask_index: ArrayLike | None = None,
        temperature: ArrayLike = 1.0,
        bias: ArrayLike = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
    ) -> torch.Tensor:
        """Return the log-probability of each token of a continuation of each member.

        With settings of `Population.sample`, the results are the log-probabilities with which
        `sample` draws the tokens, its `draw_logprob`; by default, those of the model.

        Engines with `Capability.SCORE` compute all positions of a member in one pass. On hf,
        mlx and sgl, the scores of all members are one request, and `extend` with the same
        tokens continues the engine's state of the scored tokens.

        Args:
            continuations: Token ids, shape `(n, k)`, with -1 after the end of shorter ones; or
                n lists, which may have different lengths.
            masks: As `Population.sample`, and so are all further arguments.
            mask_index: Index of each member's mask.
            temperature: Temperature of the draws.
            bias: Addend of the log-probabilities.
            top_k: Limit of the draws.
            top_p: Limit of the draws.
            min_p: Limit of the draws.

        Returns:
            Natural-log probabilities, shape `(n, k)`, float32, in main memory; 0 for -1, `-inf`
            for a token that `sample` would not draw.

        Raises:
            ValueError: The shape is not `(n, k)`, a token follows -1, or as
                `Population.sample`.
            PopulationError: Ids are outside the vocabulary, members with their continuations
                have more than `max_context` + 1 tokens, or as `Population.draw`.
        """
        limits = top_k, top_p, min_p
        settings = DrawSettings.of(
            self, masks, mask_index, limits, temperature=temperature, bias=bias
        )
        weights = settings.weights_unless_equal(self._lm.vocabulary.size)
        ids = self._checked_tokens(continuations).copy()  # the caller's may change meanwhile
        if not len(self) and ids.ndim == 1:  # an empty list
            ids = ids.reshape(0, 0)
        if ids.ndim != 2:
            raise ValueError(
                f"continuations of shape {ids.shape}; expected ({len(self)}, k) with -1 after "
                f"the end of shorter ones"
            )
        counts = (ids >= 0).sum(1)
        if (np.arange(ids.shape[1]) < counts[:, None]).tobytes() != (ids >= 0).tobytes():
            raise ValueError("a continuation has a token after -1; -1 is for its end only")
        requests = self._lm._requests  # noqa: SLF001 - internal to genlm.core.model
        width, has_table = requests.scored_columns, self._has_table
        if not width or np.count_nonzero(counts) < (
            1 if has_table else requests.smallest_group
        ):
            return await self._score_texts(ids, weights)
        self._check_room(counts)
        population: MemberScores = self
        parts = []
        for begin in range(0, ids.shape[1], width):
            columns = ids[:, begin : begin + width]
            part, population = await population._score_columns(columns, weights)
            parts.append(part)
        self._scored = ids, population
        return torch.cat(parts, dim=1)

    score_sync = blocking(score)

    @property
    def _has_table(self) -> bool:
        """Whether the engine has state of the sequences as a group, unless it evicted it."""
        return not isinstance(self._generation.root.state, Contexts | None)

    async def _score_columns(
        self, ids: Integers64, weights: RowWeights | None
    ) -> tuple[torch.Tensor, Self]:
        """Return the scores of a few tokens of each member, and the extended population."""
        logprobs = torch.zeros(ids.shape, dtype=torch.float32, device="cpu")
        step = self._step + ids.shape[1]
        if not (ids >= 0).any():
            return logprobs, self._derive(self._generation, self._places, self._finished, step)
        if not self._has_table:
            # The engine then continues its state of these sequences with all tokens at once.
            members = np.flatnonzero(ids[:, 0] >= 0)
            await self._reduce(TokenColumns(torch.from_numpy(ids[members, :1])), members)
        scored = scored_rows(self._generation, self._places, ids)
        tokens = ids[ids >= 0]
        query = self._lm._requests.scored_query(  # noqa: SLF001
            scored, _reduction(tokens, weights, scored.members), self._adapter.engine_name
        )
        logprobs[torch.from_numpy(ids >= 0)] = await self._result(
            query, scored.members, lambda columns: self._checked(columns, scored.members)
        )
        generation, places = scored.generation.extended(scored.places, scored.last_ids[:, None])
        return logprobs, self._derive(generation, places, self._finished, step)

    async def _score_texts(self, ids: Integers64, weights: RowWeights | None) -> torch.Tensor:
        """Return the scores of continuations from requests for the text of each member."""
        logprobs = torch.zeros(ids.shape, dtype=torch.float32, device="cpu")
        counts = (ids >= 0).sum(axis=1)
        members = np.flatnonzero(counts)
        contexts = [self._context(member) for member in members.tolist()]
        texts = [
            context.extend(ids[member, : counts[member]])
            for context, member in zip(contexts, members, strict=True)
        ]
        starts = [len(context) for context in contexts]
        try:
            if weights is None:
                scored = await self._lm.batch_score(texts, starts)
            else:
                places = [np.repeat(member, counts[member]) for member in members]
                items: list[Any] = [
                    self._lm._reduction_item(  # noqa: SLF001
                        text, _reduction(ids[part[0], : len(part)], weights, part), start
                    )
                    for text, part, start in zip(texts, places, starts, strict=True)
                ]
                columns = await self._lm._requests.answer(items, (), range(len(items)))  # noqa: SLF001
                scored = [self._checked(*each) for each in zip(columns, places, strict=True)]
        except GenlmError as error:
            if isinstance(error, PopulationError) or not error.places:
                raise
            failed = members[list(error.places)].tolist()
            raise PopulationError(failed, len(self), error) from error
        for member, scores in zip(members, scored, strict=True):
            logprobs[member, : len(scores)] = scores
        return logprobs

    def _checked(self, columns: tuple[torch.Tensor, ...], members: Integers64) -> torch.Tensor:
        """Return the scores among the columns of `_reduction`."""
        logprobs, *others = columns
        if logprobs.ndim == 1:
            return logprobs
        check_log_masses(others[0], members, len(self))
        return logprobs[:, 0]

    def _check_room(self, counts: Integers64) -> None:
        """Check that members with as many further tokens have at most `max_context` + 1."""
        max_context = self._lm.max_context
        if max_context is None:
            return
        lengths = np.where(counts, self.lengths.numpy() + counts, 0)
        is_too_long = lengths > max_context + 1
        if is_too_long.any():
            error = ContextLengthError(int(lengths.max()), max_context, is_text=True)
            raise PopulationError(np.flatnonzero(is_too_long).tolist(), len(self), error)


def _reduction(
    token_ids: Integers64, weights: RowWeights | None, members: Integers64
) -> GroupReduction:
    """Return the reduction for the scores of tokens of some members."""
    tokens = torch.from_numpy(token_ids)
    if weights is None:
        return ScoreColumns(tokens)
    return DrawLogprobColumns(weights.of(members), tokens[:, None])
