"""Scores of texts: the log-probability of each token given the tokens before it.

Engines with `Capability.SCORE` score all positions of a text at once (`Query.targets`), or
reduce all of its rows. For other engines, every position is a request for a reduction.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from genlm.core.base.blocking import blocking
from genlm.core.base.errors import map_batch
from genlm.core.base.validation import checked_batch, is_sequence_like
from genlm.core.queries.query import TokenScores
from genlm.core.rows.group_reductions import checked_reduction

if TYPE_CHECKING:
    from genlm.core.base.validation import Integers
    from genlm.core.model.context import TokenBatch, TokenIds
    from genlm.core.model.requests import Item, Requests
    from genlm.core.queries.query import GroupReduction, Reduction

__all__ = ["ScoreMethods"]

_REQUESTS_AT_ONCE = 256
"""Maximum number of requests that are computed at once, to show progress and, if every position
is a request, to limit the rows in memory."""


class ScoreMethods:
    """The methods of `AsyncLM` that score texts."""

    _requests: Requests

    async def score(
        self,
        token_ids: TokenIds,
        start: int = 1,
        *,
        lora_name: str | None = None,
    ) -> torch.Tensor:
        """Return the log-probability of each token of a text given the tokens before it.

        Args:
            token_ids: Text as token ids or a `Context`, at most `max_context` + 1 tokens.
            start: First scored position, from 1 to the number of tokens. The tokens before it
                are the prompt.
            lora_name: Name of a loaded adapter; by default the adapter of `with_lora`.

        Returns:
            `log p(token_ids[i] | token_ids[:i])` for all `i >= start`, shape
            `(len(token_ids) - start,)`, float32, on the CPU.

        Raises:
            TypeError: `start` is not an integer.
            ValueError: `start` is below 1 or above the number of tokens.
            GenlmError: As `next_token_logprobs`.
        """
        requested = self._requests.scores(token_ids, start, lora_name)
        [scores] = await self._scored([requested])
        return scores.logprobs

    score_sync = blocking(score)

    async def batch_score(
        self,
        texts: TokenBatch,
        start: int | Integers = 1,
        *,
        progress: bool = False,
        lora_name: str | None = None,
    ) -> list[torch.Tensor]:
        """Score several texts; see `score`. All texts are checked before any is computed.

        Args:
            texts: Texts as for `score`.
            start: First scored position: one number for all texts, or one per text.
            progress: Whether to show a progress bar on standard error.
            lora_name: As `score`.

        Returns:
            The scores of the texts, in order.
        """
        scores = await self.batch_token_scores(
            texts, start, progress=progress, lora_name=lora_name
        )
        return [each.logprobs for each in scores]

    batch_score_sync = blocking(batch_score)

    async def batch_token_scores(
        self,
        texts: TokenBatch,
        start: int | Integers = 1,
        *,
        progress: bool = False,
        lora_name: str | None = None,
    ) -> list[TokenScores]:
        """Score several texts; also return whether each token was the most likely token.

        Args:
            texts: As `batch_score`.
            start: As `batch_score`.
            progress: As `batch_score`.
            lora_name: As `score`.

        Returns:
            The scores of the texts, in order.
        """
        listed = list(checked_batch(texts))
        starts: list[Any] = list(start) if is_sequence_like(start) else [start] * len(listed)  # type: ignore[arg-type]
        if len(starts) != len(listed):
            raise ValueError(f"{len(starts)} starts for {len(listed)} texts; pass one for each")
        requested = map_batch(
            lambda each: self._requests.scores(*each, lora_name),
            zip(listed, starts, strict=True),
        )
        places = [i for i, text in enumerate(requested) for _ in text]
        return await self._scored(requested, places, progress=progress)

    batch_token_scores_sync = blocking(batch_token_scores)

    async def reduce_text(
        self,
        token_ids: TokenIds,
        reduction: GroupReduction | Reduction,
        start: int = 1,
        *,
        lora_name: str | None = None,
    ) -> Any:
        """Return a reduction of the rows that predict the tokens of a text.

        The rows are those of `score`. They are computed and reduced piece by piece on the
        device of the logits, so the rows of a whole text are never in memory at once.

        Args:
            token_ids: As `score`.
            reduction: A `GroupReduction`, whose columns have an entry for each position, or a
                `Reduction` that all positions share.
            start: First position whose row is reduced, as `score`.
            lora_name: As `score`.

        Returns:
            The results of the positions: a tensor whose first dimension is
            `len(token_ids) - start`, or a tuple of such tensors.

        Raises:
            TypeError: `reduction` is of another class, or `start` is not an integer.
            ValueError: `start` is below 1 or above the number of tokens.
            EvaluationError: `compute` of the reduction raised.
            GenlmError: As `next_token_logprobs`.
        """
        group = checked_reduction(reduction)
        columns = await self._requests.reduced_text(token_ids, group, start, lora_name)
        return columns[0] if len(columns) == 1 else columns

    reduce_text_sync = blocking(reduce_text)

    async def _scored(
        self,
        requested: list[list[Item]],
        places: Sequence[int] | None = None,
        *,
        progress: bool = False,
    ) -> list[TokenScores]:
        """Return the scores of texts, each of which is one request or one per position."""
        items = list(itertools.chain(*requested))
        ends = list(itertools.accumulate(map(len, requested)))
        is_divided = progress or len(items) > len(requested)
        step = _REQUESTS_AT_ONCE if is_divided else max(1, len(items))
        answers: list[Any] = []
        with tqdm(total=len(ends), desc="scoring", unit="text", disable=not progress) as bar:
            for begin in range(0, len(items), step):
                part = slice(begin, begin + step)
                own = None if places is None else places[part]
                answers += await self._requests.answer(items[part], (), own)
                bar.update(bisect.bisect_right(ends, begin + step) - bar.n)
        remaining = iter(answers)
        return [_scores(list(itertools.islice(remaining, len(text)))) for text in requested]


def _scores(answers: list[Any]) -> TokenScores:
    """Combine the answers for one text."""
    if answers and isinstance(answers[0], TokenScores):
        return answers[0]
    logprobs = torch.tensor([each.logprob for each in answers], dtype=torch.float32)
    is_top = torch.tensor([each.is_top for each in answers], dtype=torch.bool)
    return TokenScores(logprobs, is_top)
