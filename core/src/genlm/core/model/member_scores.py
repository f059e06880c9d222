"""`MemberScores`: scores of continuations of the members of a population."""

from __future__ import annotations

from typing import Self

import numpy as np
import torch

from genlm.core.base.blocking import blocking
from genlm.core.base.errors import ContextLengthError, GenlmError, PopulationError
from genlm.core.model.member_reductions import MemberReductions
from genlm.core.model.members import ArrayLike
from genlm.core.queries.generations import Integers64
from genlm.core.queries.member_states import Contexts
from genlm.core.queries.scored_rows import scored_rows
from genlm.core.rows.group_reductions import ScoreColumns, TokenColumns


class MemberScores(MemberReductions):
    """Scores of continuations of the members of a population; see `Population`."""

    __slots__ = ()

    async def score(self, continuations: ArrayLike) -> torch.Tensor:
        """Return the log-probability of each token of a continuation of each member.

        Engines with `Capability.SCORE` compute all positions of a member in one pass. On hf,
        mlx and sgl, the scores of all members are one request, and `extend` with the same
        tokens continues the engine's state of the scored tokens.

        Args:
            continuations: Token ids, shape `(n, k)`, with -1 after the end of shorter ones; or
                n lists, which may have different lengths.

        Returns:
            Natural-log probabilities, shape `(n, k)`, float32, in main memory; 0 for -1.

        Raises:
            ValueError: The shape is not `(n, k)`, or a token follows -1.
            PopulationError: Ids are outside the vocabulary, members with their continuations
                have more than `max_context` + 1 tokens, or as `next_token_logprobs`.
        """
        ids = self._checked_tokens(continuations)
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
            return await self._score_texts(ids)
        self._check_room(counts)
        population: MemberScores = self
        parts = []
        for begin in range(0, ids.shape[1], width):
            columns = ids[:, begin : begin + width]
            part, population = await population._score_columns(columns)
            parts.append(part)
        self._scored = ids.copy(), population
        return torch.cat(parts, dim=1)

    score_sync = blocking(score)

    @property
    def _has_table(self) -> bool:
        """Whether the engine has state of the sequences as a group, unless it evicted it."""
        return not isinstance(self._generation.root.state, Contexts | None)

    async def _score_columns(self, ids: Integers64) -> tuple[torch.Tensor, Self]:
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
        tokens = torch.from_numpy(ids[ids >= 0])
        query = self._lm._requests.scored_query(scored, ScoreColumns(tokens), self._adapter)  # noqa: SLF001
        logprobs[torch.from_numpy(ids >= 0)] = await self._result(
            query, scored.members, lambda columns: columns[0]
        )
        generation, places = scored.generation.extended(scored.places, scored.last_ids[:, None])
        return logprobs, self._derive(generation, places, self._finished, step)

    async def _score_texts(self, ids: Integers64) -> torch.Tensor:
        """Return the scores of continuations from requests for the text of each member."""
        logprobs = torch.zeros(ids.shape, dtype=torch.float32, device="cpu")
        counts = (ids >= 0).sum(axis=1)
        members = np.flatnonzero(counts).tolist()
        contexts = [self._context(member) for member in members]
        texts = [
            context.extend(ids[member, : counts[member]])
            for context, member in zip(contexts, members, strict=True)
        ]
        starts = [len(context) for context in contexts]
        try:
            scored = await self._lm.batch_score(texts, starts)
        except GenlmError as error:
            if not error.places:
                raise
            failed = [members[place] for place in error.places]
            raise PopulationError(failed, len(self), error) from error
        for member, scores in zip(members, scored, strict=True):
            logprobs[member, : len(scores)] = scores
        return logprobs

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
